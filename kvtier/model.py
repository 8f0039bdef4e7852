"""`TieredKV(model)`: the one object that a user makes."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch

from kvtier.config import KVTierConfig, load_config
from kvtier.config_files import names_source, source_name
from kvtier.errors import AlreadyWrappedError, UnsupportedError
from kvtier.forward import wrap_forward
from kvtier.generate import wrap_generate
from kvtier.hf import (
    CACHE_NAMES,
    Fingerprints,
    Patch,
    TieredCache,
    UntieredLayers,
    WeightsMark,
    WrappedMethod,
    cache_keyword,
    check_one_adapter,
    describe,
    given_cache,
    new_untiered,
    transformers_model,
)
from kvtier.runtime import Runtime
from kvtier.session import Session, SessionInfo, Sessions, seconds
from kvtier.session_transfer import import_session, import_session_async
from kvtier.stats import stats

_WRAPPED = ("forward", "generate")


class TieredKV:
    """A causal language model whose KV cache lies on GPU memory, host memory and NVMe files.

    `generate` and calls give the tokens that the model gives with everything on the GPU. While wrapped, the model
    called directly behaves bit-identically to before; after `close` nothing of kvtier is left on it.

    Threads: calls on one wrapper are serialised step by step.

    Args:
        model: a transformers causal language model on one device, or a PEFT model of one.
        config: a preset's name, a YAML file's path, a mapping, a KVTierConfig, or None for the defaults.

    Raises:
        UnsupportedModelError: the model cannot be served exactly; the message names why.
        ConfigError, BudgetError, FolderInUseError: the config cannot be used.
        AlreadyWrappedError: the model has a live wrapper.
        After each of them the model is unchanged and nothing is allocated.
    """

    def __init__(self, model: Any, config: str | Path | Mapping[str, Any] | KVTierConfig | None = None) -> None:
        loaded, config_name = load_config(config), source_name(config)
        self.model = model
        model = transformers_model(model)
        if isinstance(getattr(model, "forward", None), WrappedMethod):
            raise AlreadyWrappedError("this model is wrapped by a live TieredKV: close() that one first, or use it")
        group = describe(model, loaded.block_tokens)
        mark = WeightsMark(model)
        fingerprints = Fingerprints(model, group, mark)
        mark.describe = fingerprints.modules
        make_untiered = functools.partial(new_untiered, model, group)
        past = UntieredLayers(make_untiered()).past
        with names_source(config_name):
            self._runtime = Runtime(group, loaded, mark, make_untiered, fingerprints, past)
        try:
            patch = Patch.apply(model)
        except BaseException:  # a Ctrl-C too: nothing stays allocated
            self._runtime.close()
            raise
        # Instance attributes hide the class's methods; those that are there already (device hooks) come back on close.
        own = {name: vars(model)[name] for name in _WRAPPED if name in vars(model)}
        self._keyword = cache_keyword(model.forward)
        self._sessions = Sessions(self.model, self._runtime, functools.partial(_new_cache, self._runtime, None))
        generate = wrap_generate(model.generate, self._runtime, self._keyword)
        model.forward, model.generate = wrap_forward(model.forward, self._runtime, config_name), generate
        # Also when the wrapper is dropped without close, and at interpreter exit: threads stop, files go.
        self._finalize = weakref.finalize(self, _unwrap, model, own, patch, self._runtime)

    # -- using it -----------------------------------------------------------------------------------------------------

    def new_cache(self, batch_size: int | None = None, *, salt: str | bytes = b"") -> TieredCache:
        """An empty cache for one conversation, or a batch: pass it as `cache` to `generate` or a call, turn after turn.

        Args:
            batch_size: rows, beams and return sequences included; None: as many as the first call has.
            salt: whose KV it is: its blocks are shared with caches of the same salt, and with no other, on every tier
                and after a restart.
        """
        self._runtime.check_open()
        return _new_cache(self._runtime, batch_size, _salt(salt))

    def session(self, name: str, *, salt: str | bytes = b"", ttl: str | float | None = None) -> Session:
        """The conversation of that name: `generate` on it takes the whole transcript and computes only what differs.

        The wrapper keeps it, with the KV on its tiers, until `delete`. With `tiers.nvme.path` it is also written there
        after each turn, and a later process goes on with it.

        Args:
            name: any printable text.
            salt: whose it is. Names of other salts are other conversations.
            ttl: delete it when nobody has used it for so long: `7d`, `90min`, seconds. None: as it is, at first never.
        """
        self._runtime.check_open()
        key = self._sessions.open(name, _salt(salt), None if ttl is None else seconds(ttl))
        return Session(name, key, self._sessions)

    def sessions(self, *, salt: str | bytes = b"") -> list[SessionInfo]:
        """The conversations under a salt, those of earlier processes too, last used first."""
        self._runtime.check_open()
        return self._sessions.list(_salt(salt))

    def import_session(
        self, path: str | Path, name: str | None = None, *, salt: str | bytes = b"", overwrite: bool = False
    ) -> Session:
        """A session from a file that `Session.export` wrote, under its own name unless one is given.

        Take in only files that you trust: checksums tell damage, not who made them, and what they hold is believed.

        Raises:
            ArchiveError: not such a file, damaged, of another model (weights, adapters, settings, versions), of another
                block size or salt; the message names which.
            SessionExistsError: there is one of that name. CapacityError: no tier has room for it.
            After each of them nothing has changed.
        """
        self._runtime.check_open()
        key, known_as = import_session(self._sessions, Path(path), name, _salt(salt), overwrite)
        return Session(known_as, key, self._sessions)

    async def import_session_async(
        self, path: str | Path, name: str | None = None, *, salt: str | bytes = b"", overwrite: bool = False
    ) -> Session:
        """As `import_session`, without keeping the event loop waiting."""
        self._runtime.check_open()
        key, known_as = await import_session_async(self._sessions, Path(path), name, _salt(salt), overwrite)
        return Session(known_as, key, self._sessions)

    def generate(self, *args: Any, salt: str | bytes = b"", **kwargs: Any) -> Any:
        """`model.generate` with the KV on tiers: every argument that it takes.

        What earlier calls under the same `salt` have computed of a prompt's beginning is not computed again, unless
        the config says `prefix_cache: false`. Pass a salt for each tenant whose prompts others must learn nothing of.

        With `cache=tiered.new_cache()` several turns share one conversation: pass the whole transcript each time.

        Raises:
            UnsupportedError: an argument that cannot be honoured yet, by name. Nothing was computed.
            PromptMismatchError: the transcript does not begin with what the cache holds. Nothing was computed.
            CapacityError, BlockLostError, TransferTimeoutError: the cache is as it was before the step that failed.
        """
        self._runtime.check_open()
        check_one_adapter(kwargs)
        given = [kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None]
        kwargs = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        if not given:
            given = [self.new_cache(salt=salt)]
        elif any(not isinstance(cache, TieredCache) for cache in given):
            kind = type(given[0]).__name__
            instead = "call its own generate" if isinstance(given[0], Session) else "pass tiered.new_cache(), or none"
            raise UnsupportedError(f"cache is a {kind}: {instead}")
        elif salt and any(cache.state.salt != _salt(salt) for cache in given):
            raise UnsupportedError("generate(salt=…) with a cache of another: tiered.new_cache(salt=…) makes one of it")
        return self.model.generate(*args, **kwargs, **dict(zip(CACHE_NAMES, given, strict=False)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in chunks of at most `prefill_chunk` new tokens; a new cache unless one is given."""
        self._runtime.check_open()
        check_one_adapter(kwargs)
        if (cache := given_cache(kwargs)) is not None:
            cache.state.check_change("a forward")  # nobody but generate itself, while it works with the cache
        if kwargs.get("use_cache") is not False and all(kwargs.get(name) is None for name in CACHE_NAMES):
            kwargs[self._keyword] = self.new_cache()
        return self.model(*args, **kwargs)

    __call__ = forward

    @property
    def config(self) -> KVTierConfig:
        """The kvtier config in force. The model's own is `tiered.model.config`."""
        return self._runtime.config

    @property
    def device(self) -> torch.device:
        """The device of the model, and of the gpu tier."""
        return torch.device(self._runtime.group.device)

    def stats(self) -> dict[str, Any]:
        """What lies where, what moved and what it cost: a plain dict, documented in docs/stats.md."""
        return stats(self._runtime)

    def check_integrity(self) -> None:
        """Raise IntegrityError if kvtier's own bookkeeping contradicts itself. O(blocks)."""
        self._runtime.check_integrity()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free every tier and leave the model as it was before wrapping. Idempotent. Waits for a running step.

        Raises:
            UnsupportedError: called from inside a step, by a hook or a logits processor of it; nothing was closed.
        """
        if self._runtime.pid != os.getpid():
            return  # as `_unwrap`, and whoever has the turn is in the parent
        with self._runtime.turn:
            if self._runtime.executor.is_open:
                raise UnsupportedError("close() inside a step of the same TieredKV: call it when forward has returned")
            self._finalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"TieredKV has no attribute {name!r}: what takes a transformers model takes tiered.model, as in "
            "pipeline(..., model=tiered.model), whose calls take cache=tiered.new_cache()"
        )

    def __repr__(self) -> str:
        state = "closed" if self._runtime.closed else self._runtime.mode.value
        return f"TieredKV({type(self.model).__name__}, {state})"


def _salt(salt: str | bytes) -> bytes:
    if isinstance(salt, str):
        return b"str:" + salt.encode(errors="surrogatepass") if salt else b""
    if not isinstance(salt, bytes):
        raise UnsupportedError(f"salt={salt!r:.40}: give text or bytes, as secret as the tenants' prompts")
    return b"bytes:" + salt if salt else b""


def _new_cache(runtime: Runtime, batch_size: int | None = None, salt: bytes = b"") -> TieredCache:
    if batch_size is not None and batch_size < 1:
        raise UnsupportedError(f"new_cache(batch_size={batch_size}): at least one row")
    with runtime.turn:
        return TieredCache(runtime, batch_size, salt=salt)


def _unwrap(model: Any, own: dict[str, Callable[..., Any]], patch: Patch, runtime: Runtime) -> None:
    if runtime.pid != os.getpid():
        return  # a forked child: threads, files and folder are the parent's
    if not threading.main_thread().is_alive():  # the interpreter ends
        runtime.leave()
        return
    # With the turn: a step that runs on another thread must not lose its attention half-way.
    with runtime.turn:
        if runtime.executor.is_open:
            return  # dropped inside its own step: goes with the process
        patch.remove()
        for name in _WRAPPED:
            vars(model).pop(name, None)
        vars(model).update(own)
        runtime.close()
