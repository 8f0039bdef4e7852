"""A transfer engine without tensors, threads or time: for state machines over the tier manager. Pure Python."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import IntegrityError
from kvtier.types import Engine, Move, MoveResult, MoveStatus, Slot, Tier

Place = tuple[Tier, Slot]


@dataclass(slots=True)
class _Flight:
    move: Move
    calls_to_read: int
    calls_to_end: int
    payload: object | None = None
    was_read: bool = False


class InstantEngine(Engine):
    """Every move has ended well when somebody looks. It keeps nothing of it: for managers of millions of blocks."""

    def __init__(self) -> None:
        self._ended: list[MoveResult] = []

    def start(self, moves: Sequence[Move]) -> None:
        self._ended += [MoveResult(move, MoveStatus.DONE) for move in moves]

    def finished(self) -> list[MoveResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> list[MoveResult]:
        return self.finished()

    def withdraw(self, move_ids: Sequence[int]) -> list[MoveResult]:
        """Nothing is taken back: all have ended."""
        return []

    def in_flight(self) -> int:
        return len(self._ended)


class FakeEngine(Engine):
    """Keeps moves in flight for a random number of calls and reports them in random order, some of them as failed.

    It does the least that an engine may do: the source is read at a random moment between start and report, and the
    destination holds garbage from start to report. A manager that frees a source, or publishes a destination, too early
    is therefore seen as a difference of bytes.

    Attributes:
        bytes_by_slot: what every slot of every tier holds; absent means garbage. The test writes what steps would
            write; moves copy between entries. A move from an absent entry leaves its destination absent.
        nvme_available_slots: slots of the nvme tier that have backing; a move to a higher one ends as NO_SPACE.
            May be lowered at any time, as a disk fills up.
        retire_frac: fraction of moves to the nvme tier that end as NO_SPACE with `retires_slot`, as on a compressed
            tier whose bytes ran out.
        started: every move ever started, in order.

    `start` raises IntegrityError for what no correct manager asks: a move id twice, a destination slot that takes part
    in another move, a source that is still being written.
    """

    def __init__(self, seed: int, fail_frac: float = 0.0, max_delay: int = 3) -> None:
        """`fail_frac`: fraction of moves that end as FAILED. `max_delay`: calls of `finished` or `wait`, >= 0."""
        self._random = random.Random(seed)
        self.fail_frac = fail_frac
        self.max_delay = max_delay
        self.nvme_available_slots = sys.maxsize
        self.retire_frac = 0.0
        self.bytes_by_slot: dict[Place, object] = {}
        self.started: list[Move] = []
        self._flights: list[_Flight] = []
        self._ids: set[int] = set()

    def start(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._check(move)
            self._ids.add(move.move_id)
            self.started.append(move)
            self.bytes_by_slot.pop((move.dest, move.dest_slot), None)
            end = self._random.randint(0, self.max_delay)
            flight = _Flight(move, self._random.randint(0, end), end)
            self._flights.append(flight)
            if flight.calls_to_read == 0 and self._random.random() < 0.5:
                self._read(flight)  # at once; otherwise just before it is reported

    def finished(self) -> list[MoveResult]:
        return self._tick()

    def wait(self, timeout_s: float) -> list[MoveResult]:
        """As long as moves are in flight at least one is reported: time is counted in calls, so none runs out."""
        results = self._tick()
        while self._flights and not results:
            results = self._tick()
        return results

    def withdraw(self, move_ids: Sequence[int]) -> list[MoveResult]:
        """Moves whose source has not been read yet may not have begun: some of them are taken back."""
        wanted = set(move_ids)
        back = [
            flight
            for flight in self._flights
            if flight.move.move_id in wanted and not flight.was_read and self._random.random() < 0.3
        ]
        self._flights = [flight for flight in self._flights if flight not in back]
        return [MoveResult(flight.move, MoveStatus.WITHDRAWN) for flight in back]

    def in_flight(self) -> int:
        return len(self._flights)

    def _check(self, move: Move) -> None:
        source, dest = (move.source, move.source_slot), (move.dest, move.dest_slot)
        if move.move_id in self._ids:
            raise IntegrityError(f"move id {move.move_id} was started before")
        if source == dest:
            raise IntegrityError(f"{move} copies a slot onto itself")
        for other in (flight.move for flight in self._flights):
            other_dest = (other.dest, other.dest_slot)
            if dest in (other_dest, (other.source, other.source_slot)):
                raise IntegrityError(f"{move} writes to a slot of {other}, which is in flight")
            if source == other_dest:
                raise IntegrityError(f"{move} reads the destination of {other}, which is in flight")

    def _tick(self) -> list[MoveResult]:
        due: list[_Flight] = []
        still: list[_Flight] = []
        for flight in self._flights:
            if flight.calls_to_read <= 0:
                self._read(flight)
            (due if flight.calls_to_end <= 0 else still).append(flight)
            flight.calls_to_read -= 1
            flight.calls_to_end -= 1
        self._flights = still
        self._random.shuffle(due)
        return [self._end(flight) for flight in due]

    def _read(self, flight: _Flight) -> None:
        if not flight.was_read:
            flight.was_read = True
            flight.payload = self.bytes_by_slot.get((flight.move.source, flight.move.source_slot))

    def _end(self, flight: _Flight) -> MoveResult:
        move = flight.move
        if move.dest is Tier.NVME and move.dest_slot >= self.nvme_available_slots:
            return MoveResult(move, MoveStatus.NO_SPACE, "fake: disk full", self.nvme_available_slots)
        if move.dest is Tier.NVME and self._random.random() < self.retire_frac:
            return MoveResult(move, MoveStatus.NO_SPACE, "fake: no bytes left", self.nvme_available_slots, True)
        if self._random.random() < self.fail_frac:
            return MoveResult(move, MoveStatus.FAILED, "fake: the move failed")
        if flight.payload is not None:
            self.bytes_by_slot[move.dest, move.dest_slot] = flight.payload
        return MoveResult(move, MoveStatus.DONE)
