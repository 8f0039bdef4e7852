"""Proofs that are made beside the steps, and slots that are labelled when there is one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvtier.labels import Labels
from kvtier.origin import Origin, Sealed
from kvtier.quota import Quota
from tests.small_tiers import FakeModel, build


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

    def is_proven(self, number: int) -> bool:
        """Whether block `number` gets its label without anybody's waiting."""
        label = self.labels.label_if_proven(self.sealed[number])
        assert label is None or label == self.sealed[number].label
        return label is not None


def test_nothing_is_hashed_for_a_block_that_only_has_to_leave_until_a_proof_is_asked_for() -> None:
    house = House()
    house.seal(8)
    assert not house.is_proven(0) and house.model.num_hashed == 1  # before the first token
    house.labels.prove_beside(house.sealed[0])
    assert not house.is_proven(0) and len(house.later.waiting) == 1
    house.labels.prove_beside(house.sealed[1])
    assert len(house.later.waiting) == 1  # one proof at a time
    house.later.run()
    assert all(house.is_proven(number) for number in range(8)) and house.model.num_hashed == 2


def test_what_is_sealed_after_a_proof_began_is_not_proven_by_it() -> None:
    house = House()
    house.seal(8)
    house.labels.prove_beside(house.sealed[0])
    house.seal(1)  # of the very model that is being hashed, and yet
    house.later.run()
    assert house.is_proven(7) and not house.is_proven(8)


def test_who_can_wait_waits_for_the_proof_under_way_instead_of_hashing_again() -> None:
    house = House()
    house.seal(8)
    house.labels.prove_beside(house.sealed[0])
    assert house.labels.label(house.sealed[7]) is not None and house.model.num_hashed == 2
    house.seal(1)
    assert house.labels.label(house.sealed[8]) is not None and house.model.num_hashed == 3


def test_a_change_that_a_proof_beside_finds_refutes_what_was_sealed_and_not_what_was_proven() -> None:
    house = House()
    house.seal(8)
    house.labels.prove_beside(house.sealed[0])
    house.later.run()
    house.seal(8)
    house.labels.prove_beside(house.sealed[8])
    house.model.weights = 2  # while it is hashed, or before: nobody can tell
    house.later.run()
    assert not house.is_proven(8) and house.origin.is_stale and house.sealed[8].is_refuted
    assert house.is_proven(7)
    again = house.labels.origin(1)
    assert again is not None and again.fingerprint != house.origin.fingerprint


def test_an_origin_that_came_while_a_proof_was_under_way_is_not_proven_by_it() -> None:
    house = House()
    house.seal(8)
    house.labels.prove_beside(house.sealed[0])
    other = house.labels.origin(1, salt=b"bob")
    assert other is not None
    sealed = house.labels.seal(other, None, b"his", is_first=True)
    house.later.run()
    assert house.is_proven(7) and other.num_proven == 0 and house.labels.label_if_proven(sealed) is None
    assert house.labels.label(sealed) is not None and house.model.num_hashed == 3


def test_no_proof_is_begun_beside_the_steps_when_its_time_is_spent() -> None:
    """The first is made at once, the next when that is paid for: in a short run a burst would be all there is."""
    house = House()
    house.model.hashing = lambda: setattr(house, "now_s", house.now_s + 0.1)
    house.seal(8)
    house.labels.prove_beside(house.sealed[0])
    house.later.run()
    assert house.is_proven(7) and house.now_s == 0.1
    house.seal(1)
    house.now_s = 0.99 * 0.1 / Labels.BESIDE_TIME_FRAC
    house.labels.prove_beside(house.sealed[8])
    assert not house.later.waiting
    house.now_s = 1.01 * 0.1 / Labels.BESIDE_TIME_FRAC
    house.labels.prove_beside(house.sealed[8])
    assert len(house.later.waiting) == 1


def test_what_was_spent_beside_the_steps_takes_nothing_from_those_who_wait() -> None:
    house = House()
    house.model.hashing = lambda: setattr(house, "now_s", house.now_s + 2 * Labels.BURST_S)
    house.seal(8)
    house.labels.prove_beside(house.sealed[0])
    house.later.run()
    house.seal(1)
    assert house.labels.label(house.sealed[8]) is not None


def test_a_real_thread_hashes_and_ends_with_close() -> None:
    model = FakeModel()
    labels = Labels(model)
    origin = labels.origin(1)
    assert origin is not None
    sealed = labels.seal(origin, None, b"first", is_first=True)
    assert sealed is not None
    labels.prove_beside(sealed)
    labels.close(10)
    assert origin.num_proven == 1 and model.num_hashed == 2 and labels.label_if_proven(sealed) is not None
    labels.close(10)


# -- slots that get their label late ----------------------------------------------------------------------------------


class Tiers:
    """A gpu tier of one block whose blocks go down to files, where they are labelled when the model was hashed."""

    def __init__(self) -> None:
        self.model, self.later, self.now_s = FakeModel(), Later(), 0.0
        self.labels = Labels(self.model, lambda: self.now_s, beside=self.later)
        self.house = build(gpu=2, cpu=0, nvme=16, low_frac=0.0, labels=self.labels, shares=True, labels_late=True)
        self.files, self.next_id = self.house.engine.files, 0

    def prompt(self, num_blocks: int = 2) -> None:
        """One that never comes again."""
        batch = self.house.manager.new_batch()
        batch.origin = self.labels.origin(1)
        for _ in range(num_blocks):
            self.house.append(batch, [self.next_id + number for number in range(4)])
            self.next_id += 4
        self.house.manager.leave(batch)
        self.house.manager.drop(batch)
        self.house.drain()

    def go_on(self) -> None:
        self.house.manager.poll()
        self.house.drain()
        self.house.manager.check_integrity()

    def prove(self) -> None:
        """The proof that is under way ends, and the one that is begun for what it was not about."""
        for _ in range(2):
            self.later.run()
            self.go_on()


def test_blocks_go_down_without_a_label_and_get_it_when_they_are_proven() -> None:
    tiers = Tiers()
    for _ in range(4):
        tiers.prompt()
    tiers.go_on()
    assert tiers.model.num_hashed == 1 and not tiers.files.labels and tiers.later.waiting
    waiting = list(tiers.house.placement.unlabelled)
    assert len(waiting) >= 4
    tiers.prove()
    assert len(tiers.files.labels) == len(waiting) and not tiers.house.placement.unlabelled
    assert all(tiers.house.placement.is_labelled(block) for block in waiting)
    for slot, label in tiers.files.labels.items():
        assert label.content  # each its own
        assert sum(each == label for each in tiers.files.labels.values()) == 1, slot


def test_blocks_of_a_model_that_changed_never_get_one() -> None:
    tiers = Tiers()
    for _ in range(4):
        tiers.prompt()
    tiers.go_on()
    tiers.model.weights = 2
    tiers.prove()
    assert not tiers.files.labels and not tiers.house.placement.unlabelled


def test_a_slot_that_cannot_be_labelled_is_not_tried_again() -> None:
    tiers = Tiers()
    for _ in range(4):
        tiers.prompt()
    tiers.go_on()
    asked: list[int] = []
    tiers.house.placement.label_slot = lambda slot, label: bool(asked.append(slot))
    tiers.prove()
    tiers.go_on()
    assert asked and len(asked) == len(set(asked)) and not tiers.files.labels
    assert not tiers.house.placement.unlabelled


def test_a_header_that_comes_late_waits_for_the_limit_of_what_is_written() -> None:
    """Found by a whole run of the tests: three headers went beyond `max_writes`, which data alone had filled."""
    tiers = Tiers()
    for _ in range(4):
        tiers.prompt()
    tiers.go_on()
    waiting, writes = list(tiers.house.placement.unlabelled), tiers.house.placement.writes
    allows = writes.allows
    writes.allows = lambda *, early=False: False
    tiers.prove()
    assert waiting and not tiers.files.labels and list(tiers.house.placement.unlabelled) == waiting
    writes.allows = allows
    tiers.go_on()
    tiers.prove()
    assert len(tiers.files.labels) == len(waiting) and not tiers.house.placement.unlabelled


def test_what_a_salt_may_not_keep_does_not_hold_up_the_others() -> None:
    tiers = Tiers()
    for _ in range(4):
        tiers.prompt()
    tiers.go_on()
    waiting = list(tiers.house.placement.unlabelled)
    quota = Quota(1, tiers.files)
    tiers.house.placement.quota = quota
    quota.admits_file = lambda copies, sealed, num: sealed.number % 2 == 0
    tiers.prove()
    assert len(tiers.files.labels) == len(waiting) / 2 and not tiers.house.placement.unlabelled
    hashed = tiers.model.num_hashed
    tiers.now_s += 10_000
    tiers.go_on()
    assert tiers.model.num_hashed == hashed and not tiers.later.waiting
