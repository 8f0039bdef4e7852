"""One check of the selftest: what it found, or why it could not look."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Figures = dict[str, Any]


class Outcome(enum.Enum):
    """Of one check."""

    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"


class SkipCheck(Exception):
    """What is to be checked is not there on this machine; the message says what."""


class FailedCheck(Exception):
    """kvtier is wrong on this machine; the message says how."""


@dataclass(frozen=True, slots=True)
class Check:
    """`reason` is empty for what passed; `figures` are what was measured."""

    name: str
    device: str
    outcome: Outcome
    seconds: float
    reason: str = ""
    figures: Figures = field(default_factory=dict)

    def document(self) -> Figures:
        """As plain values."""
        return {
            "name": self.name,
            "device": self.device,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            **self.figures,
        }


def run_check(name: str, device: str, check: Callable[[], Figures]) -> Check:
    """Run one. Whatever it raises is its failure, and no reason to leave the others out."""
    started_s = time.monotonic()
    try:
        found = check()
    except SkipCheck as skip:
        return Check(name, device, Outcome.SKIP, time.monotonic() - started_s, str(skip))
    except Exception as error:  # anything: a kernel that is not built for a device says so in its own way
        lines = str(error).strip().splitlines() or [""]
        kind = "" if isinstance(error, FailedCheck) else f"{type(error).__name__}: "
        return Check(name, device, Outcome.FAIL, time.monotonic() - started_s, f"{kind}{lines[0][:400]}")
    return Check(name, device, Outcome.PASS, time.monotonic() - started_s, "", found)
