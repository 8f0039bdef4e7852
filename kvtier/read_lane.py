"""A thread with several reads under way: it begins what it is asked for, and ends one read after the other."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

End = Callable[[], None]
"""Waits for what was begun, and finishes it."""
_Call = tuple["Future[None]", Callable[..., End], tuple[Any, ...]]


class ReadLane:
    """Reads of a medium that takes many at a time, by one thread: it waits for one while the medium works on the next.

    Each thread that ends reads takes the interpreter's lock from the one that computes, at every slice, and on a
    processor with two cores also its core: half of 8,192 tokens from files took four threads 31 % longer than nothing
    from files, and one thread 12 %.

    The thread is a daemon, as those of `Workers`. One thread submits and closes.
    """

    def __init__(self, name: str) -> None:
        """The thread starts with the first read."""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)

    def submit(self, begin: Callable[..., End], *arguments: Any) -> Future[None]:
        """Queue a read: `begin(*arguments)` begins it, and what that returns ends it. In the order of these calls.

        Raises RuntimeError: no thread is to be had. Nothing was queued, and the next call asks for one again.
        """
        if not self._thread.is_alive():  # the first read, or the thread was refused before
            self._thread.start()
        future: Future[None] = Future()
        self._calls.put((future, begin, arguments))
        return future

    @property
    def is_running(self) -> bool:
        """Whether its thread has started and not ended."""
        return self._thread.is_alive()

    def close(self, *, wait: bool) -> None:
        """Let the thread end what it has; with `wait`, return when it has. Idempotent."""
        self._calls.put(None)
        if wait and self._thread.is_alive():
            self._thread.join()


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    begun: deque[tuple[Future[None], End]] = deque()
    is_open = True
    while is_open or begun:
        # All that was asked for is begun before any is ended: the medium has work while this thread has.
        while is_open and (call := _next(calls, wait=not begun)) is not _NOTHING:
            if call is None:
                is_open = False
            else:
                _begin(call, begun)
            del call  # what it holds goes now, not when the next one comes
        if begun:
            _end(*begun.popleft())


_NOTHING: Any = object()


def _next(calls: queue.SimpleQueue[_Call | None], *, wait: bool) -> _Call | None:
    try:
        return calls.get(block=wait)
    except queue.Empty:
        found: None = _NOTHING
        return found


def _begin(call: _Call, begun: deque[tuple[Future[None], End]]) -> None:
    future, begin, arguments = call
    if not future.set_running_or_notify_cancel():
        return
    try:
        begun.append((future, begin(*arguments)))
    except BaseException as error:  # it is the caller's, who may be waiting
        future.set_exception(error)
        del future  # the error's traceback names this frame: no cycle


def _end(future: Future[None], end: End) -> None:
    try:
        end()
    except BaseException as error:  # as above
        future.set_exception(error)
        del future
    else:
        future.set_result(None)
