"""Power loss: a store's writes and syncs are recorded, then prefixes of them replayed with unsynced pages dropped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.folder import OwnedFolder
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.segment import Segment
from kvtier.types import BlockShape, Compression, Slot, Survives
from tests.fault import folders
from tests.fault.folders import SHAPE, block, open_store, served, write
from tests.fault.table import Row, report

BUDGET_BYTES = 400 << 10
NUM_BLOCKS = 110


@dataclass(frozen=True)
class Create:
    name: str
    num_bytes: int


@dataclass(frozen=True)
class Write:
    name: str
    offset_bytes: int
    data: bytes


@dataclass(frozen=True)
class Punch(Write):
    """Pages given back: zeros that may reach the medium before or after what was written beside them."""


@dataclass(frozen=True)
class Erase(Write):
    """Pages made zero in place, likewise."""


@dataclass(frozen=True)
class Sync:
    """Of one file, or of the folder where the name is empty."""

    name: str


@dataclass(frozen=True)
class Begin:
    """From here on what the slot held may be gone."""

    slot: int


@dataclass(frozen=True)
class Done:
    """The write has returned."""

    slot: int
    number: int


Event = Create | Write | Sync | Begin | Done


def record(
    folder: Path,
    survives: Survives,
    monkeypatch: pytest.MonkeyPatch,
    compression: Compression = Compression.NONE,
) -> list[Event]:
    """What a store does to the disk while it writes, overwrites, forgets and erases blocks."""
    events: list[Event] = []
    write_real, punch_real, erase_real, sync_real, create_real, folder_sync_real = (
        Segment.write, Segment.punch, Segment.erase, Segment.sync, OwnedFolder.create, OwnedFolder.sync,
    )  # fmt: skip

    def creating(self: OwnedFolder, name: str, num_bytes: int, **how: bool) -> Segment:
        events.append(Create(name, num_bytes))
        return create_real(self, name, num_bytes, **how)

    def punching(self: Segment, offset_bytes: int, num_bytes: int) -> None:
        events.append(Punch(self.path.name, offset_bytes, bytes(num_bytes)))
        punch_real(self, offset_bytes, num_bytes)

    def erasing(self: Segment, offset_bytes: int, num_bytes: int) -> None:
        events.append(Erase(self.path.name, offset_bytes, bytes(num_bytes)))
        erase_real(self, offset_bytes, num_bytes)

    def writing(self: Segment, offset_bytes: int, data: np.ndarray) -> None:
        events.append(Write(self.path.name, offset_bytes, data.tobytes()))
        write_real(self, offset_bytes, data)

    def syncing(self: Segment) -> None:
        sync_real(self)
        events.append(Sync(self.path.name))

    def folder_syncing(self: OwnedFolder) -> None:
        folder_sync_real(self)
        events.append(Sync(""))

    with monkeypatch.context() as patch:
        patch.setattr(OwnedFolder, "create", creating)
        patch.setattr(Segment, "write", writing)
        patch.setattr(Segment, "punch", punching)
        patch.setattr(Segment, "erase", erasing)
        patch.setattr(Segment, "sync", syncing)
        patch.setattr(OwnedFolder, "sync", folder_syncing)
        store = open_store(folder, BUDGET_BYTES, survives=survives, compression=compression)
        work(store, events)
        store.close()
    return events


def work(store: NvmeStore, events: list[Event]) -> None:
    chance = random.Random(3)
    for number in range(NUM_BLOCKS):
        slot = chance.randrange(min(store.num_slots, 4 + number))
        events.append(Begin(slot))
        if chance.random() < 0.1:
            store.forget(Slot(slot))
        elif chance.random() < 0.1:
            store.write(Slot(slot), block(number))
        elif chance.random() < 0.05:
            store.erase(Slot(slot))
        else:
            write(store, [number], first_slot=slot)
            events.append(Done(slot, number))


@dataclass
class Disk:
    """What is on the medium, and what only the kernel has, after some of the events."""

    durable: dict[str, bytearray] = field(default_factory=dict)
    pending: dict[str, list[Write]] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    committed: dict[int, int] = field(default_factory=dict)
    """Number of the block by slot, whose write has returned."""

    def apply(self, event: Event, *, syncs: bool) -> None:
        match event:
            case Create(name, num_bytes):
                self.durable[name], self.pending[name] = bytearray(num_bytes), []
            case Write(name):
                self.pending[name].append(event)
            case Sync("") if syncs:
                self.named = set(self.durable)
            case Sync(name) if syncs:
                for pending in self.pending[name]:
                    end_bytes = pending.offset_bytes + len(pending.data)
                    self.durable[name][pending.offset_bytes : end_bytes] = pending.data
                self.pending[name] = []
            case Begin(slot):
                self.committed.pop(slot, None)
            case Done(slot, number):
                self.committed[slot] = number

    def lose_power(self, folder: Path, chance: random.Random) -> None:
        """Leave what may be on the medium: everything synced, and any of the unsynced pages."""
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        survives = chance.choice([0.0, 0.5, 0.9, 1.0])
        for name, durable in self.durable.items():
            if name not in self.named and chance.random() < 0.5:
                continue  # the folder's entry was not synced
            image = bytearray(durable)
            for pending in self.pending[name]:
                for start in range(0, len(pending.data), PAGE_BYTES):
                    if chance.random() < survives:
                        page = pending.data[start : start + PAGE_BYTES]
                        at = pending.offset_bytes + start
                        image[at : at + len(page)] = page
            path = folder / name
            path.write_bytes(image)
            path.chmod(0o600)


@dataclass
class Outcome:
    """What all power losses came to: blocks, and losses of power."""

    lost: int = 0
    wrong: int = 0
    refused: int = 0
    right: int = 0
    num_cuts: int = 0
    num_reached: int = 0
    """Where something was on its way to the medium."""
    num_detected: int = 0
    """And a slot was not trusted, or a block whose write had returned was refused or missed."""

    def report(self, request: pytest.FixtureRequest, row: Row, wrong_unchecked: int = 0) -> None:
        report(
            request,
            row,
            injected=self.num_cuts,
            reached=self.num_reached,
            detected=self.num_detected,
            absorbed=self.num_reached - self.num_detected,
            wrong=self.wrong,
            wrong_unchecked=wrong_unchecked,
        )


def replay(
    events: list[Event],
    folder: Path,
    num_prefixes: int,
    *,
    syncs: bool = True,
    compression: Compression = Compression.NONE,
) -> Outcome:
    chance = random.Random(11)
    outcome = Outcome()
    for disk in prefixes(events, sorted(chance.choices(range(len(events) + 1), k=num_prefixes)), syncs):
        disk.lose_power(folder, chance)
        is_reached = any(disk.pending.values()) or disk.named != set(disk.durable)
        store = open_store(folder, BUDGET_BYTES, compression=compression)
        right, refused, wrong = served(store, range(NUM_BLOCKS))
        store.check_integrity()
        is_seen = store.num_quarantined or refused or not set(disk.committed.values()) <= right
        store.close()
        outcome.num_cuts += 1
        outcome.num_reached += is_reached
        outcome.num_detected += bool(is_reached and is_seen)
        outcome.wrong += len(wrong)
        outcome.refused += len(refused)
        outcome.right += len(right)
        outcome.lost += len(set(disk.committed.values()) - right)
    return outcome


def prefixes(events: list[Event], ends: list[int], syncs: bool) -> Iterator[Disk]:
    disk, done = Disk(), 0
    for end in ends:
        for event in events[done:end]:
            disk.apply(event, syncs=syncs)
        done = end
        yield disk


@pytest.mark.slow
def test_power_loss_serves_nothing_wrong_and_loses_no_block_whose_write_had_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    events = record(tmp_path / "first", Survives.POWER_LOSS, monkeypatch)
    assert sum(isinstance(event, Write) for event in events) > 250
    assert sum(isinstance(event, Erase) for event in events) >= 3
    outcome = replay(events, tmp_path / "after", 1000)
    assert outcome.wrong == outcome.lost == 0
    assert outcome.right > 5000
    outcome.report(request, Row.POWER_LOSS)
    # The control: on a disk whose syncs do nothing, blocks are lost. None is served wrong even then.
    outcome = replay(events, tmp_path / "after", 100, syncs=False)
    assert outcome.lost > 100 and outcome.wrong == 0


def test_power_loss_of_what_survives_a_kill_alone_serves_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    events = record(tmp_path / "first", Survives.KILL, monkeypatch)
    assert not any(isinstance(event, Sync) for event in events)
    outcome = replay(events, tmp_path / "after", 200)
    assert outcome.wrong == 0 and outcome.lost > 100 and outcome.refused > 100
    # The control: with verification switched off, what was refused is served.
    monkeypatch.setattr("kvtier.stores.slot_reader._verify", lambda *_: None)
    unchecked = replay(events, tmp_path / "after", 50)
    assert unchecked.wrong > 25
    outcome.report(request, Row.POWER_LOSS_OF_KILL, unchecked.wrong)


def compressible(number: int, of: int = 0, shape: BlockShape = SHAPE) -> torch.Tensor:
    """Every other one takes fewer pages than the next."""
    whole = block(number, of, shape)
    if number % 2:
        whole[shape.block_bytes // 4 :] = number
    return whole


@pytest.mark.parametrize("survives", Survives)
def test_power_loss_while_slots_grow_and_shrink_serves_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: Survives, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(folders, "block", compressible)
    zstd = Compression.ZSTD
    events = record(tmp_path / "first", survives, monkeypatch, zstd)
    assert sum(isinstance(event, Punch) for event in events) > 10
    outcome = replay(events, tmp_path / "after", 200, compression=zstd)
    assert outcome.wrong == 0
    if survives is Survives.POWER_LOSS:
        assert outcome.lost == 0 and outcome.right > 1000
        outcome.report(request, Row.POWER_LOSS)
    else:
        assert outcome.lost > 100 and outcome.refused > 50
        outcome.report(request, Row.POWER_LOSS_OF_KILL)
