"""One turn of a conversation: its cache goes back to what the transcript shares with it, and ends with one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvtier.errors import UnsupportedError
from kvtier.generate import Generation
from kvtier.hf import TieredCache
from kvtier.log import logger

_LEAST_HELD = 32  # tokens: fewer are not missed


def take_turn(
    name: str, model: Any, cache: TieredCache, input_ids: torch.Tensor, kwargs: dict[str, Any], keep: Callable[[], None]
) -> Any:
    """`generate` on the whole transcript. See `Session.generate`.

    Args:
        name: the session's, for messages.
        cache: the conversation's, of one row. Nobody else may change it meanwhile.
        input_ids: `[1, length]`.
        kwargs: what `generate` takes beside.
        keep: called when the answer is there and the cache has one row again, while nobody else may change it.
    """
    state = cache.state
    use = state.enter()  # before anything is cropped: another thread may be generating on this session
    try:
        num_copies = Generation(model, kwargs).num_copies
        _keep_one_row(cache, input_ids[0].tolist())  # a call that was interrupted twice may have left more
        _warn_of_a_part(name, cache, input_ids[0].tolist())
        _go_back(cache, input_ids[0].tolist())
        if num_copies > 1:
            cache.batch_repeat_interleave(num_copies)
        out = model.generate(input_ids, cache=cache, **kwargs)
        sequences = out if isinstance(out, torch.Tensor) else out.sequences
        _keep_one_row(cache, sequences[0].tolist())
        keep()
    except BaseException:  # a Ctrl-C too: a session has one row
        _keep_one_row(cache, input_ids[0].tolist())
        raise
    finally:
        state.leave(use)
    return out


def _warn_of_a_part(name: str, cache: TieredCache, ids: list[int]) -> None:
    """A new question alone is not a transcript: all but its beginning would be dropped, and nobody would know why."""
    table = cache.state.batch.tables[0]
    held, different = table.num_tokens, table.first_difference(ids)
    common = min(held, len(ids)) if different is None else different
    if held >= _LEAST_HELD and len(ids) < held and 4 * common < len(ids):
        logger.warning(
            "session %r: the transcript of %d tokens begins with %d of the %d that it held, the others are dropped: "
            "pass the whole conversation each time, or another name for another one",
            name,
            len(ids),
            common,
            held,
        )


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
