"""The same conversation on plain transformers and on kvtier: what is recorded, and what counts as equal."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from tests.e2e.families import CHUNK, VOCABULARY, assert_close, plain_forward, tiny, tiny_from, tokens

FP32_TOLERANCE = 1e-4
BF16_FACTOR = 2
CHUNKED_TEXTS, SINGLE_TEXTS = 8, 3


@dataclass
class Step:
    """Logits, and what they depend on."""

    history: torch.Tensor
    """`[rows, tokens]` before a choice, or `[tokens]` of a forward by hand: equal histories must give equal logits."""
    logits: torch.Tensor
    scores: torch.Tensor | None = None
    """What logits processors were shown at a choice: the logits, or a beam search's log-probabilities."""


@dataclass
class Call:
    """One call of generate, or one forward by hand."""

    steps: list[Step] = field(default_factory=list)
    ids: torch.Tensor | None = None
    """What generate returned."""
    held: torch.Tensor | None = None
    """`[rows, tokens]`: what the rows of the cache hold after a beam search. Its last reordering, once every beam has
    reached the length, is of candidates whose scores have become equal: not the beams that it returns, nor in order."""


_drafting: list[Any] = []
"""Not empty while an assistant generates: it is given the same logits processors."""


def _is_choice(scores: torch.Tensor) -> bool:
    # Prompt lookup asks processors about made-up scores, all ones, to learn which candidates are forbidden.
    return not _drafting and bool((scores != scores[0, 0]).any())


class Recorder(LogitsProcessor):  # type: ignore[no-untyped-call]
    """Sees the scores of every choice, those after rejected candidates included, before other processors do.

    It changes nothing, or, where it follows another run, puts that run's scores in their place: every choice is then
    the other run's, of samples and beams too. In 16 bits near ties would soon end the comparison. Nothing is lost by
    it: two choices that differ though all logits agree within the tolerance were near ties.
    """

    def __init__(self, follow: Call | None = None) -> None:
        self.steps: list[Step] = []
        self._follow = follow

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if not _is_choice(scores):
            return scores
        number, seen = len(self.steps), scores.float().clone()
        self.steps.append(Step(input_ids.clone(), seen, seen))
        if self._follow is None:
            return scores
        assert number < len(self._follow.steps), f"step {number}: more choices than in the plain run"
        theirs = self._follow.steps[number]
        assert _same(input_ids, theirs.history), f"step {number}: other tokens before it"
        assert theirs.scores is not None
        return theirs.scores.to(scores.dtype)  # type: ignore[return-value]


class Side:
    """A model with caches, plain or tiered, and the calls that were made on it."""

    def __init__(self, model: Any, run: Any, new_cache: Callable[[], Any], chunk: int | None, follow: Side | None):
        self.model, self._run, self.new_cache, self._chunk, self._follow = model, run, new_cache, chunk, follow
        self.calls: list[Call] = []

    @property
    def is_plain(self) -> bool:
        return self._run is self.model

    def generate(self, ids: torch.Tensor, cache: Any, *, beams: bool = False, **kwargs: Any) -> torch.Tensor:
        """Prompt and answer, `[rows, tokens]`.

        Args:
            beams: the tokens are found by beam search.
        """
        # Drafts ignore prefill_chunk_size; kvtier has a chunk size of its own.
        if self.is_plain and self._chunk and not {"prefill_chunk_size", "assistant_model"} & set(kwargs):
            kwargs["prefill_chunk_size"] = self._chunk
        recorder = Recorder(self._follow.calls[len(self.calls)] if self._follow else None)
        orders: list[torch.Tensor] = []
        reorder = cache.reorder_cache
        cache.reorder_cache = lambda order: (orders.append(order), reorder(order))[1]
        out = self._run.generate(
            ids, cache=cache, logits_processor=LogitsProcessorList([recorder, *kwargs.pop("logits_processor", [])]),
            return_dict_in_generate=True, output_logits=True, **kwargs,
        )  # fmt: skip
        del cache.reorder_cache
        call = Call(recorder.steps, out.sequences)
        if beams:  # beam search shows processors log-probabilities: it hands the logits out beside them
            call.held = call.steps[-1].history[orders[-1]]
            assert len(out.logits) == len(call.steps)
            for step, logits in zip(call.steps, out.logits, strict=True):
                step.logits = logits.float()
        self.calls.append(call)
        return torch.as_tensor(out.sequences)

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of `ids`. Those of tokens that `mask` (of cache and new tokens) holds for padding are not recorded."""
        held, kwargs = cache.get_seq_length(), {}
        if mask is not None:
            # As generate does: a row's positions count its tokens, not its padding.
            positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)[:, held:]
            kwargs = {"attention_mask": mask, "position_ids": positions}
        if self.is_plain:
            logits = self._chunks(ids, cache, held, kwargs)
        else:
            logits = self._run(ids, cache=cache, **kwargs).logits
        seen = torch.ones_like(ids) if mask is None else mask[:, held:]
        steps = [Step(ids[row, : column + 1], logits[row, column].float()) for row, column in seen.nonzero().tolist()]
        self.calls.append(Call(steps))
        return logits

    def _chunks(self, ids: torch.Tensor, cache: Any, held: int, kwargs: dict[str, torch.Tensor]) -> torch.Tensor:
        parts, done = [], 0
        for piece in ids.split(self._chunk or ids.shape[1], dim=1):
            end, given = done + piece.shape[1], dict(kwargs)
            if kwargs:
                given["attention_mask"] = kwargs["attention_mask"][:, : held + end]
                given["position_ids"] = kwargs["position_ids"][:, done:end]
            parts.append(self.model(piece, cache=cache, **given).logits)
            done = end
        return torch.cat(parts, dim=1)


def plain_side(
    model: Any, chunk: int | None = CHUNK, kind: type[DynamicCache] = DynamicCache, follow: Side | None = None
) -> Side:
    """Plain transformers, prompts in chunks of `chunk` (None: whole)."""
    return Side(model, model, lambda: kind(config=model.config), chunk, follow)


def tiered_side(tiered: Any, follow: Side | None = None) -> Side:
    """kvtier, prompts in chunks of its own."""
    return Side(tiered.model, tiered, tiered.new_cache, None, follow)


# -- equality ----------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """How far two sides agree."""

    steps: int = 0
    """Compared: choices of generate (all rows) and tokens of forwards by hand."""
    difference: float = 0.0
    """The largest of a logit."""
    wide: float = 0.0
    """The difference to the plain model as it is, where that is more than twice its chunking, and with its attention
    computed in fp32 it is less. 0.0 otherwise."""


def compare(ours: Side, plain: Side, tolerance: float) -> Verdict:
    """Raise AssertionError unless every logit is within tolerance and every token is the same."""
    verdict = Verdict()
    assert len(ours.calls) == len(plain.calls), (len(ours.calls), len(plain.calls))
    for number, (mine, theirs) in enumerate(zip(ours.calls, plain.calls, strict=True)):
        _compare_call(mine, theirs, tolerance, verdict, f"call {number}")
    return verdict


def _compare_call(mine: Call, theirs: Call, tolerance: float, verdict: Verdict, where: str) -> None:
    for index, (a, b) in enumerate(zip(mine.steps, theirs.steps, strict=False)):
        assert _same(a.history, b.history), f"{where}, step {index}: other tokens before it"
        assert a.logits.shape == b.logits.shape and torch.isfinite(b.logits).all(), f"{where}, step {index}"
        difference = (a.logits - b.logits).abs().max().item()
        assert difference <= tolerance, f"{where}, step {index}: logits differ by {difference}, not by {tolerance}"
        verdict.steps, verdict.difference = verdict.steps + 1, max(verdict.difference, difference)
    assert (mine.ids is None) == (theirs.ids is None)
    if mine.ids is not None and theirs.ids is not None:
        assert _same(mine.ids, theirs.ids), f"{where}: returned other tokens"
    assert len(mine.steps) == len(theirs.steps), f"{where}: {len(mine.steps)} and {len(theirs.steps)} steps"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


# -- rows of a cache ---------------------------------------------------------------------------------------------------


def _has_linear(cache: Any) -> bool:
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def select_rows(side: Side, cache: Any, rows: list[int]) -> None:
    """Keep these rows, in this order. Plain linear-attention layers have no method for it but reorder_cache."""
    if side.is_plain and _has_linear(cache):
        cache.reorder_cache(torch.tensor(rows))
    else:
        cache.batch_select_indices(torch.tensor(rows))


def repeat_rows(side: Side, cache: Any, held: int, repeats: int) -> None:
    """Each of the `held` rows so many times, side by side."""
    if side.is_plain and _has_linear(cache):
        cache.reorder_cache(torch.arange(held).repeat_interleave(repeats))
    else:
        cache.batch_repeat_interleave(repeats)


# -- models beside the family's ----------------------------------------------------------------------------------------


@functools.cache
def assistant(family: str, dtype: torch.dtype, good: bool) -> Any:
    """A model that drafts: a noisy copy of the family's, often right, or a small Llama of its own, nearly never."""
    if good:
        model = copy.deepcopy(tiny(family, dtype))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * parameter.float().std().nan_to_num()
                parameter.add_((0.03 * noise).to(dtype))
    else:
        values = dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
        model = tiny_from(LlamaConfig, dtype, **values)
    model.generation_config.update(
        num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    generate = model.generate

    @functools.wraps(generate)
    def draft(*args: Any, **kwargs: Any) -> Any:
        _drafting.append(model)
        try:
            return generate(*args, **kwargs)
        finally:
            _drafting.pop()

    model.generate = draft
    return model


def tolerance_of(family: str, dtype: torch.dtype) -> float:
    """1e-4, or in 16 bits so many times what the plain model's logits change with the size of its chunks."""
    return tolerance_for(math.inf, tiny(family, dtype))


def tolerance_for(difference: float, model: Any) -> float:
    """What says of this difference what the model's whole tolerance says, and is not more than that: in 16 bits few of
    the texts need be run to know that it is small enough."""
    if model.dtype == torch.float32:
        return FP32_TOLERANCE
    return BF16_FACTOR * _chunkings(model).reach(difference / BF16_FACTOR)


def assert_within(ours: torch.Tensor, plain: torch.Tensor, mode: str, model: Any, what: str = "logits") -> None:
    """`assert_close` with the model's tolerance."""
    tolerance = 0.0
    if mode == "blockwise":
        assert_close(ours, plain, mode, what, math.inf)
        tolerance = tolerance_for((ours.float() - plain.float()).abs().max().item(), model)
    assert_close(ours, plain, mode, what, tolerance)


@functools.cache
def _chunkings(model: Any) -> _Chunkings:
    return _Chunkings(model)


class _Chunkings:
    """The plain model's logits, of several texts in chunks of several sizes, as far as anybody has asked."""

    STRIDE = 19

    def __init__(self, model: Any) -> None:
        self._model, self._most = model, 0.0
        # As rows of a batch: each gets the bits that it gets alone.
        self._ids = torch.cat([tokens(380, seed) for seed in range(CHUNKED_TEXTS)])
        self._runs: list[torch.Tensor] = []
        self._changes = itertools.chain(self._in_chunks(), self._token_by_token())

    def reach(self, difference: float) -> float:
        """The most that a logit was seen to change; all texts are run unless it comes to `difference` before."""
        while self._most < difference and (more := next(self._changes, None)) is not None:
            self._most = max(self._most, more)
        return self._most

    def _in_chunks(self) -> Iterator[float]:
        """The shortest last: they take the most time."""
        for chunk in (self._ids.shape[1], CHUNK, 7):
            run = plain_forward(self._model, self._ids, chunk=chunk).float()
            yield max(((run - other).abs().max().item() for other in self._runs), default=0.0)
            self._runs.append(run)

    def _token_by_token(self) -> Iterator[float]:
        """As an answer is made, which in a batch is another kernel."""
        for row in range(SINGLE_TEXTS):
            cache = DynamicCache(config=self._model.config)
            for start in range(0, self._ids.shape[1], self.STRIDE):
                part = slice(start, start + self.STRIDE)
                single = plain_forward(self._model, self._ids[row : row + 1, part], cache, chunk=1).float()
                yield max((single - run[row, part]).abs().max().item() for run in self._runs)


def other_rows(count: int, length: int, seed: int) -> torch.Tensor:
    """`[count, length]` random ids, each row its own."""
    return torch.randint(1, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1000 + seed))
