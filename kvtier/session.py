"""Named conversations: the whole transcript goes in, what it shares with the last one is not computed again."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from kvtier.errors import ClosedError, SessionExistsError, UnsupportedError
from kvtier.generate import Generation
from kvtier.hf import CACHE_NAMES, TieredCache, check_one_adapter

# Tensors that do not change the KV of the transcript.
_TENSORS = ("attention_mask", "negative_prompt_ids", "negative_prompt_attention_mask")


class Sessions:
    """The conversations of one wrapper, by name."""

    def __init__(self, model: Any, new_cache: Callable[[], TieredCache]) -> None:
        self._model, self._new_cache = model, new_cache
        self._caches: dict[str, TieredCache] = {}

    def open(self, name: str) -> Session:
        """The session of that name, a new one if there is none."""
        _check_name(name)
        if name not in self._caches:
            self._caches.setdefault(name, self._new_cache())  # another thread may have been first
        return Session(name, self)

    def cache(self, name: str) -> TieredCache:
        """Its cache. Raises ClosedError when it was deleted."""
        found = self._caches.get(name)
        if found is None:
            raise ClosedError(f"session {name!r} was deleted: tiered.session({name!r}) makes a new one")
        return found

    def fork(self, name: str, new_name: str) -> Session:
        """A session that shares every block by count. Raises SessionExistsError, with nothing changed."""
        _check_name(new_name)
        twin = self.cache(name).fork()
        if self._caches.setdefault(new_name, twin) is not twin:
            raise SessionExistsError(
                f"fork: there is a session {new_name!r} already: delete() it first, or use another name"
            )
        return Session(new_name, self)

    def delete(self, name: str) -> None:
        """Free its blocks. Idempotent. Raises UnsupportedError inside a step of it."""
        cache = self._caches.get(name)
        if cache is not None:
            cache.reset()
            self._caches.pop(name, None)

    def generate(self, name: str, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """See `Session.generate`."""
        cache = self.cache(name)
        state = cache.state
        use = state.enter()  # before anything is cropped: another thread may be generating on this session
        try:
            num_copies = Generation(self._model, kwargs).num_copies
            _keep_one_row(cache, input_ids[0].tolist())  # a call that was interrupted twice may have left more
            _go_back(cache, input_ids[0].tolist())
            if num_copies > 1:
                cache.batch_repeat_interleave(num_copies)
            out = self._model.generate(input_ids, cache=cache, **kwargs)
            sequences = out if isinstance(out, torch.Tensor) else out.sequences
            _keep_one_row(cache, sequences[0].tolist())
            return out
        except BaseException:  # a Ctrl-C too: a session has one row
            _keep_one_row(cache, input_ids[0].tolist())
            raise
        finally:
            state.leave(use)


class Session:
    """One conversation that the wrapper keeps under a name. From `tiered.session(name)`.

    Ids only: it never sees text, so nothing is tokenised again behind the caller's back. Leaving a `with` closes it.
    """

    def __init__(self, name: str, sessions: Sessions) -> None:
        self.name = name
        self._sessions = sessions
        self._closed = False

    @property
    def cache(self) -> TieredCache:
        """The conversation's cache, of one row. Raises ClosedError after `close` or `delete`."""
        if self._closed:
            raise ClosedError(
                f"this handle of session {self.name!r} was closed or deleted: tiered.session({self.name!r}) opens it, "
                "or a new one"
            )
        return self._sessions.cache(self.name)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens held, oldest first: of the last transcript and answer, all but the last token."""
        return self.cache.token_ids

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """`tiered.generate` on the whole transcript; computes only what comes after the part that the session holds.

        The transcript may have been edited anywhere: the session first goes back to the longest common prefix. With
        beams or several return sequences it keeps the row of the first sequence returned. Every id counts: without an
        attention_mask one of ones is passed, so that no id is taken for padding.

        Args:
            input_ids: `[1, length]`, all of the conversation.
            kwargs: what `generate` takes, but for a cache.

        Raises:
            UnsupportedError: another shape, padding, or a cache given. Nothing has changed.
            Whatever `tiered.generate` raises: the session then holds the common prefix and what was computed since.
        """
        cache = self.cache
        cache.state.check_between_steps("session.generate")
        check_one_adapter(kwargs)
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.shape[0] != 1:
            shape = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
            raise UnsupportedError(f"session.generate: input_ids is {shape}: pass the whole transcript, [1, tokens]")
        if input_ids.shape[1] == 0:
            raise UnsupportedError("session.generate: the transcript is empty")
        for name in (*CACHE_NAMES, "inputs", "inputs_embeds"):
            if kwargs.get(name) is not None:
                raise UnsupportedError(
                    f"session.generate({name}=…): a session has its own cache, and takes input_ids only"
                )
        others = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name not in _TENSORS]
        if others:
            raise UnsupportedError(
                f"session.generate({others[0]}=…): a session compares token ids alone, and could serve what was "
                "computed with another; use tiered.new_cache()"
            )
        mask = kwargs.pop("attention_mask", None)
        if mask is not None and (tuple(mask.shape) != tuple(input_ids.shape) or not bool((mask != 0).all())):
            raise UnsupportedError("session.generate: padding is of no use in one row: pass the transcript without it")
        return self._sessions.generate(self.name, input_ids, kwargs | {"attention_mask": torch.ones_like(input_ids)})

    def fork(self, name: str) -> Session:
        """A session of its own with the same tokens, whose blocks are shared until either side changes them.

        Raises:
            SessionExistsError: there is one of that name; nothing changed.
        """
        self.cache.state.check_between_steps("session.fork")
        return self._sessions.fork(self.name, name)

    def close(self) -> None:
        """Let go of this handle. The conversation stays: `tiered.session(name)` goes on with it. Idempotent."""
        self._closed = True

    def delete(self) -> None:
        """Forget the conversation and free its blocks. Idempotent."""
        self._sessions.delete(self.name)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session({self.name!r}{', closed' if self._closed else ''})"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UnsupportedError(f"a session's name is any printable text, not {name!r:.60}")


def _go_back(cache: TieredCache, ids: list[int]) -> None:
    """Keep the longest common prefix with `ids`, but never all of `ids`: the last one's logits are wanted."""
    table = cache.state.batch.tables[0]
    held = table.num_tokens
    different = table.first_difference(ids)
    common = min(held, len(ids) - 1) if different is None else min(different, len(ids) - 1)
    if not cache.state.has_current_weights() or len(cache.token_ids) != held:
        common = 0  # an old model's, or fed as embeddings
    if common == held:
        return
    try:
        if common:
            cache.crop(common - held)
        else:
            cache.reset()
    except UnsupportedError:  # a window or a linear layer has forgotten what it would go back to
        cache.reset()


def _keep_one_row(cache: TieredCache, ids: list[int]) -> None:
    """Of several rows, the one that follows `ids` the furthest, and of it only what does."""
    if cache.batch_size == 1:
        return
    tables = cache.state.batch.tables
    common = [len(ids) if (at := table.first_difference(ids)) is None else at for table in tables]
    best = common.index(max(common))
    cache.batch_select_indices(torch.tensor([best]))
    _go_back(cache, ids)
