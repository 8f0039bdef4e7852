"""Moves that have passed their deadline and have not ended, and the slots that they may still read or write."""

from __future__ import annotations

from kvtier.errors import IntegrityError
from kvtier.types import Move, Slot, Tier


def slots_of(move: Move) -> set[tuple[Tier, Slot]]:
    """What the move reads and writes."""
    return {(move.source, move.source_slot), (move.dest, move.dest_slot)}


class HungMoves:
    """Nobody waits for them, nor uses what comes of them; the slots that they read and write are held until they end.

    Attributes:
        moves: by id.
    """

    def __init__(self) -> None:
        self.moves: dict[int, Move] = {}
        self._held: set[tuple[Tier, Slot]] = set()
        self._orphans: set[tuple[Tier, Slot]] = set()
        """Of those, what no block owns: it goes back when the move has ended."""

    def add(self, move: Move) -> None:
        """The move hangs. Its destination belongs to no block."""
        self.moves[move.move_id] = move
        self._held.update(slots_of(move))
        self._orphans.add((move.dest, move.dest_slot))

    def remove(self, move: Move) -> list[tuple[Tier, Slot]]:
        """The move is over. The slots that nobody owns and no other move holds: they are free."""
        del self.moves[move.move_id]
        self._held = {slot for other in self.moves.values() for slot in slots_of(other)}
        free = [slot for slot in self._orphans if slot not in self._held]
        self._orphans.difference_update(free)
        return free

    def holds(self, tier: Tier, slot: Slot) -> bool:
        """Whether one of them may still read or write this slot: it must not change, nor be given up."""
        return (tier, slot) in self._held

    def num_held(self, tier: Tier) -> int:
        """Slots of `tier` that they hold."""
        return sum(each is tier for each, _ in self._held)

    def keep(self, tier: Tier, slot: Slot) -> bool:
        """A block gives the slot up; whether it stays theirs for now."""
        if (tier, slot) not in self._held:
            return False
        self._orphans.add((tier, slot))
        return True

    def claim(self, used: dict[Tier, set[Slot]]) -> None:
        """Add what belongs to them alone to `used`, the slots that blocks and other moves own.

        Raises IntegrityError: a slot of theirs has another owner, or none.
        """
        held = {slot for move in self.moves.values() for slot in slots_of(move)}
        if self._held != held or self._orphans - self._held:
            raise IntegrityError("slots are held for other moves than those that hang")
        for tier, slot in self._orphans:
            if slot in used[tier]:
                raise IntegrityError(f"{tier.label} slot {slot} has an owner, and a move that hangs has it alone")
            used[tier].add(slot)
        for tier, slot in self._held:
            if slot not in used[tier]:
                raise IntegrityError(f"{tier.label} slot {slot} is free, and a move that hangs uses it")
