"""The parts alone: files with checksums, copies to and from devices, attention kernels."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from kvtier import attention_cuda
from kvtier.attention import Kernel, merge, pack, partial_attention
from kvtier.doctor.answer import NotMeasured
from kvtier.doctor.gpu import measure_gpus
from kvtier.doctor.watch import NoWatch
from kvtier.errors import ChecksumError
from kvtier.selftest.check import FailedCheck, Figures, SkipCheck
from kvtier.stores.nvme import NvmeStore
from kvtier.types import BlockShape, Slot

_SHAPE = BlockShape(num_layers=4, kv_heads=8, block_tokens=256, key_dim=64, value_dim=64, element_bytes=2)  # 2 MiB
_NUM_BLOCKS = 24
_COPY_S = 0.15


def files(folder: Path) -> Figures:
    """Blocks into files and back, byte for byte, and a damaged byte is seen. Rates: one thread, page cache warm."""
    store = NvmeStore(_SHAPE, _NUM_BLOCKS * _SHAPE.block_bytes + (64 << 20), folder, persistent=False)
    try:
        generator = torch.Generator().manual_seed(3)
        blocks = torch.randint(0, 256, (_NUM_BLOCKS, _SHAPE.block_bytes), dtype=torch.uint8, generator=generator)
        started_s = time.monotonic()
        for number in range(_NUM_BLOCKS):
            store.write(Slot(number), blocks[number])
        written_s = time.monotonic() - started_s
        out = torch.empty(_SHAPE.block_bytes, dtype=torch.uint8)
        started_s = time.monotonic()
        for number in range(_NUM_BLOCKS):
            store.read(Slot(number), out)
            if not torch.equal(out, blocks[number]):
                raise FailedCheck(f"block {number} came back with other bytes, and no checksum saw it")
        read_s = time.monotonic() - started_s
        _damage(store, blocks[5])
        try:
            store.read(Slot(5), out)
        except ChecksumError:
            pass
        else:
            raise FailedCheck("a byte that was changed in a file was not seen")
        num_bytes = _NUM_BLOCKS * _SHAPE.block_bytes
        return {
            "io": store.io.mode.value,
            "write_bytes_per_s": num_bytes / written_s,
            "read_bytes_per_s": num_bytes / read_s,
        }
    finally:
        store.close()


def _damage(store: NvmeStore, block: torch.Tensor) -> None:
    """Flip a bit of the block behind the store's back, where its first bytes are found."""
    start = bytes(block[:64].numpy())
    for path in sorted(store.folder.glob("segment-*.kvt")):
        at = path.read_bytes().find(start)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 1000)
                byte = file.read(1)
                file.seek(at + 1000)
                file.write(bytes([byte[0] ^ 1]))
            return
    raise FailedCheck("the block is in none of the files")


def copies() -> Figures:
    """Bandwidth between host memory and each CUDA device, pinned and not, both ways."""
    gpus = measure_gpus(_COPY_S, NoWatch())
    if isinstance(gpus, NotMeasured):
        raise SkipCheck(gpus.why)
    rates = [
        {
            "gpu": gpu.index,
            "pinned": rate.is_pinned,
            "direction": "to device" if rate.to_device else "to host",
            "piece_bytes": rate.piece_bytes,
            "bytes_per_s": None if isinstance(rate.bytes_per_s, NotMeasured) else rate.bytes_per_s,
        }
        for gpu in gpus
        for rate in gpu.copies
    ]
    if not all(rate["bytes_per_s"] for rate in rates):
        reason = next(r.bytes_per_s.why for g in gpus for r in g.copies if isinstance(r.bytes_per_s, NotMeasured))
        raise FailedCheck(f"not every copy could be made: {reason}")
    return {"copies": rates}


def attention(device: torch.device, dtype: torch.dtype) -> Figures:
    """Pieces and their merge against the definition; on CUDA, which kernel was chosen, and why not those before it."""
    generator = torch.Generator().manual_seed(5)
    heads, kv_heads, dim, tolerance = 8, 2, 64, 1e-4 if dtype is torch.float32 else 2e-2
    largest, chosen = 0.0, {}
    for length in (256, 100):
        keys, values = (
            torch.randn(5, 3, kv_heads, length, dim, generator=generator).to(device, dtype)[1:4, 1] for _ in range(2)
        )
        query = torch.randn(1, heads, 1, dim, generator=generator).to(device, dtype)
        kernel = Kernel(dim**-0.5, wide=device.type == "cpu" and dtype is not torch.float32)
        part = merge([partial_attention(pack(query, kv_heads), keys, values, kernel)])
        whole_keys, whole_values = (p.transpose(0, 1).reshape(1, kv_heads, 3 * length, dim) for p in (keys, values))
        wanted, lse = attention_cuda.definition(
            pack(query, kv_heads), whole_keys, whole_values, dim**-0.5, causal=False
        )
        off = max(float((part.output - wanted).abs().max()), float((part.lse - lse).abs().max()))
        if not off <= tolerance:
            raise FailedCheck(f"pieces of {length} tokens: off by {off:.3g}, allowed are {tolerance}")
        largest = max(largest, off)
        if device.type == "cuda":
            way, reasons = attention_cuda.probe(attention_cuda.Case(device, dtype, dim, length, causal=False))
            chosen[str(length)] = {"kernel": way.value, "not": {each.value: why for each, why in reasons.items()}}
    return {"max_difference": largest, "tolerance": tolerance, **({"kernels": chosen} if chosen else {})}
