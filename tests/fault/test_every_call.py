"""A fault at every call index of a scenario: open an earlier process's folder, look up, read, write, forget, erase,
save and delete sessions, close.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.errors import KVTierError, StoreError
from kvtier.stores.segment import Segment
from kvtier.system import allocated_bytes, open_fds
from kvtier.types import BlockShape, Compression, IoMode, Slot, Survives
from tests.fault.folders import block, label, open_store, read, served, write
from tests.fault.sweep import Calls, failing
from tests.fault.table import Row, report
from tests.sessions import record

SHAPE = BlockShape(num_layers=2, kv_heads=2, block_tokens=16, key_dim=16, value_dim=16, element_bytes=2)
OTHER_SHAPE = BlockShape(num_layers=1, kv_heads=2, block_tokens=16, key_dim=16, value_dim=16, element_bytes=2)
BUDGET_BYTES = 320 << 10  # with room for four sessions
OLD = range(6)


def options(io: IoMode, compression: Compression) -> dict[str, Any]:
    return {
        "shape": SHAPE, "io": io, "compression": compression, "survives": Survives.POWER_LOSS,
        "page_cache_bytes": 4 << 20, "budget_bytes": BUDGET_BYTES,
    }  # fmt: skip


class Scenario:
    """Works on a copy of a folder; what it is served is compared at once.

    Attributes:
        right, missed, num_errors: calls that gave what they should, look-ups that found nothing, kvtier's errors.
        wrong: what was served and is not what was written.
    """

    def __init__(self, folder: Path, **how: Any) -> None:
        self.folder, self.how = folder, how
        self.right, self.missed, self.wrong = 0, 0, 0
        self.num_errors = 0
        self.written: set[int] = set()
        self.tokens = {"alice": {40}, "b": {0}, "gone": {50}}
        """How many the record of each session may have; 0: it may not be there."""

    def run(self) -> None:
        store = self.tried(lambda: open_store(self.folder, **self.how))
        if store is None:
            return
        for number in OLD[:3]:
            self.looked_up(store, number)
        for number, slot in [(10, 0), (11, 6), (12, 7), (20, store.num_slots - 1)]:
            if self.tried(lambda number=number, slot=slot: write(store, [number], first_slot=slot) or True):
                self.written.add(number)
        self.tried(lambda: store.forget(Slot(1)) or True)
        self.tried(lambda: store.erase(Slot(3)) or True)
        for name, num_tokens in [("alice", 60), ("b", 70), ("alice", 80)]:
            done = self.tried(lambda name=name, of=num_tokens: store.sessions.save(record(name, of)) or True)
            self.tokens[name] = {num_tokens} if done else {*self.tokens[name], num_tokens}
        done = self.tried(lambda: store.sessions.delete(record("gone").key()) or True)
        self.tokens["gone"] = {0} if done else {0, 50}
        self.tried(store.sessions.load)
        for number in [0, 2, 5, 10, 12, 20]:
            self.looked_up(store, number)
        self.tried(store.used_bytes)
        self.tried(lambda: store.close() or True)

    def tried(self, call: Callable[[], Any]) -> Any:
        """None for one of kvtier's errors; any other is a traceback at the user."""
        try:
            result = call()
        except KVTierError as error:
            assert isinstance(error, StoreError) or str(self.folder) in str(error)
            self.num_errors += 1
            return None
        self.right += 1
        return result

    def looked_up(self, store: Any, number: int) -> None:
        slot = store.find(label(number))
        if slot is None:
            self.missed += 1
            return
        out = self.tried(lambda: read(store, slot))
        if out is not None and not torch.equal(out, block(number, 0, SHAPE)):
            self.wrong += 1

    @property
    def result(self) -> tuple[int, int, int]:
        return self.right, self.missed, self.num_errors


def template(folder: Path, **how: Any) -> Path:
    """What an earlier process left: blocks of ours, and a file of another model's that has to go."""
    store = open_store(folder, BUDGET_BYTES, OTHER_SHAPE)
    write(store, range(2), of=5)
    store.close()
    store = open_store(folder, **how)
    write(store, OLD)
    store.sessions.save(record("alice", 40))
    store.sessions.save(record("gone", 50))
    store.close()
    return folder


OTHERS = [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EMFILE, errno.EDQUOT]


@pytest.fixture(autouse=True)
def no_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here lasts longer than the kernel: waiting for the disk would be most of the time."""
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.parametrize(
    ("io", "compression", "codes"),
    [
        (IoMode.MMAP, Compression.NONE, [errno.EIO]),
        (IoMode.DIRECT, Compression.ZSTD, [errno.EIO]),
        (IoMode.MMAP, Compression.ZSTD, OTHERS),
    ],
    ids=["EIO mmap", "EIO direct zstd", "others"],
)
def test_a_call_that_fails_costs_a_miss_or_a_named_error(
    io: IoMode, compression: Compression, codes: list[int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    how = options(io, compression)
    pristine = template(tmp_path / "pristine", **how)
    with Calls() as calls:
        plain = Scenario(shutil.copytree(pristine, tmp_path / "plain"), **how)
        plain.run()
    assert not plain.num_errors and not plain.wrong and plain.right > 15
    assert {"open", "preadv", "pwrite", "posix_fallocate", "fdatasync", "fsync", "unlink"} <= set(calls.counts)
    counts, fds = {"detected": 0, "absorbed": 0, "injected": 0, "wrong": 0}, open_fds()
    for at in range(calls.num_calls):
        folder = shutil.copytree(pristine, tmp_path / "kv")
        with Calls(failing(codes[at % len(codes)]), at) as one:
            scenario = Scenario(folder, **how)
            scenario.run()
        counts["injected"] += 1
        if one.met is not None:
            counts["absorbed" if scenario.result == plain.result else "detected"] += 1
        counts["wrong"] += scenario.wrong
        assert allocated_bytes(folder) <= BUDGET_BYTES, one.met
        if open_fds() != fds:
            gc.collect()
        assert open_fds() == fds, one.met
        # The next process, on a disk that is well again.
        store = open_store(folder, **{**how, "io": IoMode.MMAP})
        right, _, wrong = served(store, [*OLD, *range(10, 40)])
        counts["wrong"] += len(wrong)
        assert scenario.written <= right | {1}, one.met
        kept = {each.name: each for each in store.sessions.load()}
        assert not store.sessions.num_damaged, one.met
        for name, may_have in scenario.tokens.items():
            assert (len(kept[name].token_ids) if name in kept else 0) in may_have, (one.met, name)
            assert name not in kept or kept[name] == record(name, len(kept[name].token_ids))
        counts["wrong"] += len(set(kept) - set(scenario.tokens))
        assert store.used_bytes() == allocated_bytes(folder), one.met
        write(store, [50], first_slot=2)
        assert served(store, [50])[0] == {50}
        store.check_integrity()
        store.close()
        assert allocated_bytes(folder) <= BUDGET_BYTES, one.met
        shutil.rmtree(folder)
    report(request, Row.EIO if codes == [errno.EIO] else Row.OTHER_ERRORS, **counts)


# --- what the sweep found


@pytest.mark.parametrize("compression", Compression)
def test_a_disk_that_cannot_be_asked_for_room_is_a_named_error(
    compression: Compression, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an IndexError: the slot whose write had failed has no file that the message could name."""
    store = open_store(tmp_path / "kv", BUDGET_BYTES, SHAPE, compression=compression)
    monkeypatch.setattr("kvtier.system.free_disk_bytes", lambda path: failing(errno.EIO)(os.statvfs, (), {}))
    with pytest.raises(StoreError, match=f"writing slot 3.*{tmp_path}") as error:
        write(store, [3])
    assert error.value.errno == errno.EIO
    assert store.reachable_slots() == 0 and store.ceiling_bytes() == store.used_bytes()
    monkeypatch.undo()
    write(store, [3])
    assert served(store, [3])[0] == {3}
    store.close()


@pytest.mark.parametrize("compression", Compression)
def test_a_new_file_that_cannot_be_measured_is_removed(compression: Compression, tmp_path: Path) -> None:
    """It stayed, in no account, and every later attempt failed because it was there."""
    store = open_store(tmp_path / "kv", BUDGET_BYTES, SHAPE, compression=compression)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "allocated_bytes", lambda self: failing(errno.EIO)(os.fstat, (), {}))
        with pytest.raises(StoreError):
            write(store, [0])
    assert not list((tmp_path / "kv").glob("segment-*"))
    assert store.used_bytes() == allocated_bytes(tmp_path / "kv")
    write(store, [0])
    assert served(store, [0])[0] == {0}
    store.close()


def test_a_close_that_fails_keeps_nobody_out(tmp_path: Path) -> None:
    """The folder's descriptor failed to close, and the lock stayed with a store that was closed."""
    store, fds = open_store(tmp_path / "kv", BUDGET_BYTES, SHAPE), open_fds()
    with Calls(failing(errno.EIO), 0, [(os, "close")]) as calls:
        store.close()
    assert calls.met == "close" and open_fds() == fds - 2
    open_store(tmp_path / "kv", BUDGET_BYTES, SHAPE).close()
