"""Every step's logits with three small tiers, against the plain cache: prompt, answer, crop, batch, restart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtier.budget import gpu_bytes_for, staging_bytes
from kvtier.config import read_config
from kvtier.hf import describe
from kvtier.hf.tiny import VOCABULARY, plain_cache, tiny_llama
from kvtier.lower_tiers import gpu_budget
from kvtier.model import TieredKV
from kvtier.selftest.check import FailedCheck, Figures
from kvtier.stores.slab import slot_bytes
from kvtier.types import AttentionMode, LayerGroup, Tier

_CHUNK = 64
_FP32_TOLERANCE = 1e-3
"""Logits reach about 10. Rounding is off by 1e-5; a wrong block by more than 1."""
_FLOOR = {torch.float32: _FP32_TOLERANCE, torch.bfloat16: 0.1, torch.float16: 0.02}

Steps = list[torch.Tensor]
"""Logits, one entry a call."""
Course = Callable[[Any, Any, torch.Tensor], Steps]
"""Calls of a model with a cache of its own, on token ids `[rows, tokens]`."""


@dataclass(frozen=True, slots=True)
class Way:
    """How one comparison is made."""

    device: torch.device
    dtype: torch.dtype
    mode: str
    block_tokens: int
    host_attention: str = "never"

    def config(self, model: Any, folder: Path, rows: int, num_tokens: int) -> dict[str, Any]:
        """Budgets of a few blocks, so that a prompt of twenty-four needs all three tiers."""
        group = describe(model, self.block_tokens)
        block_bytes = group.shape.block_bytes
        config = {
            "attention": self.mode,
            "host_attention": self.host_attention,
            "block_tokens": self.block_tokens,
            "prefill_chunk": _CHUNK,
            "prefix_cache": False,
            "tiers": {
                "gpu": {"budget": self._gpu_bytes(group, rows, num_tokens)},
                "cpu": {"budget": 4 * block_bytes},
                "nvme": {"budget": 64 * rows * block_bytes + (16 << 20), "path": str(folder)},
            },
        }
        return with_staging(config, group) if self.device.type == "cuda" else config

    def _gpu_bytes(self, group: LayerGroup, rows: int, num_tokens: int) -> int:
        """The least with slots for the blocks that a chunk fills, and in gathered mode room for a layer."""
        shape, mode = group.shape, AttentionMode(self.mode)
        layer_bytes = shape.token_bytes // shape.num_layers * rows * num_tokens + 256
        return gpu_bytes_for(
            1 + (1 + -(-_CHUNK // self.block_tokens)) * rows,
            shape,
            gather_bytes=layer_bytes if mode is AttentionMode.GATHERED else 0,
            slot_bytes=slot_bytes(shape),
            heads=group.heads,
            prefill_chunk=_CHUNK,
            mode=mode,
            streams=True,
            wide=group.is_wide,
        )


def with_staging(config: dict[str, Any], group: LayerGroup) -> dict[str, Any]:
    """The same with what a device with queues takes of the cpu tier's budget added to it, which is in bytes."""
    known, tiers = read_config(config), config["tiers"]
    staging = staging_bytes(known, group.shape, gpu_budget(known, group).ring_slices)
    cpu_bytes = known.tiers.budget(Tier.CPU).resolve(0)
    return config | {"tiers": tiers | {"cpu": tiers["cpu"] | {"budget": cpu_bytes + staging}}}


def compare(way: Way, course: Course, folder: Path, rows: int, num_blocks: int) -> Figures:
    """Take the same course with the plain cache and with three tiers.

    Raises:
        FailedCheck: logits differ by more than rounding, or a tier was not used, so that nothing would be proven.
    """
    with _threads_of_one():
        model = tiny_llama(way.device, way.dtype)
        ids = _ids(rows, num_blocks * way.block_tokens, way.device)
        plain = course(model, plain_cache(model), ids)
        tolerance = _tolerance(way, course, ids, plain)
        with TieredKV(model, way.config(model, folder, rows, ids.shape[1])) as tiered:
            ours = course(model, tiered.new_cache(), ids)
            tiered.check_integrity()
            stats = tiered.stats()
    largest = check_logits(ours, plain, tolerance)
    slices = {tier.label: stats["tiers"][tier.label]["slices_read"] for tier in Tier}
    if not all(slices.values()):
        raise FailedCheck(f"not every tier was read, so that nothing is proven: slices {slices}")
    return {"max_difference": largest, "tolerance": tolerance, "steps": len(ours), "slices_read": slices}


def check_logits(ours: Steps, plain: Steps, tolerance: float) -> float:
    """The largest difference. Raises FailedCheck, naming the step."""
    largest = 0.0
    for number, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        off = float((mine.float() - theirs.float()).abs().max())
        if not off <= tolerance:  # NaN too
            raise FailedCheck(
                f"step {number} of {len(plain)}: a logit is off by {off:.3g}, allowed are {tolerance:.3g}"
            )
        largest = max(largest, off)
    return largest


def _tolerance(way: Way, course: Course, ids: torch.Tensor, plain: Steps) -> float:
    """In 16 bits twice what the plain model itself is off from its fp32 logits, and at least a few roundings."""
    if way.dtype is torch.float32:
        return _FP32_TOLERANCE
    wide = tiny_llama(way.device, way.dtype).float()  # the same weights, rounded as they are
    exact = course(wide, plain_cache(wide), ids)
    off = max(float((a.float() - b.float()).abs().max()) for a, b in zip(plain, exact, strict=True))
    return max(2 * off, _FLOOR[way.dtype])


@contextlib.contextmanager
def _threads_of_one() -> Iterator[None]:
    """Tiny tensors are no faster on many threads, and a busy machine makes them far slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ids(rows: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(1, VOCABULARY, (rows, num_tokens), generator=generator).to(device)


def _pieces(ids: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
    return torch.split(ids, num_tokens, 1)


# -- courses ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def prompt_and_answer(model: Any, cache: Any, ids: torch.Tensor) -> Steps:
    """A prompt in chunks, then token by token, then another turn."""
    pieces = [*_pieces(ids[:, :-40], _CHUNK), *_pieces(ids[:, -40:-20], 1), ids[:, -20:]]
    return [model(piece, cache=cache).logits for piece in pieces]


@torch.no_grad()
def crop_and_go_on(model: Any, cache: Any, ids: torch.Tensor) -> Steps:
    """What drafts do: take tokens back, a few and then more than a block, and put others in their place."""
    logits = [model(piece, cache=cache).logits for piece in _pieces(ids[:, :-60], _CHUNK)]
    for taken in (3, 45):
        cache.crop(-taken)
        logits += [model(piece, cache=cache).logits for piece in _pieces(ids[:, -taken:].flip(1), 16)]
    return logits


@torch.no_grad()
def padded_batch(model: Any, cache: Any, ids: torch.Tensor) -> Steps:
    """Rows of unlike lengths, padded on the left, and their answers."""
    mask = torch.ones_like(ids)
    for row in range(ids.shape[0]):
        mask[row, : 21 * row] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    logits, done = [], 0
    for piece in (*_pieces(ids[:, :-8], _CHUNK), *_pieces(ids[:, -8:], 1)):
        done, start = done + piece.shape[1], done
        out = model(piece, cache=cache, attention_mask=mask[:, :done], position_ids=positions[:, start:done])
        # Padding's own logits are nobody's.
        logits.append(out.logits * mask[:, start:done].unsqueeze(-1))
    return logits


def session_restart(way: Way, folder: Path, num_blocks: int) -> Figures:
    """A session that another wrapper of the same folder goes on with: nothing lost, and the plain model's logits.

    Raises: FailedCheck.
    """
    keywords: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    with _threads_of_one():
        model = tiny_llama(way.device, way.dtype)
        ids = _ids(1, num_blocks * way.block_tokens, way.device)
        config = way.config(model, folder, 1, ids.shape[1] + 32)
        with TieredKV(model, config) as tiered:
            first = tiered.session("selftest").generate(input_ids=ids, **keywords)
        with TieredKV(model, config) as tiered:
            chat = tiered.session("selftest")
            if chat.token_ids != first.sequences[0, :-1].tolist():
                raise FailedCheck(f"{len(chat.token_ids)} of {first.sequences.shape[1] - 1} tokens were found again")
            asked = torch.cat([first.sequences, ids[:, :9]], 1)
            second = chat.generate(input_ids=asked, **keywords)
            reads = tiered.stats()["nvme_sole_reads"]
        cache = plain_cache(model)
        plain_first = model.generate(ids, cache=cache, prefill_chunk_size=_CHUNK, **keywords)
        plain_second = model.generate(asked, cache=cache, prefill_chunk_size=_CHUNK, **keywords)
    ours, plain = [*first.logits, *second.logits], [*plain_first.logits, *plain_second.logits]
    largest = check_logits(ours, plain, _FP32_TOLERANCE)
    if not reads:
        raise FailedCheck("nothing was read from the files: the second wrapper computed it all")
    return {"max_difference": largest, "tolerance": _FP32_TOLERANCE, "steps": len(ours), "nvme_sole_reads": reads}
