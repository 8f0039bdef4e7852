"""`kvtier selftest`: whether kvtier gives the plain cache's logits on this machine, and a report to paste."""

from __future__ import annotations

from kvtier.selftest.check import Check, Outcome
from kvtier.selftest.report import Report, run_all

__all__ = ["Check", "Outcome", "Report", "run_all"]
