"""Ctrl-C is kept back while a turn is held, delivered where it is safe, and never lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.errors import UnsupportedError
from kvtier.turn import Turn

pytestmark = pytest.mark.usefixtures("ctrl_c_raises")


def _ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.001)  # let the interpreter see it


def test_ctrl_c_waits_for_the_end_of_the_turn() -> None:
    turn, done = Turn(), []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        with turn:
            with turn:
                _ctrl_c()
                done.append("inner")
            done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is before
    with turn:
        done.append("again")
    assert done[-1] == "again"


def test_check_delivers_it_where_stopping_is_safe() -> None:
    turn = Turn()
    with turn:
        turn.check()
        _ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            turn.check()
        turn.check()


def test_ctrl_c_is_not_lost_behind_an_error() -> None:
    turn = Turn()
    with pytest.raises(KeyboardInterrupt) as caught, turn:
        _ctrl_c()
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)


def test_ctrl_c_is_delivered_while_waiting_for_another_threads_turn() -> None:
    turn, held, release = Turn(), threading.Event(), threading.Event()

    def hold() -> None:
        with turn:
            held.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    threading.Timer(0.05, _ctrl_c).start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), turn:
        pass
    assert signal.getsignal(signal.SIGINT) is before
    release.set()
    thread.join(10)
    with turn:
        pass


def test_one_thread_at_a_time() -> None:
    turn, inside, most = Turn(), [0], [0]

    def work() -> None:
        for _ in range(50):
            with turn:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1]


def test_a_thread_that_asks_again_at_once_does_not_starve_the_others() -> None:
    turn, stop, overtaken = Turn(), threading.Event(), []

    def greedy() -> None:
        while not stop.is_set():
            queue = list(turn._waiting)
            with turn:
                overtaken.extend(waiter for waiter in queue if waiter in turn._waiting)

    thread = threading.Thread(target=greedy)
    thread.start()
    for _ in range(200):
        with turn:
            time.sleep(0)
    stop.set()
    thread.join(10)
    assert not overtaken


def test_giving_up_while_waiting_leaves_the_queue_in_order() -> None:
    turn, held, release, order = Turn(), threading.Event(), threading.Event(), []

    def hold() -> None:
        with turn:
            held.set()
            release.wait(10)

    def queue_up(name: str) -> None:
        with turn:
            order.append(name)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    first = threading.Thread(target=queue_up, args=("first",))
    first.start()
    threading.Timer(0.05, _ctrl_c).start()
    with pytest.raises(KeyboardInterrupt), turn:
        order.append("never")
    second = threading.Thread(target=queue_up, args=("second",))
    second.start()
    while len(turn._waiting) < 2:
        time.sleep(0.001)
    release.set()
    for thread in (holder, first, second):
        thread.join(10)
    assert order == ["first", "second"]
    with turn:
        pass


class _TimeLimit(Exception):
    pass


@pytest.fixture
def time_limit_raises() -> Iterator[None]:
    def raise_it(*_: object) -> None:
        raise _TimeLimit

    before = signal.signal(signal.SIGALRM, raise_it)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("time_limit_raises")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(4))
def test_a_time_limit_while_handlers_are_changed_loses_none(
    number: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGALRM's handler raises before or after any of the calls that put handlers in place and back."""
    turn, change, calls = Turn(), signal.signal, [0]
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)}

    def interrupted(*args: Any) -> Any:
        calls[0] += 1
        is_it = calls[0] == number + 1
        if is_it and not after:
            raise _TimeLimit
        result = change(*args)
        if is_it:
            raise _TimeLimit
        return result

    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", interrupted)
            with pytest.raises(_TimeLimit), turn:
                pass
        left = {each: signal.getsignal(each) for each in before}
    finally:
        for each, handler in before.items():
            if callable(handler):
                signal.signal(each, handler)
    assert left == before
    thread = threading.Thread(target=turn.__enter__)  # it is nobody's turn
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_a_second_ctrl_c_does_not_come_out_of_a_later_turn() -> None:
    turn, done = Turn(), []
    with pytest.raises(KeyboardInterrupt), turn:
        _ctrl_c()
        _ctrl_c()
        turn.check()
    for _ in range(2):
        with turn:
            turn.check()
            done.append(1)
    assert done == [1, 1]
    with pytest.raises(KeyboardInterrupt), turn:  # a new one does
        _ctrl_c()


def test_a_turn_that_is_kept_is_not_given_to_anybody() -> None:
    turn, entered = Turn(), threading.Event()

    def enter() -> None:
        with turn:
            entered.set()

    assert turn.keep(0.0)
    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    assert not entered.wait(0.3)
    turn._release()  # so that the thread ends
    assert entered.wait(30)
    thread.join()


def test_a_turn_that_another_thread_holds_is_not_waited_for_long() -> None:
    turn, taken, let_go = Turn(), threading.Event(), threading.Event()

    def hold() -> None:
        with turn:
            taken.set()
            let_go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(30) and not turn.keep(0.05)
    let_go.set()
    thread.join()
    with turn:  # nobody waits for it any more
        pass


def test_a_child_forked_while_another_thread_had_the_turn_does_not_wait_for_it_for_ever() -> None:
    """Found by a hostile tester: `close()`, `new_cache()`, `stats()` of the child hung."""
    turn, held, release = Turn(), threading.Event(), threading.Event()

    def hold() -> None:
        with turn:
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if not child:
        try:
            with turn:
                os._exit(1)
        except UnsupportedError as error:
            os._exit(0 if f"process {os.getppid()}" in str(error) else 2)
        os._exit(3)
    deadline_s = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    release.set()
    thread.join()
    assert ended == (child, 0)
