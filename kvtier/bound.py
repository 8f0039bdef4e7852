"""The bound on what is done: the slowest of what has to happen. Pure: sums of numbers that others measured or predict.

Each edge carries a number of bytes (or operations) that what is done cannot do without, at a rate. The edges work at
the same time, so the bound is the largest of their times. The planner predicts with it, `stats()` reports with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMPUTE = "compute"
NONE = "none"
_KINDS = ("decode", "prefill")
_OF_KIND = ("steps", "took_s", "compute_s")


@dataclass(frozen=True, slots=True)
class Edge:
    """What one resource has to do, and how fast it is.

    `amount` is bytes; of `compute` operations where they are predicted, and seconds where they were measured.
    """

    name: str
    amount: float
    per_s: float | None
    """None: nobody measured it."""

    @property
    def seconds(self) -> float | None:
        """Time that it takes alone; None where its rate is not known, 0.0 where it has nothing to do."""
        if not self.amount:
            return 0.0
        return None if self.per_s is None else self.amount / self.per_s


@dataclass(frozen=True, slots=True)
class Bound:
    """The edges of one thing that is done."""

    edges: tuple[Edge, ...]

    @property
    def seconds(self) -> float | None:
        """The largest of the known times; None where none is known."""
        return max((edge.seconds for edge in self.edges if edge.seconds), default=None)

    @property
    def binding(self) -> str:
        """The edge that decides; empty where none is known."""
        known = [edge for edge in self.edges if edge.seconds]
        return max(known, key=lambda edge: edge.seconds or 0.0).name if known else ""

    @property
    def unmeasured(self) -> list[str]:
        """Edges that have something to do at a rate nobody measured: the truth may be slower by them."""
        return [edge.name for edge in self.edges if edge.seconds is None]


@dataclass(frozen=True, slots=True)
class EdgeUse:
    """What went along one edge while steps ran."""

    num_bytes: int
    busy_s: float
    """Time of it in which at least one transfer was under way."""
    peak_bytes_s: float | None
    """The best rate that was seen, at any time; None: nothing was measured."""

    @property
    def best_bytes_s(self) -> float | None:
        """The peak, or what these bytes themselves went at, if that was faster: so they never take longer than that.

        A peak is taken over whole windows; what is too short for one is its own.
        """
        if not self.num_bytes or self.busy_s <= 0:
            return self.peak_bytes_s
        return max(self.peak_bytes_s or 0.0, self.num_bytes / self.busy_s)


def measured(
    took_s: float,
    kinds: Mapping[str, Mapping[str, float]],
    edges: Mapping[str, EdgeUse],
    stalls: Mapping[str, float],
) -> dict[str, Any]:
    """`stats()["bound"]`; docs/stats.md has its fields.

    Args:
        took_s: time that steps ran, aborted ones too.
        kinds: of `decode` and `prefill`: `steps` that committed, `took_s` of those, and `compute_s`: without stalls.
        edges: by name, those that anything ever went along.
        stalls: seconds by cause.
    """
    compute_s = sum(kind["compute_s"] for kind in kinds.values())
    of_edges = {name: Edge(name, use.num_bytes, use.best_bytes_s) for name, use in edges.items()}
    bound = Bound((Edge(COMPUTE, compute_s, 1.0), *of_edges.values()))
    bound_s = bound.seconds or 0.0
    return {
        "steps": sum(int(kind["steps"]) for kind in kinds.values()),
        "took_s": took_s,
        "compute_s": compute_s,
        **{name: dict(kind) for name, kind in kinds.items()},
        "edges": {
            name: {
                "bytes": use.num_bytes,
                "busy_s": use.busy_s,
                "peak_bytes_s": use.best_bytes_s,
                "seconds_at_peak": of_edges[name].seconds,
            }
            for name, use in edges.items()
        },
        "bound_s": bound_s,
        "bound_frac": bound_s / took_s if took_s > 0 else 0.0,
        "binding": bound.binding or NONE,
        "stalls": dict(stalls),
    }


def bound_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The bound of what ran between two `stats()` of one TieredKV, in the form of `stats()["bound"]`.

    Everything that is counted is the difference; peaks are the best that is known at the end. So windows add up to the
    whole in steps, seconds, bytes and stalls, and each has a bound of its own.

    Raises:
        ValueError: `before` counts more than `after`: they are of two wrappers, or the wrong way round.
    """
    old, new = before["bound"], after["bound"]
    if old["steps"] > new["steps"] or old["took_s"] > new["took_s"] or set(old["edges"]) - set(new["edges"]):
        raise ValueError("the first stats() count what the second do not: they are of another TieredKV, or later")
    nothing = {"bytes": 0, "busy_s": 0.0}
    edges = {
        name: EdgeUse(
            edge["bytes"] - old["edges"].get(name, nothing)["bytes"],
            edge["busy_s"] - old["edges"].get(name, nothing)["busy_s"],
            edge["peak_bytes_s"],
        )
        for name, edge in new["edges"].items()
    }
    return measured(
        new["took_s"] - old["took_s"],
        {kind: {of: new[kind][of] - old[kind][of] for of in _OF_KIND} for kind in _KINDS},
        edges,
        {cause: seconds - old["stalls"][cause] for cause, seconds in new["stalls"].items()},
    )
