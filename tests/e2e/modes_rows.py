"""The modes whose caches have several rows, and a cache's own methods."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.e2e.families import tiny, tokens
from tests.e2e.modes import ADDED, ANSWER, PAD, PROMPT, QUIET, SAMPLING, mode, more
from tests.e2e.sides import Side, other_rows, repeat_rows, select_rows

LENGTHS = (PROMPT, 260, 171)  # of a batch's rows
# Of rows padded on the right that generate goes on with: it chooses the first token from the logits of padding. Where a
# window holds padding alone, eager attention gives what depends on the chunk's size, so holes are smaller than windows.
RIGHT_LENGTHS = (PROMPT, 291, 280)

# -- beams -------------------------------------------------------------------------------------------------------------

_BEAMS: dict[str, Any] = {"num_beams": 3, "max_new_tokens": ANSWER, "do_sample": False}


@mode(rows=3)
def beams(side: Side, family: str) -> None:
    """`num_beams=3`, on fresh caches with a growing transcript; at the end all rows of the cache go on."""
    ids = tokens(PROMPT)
    for turn in range(3):
        cache = side.new_cache()
        ids = more(side.generate(ids, cache, beams=True, num_return_sequences=2, **_BEAMS)[:1], turn)
    side.generate(more(_held(side), 3), cache, **QUIET)


@mode(rows=3)
def beams_continued(side: Side, family: str) -> None:
    """Three searches on one cache: between two of them one row is selected, and repeated."""
    cache, ids = side.new_cache(), tokens(PROMPT)
    for turn in range(3):
        side.generate(ids, cache, beams=True, num_return_sequences=2, **_BEAMS)
        ids = more(_held(side)[1:2], turn)
        select_rows(side, cache, [1])
        repeat_rows(side, cache, 1, 3)


def _held(side: Side) -> torch.Tensor:
    held = side.calls[-1].held
    assert held is not None
    return held


@mode(rows=3)
def beam_sampling(side: Side, family: str) -> None:
    """`num_beams=3` with `do_sample=True` and a seed."""
    ids = tokens(PROMPT)
    for turn in range(3):
        torch.manual_seed(turn)
        how = _BEAMS | {"do_sample": True, "top_k": 0, "temperature": 1.0}
        ids = more(side.generate(ids, side.new_cache(), beams=True, num_return_sequences=2, **how)[:1], turn)


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
    # The model may say PAD too: only what is followed by nothing else is padding.
    said = (answered != PAD).long().flip(1).cummax(1).values.flip(1)
    mask = torch.cat([mask, said, torch.ones(len(out), ADDED, dtype=torch.long)], dim=1)
    return more(out, turn), mask


@functools.cache
def end_token(family: str, dtype: torch.dtype, left: bool) -> int:
    """A token that one row of the batch says in its first answer, and another row does not."""
    model, (ids, mask) = tiny(family, dtype), padded(left, LENGTHS if left else RIGHT_LENGTHS)
    out = model.generate(ids, attention_mask=mask, pad_token_id=PAD, **QUIET)
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
        out = side.generate(ids, cache, attention_mask=mask, **QUIET, **ends)
        ids, mask = _next_turn(out, mask, turn)


@mode(rows=3, at_least=ANSWER + 2)
def left_padded(side: Side, family: str) -> None:
    """Three prompts of several lengths, padded on the left; rows end at `eos_token_id`, each at its own step."""
    _batch(side, family, left=True)


@mode(rows=3, at_least=ANSWER + 2)
def right_padded(side: Side, family: str) -> None:
    """The same padded on the right: the holes stay in the middle of the rows, for good."""
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
    """`model(...)` of such a batch: the logits of every token but padding."""
    _batch_by_hand(side, left=True)


@mode(rows=3, at_least=sum(LENGTHS))
def right_padded_by_hand(side: Side, family: str) -> None:
    """The same padded on the right."""
    _batch_by_hand(side, left=False)


@mode(rows=4)
def padded_beams(side: Side, family: str) -> None:
    """`num_beams=2` on two prompts, padded on the left."""
    ids, mask = padded(left=True, lengths=LENGTHS[:2])
    for turn in range(3):
        how = _BEAMS | {"num_beams": 2, "pad_token_id": PAD}
        out = side.generate(ids, side.new_cache(), beams=True, attention_mask=mask, **how)
        ids, mask = _next_turn(out, mask, turn)


@mode(rows=3)
def return_sequences(side: Side, family: str) -> None:
    """`num_return_sequences=3`: samples of one prompt, which go on as three rows."""
    cache, ids = side.new_cache(), tokens(PROMPT)
    for turn in range(3):
        torch.manual_seed(turn)
        how = {} if turn else {"num_return_sequences": 3}
        ids = more(side.generate(ids, cache, **SAMPLING, **how), turn)


# -- a cache's own methods ---------------------------------------------------------------------------------------------


@mode(rows=3, at_least=3 * PROMPT)
def reordered(side: Side, family: str) -> None:
    """`cache.reorder_cache`, with rows that are doubled and dropped, and `cache.reset`."""
    cache = side.new_cache()
    side.forward(other_rows(3, PROMPT, 1), cache)
    for turn, order in enumerate(([2, 0, 1], [1, 1, 0], [0, 2, 2], [0, 1, 2])):
        cache.reorder_cache(torch.tensor(order))
        side.forward(other_rows(3, 1 + 5 * turn, 10 + turn), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    side.forward(other_rows(3, 40, 2), cache)


@mode(rows=4, at_least=PROMPT)
def rows_come_and_go(side: Side, family: str) -> None:
    """`cache.batch_repeat_interleave` and `cache.batch_select_indices`."""
    cache = side.new_cache()
    side.forward(tokens(PROMPT), cache)
    rows = 1
    for turn, change in enumerate((3, [2, 0], 2, [1, 2], [1], 2, [1, 0, 1], [2])):
        if isinstance(change, int):
            repeat_rows(side, cache, rows, change)
            rows *= change
        else:
            select_rows(side, cache, change)
            rows = len(change)
        side.forward(other_rows(rows, 1 + 6 * turn, 10 + turn), cache)


def _croppable(side: Side, cache: Any) -> None:
    """Plain crop keeps a recurrent state as it is, and says so only if asked; kvtier's must refuse by itself."""
    if side.is_plain and not cache.is_croppable:
        raise ValueError("cache.is_croppable is False: crop would leave the recurrent states as they are")


@mode(rows=2, at_least=2 * PROMPT)
def cropped(side: Side, family: str) -> None:
    """`cache.crop` by 0 to 150 tokens, within a block and across many, two rows."""
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
    """`cache.crop` between two calls of `generate`: back by 0 to 150 tokens, and on with others."""
    cache, ids = side.new_cache(), tokens(PROMPT)
    cache.activate_past_recording()
    for turn, (size, added) in enumerate(((5, 150), (150, 45), (40, ADDED), (0, 0))):
        out = side.generate(ids, cache, **QUIET)
        _croppable(side, cache)
        cache.crop(-size)
        ids = torch.cat([out[:, : cache.get_seq_length()], tokens(added, 60 + turn)], dim=1)
