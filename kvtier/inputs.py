"""What one call of a model gives its cache: new columns by row, and which of them are padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.batch import Batch
from kvtier.block_table import BlockTable, Made
from kvtier.errors import UnsupportedError
from kvtier.hf import PLAIN_ARGUMENTS, check_mask_kind
from kvtier.step import NewColumns, Run

# Not what older models may take positions from.
_KNOWN = PLAIN_ARGUMENTS - {"cache_position"}


def check_token_ids(ids: torch.Tensor, caller: str) -> None:
    """Raise UnsupportedError, with what to pass instead, unless these are whole numbers in rows, `[rows, tokens]`."""
    if ids.ndim != 2:
        mend = f", such as ids[None], [1, {ids.shape[0]}]" if ids.ndim == 1 else ""
        raise UnsupportedError(f"{caller}: input_ids has the shape {tuple(ids.shape)}: give rows, [rows, tokens]{mend}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise UnsupportedError(f"{caller}: input_ids are of {ids.dtype}: give token ids, torch.long")


def check_vocabulary(ids: torch.Tensor | None, caller: str, model: Any) -> None:
    """Raise UnsupportedError, with the id and its place, unless the model's table of input embeddings has all ids.

    A CPU says `index out of range in self` of such an id, and a GPU is lost to the process. Once a prompt, not once a
    token: it waits for the device. Says nothing of a model without a plain table.
    """
    get_table = getattr(model, "get_input_embeddings", None)
    try:
        num_ids = getattr(get_table() if get_table else None, "num_embeddings", None)
    except NotImplementedError:  # transformers, of a model that has none
        return
    if ids is None or not isinstance(num_ids, int) or ids.numel() == 0:
        return
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < num_ids:
        return
    row, token = ((ids < 0) | (ids >= num_ids)).nonzero()[0].tolist()
    raise UnsupportedError(
        f"{caller}: token id {int(ids[row, token])}, number {token} of row {row}, is none of the model's, which are 0 "
        f"to {num_ids - 1}: use the model's own tokenizer, or after adding tokens to it "
        "model.resize_token_embeddings(len(tokenizer))"
    )


@dataclass(frozen=True, slots=True)
class CallInputs:
    """The new columns of one call, in every row."""

    num_rows: int
    num_columns: int
    ids: torch.Tensor | None
    """`[rows, columns]`; None when the call passes embeddings."""
    positions: torch.Tensor | None
    """`[rows, columns]`, or None where the model counts columns itself."""
    new_mask: torch.Tensor | None
    """`[rows, columns]` booleans; None: no padding among the new columns."""
    made: Made

    @staticmethod
    def read(arguments: Mapping[str, Any], held: int) -> CallInputs:
        """Read a call's arguments.

        Args:
            held: columns that the cache holds.

        Raises:
            UnsupportedError: by name, for shapes and masks that would not be exact.
        """
        given = [arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None]
        if len(given) != 1:
            raise UnsupportedError("give exactly one of input_ids and inputs_embeds")
        if not isinstance(given[0], torch.Tensor):
            raise UnsupportedError(
                f"a call takes a tensor of token ids, [rows, tokens], not a {type(given[0]).__name__}"
            )
        if arguments.get("input_ids") is not None:
            check_token_ids(given[0], "a call")
        rows, num_new = given[0].shape[:2]
        if num_new == 0 or rows == 0:
            raise UnsupportedError(f"no new tokens: the cache holds {held} tokens and the prompt adds none")
        positions = arguments.get("position_ids")
        if positions is not None:
            if positions.ndim != 2 or positions.shape[0] not in (1, rows) or positions.shape[1] != num_new:
                raise UnsupportedError(
                    f"position_ids has the shape {tuple(positions.shape)}: give one a new token, [{rows}, {num_new}]"
                )
            if positions.is_floating_point() or bool(((positions >= 1 << 31) | (positions < 0)).any()):
                raise UnsupportedError(f"position_ids of {positions.dtype}: give whole numbers from 0 to 2**31 - 1")
            positions = positions.expand(rows, -1)
        made = Made.COUNTED if positions is None else Made.PLACED
        if any(value is not None and value is not False and name not in _KNOWN for name, value in arguments.items()):
            made = Made.OTHERWISE
        return CallInputs(
            rows, num_new, arguments.get("input_ids"), positions, _new_mask(arguments, rows, held, num_new), made
        )

    def columns(self, start: int, size: int, held: int) -> list[NewColumns]:
        """What each row gets in the step of new columns `start … start + size - 1`, behind `held` columns."""
        piece = slice(start, start + size)
        ids = None if self.ids is None else self.ids[:, piece].tolist()
        positions = None if self.positions is None else self.positions[:, piece].tolist()
        mask = None if self.new_mask is None else self.new_mask[:, piece].tolist()
        new: list[NewColumns] = []
        for row in range(self.num_rows):
            row_ids = None if ids is None else ids[row]
            row_positions = list(range(held + start, held + start + size)) if positions is None else positions[row]
            if mask is None or all(mask[row]):
                new.append(NewColumns(size, (Run(0, size),), row_ids, row_positions, self.made))
                continue
            kept = [column for column, is_token in enumerate(mask[row]) if is_token]
            picked_ids = None if row_ids is None else [row_ids[column] for column in kept]
            picked_positions = [row_positions[column] for column in kept]
            new.append(NewColumns(size, _runs(kept), picked_ids, picked_positions, self.made))
        return new


def _new_mask(arguments: Mapping[str, Any], rows: int, held: int, num_new: int) -> torch.Tensor | None:
    mask = arguments.get("attention_mask")
    check_mask_kind(mask)
    if mask is None:
        return None
    if tuple(mask.shape) != (rows, held + num_new):
        raise UnsupportedError(
            f"attention_mask has the shape {tuple(mask.shape)}, cache and new tokens are {(rows, held + num_new)}: "
            "pass one of all tokens"
        )
    new_mask = mask[:, held:] != 0
    return None if bool(new_mask.all()) else new_mask


def columns_masked_since(batch: Batch, mask: torch.Tensor | None) -> list[int]:
    """By row, how many of the last columns held are masked now and were tokens before: a finished row's padding.

    Args:
        mask: the call's `attention_mask`, over held and new columns.

    Raises:
        UnsupportedError: the mask differs from the padding held in any other way, or is missing where there is padding.
    """
    held = batch.length
    if mask is None:
        if batch.is_padded:
            raise UnsupportedError(
                "the cache holds padding and the call has no attention_mask: pass one of all tokens, or padding would "
                "be attended to"
            )
        return [0] * batch.num_rows
    now = mask[:, :held] != 0
    if not batch.is_padded and bool(now.all()):
        return [0] * batch.num_rows
    return [_masked_since(number, table, now[number]) for number, table in enumerate(batch.tables)]


def _masked_since(number: int, table: BlockTable, now: torch.Tensor) -> int:
    held = torch.zeros(table.length, dtype=torch.bool)
    for column, _, count in table.pieces(0, table.num_tokens):
        held[column : column + count] = True
    now = now.cpu()
    if torch.equal(now, held):
        return 0
    first = int((now != held).nonzero()[0, 0])
    if not held[first]:
        raise UnsupportedError(
            f"attention_mask unmasks column {first} of row {number}, which is padding in the cache: its K and V were "
            "never computed; use a new cache"
        )
    if bool(now[first:].any()):
        raise UnsupportedError(
            f"attention_mask hides token {first} of row {number}, which the cache holds, and shows later ones: only a "
            "row's last tokens can become padding (if the prompt merely contains the pad token's id, pass "
            "attention_mask=torch.ones_like(input_ids))"
        )
    return table.length - first


def _runs(columns: list[int]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for column in columns:
        if runs and runs[-1].first + runs[-1].count == column:
            runs[-1] = Run(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(Run(column, 1))
    return tuple(runs)
