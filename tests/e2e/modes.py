"""Every mode of generation as one function that runs the same on plain transformers and on kvtier.

Each makes calls on a `Side`, which records the logits of every choice. Prompts are far longer than the small budgets'
gpu and cpu tiers, and a cache sees three turns: a prompt, then twice the transcript and something new.
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
LENGTHS = (PROMPT, 260, 171)  # of a batch's rows
# Of rows padded on the right that generate goes on with: it chooses the first token from the logits of padding. Where a
# window holds padding alone, eager attention gives what depends on the chunk's size, so holes are smaller than windows.
RIGHT_LENGTHS = (PROMPT, 291, 280)
_QUIET: dict[str, Any] = {"max_new_tokens": ANSWER, "do_sample": False}
_SAMPLING: dict[str, Any] = {"max_new_tokens": ANSWER, "do_sample": True, "temperature": 0.8, "top_k": 0}


@dataclass(frozen=True)
class Mode:
    """A way to generate."""

    run: Callable[[Side, str], None]
    """Takes the side and the family's name."""
    rows: int = 1
    """The most rows that a cache of it has."""
    at_least: int = 3 * ANSWER
    """Steps that are compared at least, if nothing diverges."""


MODES_BY_NAME: dict[str, Mode] = {}


def mode(rows: int = 1, at_least: int = 3 * ANSWER) -> Callable[[Callable[[Side, str], None]], Any]:
    """Enter a function, under its own name, into `MODES_BY_NAME`."""

    def enter(run: Callable[[Side, str], None]) -> Callable[[Side, str], None]:
        MODES_BY_NAME[run.__name__] = Mode(run, rows, at_least)
        return run

    return enter


def more(transcript: torch.Tensor, turn: int) -> torch.Tensor:
    """The transcript and the next turn's new tokens, which differ from row to row."""
    return torch.cat([transcript, other_rows(len(transcript), ADDED, turn)], dim=1)


# -- one row -----------------------------------------------------------------------------------------------------------


@mode()
def greedy(side: Side, family: str) -> None:
    cache, ids = side.new_cache(), tokens(PROMPT)
    for turn in range(3):
        ids = more(side.generate(ids, cache, **_QUIET), turn)


@mode()
def sampling(side: Side, family: str) -> None:
    cache, ids = side.new_cache(), tokens(PROMPT)
    for turn in range(3):
        torch.manual_seed(turn)
        ids = more(side.generate(ids, cache, **_SAMPLING), turn)


@mode()
def own_chunks(side: Side, family: str) -> None:
    """The user's own prefill_chunk_size, no multiple of kvtier's."""
    cache, ids = side.new_cache(), tokens(PROMPT)
    for turn in range(3):
        ids = more(side.generate(ids, cache, prefill_chunk_size=48, **_QUIET), turn)


@mode()
def new_tokens_only(side: Side, family: str) -> None:
    """A filled cache and new tokens alone; the mask covers all."""
    cache, ids, total = side.new_cache(), tokens(PROMPT), PROMPT
    for turn in range(3):
        out = side.generate(ids, cache, attention_mask=torch.ones(1, total, dtype=torch.long), **_QUIET)
        ids = torch.cat([out[:, -1:], tokens(ADDED, 50 + turn)], dim=1)  # the last token was never fed
        total = cache.get_seq_length() + ids.shape[1]


@mode(at_least=PROMPT + 2 * ADDED)
def forward_by_hand(side: Side, family: str) -> None:
    """Prompts in one call each, then a loop that feeds token by token, the same on every side."""
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
    """Streamer, stopping criteria, logits processor and max_time in one call."""
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
        out = side.generate(ids, cache, attention_mask=torch.ones(1, total, dtype=torch.long), **_QUIET, **how)
        repeated = out[:, -8:].repeat(1, 3)  # something to look up
        ids = torch.cat([out[:, -1:], repeated, tokens(ADDED, 50 + turn), repeated[:, :4]], dim=1)
        total = cache.get_seq_length() + ids.shape[1]


@mode()
def prompt_lookup(side: Side, family: str) -> None:
    """The prompt holds the model's own answer to it, so that some candidates are right, and repeats itself."""
    ids = tokens(PROMPT - 120)
    own = greedy_answer(family, side.model.dtype, 40)
    _drafts(side, torch.cat([ids, own, ids[:, -40:], own], dim=1), prompt_lookup_num_tokens=4)


@functools.cache
def greedy_answer(family: str, dtype: torch.dtype, length: int) -> torch.Tensor:
    """What the plain model says to the first 180 tokens: the same on every side, so not asked of the side itself."""
    model, ids = tiny(family, dtype), tokens(PROMPT - 120)
    return _plainly(model, lambda: model.generate(ids, max_new_tokens=length, do_sample=False))[:, ids.shape[1] :]


def _plainly(model: Any, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    before = torch.get_rng_state()
    try:
        return run()
    finally:
        torch.set_rng_state(before)


@mode()
def assistant_often_right(side: Side, family: str) -> None:
    _drafts(side, tokens(PROMPT), assistant_model=assistant(family, side.model.dtype, good=True))


@mode()
def assistant_rarely_right(side: Side, family: str) -> None:
    _drafts(side, tokens(PROMPT), assistant_model=assistant(family, side.model.dtype, good=False))


# -- beams -------------------------------------------------------------------------------------------------------------

_BEAMS: dict[str, Any] = {"num_beams": 3, "max_new_tokens": ANSWER, "do_sample": False}


@mode(rows=3)
def beams(side: Side, family: str) -> None:
    """Three searches on fresh caches with a growing transcript; at the end all beams go on as rows of their cache."""
    ids = tokens(PROMPT)
    for turn in range(3):
        cache = side.new_cache()
        out = side.generate(
            ids, cache, beams=True, fresh=turn < 2, num_return_sequences=3 if turn == 2 else 2, **_BEAMS
        )
        ids = more(out[:1], turn)
    # The last reordering has left the running beams in the rows, best first, as they are returned.
    side.generate(more(out, 3), cache, **_QUIET)


@mode(rows=3)
def beams_continued(side: Side, family: str) -> None:
    """Three searches on one cache: between two of them only the best beam's row is kept, and repeated."""
    cache, ids = side.new_cache(), tokens(PROMPT)
    for turn in range(3):
        if turn:
            cache.batch_select_indices(torch.tensor([0]))
            cache.batch_repeat_interleave(3)
        ids = more(side.generate(ids, cache, beams=True, num_return_sequences=2, **_BEAMS)[:1], turn)


@mode(rows=3)
def beam_sampling(side: Side, family: str) -> None:
    ids = tokens(PROMPT)
    for turn in range(3):
        torch.manual_seed(turn)
        how = _BEAMS | {"do_sample": True, "top_k": 0, "temperature": 1.0}
        ids = more(
            side.generate(ids, side.new_cache(), beams=True, fresh=True, num_return_sequences=2, **how)[:1], turn
        )


# -- batches -----------------------------------------------------------------------------------------------------------


def padded(left: bool, lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of several lengths, and their mask."""
    ids, mask = torch.full((len(lengths), PROMPT), PAD), torch.zeros((len(lengths), PROMPT), dtype=torch.long)
    for row, length in enumerate(lengths):
        where = slice(PROMPT - length, None) if left else slice(0, length)
        ids[row, where], mask[row, where] = tokens(length, seed=20 + row)[0], 1
    return ids, mask


def _next_turn(out: torch.Tensor, mask: torch.Tensor, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a row answered after its end is padding, and becomes hidden although the cache holds it."""
    answered = out[:, mask.shape[1] :]
    mask = torch.cat([mask, (answered != PAD).long(), torch.ones(len(out), ADDED, dtype=torch.long)], dim=1)
    return more(out, turn), mask


@functools.cache
def end_token(family: str, dtype: torch.dtype, left: bool) -> int:
    """A token that one row of the batch says in its first answer, and another row does not."""
    model, (ids, mask) = tiny(family, dtype), padded(left, LENGTHS if left else RIGHT_LENGTHS)
    out = _plainly(model, lambda: model.generate(ids, attention_mask=mask, pad_token_id=PAD, **_QUIET))
    said = out[:, PROMPT:].tolist()
    for row in said:
        for token in row[2:8]:
            if any(token not in other for other in said):
                return int(token)
    raise AssertionError(f"no token ends one row and not another: {said}")


def _batch(side: Side, family: str, left: bool) -> None:
    (ids, mask), cache = padded(left, LENGTHS if left else RIGHT_LENGTHS), side.new_cache()
    ends = {"eos_token_id": end_token(family, side.model.dtype, left), "pad_token_id": PAD}
    for turn in range(3):
        out = side.generate(ids, cache, attention_mask=mask, **_QUIET, **ends)
        ids, mask = _next_turn(out, mask, turn)


@mode(rows=3, at_least=ANSWER + 2)
def left_padded(side: Side, family: str) -> None:
    _batch(side, family, left=True)


@mode(rows=3, at_least=ANSWER + 2)
def right_padded(side: Side, family: str) -> None:
    """The holes stay in the middle of a row, for good. generate takes the first choice from a hole's own logits."""
    _batch(side, family, left=False)


def _batch_by_hand(side: Side, left: bool) -> None:
    (ids, mask), cache = padded(left), side.new_cache()
    for turn in range(6):
        side.forward(ids, cache, mask)
        ids = other_rows(len(mask), ADDED if turn % 2 else 1, 30 + turn)
        new = torch.ones_like(ids)
        if turn == 3:
            new[1, 5:11] = 0  # a row whose later tokens are padding too
        mask = torch.cat([mask, new], dim=1)


@mode(rows=3, at_least=sum(LENGTHS))
def left_padded_by_hand(side: Side, family: str) -> None:
    """Logits of every token but padding."""
    _batch_by_hand(side, left=True)


@mode(rows=3, at_least=sum(LENGTHS))
def right_padded_by_hand(side: Side, family: str) -> None:
    """Logits of every token but padding."""
    _batch_by_hand(side, left=False)


@mode(rows=4)
def padded_beams(side: Side, family: str) -> None:
    ids, mask = padded(left=True, lengths=LENGTHS[:2])
    for turn in range(3):
        out = side.generate(
            ids,
            side.new_cache(),
            beams=True,
            fresh=True,
            attention_mask=mask,
            pad_token_id=PAD,
            **_BEAMS | {"num_beams": 2},
        )
        ids, mask = _next_turn(out, mask, turn)


@mode(rows=3)
def return_sequences(side: Side, family: str) -> None:
    """Three samples of one prompt, which go on as three rows."""
    cache, ids = side.new_cache(), tokens(PROMPT)
    for turn in range(3):
        torch.manual_seed(turn)
        how = {} if turn else {"num_return_sequences": 3}
        ids = more(side.generate(ids, cache, **_SAMPLING, **how), turn)


# -- a cache's own methods ---------------------------------------------------------------------------------------------


@mode(rows=3, at_least=3 * PROMPT)
def reordered(side: Side, family: str) -> None:
    """reorder_cache, with rows that are doubled and dropped, and reset."""
    cache = side.new_cache()
    side.forward(other_rows(3, PROMPT, 1), cache)
    for turn, order in enumerate(([2, 0, 1], [1, 1, 0], [0, 2, 2], [0, 1, 2])):
        cache.reorder_cache(torch.tensor(order))
        side.forward(other_rows(3, 1 + 5 * turn, 10 + turn), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    side.forward(other_rows(3, 40, 2), cache)


@mode(rows=3, at_least=PROMPT)
def rows_come_and_go(side: Side, family: str) -> None:
    """batch_repeat_interleave and batch_select_indices."""
    cache = side.new_cache()
    side.forward(tokens(PROMPT), cache)
    for turn, change in enumerate((3, [2, 0], [1], 2, [1, 0, 1], [2])):
        if isinstance(change, int):
            cache.batch_repeat_interleave(change)
            rows = change
        else:
            cache.batch_select_indices(torch.tensor(change))
            rows = len(change)
        side.forward(other_rows(rows, 1 + 6 * turn, 10 + turn), cache)


def _croppable(side: Side, cache: Any) -> None:
    """Plain crop keeps a recurrent state as it is, and says so only if asked; kvtier's must refuse by itself."""
    if side.is_plain and not cache.is_croppable:
        raise ValueError("cache.is_croppable is False: crop would leave the recurrent states as they are")


@mode(rows=2, at_least=2 * PROMPT)
def cropped(side: Side, family: str) -> None:
    """crop by sizes within a block and across many, 0 among them, two rows."""
    cache = side.new_cache()
    cache.activate_past_recording()  # or a window forgets what a crop would bring back
    side.forward(other_rows(2, PROMPT, 1), cache)
    _croppable(side, cache)
    for turn, size in enumerate((1, 0, 5, 16, 37, 150)):
        # A crop cuts a window to its size: what the next one drops must have come since.
        side.forward(other_rows(2, size + 3, 10 + turn), cache)
        cache.crop(-size)
    side.forward(other_rows(2, 20, 2), cache)


@mode(at_least=4 * ANSWER)
def crop_and_answer_again(side: Side, family: str) -> None:
    """Back by 5 to 150 tokens, and on with others."""
    cache, ids = side.new_cache(), tokens(PROMPT)
    cache.activate_past_recording()
    for turn, (size, added) in enumerate(((5, 150), (150, 45), (40, ADDED), (0, 0))):
        out = side.generate(ids, cache, **_QUIET)
        _croppable(side, cache)
        cache.crop(-size)
        ids = torch.cat([out[:, : cache.get_seq_length()], tokens(added, 60 + turn)], dim=1)
