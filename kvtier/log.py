"""The library's logger, `kvtier`, rate-limited: a failing disk must not fill another one with its messages.

The library never prints and leaves handlers to the application, unless the user asks: with `KVTIER_LOG=info` (debug,
info, warning or error) in the environment, messages of that level and above go to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TextIO

from kvtier.log_level import VARIABLE, parse_level


class RateLimit(logging.Filter):
    """Lets each message template through `burst` times in `window_s`; the next one says how many were kept back."""

    def __init__(self, burst: int = 3, window_s: float = 60.0) -> None:
        super().__init__()
        self.burst, self.window_s = burst, window_s
        self._seen: dict[object, tuple[float, int]] = {}

    def reset(self) -> None:
        """Forget what was logged."""
        self._seen.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record goes on. O(1); templates are the program's own, so there are few."""
        template = record.msg
        began_s, count = self._seen.get(template, (0.0, 0))
        now_s = time.monotonic()
        if count == 0 or now_s - began_s > self.window_s:
            if count > self.burst:
                record.msg = f"{template} ({count - self.burst} more like this were not logged)"
            began_s, count = now_s, 0
        count += 1
        self._seen[template] = (began_s, count)
        return count <= self.burst


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is when the message comes: live displays and tests put another one there."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("kvtier: %(levelname)s: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def show(name: str | None) -> None:
    """Show the library's messages on stderr from a level on; None or "" leaves logging as it is.

    A wrong name is a warning, not an error: an import must not fail over a variable. `kvtier` on the command line
    refuses it.
    """
    if not name:
        return
    try:
        level = parse_level(name)
    except ValueError as error:
        logger.warning("%s", error)
        return
    logger.setLevel(level)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())


logger = logging.getLogger("kvtier")
rate_limit = RateLimit()
logger.addFilter(rate_limit)
show(os.environ.get(VARIABLE))
