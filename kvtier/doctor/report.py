"""What an examination comes to: rows, the proposal, warnings and problems; and the JSON document of all that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtier import __version__
from kvtier.doctor.answer import NotMeasured
from kvtier.doctor.disk_rates import DiskRate
from kvtier.doctor.facts import Facts
from kvtier.doctor.proposal import Proposal
from kvtier.doctor.rows import Row, make_rows

FORMAT = 1
EXIT_FINE, EXIT_CANNOT_WORK = 0, 1


@dataclass(frozen=True, slots=True)
class Report:
    """The result. `config` is the given one's name; empty without one."""

    facts: Facts
    proposal: Proposal
    config: str
    problems: list[str]
    warnings: list[str]
    is_quick: bool
    elapsed_s: float

    @property
    def exit_status(self) -> int:
        """0: all is well; 1: the given config cannot work here."""
        return EXIT_CANNOT_WORK if self.problems else EXIT_FINE

    @property
    def rows(self) -> list[Row]:
        """Everything but the disk's rates."""
        return make_rows(self.facts)

    def document(self) -> dict[str, Any]:
        """As docs/doctor.md describes it, field by field; plain values only."""
        return {
            "format": FORMAT,
            "kvtier": __version__,
            "quick": self.is_quick,
            "elapsed_s": round(self.elapsed_s, 3),
            "rows": [_row(row) for row in self.rows],
            "disk": [_rate(rate) for rate in self.facts.disk.rates],
            "proposal": {"yaml": self.proposal.yaml, "config": self.proposal.values},
            "config": self.config or None,
            "problems": self.problems,
            "warnings": self.warnings,
            "exit_status": self.exit_status,
        }


def _row(row: Row) -> dict[str, Any]:
    value, why = _answer(row.value)
    return {
        "section": row.section,
        "name": row.name,
        "value": value,
        "unit": row.unit.value,
        "note": row.note,
        "not_measured": why,
    }


def _rate(rate: DiskRate) -> dict[str, Any]:
    value, why = _answer(rate.bytes_per_s)
    frac, _ = _answer(rate.disk_frac)
    core_rate, _ = _answer(rate.core_bytes_per_s)
    return {
        "io": rate.mode.value,
        "access": rate.access.value,
        "request_bytes": rate.request_bytes,
        "depth": rate.depth,
        "bytes_per_s": value,
        "disk_frac": frac,
        "core_bytes_per_s": core_rate,
        "not_measured": why,
    }


def _answer(value: int | float | str | NotMeasured) -> tuple[int | float | str | None, str | None]:
    """JSON has no word for "could not be measured": null, and the reason beside it."""
    if isinstance(value, NotMeasured):
        return None, value.why
    return (round(value, 4) if isinstance(value, float) else value), None
