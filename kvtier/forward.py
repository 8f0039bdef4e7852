"""The wrapped `forward`: any call with a TieredCache becomes steps of at most one chunk, each committed as a whole."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvtier.batch import Batch
from kvtier.block_table import Made
from kvtier.config_files import names_source
from kvtier.errors import BlockLostError, BudgetError, CapacityError, UnsupportedError
from kvtier.hf import (
    CACHE_NAMES,
    TieredCache,
    WrappedMethod,
    cache_keyword,
    check_process,
    current_step,
    given_cache,
)
from kvtier.inputs import CallInputs, check_vocabulary, columns_masked_since
from kvtier.mend import Mender
from kvtier.open_step import OpenStep
from kvtier.runtime import Runtime
from kvtier.step import NewColumns
from kvtier.types import AttentionMode

# Arguments with one entry a new token, split along dimension 1 with the tokens.
_PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
MIN_PREFILL_TOKENS = 32  # fewer in a step say little of what prompts cost
_JOINED = ("logits", "last_hidden_state", "hidden_states")


def wrap_forward(original: Callable[..., Any], runtime: Runtime, config_name: str = "") -> Callable[..., Any]:
    """A forward that behaves as `original`, bit for bit, unless its cache is a TieredCache of `runtime`.

    `config_name`: of the file or preset that a step's BudgetError is to name, if there is one.
    """
    signature = inspect.signature(original)
    keyword = cache_keyword(original)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    model = _Model(original, runtime, keyword, "logits_to_keep" in signature.parameters)

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(*args, **kwargs).arguments) if args else dict(kwargs)
        if rest is not None:
            arguments.update(arguments.pop(rest, {}))
        cache = given_cache(arguments)
        if cache is None:
            return _plainly(original, args, kwargs)
        arguments = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
        if cache.state.runtime is not runtime:
            cache.state.check_open()
            raise UnsupportedError("this cache belongs to another TieredKV: its KV comes from another model")
        with names_source(config_name):
            return _SplitForward(model, cache, arguments, recomputes=runtime.config.on_block_loss == "recompute").run()

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


@dataclass(frozen=True, slots=True)
class _Model:
    """What is called, and how it takes its cache."""

    original: Callable[..., Any]
    runtime: Runtime
    keyword: str
    keeps_logits: bool

    def recompute(self, cache: TieredCache, arguments: dict[str, Any]) -> None:
        """A call for the sake of its K and V. What it loses itself is not mended from inside of it."""
        if self.keeps_logits:
            arguments = arguments | {"logits_to_keep": 1}
        _SplitForward(self, cache, arguments, recomputes=False).run()


class _SplitForward:
    """One call of the wrapped forward."""

    def __init__(self, model: _Model, cache: TieredCache, arguments: dict[str, Any], *, recomputes: bool) -> None:
        """`recomputes`: whether lost blocks are."""
        self._original, self._runtime, self._state = model.original, model.runtime, cache.state
        self._arguments = arguments | {model.keyword: cache}
        self._batch = cache.state.batch
        self._mender = Mender(model.runtime, cache.state, model.recompute) if recomputes else None
        self._returns_dict = arguments.get("return_dict") is not False
        keep = arguments.get("logits_to_keep", 0)
        self._keep = keep if isinstance(keep, int) else None
        self._keeps_logits = model.keeps_logits

    def _read(self) -> tuple[CallInputs, list[int]]:
        """The new columns, and how many columns of each row the mask hides since. Raises UnsupportedError by name."""
        arguments = self._arguments
        for name in ("output_attentions", "labels"):
            value = arguments.get(name)
            if value is not None and value is not False:
                raise UnsupportedError(f"{name} cannot be honoured with a TieredCache: call the model without one")
        if arguments.get("use_cache") is False:
            raise UnsupportedError("use_cache=False with a TieredCache: leave the cache out to run without one")
        self._drop_held()
        inputs = CallInputs.read(arguments, self._batch.length)
        self._state.check_positions(arguments, inputs.num_columns)
        self._state.take_rows(inputs.num_rows)
        self._state.check_weights()
        self._state.note_arguments(arguments)
        if not self._state.is_as_begun():
            inputs = replace(inputs, made=Made.OTHERWISE)
        return inputs, columns_masked_since(self._batch, arguments.get("attention_mask"))

    def _drop_held(self) -> None:
        """Assisted decoding passes the whole prompt whatever the cache holds; `generate` has compared them."""
        held, self._state.held_of_prompt = self._state.held_of_prompt, 0
        ids, mask, positions = (self._arguments.get(n) for n in ("input_ids", "attention_mask", "position_ids"))
        if not held or ids is None or ids.shape[1] <= held:
            return
        # Should a version of transformers cut the prompt itself, what it passes is new and must stay.
        counts_all = mask is None or mask.shape[1] == ids.shape[1]
        begins_at_0 = positions is None or int(positions[0, 0]) == 0
        is_held = self._batch.tables[0].first_difference(ids[0, :held].tolist()) is None
        if not (counts_all and begins_at_0 and is_held):
            return
        for name in _PER_TOKEN:
            if self._arguments.get(name) is not None:
                self._arguments[name] = self._arguments[name][:, held:]

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Run the call in chunks counted from its first new token.

        If a chunk fails the cache is put back to what it was at entry, and the error goes on.
        """
        manager = self._runtime.manager
        with self._runtime.turn:
            self._runtime.check_open()
            check_process(self._runtime.pid)
            self._inputs, masked = self._read()
            self._num_new = self._inputs.num_columns
            untiered = self._state.untiered.snapshot()
            backup = manager.fork(self._batch) if any(masked) else None
            held, done = self._batch.length, 0
            pieces: dict[str, list[Any]] = {}
            try:
                for row, count in enumerate(masked):
                    if count:
                        manager.mask_end(self._batch, row, count)
                while done < self._num_new:
                    size = self._chunk_size(self._num_new - done)
                    out = self._step(held, done, size, None if done else untiered)
                    if size < self._num_new:
                        self._collect(pieces, out, self._tokens_kept(done + size) - self._tokens_kept(done))
                    done += size
                    if done < self._num_new:
                        self._runtime.turn.check()
            except BaseException as error:  # a Ctrl-C too: the cache is as it was at entry
                self._undo(held, backup)
                self._state.untiered.restore(untiered)
                if isinstance(error, IndexError):  # looked for when it has failed: steps are too many to look before
                    check_vocabulary(self._inputs.ids, "a call", getattr(self._original, "__self__", None))
                raise
            if backup is not None:
                manager.drop(backup)
        return self._join(out, pieces)

    def _undo(self, held: int, backup: Batch | None) -> None:
        if backup is not None:
            self._runtime.manager.restore(self._batch, backup)
        elif self._batch.length > held:
            self._runtime.manager.truncate(self._batch, held)

    @staticmethod
    def _collect(pieces: dict[str, list[Any]], out: Any, kept: int) -> None:
        """Keep of a chunk's output what the answer has of it: a prompt's logits may be gigabytes."""
        if out.get("router_logits") is not None:
            raise UnsupportedError(
                "output_router_logits cannot be joined over chunks: pass at most prefill_chunk tokens"
            )
        for name in _JOINED:
            if out.get(name) is not None and (name != "logits" or kept):
                pieces.setdefault(name, []).append(out[name])

    def _chunk_size(self, left: int) -> int:
        wanted = min(self._runtime.config.prefill_chunk, left)
        size = min(wanted, self._runtime.executor.chunk(self._batch))
        if size < wanted and self._runtime.mode is AttentionMode.GATHERED:
            raise BudgetError(
                f"attention: gathered promises the bits of prefill_chunk {self._runtime.config.prefill_chunk}, and the "
                f"gpu budget has room for {size} new tokens in {self._batch.num_rows} rows: raise tiers.gpu.budget or "
                "lower prefill_chunk"
            )
        if self._inputs.new_mask is not None and self._runtime.group.num_untiered:
            # transformers does not mask a chunk of one column in linear layers: padding must not be alone in one.
            if size < min(3, left):
                raise BudgetError(
                    "a padded batch of a model with untiered layers needs room for 3 new tokens a row, and there is "
                    f"for {size} in {self._batch.num_rows} rows: raise tiers.gpu.budget or prefill_chunk, or use fewer"
                )
            size -= left - size == 1
        return size

    def _tokens_kept(self, end: int) -> int:
        """How many of the first `end` new tokens have logits in the answer."""
        if not self._keep:
            return end
        return max(0, end - (self._num_new - self._keep))

    def _step(self, held: int, start: int, size: int, untiered: dict[int, dict[str, Any]] | None) -> Any:
        """One step, repeated if it lost blocks. `untiered` is a snapshot of now, if there is one already."""
        arguments = self._piece(held, start, size) if size < self._num_new else self._arguments
        new = self._inputs.columns(start, size, held)
        if self._mender is None:
            return self._one_step(arguments, new)
        before = self._state.untiered.snapshot() if untiered is None else untiered

        def step() -> Any:
            try:
                return self._one_step(arguments, new)
            except (BlockLostError, CapacityError):
                self._state.untiered.restore(before)
                raise

        return self._mender.repeat(step, new)

    def _one_step(self, arguments: dict[str, Any], new: list[NewColumns]) -> Any:
        with self._runtime.step_timer.step(new[0].num_columns, is_inner=self._runtime.executor.is_open):
            return self._run_step(arguments, new)

    def _run_step(self, arguments: dict[str, Any], new: list[NewColumns]) -> Any:
        executor = self._runtime.executor
        self._runtime.untiered.stepping_bytes = self._state.untiered.num_bytes
        opened: OpenStep = executor.open(self._batch, new)
        before = current_step.set(opened)
        started_s, stalled_s = time.monotonic(), self._runtime.metrics.stall_s
        try:
            out = self._original(**arguments)
            num_tokens = sum(row.num_tokens for row in new)
            if num_tokens >= MIN_PREFILL_TOKENS and torch.device(self._runtime.group.device).type == "cuda":
                torch.cuda.synchronize()  # its kernels are only queued, and what they take is what counts
            took_s = time.monotonic() - started_s
            self._state.untiered.measure()
            self._runtime.untiered.check()
            self._runtime.turn.check()  # the last place where a Ctrl-C leaves the state as before the step
        except BaseException:  # whatever it is, no step stays open
            executor.abort(opened.step)
            raise
        finally:
            current_step.reset(before)
        executor.commit(opened)
        if num_tokens >= MIN_PREFILL_TOKENS:
            stalled_s = self._runtime.metrics.stall_s - stalled_s
            self._runtime.prefill.add(num_tokens, max(1e-9, took_s - stalled_s))
        return out

    def _piece(self, held: int, start: int, size: int) -> dict[str, Any]:
        arguments = dict(self._arguments)
        for name, value in arguments.items():
            if name in _PER_TOKEN and value is not None:
                arguments[name] = value[:, start : start + size]
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
