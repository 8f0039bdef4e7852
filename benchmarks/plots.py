"""A soak's timeline as SVG pictures that stand in a page without anything from outside."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.benchmarks.monitor import EDGES, TIERS

Columns = dict[str, list[float]]

MAX_BINS = 60  # for rates: single seconds jump between reading and generating

# Okabe and Ito's colours, which people with any colour vision tell apart, each with a line of its own.
STYLES = (
    ("#0072B2", "-"),
    ("#D55E00", (0, (6, 2))),
    ("#009E73", (0, (1.5, 1.5))),
    ("#7A4E9F", (0, (7, 2, 1.5, 2))),
    ("#8A6D00", (0, (3, 1, 3, 3))),
    ("#333333", (0, (9, 3))),
)
LIMIT_COLOUR = "#444444"
_GIB, _MIB, _KIB = 1 << 30, 1 << 20, 1 << 10


@dataclass(frozen=True)
class Plot:
    """One picture: its title, what is to be seen there, and the SVG."""

    name: str
    title: str
    caption: str
    svg: str


def make_plots(document: dict[str, Any]) -> list[Plot]:
    """Every plot of a soak's document; none for a timeline of less than two samples."""
    timeline = document["timeline"]
    columns: Columns = timeline["columns"]
    if len(columns["t_s"]) < 2:
        return []
    figure = _Figure(columns["t_s"], timeline["resumed_at_s"])
    budgets = {tier: document["tiers"][tier]["budget_bytes"] for tier in TIERS}
    plots = [_occupancy(figure, columns, tier, budgets[tier]) for tier in TIERS if budgets[tier]]
    return [
        *plots,
        _memory(figure, columns),
        _tokens(figure, columns),
        _reading(figure, columns),
        _hits(figure, columns),
        _edges(figure, columns),
        _stall(figure, columns),
        _files(figure, columns),
    ]


def _occupancy(figure: _Figure, columns: Columns, tier: str, budget: int) -> Plot:
    used = columns[f"{tier}_used_bytes"]
    unit, unit_bytes = _unit(max([budget, *used]))
    series = {"used": [value / unit_bytes for value in used]}
    caption = "Bytes taken. Never above the budget."
    if tier == "nvme":
        series = {"files (du)": [value / unit_bytes for value in columns["nvme_disk_bytes"]]}
        series["only copy is here"] = [value / unit_bytes for value in columns["nvme_only_copy_bytes"]]
        caption = "Disk that the folder takes (files are laid out whole), and KV that lies nowhere else."
    limit = ("budget", [budget / unit_bytes] * len(used))
    svg = figure.draw(f"{tier}-tier", unit, series, limit=limit)
    return Plot(f"{tier}-tier", f"{tier} tier", caption, svg)


def _memory(figure: _Figure, columns: Columns) -> Plot:
    memory, allowed = columns["memory_bytes"], columns["memory_allowed_bytes"]
    unit, unit_bytes = _unit(max([*memory, *allowed]))
    limit = ("allowed", [value / unit_bytes for value in allowed])
    svg = figure.draw("memory", unit, {"resident": [value / unit_bytes for value in memory]}, limit=limit)
    caption = "Resident memory of the process (anonymous and shared), the model's weights with it. Allowed: what it "
    return Plot("memory", "Memory", caption + "had before, the budgets in memory, and a fixed slack.", svg)


def _tokens(figure: _Figure, columns: Columns) -> Plot:
    svg = figure.draw_rates("tokens", "tokens/s", {"generated": columns["tokens"]})
    return Plot("tokens", "Tokens generated", "Per second of the run; 0 while prompts are read.", svg)


def _reading(figure: _Figure, columns: Columns) -> Plot:
    read = [max(0, all_of - own) for all_of, own in zip(columns["committed_tokens"], columns["tokens"], strict=True)]
    svg = figure.draw_rates("reading", "tokens/s", {"read": read})
    return Plot("reading", "Prompt tokens read", "Per second of the run; 0 while answers are generated.", svg)


def _hits(figure: _Figure, columns: Columns) -> Plot:
    counts = {tier: columns[f"{tier}_slices_read"] for tier in TIERS}
    svg = figure.draw_rates("hits", "% of slices", counts, share_of_all=True)
    return Plot(
        "hits", "Where attention found KV", "Slices read from each tier, as a share of all that were read.", svg
    )


def _edges(figure: _Figure, columns: Columns) -> Plot:
    moved = {edge: columns[f"{edge}_bytes"] for edge in EDGES if columns[f"{edge}_bytes"][-1]}
    names = {edge.replace("_to_", " → "): [value / _MIB for value in column] for edge, column in moved.items()}
    svg = figure.draw_rates("edges", "MiB/s", names)
    return Plot(
        "edges", "Bytes moved per edge", "Blocks and streamed slices. Edges that moved nothing are left out.", svg
    )


def _stall(figure: _Figure, columns: Columns) -> Plot:
    stalled = [100 * value for value in columns["stall_s"]]
    svg = figure.draw_rates("stall", "% of the time", {"stalled": stalled})
    return Plot("stall", "Stall", "Share of the time that steps waited for KV from a lower tier.", svg)


def _files(figure: _Figure, columns: Columns) -> Plot:
    series = {"open files": columns["open_fds"], "threads": columns["threads"]}
    svg = figure.draw("files", "number", series)
    return Plot("files", "Open files and threads", "Descriptors and threads of the process.", svg)


def _unit(largest_bytes: float) -> tuple[str, int]:
    for unit, unit_bytes in (("GiB", _GIB), ("MiB", _MIB)):
        if largest_bytes >= 2 * unit_bytes:
            return unit, unit_bytes
    return "KiB", _KIB


class _Figure:
    """Draws plots over one time axis."""

    def __init__(self, times_s: Sequence[float], resumed_at_s: Sequence[float]) -> None:
        length_s = times_s[-1] - times_s[0]
        self._unit, unit_s = ("seconds", 1.0) if length_s < 180 else ("minutes", 60.0)
        if length_s >= 4 * 3600:
            self._unit, unit_s = "hours", 3600.0
        self._times = [t_s / unit_s for t_s in times_s]
        self._seconds = list(times_s)
        self._resumed = [t_s / unit_s for t_s in resumed_at_s]

    def draw(
        self,
        name: str,
        unit: str,
        series: dict[str, Sequence[float]] | dict[str, list[float]],
        limit: tuple[str, list[float]] | None = None,
    ) -> str:
        """Lines through values, under a dashed limit with its name and value."""

        def plot(axes: Any) -> None:
            for (label, values), (colour, dashes) in zip(series.items(), STYLES, strict=False):
                axes.plot(self._times, values, color=colour, linestyle=dashes, label=label)
            most = max(max(values) for values in series.values())
            if limit:
                label, values = limit
                axes.plot(self._times, values, color=LIMIT_COLOUR, linestyle=(0, (5, 3)), linewidth=1.4)
                words = f"{label} {values[-1]:,.4g} {unit}"
                axes.annotate(
                    words, (self._times[-1], values[-1]), xytext=(0, 4), textcoords="offset points", ha="right"
                )
                most = max(most, *values)
            axes.set_ylim(0, most * 1.2 or 1)

        return self._svg(name, unit, plot, legend=len(series) > 1)

    def draw_rates(self, name: str, unit: str, counters: dict[str, list[float]], *, share_of_all: bool = False) -> str:
        """Steps of what was counted per second of each interval, or its share (in %) of what all counted."""
        step = max(2, math.ceil((len(self._times) - 1) / MAX_BINS))
        places = [*range(0, len(self._times) - 1, step), len(self._times) - 1]
        pairs = list(itertools.pairwise(places))
        grown = {label: [column[b] - column[a] for a, b in pairs] for label, column in counters.items()}
        if share_of_all:
            sums = [sum(values) for values in zip(*grown.values(), strict=True)]
            rates = {
                label: [100 * value / total if total else math.nan for value, total in zip(values, sums, strict=True)]
                for label, values in grown.items()
            }
        else:
            spans = [max(self._seconds[b] - self._seconds[a], 1e-9) for a, b in pairs]
            rates = {label: [v / s for v, s in zip(values, spans, strict=True)] for label, values in grown.items()}

        def plot(axes: Any) -> None:
            edges = [self._times[place] for place in places]
            for (label, values), (colour, dashes) in zip(rates.items(), STYLES, strict=False):
                axes.stairs(values, edges, baseline=None, color=colour, linestyle=dashes, linewidth=1.6, label=label)
            most = max((v for values in rates.values() for v in values if not math.isnan(v)), default=0)
            axes.set_ylim(*((-2, 105) if share_of_all else (0, most * 1.1 or 1)))

        return self._svg(name, unit, plot, legend=len(rates) > 1)

    def _svg(self, name: str, unit: str, plot: Callable[[Any], None], *, legend: bool) -> str:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        # Words stay words (fonttype none): the page's fonts draw them, they can be searched, and they need few bytes.
        settings: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11, "lines.linewidth": 1.8}
        with rc_context(settings):
            figure = Figure(figsize=(5, 2.6), layout="constrained")
            FigureCanvasSVG(figure)
            axes = figure.add_subplot()
            for at in self._resumed:
                axes.axvline(at, color="#777777", linestyle=":", linewidth=1.2)
            plot(axes)
            axes.set_xlim(self._times[0], max(self._times[-1], self._times[0] + 1e-6))
            axes.set_xlabel(self._unit)
            axes.set_ylabel(unit)
            axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 3, 5, 10]))
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
            axes.grid(axis="y", color="#dddddd", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            if legend:
                figure.legend(loc="outside upper left", ncols=3, frameon=False, handlelength=2.6, columnspacing=1.2)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        return _for_a_page(file.getvalue(), name)


def _for_a_page(svg: str, name: str) -> str:
    """Only the element, as wide as its column, without addresses, and with ids that no other picture has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    head = rf'<svg viewBox="\1" role="img" aria-labelledby="title-{name}">'
    return re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', head, svg, count=1)
