"""Ctrl-C is kept back while a turn is held, delivered where it is safe, and never lost."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

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
