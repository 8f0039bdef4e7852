"""Plots of benchmarks' documents, as SVG files that stand for themselves. Needs the extra `report`."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.benchmarks.plots import STYLES

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Metric:
    """What is drawn of a benchmark's rows: `key` over `along`, a line for each value of `series`."""

    key: str
    label: str
    along: str | None = None
    """None, or where all rows have the same: a bar for each series."""
    series: tuple[str, ...] = ("case",)
    is_ratio: bool = False
    """A line is drawn at 1."""
    only: tuple[str, Any] | None = None
    """Rows that have this value of a key."""

    def chosen(self, rows: Rows) -> Rows:
        """Those that are drawn."""
        found = [row for row in rows if row.get(self.key) is not None]
        return [row for row in found if self.only is None or row[self.only[0]] == self.only[1]]

    def name(self, row: dict[str, Any]) -> str:
        """Of the series that a row belongs to."""
        return ", ".join(str(row[key]) for key in self.series)


METRICS: dict[str, tuple[Metric, ...]] = {
    "decode": (
        Metric("ratio_to_dynamic", "speed, DynamicCache = 1", "context", is_ratio=True),
        Metric("ms_per_token", "ms per token", "context"),
        Metric("bound_frac", "share of the bound", "context", is_ratio=True),
    ),
    "prefill": (
        Metric("ratio_to_chunked", "speed, plain in chunks = 1", "context", is_ratio=True),
        Metric("peak_bytes", "bytes of memory beyond the model", "context"),
    ),
    "overlap": (
        Metric("ratio", "step time, bound = 1", "link_gb_s", ("method", "device"), True, ("load", "balanced")),
    ),
    "scale": (
        Metric("us", "us an operation", "blocks", ("operation",)),
        Metric("ms_per_token", "ms per token", "context"),
    ),
    "lookup": (Metric("ratio_to_greedy", "speed, greedy = 1", is_ratio=True),),
    "resume": (Metric("ratio_to_prefill", "speed, plain prefill = 1", is_ratio=True),),
}
_MORE_STYLES = (("#CC79A7", (0, (5, 1))), ("#56B4E9", (0, (2, 1))), ("#B8860B", (0, (1, 3))))


def draw(document: dict[str, Any]) -> dict[str, str]:
    """SVG by metric; of what the document's benchmark has no metrics for, none."""
    pictures = {}
    for metric in METRICS.get(document["benchmark"], ()):
        rows = metric.chosen(document.get("rows", ()))
        if rows:
            pictures[metric.key] = _picture(document["benchmark"], metric, rows)
    return pictures


def _picture(benchmark: str, metric: Metric, rows: Rows) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(metric.name(row) for row in rows))
    # The same picture for the same figures: no date, and ids that are not drawn by lot.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": f"{benchmark}-{metric.key}", "font.size": 11}
    with rc_context(settings):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        if metric.along is None or len({row[metric.along] for row in rows}) < 2:
            _bars(axes, metric, names, rows)
        else:
            _lines(axes, metric, names, rows)
            figure.legend(loc="outside right upper", frameon=False, handlelength=2.6)
        axes.set_title(benchmark, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue()


def _lines(axes: Any, metric: Metric, names: Sequence[str], rows: Rows) -> None:
    assert metric.along is not None
    for name, (colour, dashes) in zip(names, itertools.cycle((*STYLES, *_MORE_STYLES)), strict=False):
        points = sorted((row[metric.along], row[metric.key]) for row in rows if metric.name(row) == name)
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, marker="o", markersize=4, label=name)
    places = sorted({row[metric.along] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel(metric.along)
    axes.set_ylabel(metric.label)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    if metric.is_ratio:
        axes.axhline(1, color="#444444", linewidth=1)


def _bars(axes: Any, metric: Metric, names: Sequence[str], rows: Rows) -> None:
    values = [next(row[metric.key] for row in rows if metric.name(row) == name) for name in names]
    places = range(len(names))
    axes.barh(places, values, color=STYLES[0][0])
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel(metric.label)
    for place, value in zip(places, values, strict=True):
        axes.annotate(f" {value:,.4g}", (value, place), va="center")
    axes.margins(x=0.15)
    if metric.is_ratio:
        axes.axvline(1, color="#444444", linewidth=1)
