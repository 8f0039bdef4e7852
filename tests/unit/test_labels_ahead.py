"""Proofs that are made beside the steps, before the blocks go down that need one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvtier.labels import Labels, Origin, Sealed
from tests.small_tiers import FakeModel


class Later:
    """Runs what it is given when it is told to, or waited for: as a thread would, at the worst moment."""

    def __init__(self) -> None:
        self.waiting: list[tuple[_WaitedFor, Callable[..., Any], tuple[Any, ...]]] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future = _WaitedFor(self)
        self.waiting.append((future, function, arguments))
        return future

    def run(self) -> None:
        for future, function, arguments in self.waiting:
            future.set_result(function(*arguments))
        self.waiting.clear()


class _WaitedFor(Future[Any]):
    def __init__(self, later: Later) -> None:
        super().__init__()
        self.later = later

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.later.run()
        return super().result(timeout)


class House:
    """Blocks of one conversation that are sealed and go down, one after the other."""

    def __init__(self) -> None:
        self.model, self.later, self.now_s = FakeModel(), Later(), 0.0
        self.labels = Labels(self.model, lambda: self.now_s, beside=self.later)
        origin = self.labels.origin(1)
        assert isinstance(origin, Origin)
        self.origin = origin
        self.sealed: list[Sealed] = []

    def seal(self, num: int) -> None:
        for _ in range(num):
            parent = self.sealed[-1] if self.sealed else None
            sealed = self.labels.seal(self.origin, parent, b"%d" % len(self.sealed), is_first=parent is None)
            assert sealed is not None
            self.sealed.append(sealed)

    def goes_down(self, number: int) -> bool:
        """Whether block `number` gets its label."""
        label = self.labels.label(self.sealed[number])
        assert label is None or label == self.sealed[number].label
        return label is not None


def test_a_proof_is_begun_while_proven_blocks_are_left_and_nobody_waits_for_it() -> None:
    house = House()
    house.seal(8)
    assert house.goes_down(0) and house.model.num_hashed == 2  # before the first token, and for all eight
    house.seal(8)
    assert house.goes_down(1) and not house.later.waiting  # seven are proven, eight wait
    assert house.goes_down(6) and len(house.later.waiting) == 1
    assert house.model.num_hashed == 2
    assert house.goes_down(7) and len(house.later.waiting) == 1  # one proof at a time
    house.later.run()
    assert house.goes_down(8) and house.model.num_hashed == 3
    assert all(house.goes_down(number) for number in range(9, 16)) and house.model.num_hashed == 3


def test_what_is_sealed_after_a_proof_began_is_not_proven_by_it() -> None:
    house = House()
    house.seal(8)
    house.goes_down(0)
    house.seal(8)
    house.goes_down(7)
    assert len(house.later.waiting) == 1
    house.seal(1)  # of the very model that is being hashed, and yet
    house.later.run()
    assert house.goes_down(15) and house.origin.num_proven == 16
    assert house.goes_down(16) and house.origin.num_proven == 17 and house.model.num_hashed == 4


def test_a_block_that_a_proof_under_way_is_about_waits_for_it_instead_of_hashing_again() -> None:
    house = House()
    house.seal(8)
    house.goes_down(0)
    house.seal(8)
    house.goes_down(7)
    assert house.model.num_hashed == 2
    assert house.goes_down(8) and house.model.num_hashed == 3 and not house.later.waiting


def test_a_change_that_a_proof_beside_finds_refutes_what_was_sealed_and_not_what_was_proven() -> None:
    house = House()
    house.seal(8)
    house.goes_down(0)
    house.seal(8)
    house.goes_down(7)
    house.model.weights = 2  # while it is hashed, or before: nobody can tell
    house.later.run()
    assert not house.goes_down(8) and house.origin.is_stale
    assert house.goes_down(7)
    again = house.labels.origin(1)
    assert again is not None and again.fingerprint != house.origin.fingerprint


def test_an_origin_that_came_while_a_proof_was_under_way_is_not_proven_by_it() -> None:
    house = House()
    house.seal(8)
    house.goes_down(0)
    house.seal(8)
    house.goes_down(7)
    other = house.labels.origin(1, salt=b"bob")
    assert other is not None
    sealed = house.labels.seal(other, None, b"his", is_first=True)
    house.later.run()
    assert house.goes_down(15) and other.num_proven == 0
    assert house.labels.label(sealed) is not None and house.model.num_hashed == 4


def test_no_proof_is_begun_beside_the_steps_when_its_time_is_spent() -> None:
    house = House()
    house.seal(8)
    house.goes_down(0)
    house.seal(8)
    house.labels._spent_s = 2 * Labels.BURST_S
    assert house.goes_down(7) and not house.later.waiting
    assert not house.goes_down(8)
    house.now_s += Labels.BURST_S / Labels.MAX_TIME_FRAC
    assert house.goes_down(7) and len(house.later.waiting) == 1


def test_a_real_thread_hashes_and_ends_with_close() -> None:
    model = FakeModel()
    labels = Labels(model)
    origin = labels.origin(1)
    assert origin is not None
    first = labels.seal(origin, None, b"first", is_first=True)
    assert labels.label(first) is not None
    second = labels.seal(origin, first, b"second", is_first=False)
    labels._prove_ahead(origin, 1)
    labels.close()
    assert origin.num_proven == 2 and model.num_hashed == 3 and labels.label(second) is not None
    labels.close()
