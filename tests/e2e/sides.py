"""The same conversation on plain transformers and on kvtier: what is recorded, and what counts as equal."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LogitsProcessor, LogitsProcessorList

from tests.e2e.families import CHUNK, VOCABULARY, plain_forward, tiny, tiny_from, tokens

FP32_TOLERANCE = 1e-4
# Two chunk sizes of the plain model share most of their roundings, kvtier's and the plain model's do not (the plain
# model's sdpa and eager attention differ by one to eight times as much): see test_exact.test_bfloat16.
BF16_FACTOR = 3


@dataclass
class Step:
    """Logits, and what they depend on."""

    history: torch.Tensor
    """`[rows, tokens]` before a choice, or `[tokens]` of a forward by hand: equal histories must give equal logits."""
    logits: torch.Tensor


@dataclass
class Call:
    """One call of generate, or one forward by hand."""

    steps: list[Step] = field(default_factory=list)
    ids: torch.Tensor | None = None
    """What generate returned."""
    beams: bool = False
    held: torch.Tensor | None = None
    """`[rows, tokens]`: what the rows of the cache hold after a beam search. Its last reordering, once every beam has
    reached the length, is of candidates whose scores have become equal: not the beams that it returns, nor in order."""
    fresh: bool = False
    """It depends on no call before it."""


_drafting: list[Any] = []
"""Not empty while an assistant generates: it is given the same logits processors."""


def _is_choice(scores: torch.Tensor) -> bool:
    # Prompt lookup asks processors about made-up scores, all ones, to learn which candidates are forbidden.
    return not _drafting and bool((scores != scores[0, 0]).any())


class Recorder(LogitsProcessor):  # type: ignore[no-untyped-call]
    """Sees the logits of every choice, those after rejected candidates included, and changes nothing."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if _is_choice(scores):
            self.steps.append(Step(input_ids.clone(), scores.float().clone()))
        return scores


class Follow(LogitsProcessor):  # type: ignore[no-untyped-call]
    """Makes each row take the token that it took in the plain run: in 16 bits near ties would soon end the comparison.

    Nothing is lost by it: two choices that differ though all logits agree within the tolerance were near ties.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        length = input_ids.shape[1]
        if not _is_choice(scores) or length >= self._ids.shape[1]:
            return scores
        forced = torch.full_like(scores, float("-inf"))
        for row in range(len(scores)):
            if torch.equal(input_ids[row], self._ids[row, :length]):
                forced[row, self._ids[row, length]] = 0.0
            else:  # after a candidate that will be rejected
                forced[row] = scores[row]
        return forced


class Side:
    """A model with caches, plain or tiered, and the calls that were made on it."""

    def __init__(self, model: Any, run: Any, new_cache: Callable[[], Any], chunk: int | None, follow: Side | None):
        self.model, self._run, self.new_cache, self._chunk, self._follow = model, run, new_cache, chunk, follow
        self.calls: list[Call] = []

    @property
    def is_plain(self) -> bool:
        return self._run is self.model

    def generate(
        self, ids: torch.Tensor, cache: Any, *, beams: bool = False, fresh: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """Prompt and answer, `[rows, tokens]`.

        Args:
            beams: the tokens are found by beam search.
            fresh: the cache is empty and no later call uses it, so that a near tie in this call says nothing of others.
        """
        # Drafts ignore prefill_chunk_size; kvtier has a chunk size of its own.
        if self.is_plain and self._chunk and not {"prefill_chunk_size", "assistant_model"} & set(kwargs):
            kwargs["prefill_chunk_size"] = self._chunk
        theirs = self._follow.calls[len(self.calls)] if self._follow else None
        recorder = Recorder()
        # The recorder first, so that it sees the model's own logits.
        processors = [recorder, *kwargs.pop("logits_processor", [])]
        if theirs is not None and theirs.ids is not None and not beams:
            processors.append(Follow(theirs.ids))
        orders: list[torch.Tensor] = []
        reorder = cache.reorder_cache
        cache.reorder_cache = lambda order: (orders.append(order), reorder(order))[1]
        out = self._run.generate(
            ids, cache=cache, logits_processor=LogitsProcessorList(processors), return_dict_in_generate=True,
            output_logits=True, **kwargs,
        )  # fmt: skip
        del cache.reorder_cache
        call = Call(recorder.steps, out.sequences, beams, fresh=fresh)
        if beams:  # beam search shows processors log-probabilities: it hands the logits out beside them
            call.held = call.steps[-1].history[orders[-1]]
            assert len(out.logits) == len(call.steps)
            for step, logits in zip(call.steps, out.logits, strict=True):
                step.logits = logits.float()
        self.calls.append(call)
        if theirs is not None and theirs.ids is not None and fresh:
            return theirs.ids
        return out.sequences

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
    near_ties: int = 0
    """Beam searches that went apart at one."""


def compare(ours: Side, plain: Side, tolerance: float, near_ties: bool = False) -> Verdict:
    """Raise AssertionError unless every logit is within tolerance and every token is the same.

    With `near_ties` two beam searches may go apart where the plain logits rank both choices within the tolerance. What
    follows such a place has another history and is not compared, up to the next call that is fresh.
    """
    verdict, comparable = Verdict(), True
    assert len(ours.calls) == len(plain.calls), (len(ours.calls), len(plain.calls))
    for number, (mine, theirs) in enumerate(zip(ours.calls, plain.calls, strict=True)):
        comparable = comparable or theirs.fresh
        if comparable and not _compare_call(mine, theirs, tolerance, near_ties, verdict, f"call {number}"):
            comparable = False
            verdict.near_ties += 1
    return verdict


def _compare_call(mine: Call, theirs: Call, tolerance: float, near_ties: bool, verdict: Verdict, where: str) -> bool:
    """False if the call went another way at a near tie."""
    for index, (a, b) in enumerate(zip(mine.steps, theirs.steps, strict=False)):
        if not _same(a.history, b.history):
            assert near_ties and theirs.beams and index, f"{where}, step {index}: other tokens before it"
            _check_near_tie(a.history, b.history, theirs, tolerance, f"{where}, step {index}")
            return False
        assert a.logits.shape == b.logits.shape and torch.isfinite(b.logits).all(), f"{where}, step {index}"
        difference = (a.logits - b.logits).abs().max().item()
        assert difference <= tolerance, f"{where}, step {index}: logits differ by {difference}, not by {tolerance}"
        verdict.steps, verdict.difference = verdict.steps + 1, max(verdict.difference, difference)
    if mine.ids is not None and theirs.ids is not None and not _same(mine.ids, theirs.ids):
        assert near_ties and theirs.beams, f"{where}: returned other tokens"
        _check_near_tie(mine.ids, theirs.ids, theirs, tolerance, where)
        return False
    assert (mine.ids is None) == (theirs.ids is None)
    assert len(mine.steps) == len(theirs.steps), f"{where}: {len(mine.steps)} and {len(theirs.steps)} steps"
    return True


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _check_near_tie(ours: torch.Tensor, plain: torch.Tensor, theirs: Call, tolerance: float, where: str) -> None:
    """Rank by rank, the plain side's log-probability of our beam is its own beam's, within what logits may differ."""
    known = {tuple(row.tolist()): step.logits[n] for step in theirs.steps for n, row in enumerate(step.history)}
    start = theirs.steps[0].history.shape[1]

    def score(row: list[int]) -> float:
        prefixes = ((row[:end], row[end]) for end in range(start, len(row)))
        return sum(torch.log_softmax(known[tuple(prefix)], dim=-1)[token].item() for prefix, token in prefixes)

    assert ours.shape == plain.shape, where
    for other, right in zip(ours.tolist(), plain.tolist(), strict=True):
        gap = abs(score(other) - score(right))
        assert gap <= tolerance, f"{where}: beams {gap} apart are no near tie"


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


@functools.cache
def tolerance_of(family: str, dtype: torch.dtype) -> float:
    """1e-4, or in 16 bits so many times what the plain model's logits change with the size of its chunks."""
    if dtype == torch.float32:
        return FP32_TOLERANCE
    return BF16_FACTOR * max(_chunking(tiny(family, dtype), tokens(380, seed)) for seed in range(3))


def _chunking(model: Any, ids: torch.Tensor) -> float:
    runs = [plain_forward(model, ids, chunk=chunk).float() for chunk in (CHUNK, 7, ids.shape[1])]
    if all(torch.equal(runs[0], run) for run in runs):
        # Eager attention gives some models the same bits in every chunk but one of one token.
        cache = DynamicCache(config=model.config)
        pieces = ((ids[:, :-40], CHUNK), (ids[:, -40:], 1))
        runs.append(torch.cat([plain_forward(model, piece, cache, chunk).float() for piece, chunk in pieces], dim=1))
    return max((a - b).abs().max().item() for a in runs for b in runs)


def other_rows(count: int, length: int, seed: int) -> torch.Tensor:
    """`[count, length]` random ids, each row its own."""
    return torch.randint(1, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1000 + seed))
