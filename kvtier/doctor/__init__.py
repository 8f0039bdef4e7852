"""`kvtier doctor`: what this machine can do, measured, and the config that follows from it."""

from __future__ import annotations

from kvtier.doctor.examine import Wishes, examine
from kvtier.doctor.report import Report
from kvtier.doctor.watch import NoWatch, Watch

__all__ = ["NoWatch", "Report", "Watch", "Wishes", "examine"]
