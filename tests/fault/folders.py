"""Labelled blocks in persistent folders, for tests that close, break and reopen them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from kvtier.errors import StoreError
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.nvme import NvmeStore
from kvtier.types import BlockShape, Slot, SlotLabel

SHAPE = BlockShape(num_layers=3, kv_heads=2, block_tokens=16, key_dim=16, value_dim=16, element_bytes=2)
"""A block of two pages; a slot of three, with its header."""
HEADER_BYTES = PAGE_BYTES
SLOT_BYTES = HEADER_BYTES + 2 * PAGE_BYTES
BUDGET_BYTES = 1 << 20


def open_store(folder: Path, budget_bytes: int = BUDGET_BYTES, shape: BlockShape = SHAPE, **more: Any) -> NvmeStore:
    return NvmeStore(shape, budget_bytes, folder, True, reserve_free_frac=0.0, **more)


def namespace(number: int) -> bytes:
    return hashlib.sha256(b"namespace %d" % number).digest()


def label(number: int, of: int = 0, content: bytes | None = None) -> SlotLabel:
    """What block `number` of namespace `of` is found by."""
    identity = hashlib.sha256(b"block %d" % number).digest()
    return SlotLabel(namespace(of), identity, b"tokens of %d" % number if content is None else content)


def block(number: int, of: int = 0, shape: BlockShape = SHAPE) -> torch.Tensor:
    """Bytes that depend on the numbers alone."""
    generator = torch.Generator().manual_seed(1000 * of + number)
    return torch.randint(0, 256, (shape.block_bytes,), dtype=torch.uint8, generator=generator)


def write(store: NvmeStore, numbers: Iterable[int], of: int = 0, first_slot: int | None = None) -> None:
    """Block n in slot n, or in slots from `first_slot` on."""
    for index, number in enumerate(numbers):
        slot = number if first_slot is None else first_slot + index
        store.write(Slot(slot), block(number, of, store.shape), label(number, of))


def read(store: NvmeStore, slot: int) -> torch.Tensor:
    out = torch.full((store.shape.block_bytes,), 0xA5, dtype=torch.uint8)
    store.read(Slot(slot), out)
    return out


def filled(folder: Path, numbers: Iterable[int], of: int = 0, **more: Any) -> None:
    """A folder that a process left: those blocks, each in the slot of its number."""
    store = open_store(folder, **more)
    write(store, numbers, of)
    store.close()


def served(store: NvmeStore, numbers: Iterable[int], of: int = 0) -> tuple[set[int], set[int], set[int]]:
    """Of these blocks: those found and right, those found and refused at their reading, those served with other bytes.

    Slices are read one by one too: what a whole read refuses must not come in parts.
    """
    right, refused, wrong = set(), set(), set()
    for number in numbers:
        slot = store.find(label(number, of))
        if slot is None:
            continue
        expected = block(number, of, store.shape)
        try:
            (right if torch.equal(read(store, slot), expected) else wrong).add(number)
        except StoreError:
            refused.add(number)
        step = store.shape.slice_bytes
        for layer in range(store.shape.num_layers):
            out = torch.empty(step, dtype=torch.uint8)
            try:
                store.read_slice(slot, layer, out)
            except StoreError:
                assert number in refused
                continue
            if not torch.equal(out, expected[layer * step : (layer + 1) * step]):
                wrong.add(number)
    return right, refused, wrong


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*.kvt"))


def place(slot: int, offset_bytes: int = 0) -> int:
    """Where in the first segment a byte of a slot lies; its block begins at HEADER_BYTES."""
    return PAGE_BYTES + slot * SLOT_BYTES + offset_bytes


def edit(path: Path, offset_bytes: int, change: Callable[[bytes], bytes], num_bytes: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        data = file.read(num_bytes)
        file.seek(offset_bytes)
        file.write(change(data))


def flip(path: Path, offset_bytes: int, bit: int = 4) -> None:
    edit(path, offset_bytes, lambda data: bytes([data[0] ^ 1 << bit]))
