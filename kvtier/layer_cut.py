"""How a layer's streamed slices are cut: into groups that attention takes at once, and pieces that one thread reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
class GroupSources:
    """Sources whose slices of a layer are attended to at once, in plan order."""

    sources: Sequence[Source]
    pieces: Sequence[Piece]
    num_slices: Mapping[Tier, int]
    """How many of them lie on each tier; those on which none does are left out."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """The same for each layer of a plan: blocks span all layers."""

    group_slices: int = 0
    """Of a group at most; 0 before the first plan."""
    groups: Sequence[GroupSources] = ()


def even_group_slices(num_sources: int, num_buffers: int) -> int:
    """Slices of a group at most, so that buffers take several groups, none of which is nearly empty."""
    size = num_sources if num_buffers >= _WHOLE_LAYERS * num_sources else num_buffers // _MIN_GROUPS
    num_groups = -(-num_sources // max(1, size))
    return -(-num_sources // num_groups)


def cut_layer(sources: Sequence[Source], group_slices: int, num_threads: Mapping[Tier, int]) -> LayerCut:
    """`num_threads`: among which a tier's slices of a group are shared out."""
    cuts = (sources[first : first + group_slices] for first in range(0, len(sources), group_slices))
    return LayerCut(group_slices, [_cut_group(members, num_threads) for members in cuts])


def _cut_group(members: Sequence[Source], num_threads: Mapping[Tier, int]) -> GroupSources:
    num_slices = Counter(source.tier for source in members)
    most = {tier: -(-num_own // num_threads[tier]) for tier, num_own in num_slices.items()}
    pieces, start = list[Piece](), 0
    for end in range(1, len(members) + 1):
        tier = members[start].tier
        if end == len(members) or members[end].tier is not tier or end - start == most[tier]:
            sources = members[start:end]
            pieces.append(Piece(tier, start, sources, [source.slot for source in sources]))
            start = end
    return GroupSources(members, pieces, num_slices)
