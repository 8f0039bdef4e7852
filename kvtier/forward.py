"""The wrapped `forward`: any call with a TieredCache becomes steps of at most one chunk, each committed as a whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from kvtier.errors import BudgetError, UnsupportedError
from kvtier.executor import OpenStep
from kvtier.hf import TieredCache, WrappedMethod, cache_keyword, check_mask_kind, check_process, current_step
from kvtier.runtime import Runtime
from kvtier.types import AttentionMode

# Arguments with one entry a new token, split along dimension 1 with the tokens.
_PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
_JOINED = ("logits", "last_hidden_state", "hidden_states")


def wrap_forward(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """A forward that behaves as `original`, bit for bit, unless its cache is a TieredCache of `runtime`."""
    signature = inspect.signature(original)
    keyword = cache_keyword(original)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    keeps_logits = "logits_to_keep" in signature.parameters

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(*args, **kwargs).arguments) if args else dict(kwargs)
        if rest is not None:
            arguments.update(arguments.pop(rest, {}))
        cache = arguments.get(keyword, arguments.get("past_key_values"))
        if not isinstance(cache, TieredCache):
            return _plainly(original, args, kwargs)
        if cache.state.runtime is not runtime:
            cache.state.check_open()
            raise UnsupportedError("this cache belongs to another TieredKV: its KV comes from another model")
        return _SplitForward(original, runtime, cache, arguments, keeps_logits).run()

    return WrappedMethod(original, forward)


def _plainly(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if current_step.get() is None:
        return original(*args, **kwargs)
    # Called from a hook inside a step: it is not part of that step.
    before = current_step.set(None)
    try:
        return original(*args, **kwargs)
    finally:
        current_step.reset(before)


class _SplitForward:
    """One call of the wrapped forward."""

    def __init__(
        self,
        original: Callable[..., Any],
        runtime: Runtime,
        cache: TieredCache,
        arguments: dict[str, Any],
        keeps_logits: bool,
    ) -> None:
        self._original, self._runtime, self._cache, self._arguments = original, runtime, cache, arguments
        self._table = cache.state.table
        self._returns_dict = arguments.get("return_dict") is not False
        keep = arguments.get("logits_to_keep", 0)
        self._keep = keep if isinstance(keep, int) else None
        self._keeps_logits = keeps_logits

    # -- what cannot be honoured --------------------------------------------------------------------------------------

    def _check(self) -> int:
        """The number of new tokens. Raises UnsupportedError by name for what would not be exact."""
        arguments, held = self._arguments, self._table.num_tokens
        given = [arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None]
        if len(given) != 1:
            raise UnsupportedError("give exactly one of input_ids and inputs_embeds")
        if given[0].ndim < 2:
            raise UnsupportedError(f"input_ids has the shape {tuple(given[0].shape)}: give one row, [1, tokens]")
        rows, num_new = given[0].shape[:2]
        if rows != 1:
            raise UnsupportedError(
                f"a batch of {rows} rows (prompts, beams or return sequences) is not supported yet: one row a cache"
            )
        if num_new == 0:
            raise UnsupportedError(f"no new tokens: the cache holds {held} tokens and the prompt adds none")
        for name in ("output_attentions", "labels"):
            value = arguments.get(name)
            if value is not None and value is not False:
                raise UnsupportedError(f"{name} cannot be honoured with a TieredCache: call the model without one")
        if arguments.get("use_cache") is False:
            raise UnsupportedError("use_cache=False with a TieredCache: leave the cache out to run without one")
        self._check_mask(arguments.get("attention_mask"), held + num_new)
        self._cache.state.check_weights()
        positions = arguments.get("position_ids")
        if positions is not None:
            expected = torch.arange(held, held + num_new, device=positions.device)
            if positions.shape[-1] != num_new or not bool((positions == expected).all()):
                raise UnsupportedError(
                    f"position_ids other than {held} … {held + num_new - 1} are not supported yet (padding, packing)"
                )
        return int(num_new)

    @staticmethod
    def _check_mask(mask: Any, total: int) -> None:
        check_mask_kind(mask)
        if mask is None:
            return
        if mask.shape[1] != total:
            raise UnsupportedError(
                f"attention_mask covers {mask.shape[1]} tokens, cache and new tokens are {total}: pass one of all"
            )
        if not bool(mask.all()):
            raise UnsupportedError(
                "attention_mask with zeros (padding) is not supported yet: pass unpadded rows one by one "
                "(if the prompt merely contains the pad token's id, pass attention_mask=torch.ones_like(input_ids))"
            )

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Run the call in chunks counted from its first new token.

        If a chunk fails the cache is cropped to its length at entry, and the error goes on.
        """
        with self._runtime.turn:
            self._runtime.check_open()
            check_process(self._runtime.pid)
            self._num_new = self._check()
            held, done = self._table.num_tokens, 0
            pieces: dict[str, list[Any]] = {}
            try:
                while done < self._num_new:
                    size = self._chunk_size(self._num_new - done)
                    out = self._step(held, done, size)
                    if size < self._num_new:
                        self._collect(pieces, out, self._tokens_kept(done + size) - self._tokens_kept(done))
                    done += size
                    if done < self._num_new:
                        self._runtime.turn.check()
            except BaseException:
                if self._table.num_tokens > held:
                    self._runtime.manager.truncate(self._table, held)
                raise
        return self._join(out, pieces)

    @staticmethod
    def _collect(pieces: dict[str, list[Any]], out: Any, kept: int) -> None:
        """Keep of a chunk's output what the answer has of it: a prompt's logits may be gigabytes."""
        for name in _JOINED:
            if out.get(name) is not None and (name != "logits" or kept):
                pieces.setdefault(name, []).append(out[name])

    def _chunk_size(self, left: int) -> int:
        wanted = min(self._runtime.config.prefill_chunk, left)
        size = min(wanted, self._runtime.executor.chunk(self._table))
        if size < wanted and self._runtime.mode is AttentionMode.GATHERED:
            raise BudgetError(
                f"attention: gathered promises the bits of prefill_chunk {self._runtime.config.prefill_chunk}, and the "
                f"gpu budget has room for {size} new tokens: raise tiers.gpu.budget or lower prefill_chunk"
            )
        return size

    def _tokens_kept(self, end: int) -> int:
        """How many of the first `end` new tokens have logits in the answer."""
        if not self._keep:
            return end
        return max(0, end - (self._num_new - self._keep))

    def _step(self, held: int, start: int, size: int) -> Any:
        arguments = self._piece(held, start, size) if size < self._num_new else self._arguments
        ids = self._arguments.get("input_ids")
        token_ids = None if ids is None else ids[0, start : start + size].tolist()
        executor = self._runtime.executor
        opened: OpenStep = executor.open(self._table, size)
        before = current_step.set(opened)
        try:
            out = self._original(**arguments)
            self._runtime.turn.check()  # the last place where a Ctrl-C leaves the state as before the step
        except BaseException:
            executor.abort(opened.step)
            raise
        finally:
            current_step.reset(before)
        executor.commit(opened, token_ids)
        return out

    def _piece(self, held: int, start: int, size: int) -> dict[str, Any]:
        arguments = dict(self._arguments)
        for name, value in arguments.items():
            if name in _PER_TOKEN and value is not None:
                arguments[name] = value[..., start : start + size] if value.ndim < 3 else value[:, start : start + size]
            elif name == "attention_mask" and value is not None:
                arguments[name] = value[:, : held + start + size]
            elif isinstance(value, torch.Tensor) and name != "logits_to_keep":
                raise UnsupportedError(f"{name} cannot be split into chunks: pass at most prefill_chunk tokens with it")
        arguments["return_dict"] = True
        if self._keeps_logits:
            if self._keep is None:
                raise UnsupportedError("logits_to_keep as a tensor cannot be split into chunks: pass a number")
            if self._keep:
                # At least one: 0 would mean all of them. What is not asked for is dropped at once.
                kept = self._tokens_kept(start + size) - self._tokens_kept(start)
                arguments["logits_to_keep"] = max(1, min(size, kept))
        return arguments

    def _join(self, out: Any, pieces: dict[str, list[Any]]) -> Any:
        for name, parts in pieces.items():
            if name == "hidden_states":
                out[name] = tuple(torch.cat(layer, dim=1) for layer in zip(*parts, strict=True))
            else:
                out[name] = torch.cat(parts, dim=1)
        if not self._returns_dict and hasattr(out, "to_tuple"):
            return out.to_tuple()
        return out
