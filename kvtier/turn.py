"""Whose turn it is: one thread at a time, and no Ctrl-C in the middle of bookkeeping."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from kvtier.errors import UnsupportedError

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

# Those whose handlers are known to raise: Ctrl-C, time limits, orderly ends.
_SIGNALS = (signal.SIGINT, signal.SIGALRM, signal.SIGTERM)

# How long a wait for another thread's turn may keep Ctrl-C back.
_POLL_S = 0.1


class Turn:
    """A fair, re-entrant lock that keeps Ctrl-C and other signals back while it is held, on the main thread.

    A KeyboardInterrupt can come between any two instructions; in the middle of a commit it would leave a slot without
    owner, or a read still writing into a buffer that the next step uses. So the signal is noted while the turn is held,
    and delivered by `check`, called where stopping is safe, or when the turn ends. Waits inside it have deadlines.

    Raises UnsupportedError instead of waiting for a turn that is held in another process: that of a fork's parent.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # held for a few instructions, never while waiting
        self._pid = os.getpid()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Event]] = deque()
        self._handlers: dict[int, _Handler] = {}
        self._pending: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Turn:
        handlers: dict[int, _Handler] = {}
        try:
            self._hold_back(handlers)
            self._acquire(handlers)
        except BaseException:  # a Ctrl-C too: a handler that is lost is one that is lost for good
            self._put_back(handlers)
            raise
        if handlers:
            self._handlers = handlers
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handlers: dict[int, _Handler] = {}
        if self._depth == 1:
            handlers, self._handlers = self._handlers, handlers
        if handlers and kind is KeyboardInterrupt:
            # More of what is being delivered already: it must not come out of a later call.
            self._pending = [each for each in self._pending if each[0] != signal.SIGINT]
        self._release()
        self._put_back(handlers)
        if kind is not KeyboardInterrupt:
            self._deliver(handlers)

    # -- first come, first served -------------------------------------------------------------------------------------

    def keep(self, timeout_s: float) -> bool:
        """Take the turn and never give it back, at the process's end; False if it was not to be had within that."""
        try:
            self._acquire({}, time.monotonic() + timeout_s)
        except TimeoutError:
            return False
        return True

    def _acquire(self, handlers: dict[int, _Handler], until_s: float = math.inf) -> None:
        me = threading.get_ident()
        handed = threading.Event()
        ticket = (me, handed)
        with self._mutex:
            if self._owner == me:
                self._depth += 1
                return
            if self._owner is None:
                self._owner, self._depth = me, 1
                return
            if os.getpid() != self._pid:  # whoever had it when the process was forked is not here to give it back
                raise UnsupportedError(
                    f"this TieredKV belongs to process {self._pid}, where a step ran: wrap the model anew in the child"
                )
            self._waiting.append(ticket)
        try:
            while not handed.wait(_POLL_S):
                self._deliver(handlers)
                if time.monotonic() > until_s:
                    raise TimeoutError
        except BaseException:  # a Ctrl-C while it waits: nobody may hand the turn to it any more
            with self._mutex:
                gave_up_in_time = not handed.is_set()
                if gave_up_in_time:
                    self._waiting.remove(ticket)
            if not gave_up_in_time:
                self._release()
            raise

    def _release(self) -> None:
        # Handed over, not just let go: a thread that asks again at once would otherwise always be first.
        with self._mutex:
            self._depth -= 1
            if self._depth:
                return
            if self._waiting:
                self._owner, handed = self._waiting.popleft()
                self._depth = 1
                handed.set()
            else:
                self._owner = None

    def check(self) -> None:
        """Deliver what came while the turn was held: a Ctrl-C usually raises KeyboardInterrupt."""
        self._deliver(self._handlers)

    # -- signals ------------------------------------------------------------------------------------------------------

    def _hold_back(self, handlers: dict[int, _Handler]) -> None:
        """Note signals from here on, and the handlers to put back, none where there is nothing to do."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            # Only what Python code handles can raise; ours is there already in an inner turn.
            if callable(handler) and handler != self._note:
                handlers[number] = handler  # first: the next line may raise what came just before it
                signal.signal(number, self._note)

    @staticmethod
    def _put_back(handlers: dict[int, _Handler]) -> None:
        """All of them, whatever those that are back already raise: a handler that is lost is a Ctrl-C that is lost."""
        left = list(handlers.items())
        raised: BaseException | None = None
        while left:
            try:
                while left:
                    signal.signal(*left[-1])
                    left.pop()
            except BaseException as error:  # a handler that is back already may raise anything
                raised = error
        if raised is not None:
            raise raised

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending.append((number, frame))

    def _deliver(self, handlers: dict[int, _Handler]) -> None:
        while handlers and self._pending:
            number, frame = self._pending.pop(0)
            handler = handlers.get(number)
            if callable(handler):
                handler(number, frame)
