"""The library's logger, `kvtier`, rate-limited: a failing disk must not fill another one with its messages."""

from __future__ import annotations

import logging
import time


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


logger = logging.getLogger("kvtier")
rate_limit = RateLimit()
logger.addFilter(rate_limit)
