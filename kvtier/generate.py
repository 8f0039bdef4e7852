"""The wrapped `generate`: with a TieredCache it is checked first, by whichever way it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvtier.block_table import TokenSource
from kvtier.errors import PromptMismatchError, UnsupportedError
from kvtier.hf import (
    CACHE_NAMES,
    TieredCache,
    WrappedMethod,
    check_mask_kind,
    check_own_inputs,
    check_process,
    given_cache,
)
from kvtier.inputs import check_token_ids, check_vocabulary
from kvtier.reuse import Reuse, is_plain_call, read_prompts
from kvtier.runtime import Runtime

# Arguments that another cache, or another model of the KV, would be needed for. Name, neutral value, and why.
_REFUSED = {
    "cache_implementation": (None, "the cache is the TieredCache"),
    "penalty_alpha": (None, "contrastive search is custom code that edits the cache's tensors"),
    "dola_layers": (None, "DoLa is custom code"),
    "assistant_early_exit": (None, "layers that are skipped append nothing"),
    "custom_generate": (None, "custom code may edit the cache's tensors"),
    "output_attentions": (False, "partial attention has no weights to show"),
}
_ASSISTED = ("prompt_lookup_num_tokens", "assistant_model")


def wrap_generate(original: Callable[..., Any], runtime: Runtime, keyword: str) -> Callable[..., Any]:
    """A generate that behaves as `original` unless its cache is a TieredCache of `runtime`.

    Args:
        keyword: what the model calls its cache.
    """

    def generate(*args: Any, **kwargs: Any) -> Any:
        cache = given_cache(kwargs)
        if cache is None:
            return original(*args, **kwargs)
        cache.state.check_open()
        check_process(runtime.pid)  # here: what looks a prompt up would move blocks of the parent
        if cache.state.runtime is not runtime:
            raise UnsupportedError("this cache belongs to another TieredKV: its KV comes from another model")
        positional = dict(zip(("inputs", "generation_config"), args, strict=False))
        kwargs = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        call = _Call(original, cache, positional | kwargs, keyword)
        kwargs = kwargs | call.overrides() | {keyword: cache}
        use = cache.state.enter(call.changes())
        try:
            call.check()
            call.count_held()
            call.reuse()
            cache.state.held_of_prompt = call.held_of_prompt()
            cache.state.own_positions = kwargs.get("position_ids") is not None
            return original(*args, **kwargs)
        except BaseException:  # a Ctrl-C too
            call.give_back()
            raise
        finally:
            cache.state.leave(use)

    return WrappedMethod(original, generate)


class Generation:
    """What one generate call asks for: as given, or from a generation config."""

    def __init__(self, model: Any, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        configs = arguments.get("generation_config"), getattr(model, "generation_config", None)
        self._configs = [config for config in configs if config is not None]

    def value(self, name: str) -> Any:
        """The value in force; None where nobody set one."""
        if self._arguments.get(name) is not None:
            return self._arguments[name]
        return next((value for c in self._configs if (value := getattr(c, name, None)) is not None), None)

    @property
    def num_copies(self) -> int:
        """Rows that each prompt becomes: beams or return sequences."""
        return max(self.value("num_beams") or 1, self.value("num_return_sequences") or 1)


class _Call:
    """One generate call with a TieredCache."""

    def __init__(
        self, original: Callable[..., Any], cache: TieredCache, arguments: dict[str, Any], keyword: str
    ) -> None:
        self._cache, self._arguments, self._keyword = cache, arguments, keyword
        self._model = getattr(original, "__self__", None)
        config = getattr(self._model, "generation_config", None)
        self._own_arguments = {*inspect.signature(original).parameters, *(vars(config) if config is not None else ())}
        """Arguments of `generate` itself; others go to the model."""
        self._generation = Generation(self._model, arguments)
        ids = next((arguments[n] for n in ("inputs", "input_ids") if arguments.get(n) is not None), None)
        if ids is not None and not isinstance(ids, torch.Tensor):
            raise UnsupportedError(
                f"generate takes a tensor of token ids, not a {type(ids).__name__}: "
                "generate(**tokenizer(text, return_tensors='pt'))"
            )
        if ids is not None:
            check_token_ids(ids, "generate")
            check_vocabulary(ids, "generate", self._model)
        self._ids = ids
        self._mask = arguments.get("attention_mask")
        self._num_reused = 0
        """Columns that the cache began with in this call."""

    def check(self) -> None:
        """Raise UnsupportedError or PromptMismatchError, by name, for what would not be exact. Nothing was computed."""
        if self._model is not None:
            check_own_inputs(self._model)
        overrides = self.overrides()
        for name, (neutral, why) in _REFUSED.items():
            value = None if name in overrides else self._generation.value(name)
            if value is not None and value != neutral:
                raise UnsupportedError(f"generate({name}={value!r:.40}) cannot be honoured with a TieredCache: {why}")
        if self._arguments.get("use_cache") is False:
            raise UnsupportedError("use_cache=False leaves nothing to tier: call model.generate without a TieredCache")
        self._check_mask()
        self._check_embeds()
        if self._ids is not None and not self._passes_new_tokens_only():
            check_prompt(self._cache, self._ids, self._generation.num_copies)

    def overrides(self) -> dict[str, Any]:
        """Arguments in place of what a checkpoint ships in its generation config and no caller asked for."""
        shipped = getattr(getattr(self._model, "generation_config", None), "cache_implementation", None)
        # A config that the caller made from the model's own has the same value in it.
        in_config = getattr(self._arguments.get("generation_config"), "cache_implementation", None)
        asked = self._arguments.get("cache_implementation") is not None or in_config not in (None, shipped)
        return {} if shipped is None or asked else {"cache_implementation": None}

    def count_held(self) -> None:
        """Count what a cache that goes on, or a session, holds of the prompts: it is not computed again."""
        runtime, batch = self._cache.state.runtime, self._cache.state.batch
        if self._ids is not None and batch.length and not self._passes_new_tokens_only():
            with runtime.turn:
                for table in batch.tables[:: self._generation.num_copies]:
                    runtime.prefix_cache.count_held(table)

    def reuse(self) -> None:
        """Begin with what is found of the prompts, where that gives the tokens that computing them would."""
        ids = self._ids
        if ids is None or not self._cache.state.runtime.shares or self._cache.state.batch.length:
            return
        if self._passes_new_tokens_only():
            return
        if not is_plain_call(self._arguments, self._own_arguments, self._generation.value):
            return
        padding = self._generation.value("pad_token_id")
        takes_positions = "position_ids" in self._parameters()
        prompts = read_prompts(ids, self._mask, padding if isinstance(padding, int) else None, takes_positions)
        if prompts is not None:
            try:
                Reuse(self._cache, self._compute).begin(prompts, self._generation.num_copies)
            finally:
                self._num_reused = self._cache.state.batch.length

    def give_back(self) -> None:
        """Let the cache be empty again if nothing was computed behind what it began with: the call had failed."""
        runtime, batch = self._cache.state.runtime, self._cache.state.batch
        with runtime.turn:
            if self._num_reused and batch.length == self._num_reused and not runtime.closed:
                runtime.manager.truncate(batch, 0)

    @torch.no_grad()
    def _compute(self, token_ids: list[int]) -> None:
        assert self._model is not None  # it is what generates
        ids = torch.tensor([token_ids], device=self._cache.state.runtime.group.device)
        only_last = {"logits_to_keep": 1} if "logits_to_keep" in self._parameters() else {}
        self._model(input_ids=ids, use_cache=True, **{self._keyword: self._cache}, **only_last)

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        forward = getattr(self._model, "forward", None)
        return {} if forward is None else inspect.signature(forward).parameters

    def _passes_new_tokens_only(self) -> bool:
        return self._ids is not None and self._mask is not None and self._mask.shape[1] != self._ids.shape[1]

    def held_of_prompt(self) -> int:
        """Columns that the first forward must leave out: assisted decoding passes the whole prompt to it."""
        is_assisted = self._is_assisted and self._generation.num_copies == 1  # transformers ignores drafts for beams
        return self._cache.state.batch.length if is_assisted and not self._passes_new_tokens_only() else 0

    @property
    def _is_assisted(self) -> bool:
        return any(self._generation.value(name) is not None for name in _ASSISTED)

    def changes(self) -> frozenset[str]:
        """Operations of a cache that transformers itself uses in this mode; nobody else may while it runs."""
        names = {"reorder_cache"} if (self._generation.value("num_beams") or 1) > 1 else set()
        return frozenset(names | {"crop"} if self._is_assisted or self._defers_stop else names)

    @property
    def _defers_stop(self) -> bool:
        """Devices on which transformers computes one step too many and crops it."""
        return self._cache.state.runtime.group.device.split(":")[0] not in ("cpu",)

    def _check_mask(self) -> None:
        check_mask_kind(self._mask)
        if self._ids is None or self._mask is None:
            return
        held, wanted = self._cache.state.batch.length, self._ids.shape[1]
        if self._mask.shape[1] in (wanted, held + wanted):
            return
        of_new = f", or {held + wanted} with new tokens alone" if held else ""
        raise UnsupportedError(
            f"generate: attention_mask has the shape {tuple(self._mask.shape)}, input_ids {tuple(self._ids.shape)}: "
            f"give one of {wanted} columns{of_new}"
        )

    def _check_embeds(self) -> None:
        batch = self._cache.state.batch
        embeds = any(table.source is TokenSource.EMBEDS for table in batch.tables)
        if batch.length and (self._arguments.get("inputs_embeds") is not None or embeds):
            raise UnsupportedError(
                f"the cache holds {batch.length} tokens and embeddings cannot be compared with them, so another "
                "conversation's KV could be served: use a new cache, or pass the new embeddings to tiered(...)"
            )


def check_prompt(cache: TieredCache, input_ids: torch.Tensor, num_copies: int = 1) -> None:
    """Raise unless the prompts continue what the cache's rows hold.

    `generate` cuts `get_seq_length()` tokens off a prompt without looking at them, so another conversation's prompt
    would silently be answered from this cache's KV.

    Args:
        input_ids: `[prompts, length]`: the whole transcripts.
        num_copies: rows that each prompt becomes (beams, return sequences).

    Raises:
        PromptMismatchError: a transcript departs from the cache, or adds nothing to it; the cache is unchanged.
        UnsupportedError: the cache has another number of rows.
    """
    batch = cache.state.batch
    held = batch.length
    if held == 0:
        return
    cache.state.take_rows(input_ids.shape[0] * num_copies)
    for number, table in enumerate(batch.tables):
        ids = input_ids[number // num_copies, :held].tolist()
        columns = (range(column, column + count) for column, _, count in table.pieces(0, table.num_tokens))
        tokens = [ids[column] for run in columns for column in run if column < len(ids)]
        where = table.first_difference(tokens)
        if where is not None:
            row = f"row {number}: " if batch.num_rows > 1 else ""
            column = next(c + where - t for c, t, n in table.pieces(0, table.num_tokens) if t <= where < t + n)
            raise PromptMismatchError(
                f"{row}the prompt departs from the cache's {held} tokens at token {column}: it is another "
                f"conversation's, or was edited; use a new cache, or cache.crop({column - held})"
            )
    if input_ids.shape[1] <= held:
        back = max(input_ids.shape[1] - 1, 0) - held
        raise PromptMismatchError(
            f"the cache holds {held} tokens, the prompt has {input_ids.shape[1]}: pass the whole transcript with new "
            f"tokens at its end, or to answer this prompt again cache.crop({back}) first"
        )
