"""Every mode of generation as one function that runs the same on plain transformers and on kvtier.

Each makes calls on a `Side`, which records the logits of every choice. Prompts are far longer than the small budgets'
gpu and cpu tiers, and a cache sees three turns: a prompt, then twice the transcript and something new. A mode's
docstring is its line in `docs/matrix.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from tests.e2e.families import tiny, tokens
from tests.e2e.sides import Side, assistant, other_rows

PROMPT, ADDED, ANSWER, PAD = 300, 25, 12, 0  # `tokens` never draws PAD
QUIET: dict[str, Any] = {"max_new_tokens": ANSWER, "do_sample": False}
SAMPLING: dict[str, Any] = {"max_new_tokens": ANSWER, "do_sample": True, "temperature": 0.8, "top_k": 0}


@dataclass(frozen=True)
class Mode:
    """A way to generate."""

    run: Callable[[Side, str], None]
    """Takes the side and the family's name."""
    rows: int = 1
    """The most rows that a cache of it has."""
    at_least: int = 3 * ANSWER
    """Steps that are compared at least."""
    same_chunks: bool = True
    """Whether plain transformers takes prompts in chunks of kvtier's size: `gathered` then gives its bits."""

    @property
    def description(self) -> str:
        """What it does, in a sentence for users."""
        return str(self.run.__doc__).strip()


MODES_BY_NAME: dict[str, Mode] = {}


def mode(
    rows: int = 1, at_least: int = 3 * ANSWER, same_chunks: bool = True
) -> Callable[[Callable[[Side, str], None]], Any]:
    """Enter a function, under its own name, into `MODES_BY_NAME`."""

    def enter(run: Callable[[Side, str], None]) -> Callable[[Side, str], None]:
        MODES_BY_NAME[run.__name__] = Mode(run, rows, at_least, same_chunks)
        return run

    return enter


def more(transcript: torch.Tensor, turn: int) -> torch.Tensor:
    """The transcript and the next turn's new tokens, which differ from row to row."""
    return torch.cat([transcript, other_rows(len(transcript), ADDED, turn)], dim=1)


# -- one row -----------------------------------------------------------------------------------------------------------


@mode()
def greedy(side: Side, family: str) -> None:
    """`generate`, three turns on one cache, each with the whole transcript."""
    cache, ids = side.new_cache(), tokens(PROMPT)
    for turn in range(3):
        ids = more(side.generate(ids, cache, **QUIET), turn)


@mode()
def sampling(side: Side, family: str) -> None:
    """The same with `do_sample=True`, a temperature and a seed."""
    cache, ids = side.new_cache(), tokens(PROMPT)
    for turn in range(3):
        torch.manual_seed(turn)
        ids = more(side.generate(ids, cache, **SAMPLING), turn)


@mode(same_chunks=False)
def own_chunks(side: Side, family: str) -> None:
    """With a `prefill_chunk_size` of the user's own, no multiple of kvtier's."""
    cache, ids = side.new_cache(), tokens(PROMPT)
    for turn in range(3):
        ids = more(side.generate(ids, cache, prefill_chunk_size=48, **QUIET), turn)


@mode()
def new_tokens_only(side: Side, family: str) -> None:
    """`generate` with a filled cache and the new tokens alone; the mask covers all."""
    cache, ids, total = side.new_cache(), tokens(PROMPT), PROMPT
    for turn in range(3):
        out = side.generate(ids, cache, attention_mask=torch.ones(1, total, dtype=torch.long), **QUIET)
        ids = torch.cat([out[:, -1:], tokens(ADDED, 50 + turn)], dim=1)  # the last token was never fed
        total = cache.get_seq_length() + ids.shape[1]


@mode(at_least=PROMPT + 2 * ADDED)
def forward_by_hand(side: Side, family: str) -> None:
    """`model(...)`: prompts in one call each, and a loop that feeds token by token."""
    cache, said = side.new_cache(), greedy_answer(family, side.model.dtype, 40)
    side.forward(tokens(PROMPT), cache)
    for turn in range(3):
        for token in said[:, 12 * turn : 12 * turn + 12].split(1, dim=1):
            side.forward(token, cache)
        side.forward(tokens(ADDED, 50 + turn), cache)


class NoRepeats(LogitsProcessor):  # type: ignore[no-untyped-call]
    """Forbids the last ten tokens."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores.scatter(1, input_ids[:, -10:], float("-inf"))


class AtLength(StoppingCriteria):
    """Stops at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Heard(BaseStreamer):
    """Keeps what is streamed."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ids.append(-1)


@mode(at_least=30)
def every_extra(side: Side, family: str) -> None:
    """A streamer, stopping criteria, a logits processor, `max_time` and `output_scores` in one call."""
    cache, ids = side.new_cache(), tokens(PROMPT)
    for turn in range(3):
        heard, length = Heard(), ids.shape[1] + 10
        out = side.generate(
            ids, cache, max_new_tokens=40, do_sample=False, max_time=3600.0, output_scores=True, streamer=heard,
            logits_processor=[NoRepeats()], stopping_criteria=[AtLength(length)],
        )  # fmt: skip
        assert heard.ids == [*out[0].tolist(), -1] and out.shape[1] == length
        ids = more(out, turn)


# -- drafts: one row, candidates that are kept or cropped --------------------------------------------------------------


def _drafts(side: Side, ids: torch.Tensor, **how: Any) -> None:
    """Continued with new tokens alone: plain assisted decoding feeds all it is given, whatever the cache holds."""
    cache, total = side.new_cache(), PROMPT
    for turn in range(3):
        out = side.generate(ids, cache, attention_mask=torch.ones(1, total, dtype=torch.long), **QUIET, **how)
        repeated = out[:, -8:].repeat(1, 3)  # something to look up
        ids = torch.cat([out[:, -1:], repeated, tokens(ADDED, 50 + turn), repeated[:, :4]], dim=1)
        total = cache.get_seq_length() + ids.shape[1]


class Parrot(LogitsProcessor):  # type: ignore[no-untyped-call]
    """Three times of four it has the model say what came after the same token before: random models do not copy."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        before = (input_ids[0, :-1] == input_ids[0, -1]).nonzero()
        if input_ids.shape[1] % 4 and len(before):
            scores = scores.index_add(1, input_ids[0, before[0] + 1], torch.full((1, 1), 100.0))
        return scores


@mode(same_chunks=False)
def prompt_lookup(side: Side, family: str) -> None:
    """`prompt_lookup_num_tokens`, on a prompt that repeats itself; some candidates are right."""
    ids = tokens(PROMPT // 3).repeat(1, 3)
    _drafts(side, ids, prompt_lookup_num_tokens=4, logits_processor=[Parrot()])


@functools.cache
def greedy_answer(family: str, dtype: torch.dtype, length: int) -> torch.Tensor:
    """What the plain model says to the first 180 tokens: the same on every side, so not asked of the side itself."""
    model, ids = tiny(family, dtype), tokens(PROMPT - 120)
    return torch.as_tensor(model.generate(ids, max_new_tokens=length, do_sample=False)[:, ids.shape[1] :])


@mode(same_chunks=False)
def assistant_often_right(side: Side, family: str) -> None:
    """`assistant_model`, one that drafts nearly what the model says."""
    _drafts(side, tokens(PROMPT), assistant_model=assistant(family, side.model.dtype, good=True))


@mode(same_chunks=False)
def assistant_rarely_right(side: Side, family: str) -> None:
    """`assistant_model`, one whose drafts are nearly all rejected."""
    _drafts(side, tokens(PROMPT), assistant_model=assistant(family, side.model.dtype, good=False))
