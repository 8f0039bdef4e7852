"""What a decode step should take, beside the bound that it cannot beat: a sum over what one core does. Pure Python.

The bound takes it that everything happens at once and nothing else costs anything. On the threads that compute, things
come one after the other: products with the weights, attention over K and V, and the code around both. Beside them go
reads and copies, as far as there are cores for them. Every figure is the doctor's or the model's; none is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtier.planner.bound import decode_round, rows_at_once
from kvtier.planner.layout import Layout, Placement
from kvtier.planner.rates import Rates
from kvtier.stores.space_limits import expected_frac
from kvtier.types import AttentionMode, Tier


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the time."""

    name: str
    seconds: float | None
    """None: the doctor did not measure what it is made of."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The time that is expected of a decode step."""

    computing: tuple[Term, ...]
    """One after the other."""
    beside: tuple[Term, ...]
    """Each at the same time as all of `computing`."""
    bound_s: float | None

    @property
    def unmeasured(self) -> list[str]:
        """Terms without a figure: nothing is expected then."""
        return [term.name for term in (*self.computing, *self.beside) if term.seconds is None]

    @property
    def seconds(self) -> float | None:
        """The longest of: all computing, what goes on beside it, the bound. None where a term has no figure."""
        if self.unmeasured or self.bound_s is None:
            return None
        return max(_sum(self.computing), self.bound_s, *(term.seconds or 0.0 for term in self.beside))

    @property
    def binding(self) -> str:
        """`computing`, or the name of what goes on beside it and takes longer; empty where nothing is expected."""
        if self.unmeasured:
            return ""
        longest = max((("computing", _sum(self.computing)), *((t.name, t.seconds or 0.0) for t in self.beside)),
                      key=lambda each: each[1])  # fmt: skip
        return longest[0]

    def document(self, users: int) -> dict[str, Any]:
        """As docs/plan.md describes it."""
        seconds = self.seconds
        return {
            "ms": None if seconds is None else seconds * 1e3,
            **speeds(seconds, users),
            "binding": self.binding or None,
            "unmeasured": self.unmeasured,
            "terms": [
                {"name": term.name, "ms": None if term.seconds is None else term.seconds * 1e3, "beside": beside}
                for terms, beside in ((self.computing, False), (self.beside, True))
                for term in terms
            ],
        }


def speeds(seconds: float | None, users: int) -> dict[str, float | None]:
    """Of a round that takes so long: of all users, and of one."""
    return {
        "tokens_per_s": None if seconds is None else users / seconds,
        "tokens_per_s_per_user": None if seconds is None else 1 / seconds,
    }


def expected_round(
    layout: Layout, rates: Rates, users: int, num_threads: int | None = None, placed: Placement | None = None
) -> Expected | None:
    """One new token for each of `users`. Arguments as `decode_round`.

    Returns:
        None with `attention: gathered`, whose attention is the model's own: the doctor does not measure that.
    """
    config, card, shape = layout.config, layout.card, layout.shape
    if config.attention is AttentionMode.GATHERED or layout.gpu is None:
        return None
    steps = -(-users // max(1, rows_at_once(layout, users)))
    placed = placed or layout.place(users)
    dtype, context = card.dtype, layout.context_tokens
    step_s, layer_s = rates.decoding_s("step", num_threads), rates.decoding_s("layer", num_threads)
    num_layers = card.num_full + card.num_window + card.num_linear
    columns = card.heads * card.head_dim  # the hidden size, but for a few families
    on_cuda = layout.device == "cuda"
    # The doctor's figure for a layer has calls in it: over a block and the tail, or over both in one piece.
    in_layer = (2 if on_cuda else 1) * steps
    calls = card.num_full * max(
        0, _num_calls(placed, users, steps, layout.gpu.num_pieces, joined=not on_cuda) - in_layer
    )
    streamed = placed.blocks[Tier.NVME] + (placed.blocks[Tier.CPU] if on_cuda else 0)
    computing = [
        _by_rate("weights", steps * card.read_parameters * card.element_bytes,
                 rates.read_weights(dtype, num_threads, columns)),
        _by_rate("products of further users", (users - steps) * 2 * card.read_parameters,
                 rates.flop(dtype, num_threads)),
        _by_rate("attention", users * card.kv_bytes(context),
                 rates.attention(dtype, num_threads, card.heads // card.kv_heads)),
        Term("layers", None if step_s is None or layer_s is None else steps * (step_s + num_layers * layer_s)),
        _by_count("calls of attention", calls, rates.decoding_s("call of attention", num_threads)),
        _by_count("hand-overs of slices", streamed * card.num_full, rates.handover_s),
    ]  # fmt: skip
    beside: list[Term] = []
    if on_cuda:
        rate = rates.copies_up_of(shape.slice_bytes) or rates.copies(to_device=True)  # slice by slice
        beside.append(_by_rate("host to device", streamed * shape.block_bytes, rate))
    if placed.blocks[Tier.NVME]:
        # A device's kernels run by themselves; the thread that starts them takes a core all the same.
        busy = 1 if on_cuda else num_threads or rates.cores
        read_s, work_s = _reading(layout, rates, placed.blocks[Tier.NVME] * shape.block_bytes)
        readers = min(config.io_threads, max(0, rates.cores - busy))
        if not readers:
            computing.append(Term("work of reading", work_s))
        elif work_s is not None and read_s is not None:
            read_s = max(read_s, work_s / readers)
        else:
            read_s = None
        beside.append(Term("nvme read", read_s))
    bound = decode_round(layout, rates, users, num_threads, placed)
    return Expected(tuple(computing), tuple(beside), bound.seconds)


def _num_calls(placed: Placement, users: int, steps: int, num_pieces: int, *, joined: bool) -> int:
    """Of all steps, for each layer: full blocks, so many a call, and tails, which lie on the gpu tier: joined, they are
    a run's last."""
    full = {tier: count - users if tier is Tier.GPU and not joined else count for tier, count in placed.blocks.items()}
    calls = sum(-(-max(0, count) // num_pieces) for count in full.values())
    return calls if joined else calls + steps


def _reading(layout: Layout, rates: Rates, num_bytes: int) -> tuple[float | None, float | None]:
    """Seconds of the disk, and of cores: the kernel's and the reader's work, checksums, decompression."""
    nvme, config = layout.config.tiers.nvme, layout.config
    assert nvme is not None  # its blocks are somewhere
    frac = expected_frac(layout.shape, nvme.compression)
    reads = rates.disk_reads(nvme.io, int(layout.shape.slice_bytes * frac), config.io_threads)
    parts = [
        _by_rate("", num_bytes * frac, None if reads is None else reads.core_bytes_per_s),
        _by_rate("", num_bytes * frac, rates.checksum),
        *([_by_rate("", num_bytes, rates.decompress)] if frac < 1.0 else []),
    ]
    work_s = None if any(part.seconds is None for part in parts) else _sum(parts)
    return None if reads is None else num_bytes * frac / reads.bytes_per_s, work_s


def _by_rate(name: str, amount: float, per_s: float | None) -> Term:
    if not amount:
        return Term(name, 0.0)
    return Term(name, None if per_s is None else amount / per_s)


def _by_count(name: str, count: int, each_s: float | None) -> Term:
    if not count:
        return Term(name, 0.0)
    return Term(name, None if each_s is None else count * each_s)


def _sum(terms: list[Term] | tuple[Term, ...]) -> float:
    return sum(term.seconds or 0.0 for term in terms)
