"""How a layer's streamed slices are cut: into groups that attention takes at once, and pieces that one thread reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.plan import Source
from kvtier.types import Slot, Tier

_MIN_GROUPS = 4
_WHOLE_LAYERS = 3
"""Where buffers have room for so many layers, each is one group."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Sources of a group that lie on one tier, and go to neighbouring buffers of its cell."""

    tier: Tier
    first: int
    """Which of the cell's buffers is the first one's."""
    sources: Sequence[Source]
    slots: Sequence[Slot]


@dataclass(frozen=True, slots=True)
class LayerCut:
    """The same for each layer of a plan: blocks span all layers."""

    group_slices: int = 0
    """Of a group at most; 0 before the first plan."""
    groups: Sequence[Sequence[Source]] = ()
    """In plan order."""
    pieces: Sequence[Sequence[Piece]] = ()
    """Of each group."""


def even_group_slices(num_sources: int, num_buffers: int) -> int:
    """Slices of a group at most, so that buffers take several groups, none of which is nearly empty."""
    size = num_sources if num_buffers >= _WHOLE_LAYERS * num_sources else num_buffers // _MIN_GROUPS
    num_groups = -(-num_sources // max(1, size))
    return -(-num_sources // num_groups)


def cut_layer(sources: Sequence[Source], group_slices: int, *, num_threads: int, num_together: int) -> LayerCut:
    """Args:
    num_threads: for each tier, among which its slices of a group are shared out.
    num_together: slices of the nvme tier in one piece at least, if there are so many.
    """
    groups = [sources[first : first + group_slices] for first in range(0, len(sources), group_slices)]
    return LayerCut(group_slices, groups, [_cut_group(group, num_threads, num_together) for group in groups])


def _cut_group(members: Sequence[Source], num_threads: int, num_together: int) -> list[Piece]:
    """Pieces of a group, each of one tier and for one thread."""
    most = {}
    for tier in Tier:
        num_own = sum(source.tier is tier for source in members)
        most[tier] = max(-(-num_own // num_threads), num_together if tier is Tier.NVME else 1)
    pieces, start = list[Piece](), 0
    for end in range(1, len(members) + 1):
        tier = members[start].tier
        if end == len(members) or members[end].tier is not tier or end - start == most[tier]:
            sources = members[start:end]
            pieces.append(Piece(tier, start, sources, [source.slot for source in sources]))
            start = end
    return pieces
