"""What the steps of one runtime work with: the slabs, the ring, and the arena of `gathered`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvtier.attention import Kernel
from kvtier.host_attention import HostAttender, HostShare
from kvtier.metrics import Metrics
from kvtier.places import Places, WholeSlab
from kvtier.plan import StepPlan
from kvtier.ring import SliceRing
from kvtier.stores.slab import LayerViews
from kvtier.types import AttentionMode, LayerGroup, Tier


class StepMemory:
    """Memory that every step of a runtime writes to or reads, and how it attends."""

    def __init__(
        self,
        group: LayerGroup,
        slabs: Mapping[Tier, LayerViews],
        ring: SliceRing | None,
        metrics: Metrics,
        mode: AttentionMode,
        num_pieces: int,
        arena: torch.Tensor,
        share: HostShare,
    ) -> None:
        """`slabs`: the gpu tier's, and the cpu tier's where there is one."""
        self.group, self.slabs, self.ring, self.metrics, self.mode = group, dict(slabs), ring, metrics, mode
        self.num_pieces, self.arena, self.share = num_pieces, arena, share
        self._whole_slabs = {tier: WholeSlab(views) for tier, views in self.slabs.items()}
        self.gather_start = -arena.data_ptr() % 64
        self.positions = {layer: position for position, layer in enumerate(group.layers)}
        self.dtype = self.slabs[Tier.GPU].keys[0].dtype
        # What attention copies or writes out beside K and V is in the budget for so many blocks at once; a single
        # query's results are small, and those of a chunk are as many for a long piece as for a block.
        unbounded = num_pieces if group.is_wide or group.writes_scores else 1 << 30
        is_joined = all(slab.is_joined for slab in self._whole_slabs.values())
        self.num_decode_pieces, self.num_joined_pieces = unbounded, unbounded if is_joined else num_pieces
        device = torch.device(group.device)
        self.attender = HostAttender(device, share) if device.type != "cpu" and Tier.CPU in self.slabs else None
        """Attends beside the device; None: the model runs on the CPU, and needs no one beside it."""
        self._places: Places | None = None
        self._kernel = Kernel(1.0)

    def kernel(self, scale: float, softcap: float | None) -> Kernel:
        """How this group's layers score; most often as the layer before."""
        if self._kernel.scale != scale or self._kernel.softcap != softcap or self._kernel.wide != self.group.is_wide:
            self._kernel = Kernel(scale, softcap, self.group.is_wide)
        return self._kernel

    def host_frac(self) -> float:
        """Which share of the cpu tier's blocks is attended to, or gathered from, where it lies."""
        if Tier.CPU not in self.slabs or (self.mode is AttentionMode.GATHERED and self.attender is not None):
            return 0.0
        return self.share.frac()

    def places(self, plan: StepPlan) -> Places:
        """Views for this plan; the same ones as long as it is the same object."""
        if self._places is None or self._places.plan is not plan:
            self._places = Places(plan, self.slabs, self._whole_slabs)
        return self._places

    def layer_bytes(self, num_tokens: int) -> tuple[int, int]:
        """Bytes of one assembled layer: K, padded so that V behind it is aligned, and V."""
        shape = self.group.shape
        key_bytes, value_bytes = (
            num_tokens * shape.kv_heads * dim * shape.element_bytes for dim in (shape.key_dim, shape.value_dim)
        )
        return key_bytes + -key_bytes % 64, value_bytes

    def close(self) -> None:
        """Let go of every view and of the arena. Idempotent."""
        if self.attender is not None:
            self.attender.close()
        self._places = None
        self.slabs.clear()
        self._whole_slabs.clear()
        self.arena = torch.empty(0, dtype=torch.uint8)
