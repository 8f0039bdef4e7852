"""Whose turn it is: one thread at a time, and no Ctrl-C in the middle of bookkeeping."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

# How long a wait for another thread's turn may keep Ctrl-C back.
_POLL_S = 0.1


class Turn:
    """A re-entrant lock that also keeps SIGINT back while it is held, on the main thread.

    A KeyboardInterrupt can come between any two instructions; in the middle of a commit it would leave a slot without
    owner, or a read still writing into a buffer that the next step uses. So the signal is noted while the turn is held,
    and delivered by `check`, called where stopping is safe, or when the turn ends. Waits inside it have deadlines.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._handler: _Handler = None
        self._pending: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Turn:
        handler = self._hold_back()
        try:
            while not self._lock.acquire(timeout=_POLL_S):
                if handler is not None:
                    self._deliver(handler)
        except BaseException:
            if handler is not None:
                signal.signal(signal.SIGINT, handler)
            raise
        self._depth += 1
        if handler is not None:
            self._handler = handler
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        handler: _Handler = None
        pending = None
        if self._depth == 0:
            handler, self._handler = self._handler, None
        self._lock.release()
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            pending, self._pending = self._pending, None
        if pending is not None and kind is not KeyboardInterrupt and callable(handler):
            handler(*pending)

    def check(self) -> None:
        """Deliver a Ctrl-C that came while the turn was held: usually raises KeyboardInterrupt."""
        if self._handler is not None:
            self._deliver(self._handler)

    # -- signals ------------------------------------------------------------------------------------------------------

    def _hold_back(self) -> _Handler:
        """Note SIGINT from here on; returns the handler to put back, None where there is nothing to do."""
        if threading.current_thread() is not threading.main_thread():
            return None
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler) or handler == self._note:
            return None  # ignored, the system's own, not Python's, or ours already: an inner turn
        signal.signal(signal.SIGINT, self._note)
        return handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = (number, frame)

    def _deliver(self, handler: _Handler) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and callable(handler):
            handler(*pending)
