"""What `overlap.py` stands for: Llama-3.1-8B in bf16 on two GPUs and three links, and how time is scaled for it.

A decode step reads every weight and every K and V of the context once from device memory, layer after layer, and then
the head; a layer's spilled K and V cross the link meanwhile. Both are bandwidth questions, so that

    compute of a layer  = (weights of a layer + KV of a layer) / device memory's bandwidth
    compute of the head = weights of the head / device memory's bandwidth
    transfer of a layer = spilled KV of a layer / link's bandwidth

Public figures, all of them peaks: GeForce RTX 4090, 1,008 GB/s (GDDR6X, 384 bit); H100 SXM, 3,350 GB/s (HBM3). Links,
as achieved by large copies: 12 GB/s is PCIe 3 x16 (or PCIe 4 x8), 25 GB/s PCIe 4 x16, as the RTX 4090 has it, and
50 GB/s PCIe 5 x16, as the H100 has it. A copy takes 10 us until it is under way and known to be over. The model's
numbers are those of `kvtier plan --model Llama-3.1-8B`.

`balanced` spills so much of 8,192 tokens (all rows together) that on the GPU's own link transfer takes as long as
compute: there an overlap has the most to hide and nothing to spare. On the other links the same is bound by the link,
or by compute. `deep` spills half of 16,384 tokens, which is bound by each of these links.

Pure Python.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.planner.card import ModelCard
from kvtier.planner.models import find_card

MODEL = "Llama-3.1-8B"
BLOCK_TOKENS = 256
LATENCY_S = 10e-6
LINKS = (12e9, 25e9, 50e9)
TIME_SCALE = 24.0
"""All of it takes so many times longer: a layer then takes milliseconds, of which what a sleep is late is under 1 %."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device by its public figures, in bytes a second."""

    name: str
    memory_bytes_s: float
    own_link_bytes_s: float


GPUS = (Gpu("RTX 4090", 1008e9, 25e9), Gpu("H100", 3350e9, 50e9))


@dataclass(frozen=True, slots=True)
class Case:
    """One GPU behind one link, with so many tokens in all, and so many blocks of them that are not on the GPU.

    All times are unscaled.
    """

    gpu: Gpu
    link_bytes_s: float
    load: str
    num_blocks: int
    num_spilled: int

    @property
    def context_tokens(self) -> int:
        """Tokens of all rows together."""
        return self.num_blocks * BLOCK_TOKENS

    @property
    def slice_bytes(self) -> int:
        """K and V of one block in one layer."""
        return BLOCK_TOKENS * card().layer_token_bytes

    @property
    def layer_s(self) -> float:
        """Compute of a layer."""
        return _layer_s(self.gpu, self.num_blocks)

    @property
    def head_s(self) -> float:
        """Compute of what follows the last layer."""
        return _head_s(self.gpu)

    @property
    def layer_transfer_s(self) -> float:
        """The link's time for a layer's spilled slices."""
        return self.num_spilled * self.slice_bytes / self.link_bytes_s

    @property
    def compute_s(self) -> float:
        """Compute of a step."""
        return card().num_full * self.layer_s + self.head_s

    @property
    def transfer_s(self) -> float:
        """The link's time for a step."""
        return card().num_full * self.layer_transfer_s

    @property
    def binding(self) -> str:
        """`link`, `compute`, or `both` where they differ by less than a tenth."""
        ratio = self.transfer_s / self.compute_s
        return "both" if 0.9 < ratio < 1.1 else ("link" if ratio > 1 else "compute")


def card() -> ModelCard:
    """The model's numbers."""
    return find_card(MODEL)[0]


def cases(loads: tuple[str, ...] = ("balanced", "deep"), *, own_links: bool = False) -> list[Case]:
    """Every GPU behind every link. `own_links`: only behind the one that it comes with."""
    found = []
    for load in loads:
        for gpu in GPUS:
            num_blocks = {"balanced": 32, "deep": 64}[load]
            num_spilled = {"balanced": _balanced(gpu, num_blocks), "deep": num_blocks // 2}[load]
            links = (gpu.own_link_bytes_s,) if own_links else LINKS
            found += [Case(gpu, link, load, num_blocks, num_spilled) for link in links]
    return found


def _layer_s(gpu: Gpu, num_blocks: int) -> float:
    model = card()
    weights = model.layer_parameters * model.element_bytes / model.num_full
    return (weights + num_blocks * BLOCK_TOKENS * model.layer_token_bytes) / gpu.memory_bytes_s


def _head_s(gpu: Gpu) -> float:
    model = card()
    return model.table_parameters * model.element_bytes / gpu.memory_bytes_s


def _balanced(gpu: Gpu, num_blocks: int) -> int:
    """Spilled blocks whose transfer on the GPU's own link takes as long as compute, to the next whole block."""
    model = card()
    step_s = model.num_full * _layer_s(gpu, num_blocks) + _head_s(gpu)
    return round(step_s * gpu.own_link_bytes_s / (model.num_full * BLOCK_TOKENS * model.layer_token_bytes))
