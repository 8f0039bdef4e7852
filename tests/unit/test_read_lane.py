"""A lane: one thread, several reads under way, each ended once and in order, and every error its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest

from kvtier.read_lane import ReadLane


class Reads:
    """What a lane was seen to do, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.refused: set[int] = set()
        self.failed: set[int] = set()

    def begin(self, number: int) -> Callable[[], None]:
        self.seen.append(("begin", number))
        if number in self.refused:
            raise ValueError(f"read {number} is refused")

        def end() -> None:
            assert self.may_end.wait(20)
            self.seen.append(("end", number))
            if number in self.failed:
                raise OSError(f"read {number} fails")

        return end


@pytest.fixture
def reads() -> Reads:
    return Reads()


def test_what_was_asked_for_is_begun_before_the_first_has_ended(reads: Reads) -> None:
    lane = ReadLane("lane")
    reads.may_end.clear()
    first = lane.submit(reads.begin, 0)
    while ("begin", 0) not in reads.seen:
        pass
    others = [lane.submit(reads.begin, number) for number in range(1, 4)]
    reads.may_end.set()
    for future in (first, *others):
        assert future.result(20) is None
    # The first was being ended when the others were asked for; they are begun before any of them is ended.
    assert reads.seen == [
        ("begin", 0),
        ("end", 0),
        *(("begin", n) for n in (1, 2, 3)),
        *(("end", n) for n in (1, 2, 3)),
    ]
    lane.close(wait=True)


def test_errors_are_those_of_their_own_read(reads: Reads) -> None:
    lane = ReadLane("lane")
    reads.refused, reads.failed = {1}, {2}
    futures = [lane.submit(reads.begin, number) for number in range(4)]
    assert futures[0].result(20) is None and futures[3].result(20) is None
    with pytest.raises(ValueError, match="read 1 is refused"):
        futures[1].result(20)
    with pytest.raises(OSError, match="read 2 fails"):
        futures[2].result(20)
    assert ("end", 1) not in reads.seen
    lane.close(wait=True)


def test_what_is_taken_back_in_time_never_begins(reads: Reads) -> None:
    lane = ReadLane("lane")
    reads.may_end.clear()
    first = lane.submit(reads.begin, 0)
    while ("begin", 0) not in reads.seen:
        pass
    second = lane.submit(reads.begin, 1)
    assert second.cancel()
    reads.may_end.set()
    assert first.result(20) is None
    with pytest.raises(CancelledError):
        second.result(20)
    lane.close(wait=True)
    assert reads.seen == [("begin", 0), ("end", 0)]


def test_close_ends_what_was_begun(reads: Reads) -> None:
    """What the medium still writes into a buffer is waited for, whoever has lost interest in it."""
    lane = ReadLane("lane")
    reads.may_end.clear()
    futures = [lane.submit(reads.begin, number) for number in range(3)]
    lane.close(wait=False)
    lane.close(wait=False)
    reads.may_end.set()
    lane.close(wait=True)
    assert all(future.done() for future in futures)
    assert reads.seen.count(("end", 2)) == 1
    ReadLane("never used").close(wait=True)


def test_a_thread_that_is_refused_is_asked_for_again_at_the_next_read(
    reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a hostile tester: no later read was ever begun, and `close` raised, which left the folder locked."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lane = ReadLane("lane")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            lane.submit(reads.begin, 0)
        refused = ReadLane("refused")
        with pytest.raises(RuntimeError, match="can't start new thread"):
            refused.submit(reads.begin, 1)
        refused.close(wait=True)
    assert lane.submit(reads.begin, 2).result(20) is None
    assert reads.seen == [("begin", 2), ("end", 2)]
    lane.close(wait=True)
