"""Threads that run calls in order, and that the process need not wait for at its end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Workers:
    """As `concurrent.futures.ThreadPoolExecutor`, but its threads are daemons.

    The interpreter joins that one's threads before anything else at its exit: a single read that hangs in the kernel
    would keep the process for ever. Whoever has work to finish closes these in time. One thread submits and closes.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        """Threads are started as they are needed."""
        self._num_threads, self._name = num_threads, name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queue a call. `Future.cancel` takes it back if it has not begun.

        Raises RuntimeError: not even one thread is to be had. Nothing was queued, and the next call asks for one again.
        """
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._num_threads:
            self._start_thread()
        future: Future[T] = Future()
        self._calls.put((future, function, arguments))
        return future

    def close(self, *, wait: bool) -> None:
        """Cancel what has not begun and let the threads end; with `wait`, return when they have. Idempotent."""
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is not None:
                call[0].cancel()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
            if thread.is_alive():  # else it has ended, or a Ctrl-C came before it was there
                thread.join()

    def _start_thread(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=_work, args=(self._calls, self._idle), name=name, daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # the machine has no more of them to give
            self._threads.remove(thread)
            if not self._threads:
                raise


def _work(calls: queue.SimpleQueue[_Call | None], idle: threading.Semaphore) -> None:
    while (call := calls.get()) is not None:
        _run(*call)
        del call  # what it holds goes now, not when the next one comes
        idle.release()


def _run(future: Future[Any] | None, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if future is None or not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*arguments)
    except BaseException as error:  # it is the caller's, who may be waiting
        future.set_exception(error)
        future = None  # the error's traceback names this frame: no cycle
    else:
        future.set_result(result)
