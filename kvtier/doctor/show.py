"""For people: a progress bar while it runs, then the proposal and what is wrong; before them tables if asked for."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvtier.doctor.answer import NotMeasured
from kvtier.doctor.disk_rates import DEPTHS, MODES, REQUEST_BYTES, Access, DiskRate
from kvtier.doctor.report import Report
from kvtier.doctor.rows import Row, Unit
from kvtier.size import size_words, speed_words
from kvtier.terminal import print_page, printable

_COLD_FRAC = 0.95


class Bars:
    """A watch that shows one bar a phase, with what it should take. Silent where the console is not a terminal."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        elapsed = TimeElapsedColumn()
        self._progress = Progress(
            *columns, elapsed, console=console, transient=True, disable=not console.is_terminal, redirect_stdout=False
        )
        self._task: TaskID | None = None
        self._total = 0

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, name: str, estimate_s: float, num_steps: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=self._total)
        self._task = self._progress.add_task(f"{name} (about {max(1, round(estimate_s))} s)", total=num_steps)
        self._total = num_steps

    def step(self) -> None:
        if self._task is not None:
            self._progress.advance(self._task)


def print_report(report: Report, console: Console, verbose: bool = False) -> None:
    """The report; the tables of all that was measured only if `verbose`: they are 150 lines and more."""
    print_page(_parts(report, verbose), console)


def _parts(report: Report, verbose: bool) -> Iterator[RenderableType]:
    if verbose:
        yield _rows_table(report)
        yield _disk_table(report)
    else:
        num_figures = len(report.rows) + len(report.facts.disk.rates)
        yield Text(f"Looked at: {num_figures} figures of this machine. --verbose shows them, --json has them.")
    yield Text("\nProposed config:\n")
    yield Text(report.proposal.yaml)
    for warning in report.warnings:
        yield Text(printable(f"warning: {warning}"), style="yellow")
    for problem in report.problems:
        yield Text(printable(f"{report.config} cannot work here: {problem}"), style="bold red")
    if report.config and not report.problems:
        yield Text(printable(f"{report.config}: nothing speaks against it here"), style="green")


def _rows_table(report: Report) -> Table:
    table = Table(title="This machine", title_justify="left", show_header=False)
    for _ in range(4):
        table.add_column(overflow="fold")
    section = ""
    for row in report.rows:
        if section and row.section != section:
            table.add_section()
        table.add_row("" if row.section == section else row.section, row.name, _value(row), Text(printable(_note(row))))
        section = row.section
    return table


def _value(row: Row) -> Text:
    value = row.value
    if isinstance(value, NotMeasured):
        return Text("–")
    if isinstance(value, str) or row.unit is Unit.TEXT:
        return Text(printable(str(value)))
    return Text(_words(value, row.unit), justify="right")


def _words(value: float, unit: Unit) -> str:
    match unit:
        case Unit.BYTES:
            return size_words(value)
        case Unit.BYTES_PER_S:
            return speed_words(value)
        case Unit.TOKENS_PER_S:
            return f"{value:,.0f} tokens/s"
        case Unit.FLOP_PER_S:
            return f"{value / 1e9:,.0f} GFLOP/s"
        case Unit.MICROSECONDS:
            return f"{value:,.1f} us"
        case Unit.FRACTION:
            return f"{value:.2f}"
    return f"{value:,}"


def _note(row: Row) -> str:
    return f"not measured: {row.value.why}" if isinstance(row.value, NotMeasured) else row.note


def _disk_table(report: Report) -> Table:
    table = Table(title="Disk, cold, random places (GB/s)", title_justify="left")
    table.add_column("request")
    table.add_column("at a time", justify="right")
    heads = [(access, mode) for access in Access for mode in sorted(MODES, key=lambda mode: mode.value)]
    for access, mode in heads:
        table.add_column(f"{access.value}, {mode.value}", justify="right")
    notes: dict[str, None] = {}
    for size in sorted(REQUEST_BYTES):
        for depth in sorted(DEPTHS):
            cells = [report.facts.disk.row(mode, access, size, depth) for access, mode in heads]
            table.add_row(size_words(size), str(depth), *(_cell(cell, notes) for cell in cells))
        table.add_section()
    table.caption, table.caption_justify = "\n".join(notes) or None, "left"
    return table


def _cell(cell: DiskRate, notes: dict[str, None]) -> str:
    if isinstance(cell.bytes_per_s, NotMeasured):
        notes[printable(f"–: not measured: {cell.bytes_per_s.why}")] = None
        return "–"
    cached = cell.access is Access.READ and isinstance(cell.disk_frac, float) and cell.disk_frac < _COLD_FRAC
    if cached:
        notes["*: a cache, or memory, gave part of it"] = None
    return f"{cell.bytes_per_s / 1e9:.2f}" + "*" * cached


__all__ = ["Bars", "print_report"]
