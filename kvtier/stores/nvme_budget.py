"""Whether what the config lets an nvme store take and write is enough for the least that it needs."""

from __future__ import annotations

from pathlib import Path

from kvtier.errors import BudgetError
from kvtier.rate import Rate
from kvtier.size import size_and_bytes
from kvtier.stores.nvme_layout import BOOKKEEPING_BYTES, min_budget_bytes, slot_bytes
from kvtier.stores.session_files import SessionFiles
from kvtier.types import BlockShape


def check_budgets(shape: BlockShape, budget_bytes: int, max_writes: Rate | None) -> None:
    """Raise BudgetError: no room for one slot, or no leave to write one."""
    each_bytes, least_bytes = slot_bytes(shape), min_budget_bytes(shape)
    if budget_bytes < least_bytes:
        raise BudgetError(
            f"tiers.nvme.budget is {size_and_bytes(budget_bytes)}, its minimum is {size_and_bytes(least_bytes)}: one "
            f"slot of {each_bytes} bytes and {least_bytes - each_bytes} for the folder, lock and index. "
            "Raise it, lower block_tokens, or leave the nvme tier out"
        )
    move_bytes = each_bytes + BOOKKEEPING_BYTES
    if max_writes is not None and max_writes.num_bytes < move_bytes:
        raise BudgetError(
            f"tiers.nvme.max_writes is {max_writes}, its minimum is "
            f"{Rate(move_bytes, max_writes.period_s)}: one block of {shape.block_tokens} tokens. Raise "
            "it, or leave it out for no limit"
        )


def sessions_kept_bytes(shape: BlockShape, budget_bytes: int, sessions: SessionFiles, folder: Path) -> int:
    """What segments leave of the budget for sessions: their part, or more where there are more of an earlier one.

    Raises BudgetError: those leave no room for a slot.
    """
    used_bytes = sessions.used_bytes()
    least_bytes = min_budget_bytes(shape) + used_bytes
    if used_bytes and budget_bytes < least_bytes:
        raise BudgetError(
            f"tiers.nvme.budget is {size_and_bytes(budget_bytes)}, its minimum is {size_and_bytes(least_bytes)}: the "
            f"sessions in {folder} take {used_bytes} bytes of it. Raise it, delete sessions, or give another "
            "tiers.nvme.path"
        )
    return max(sessions.room_bytes, used_bytes)
