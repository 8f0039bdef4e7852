"""Faults under a model that generates: the right tokens, and what it cost is counted.

Each way that a block is lost and computed again is in tests/e2e/test_recompute.py, each trouble of a disk in
tests/e2e/test_failing_disk.py; here each kind of fault is met often enough for the table.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier import TieredKV
from kvtier.errors import (
    BlockLostError,
    CapacityError,
    ChecksumError,
    ShortReadError,
    StoreError,
    TransferTimeoutError,
)  # fmt: skip
from kvtier.stores import slot_reader
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.segment import Segment
from kvtier.system import allocated_bytes
from kvtier.testing import Fault, FaultyStore
from kvtier.types import Tier
from tests.e2e.families import GREEDY, assert_same, plain_turns, small_config, tiny
from tests.e2e.test_failing_disk import ROOMY, Trouble, broken, no_descriptors, no_permission, read_only, told_time
from tests.e2e.test_loss import truncate
from tests.e2e.test_recompute import damage_files, recomputed
from tests.fault.table import LEAST_REACHED, Row, report


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> Counter[type]:
    """The errors that a store raised at its readers, by class."""
    errors: Counter[type] = Counter()
    lock, inside = threading.Lock(), threading.local()

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(*arguments: Any) -> Any:
            if getattr(inside, "is_reading", False):  # slices read together may be read one by one
                return real(*arguments)
            inside.is_reading, failures = True, []
            try:
                failures = real(*arguments) or []
                return failures
            except StoreError as error:
                failures = [error]
                raise
            finally:
                inside.is_reading = False
                with lock:
                    errors.update(type(error) for error in failures if error is not None)

        return read

    for name in ("read", "read_slice"):
        monkeypatch.setattr(NvmeStore, name, counting(getattr(NvmeStore, name)))
    begin = NvmeStore.begin_slices
    monkeypatch.setattr(NvmeStore, "begin_slices", lambda *arguments: counting(begin(*arguments)))
    return errors


class Met:
    """Has some of the calls meet a fault, by seed and rate."""

    def __init__(self, rate: float) -> None:
        self.rate, self.num = rate, 0
        self._chance, self._lock = random.Random(7), threading.Lock()

    def __bool__(self) -> bool:
        with self._lock:
            is_met = self._chance.random() < self.rate
            self.num += is_met
            return is_met


def spoil_reads(monkeypatch: pytest.MonkeyPatch, met: Met) -> None:
    """The topmost bit of an exponent, of what the file gave: before anything verifies it."""
    real = Segment.read

    def read(self: Segment, offset_bytes: int, out: np.ndarray) -> None:
        real(self, offset_bytes, out)
        if met:
            out[out.nbytes // 8 * 4 + 3] ^= 0x40

    monkeypatch.setattr(Segment, "read", read)


def fail_reads(monkeypatch: pytest.MonkeyPatch, met: Met) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if met:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize(("row", "spoil"), [(Row.MODEL_FLIP, spoil_reads), (Row.MODEL_EIO, fail_reads)])
def test_reads_that_go_wrong_give_the_right_tokens(
    row: Row,
    spoil: Callable[[pytest.MonkeyPatch, Met], None],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    raised: Counter[type],
) -> None:
    model, met, turns = tiny(), Met(0.003), plain_turns(tiny())
    spoil(monkeypatch, met)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        for _ in range(8):
            cache = tiered.new_cache()
            for ids, expected in turns:
                assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, "blockwise")
                tiered.check_integrity()
            if min(met.num, recomputed(tiered)) >= LEAST_REACHED:
                break
        num_met, num_recomputed = met.num, recomputed(tiered)
        detected = raised[ChecksumError if row is Row.MODEL_FLIP else StoreError]
        used = allocated_bytes(Path(tiered.stats()["tiers"]["nvme"]["folder"]))
        assert used <= tiered.stats()["tiers"]["nvme"]["budget_bytes"]
    unchecked = 0
    if row is Row.MODEL_FLIP:
        monkeypatch.setattr(slot_reader, "_verify", lambda *_: None)
        with TieredKV(model, small_config(model, tmp_path)) as tiered:
            cache = tiered.new_cache()
            for ids, expected in turns:
                out = tiered.generate(ids, cache=tiered.new_cache() if unchecked else cache, **GREEDY)
                unchecked += not torch.equal(out.sequences, expected.sequences)
            assert met.num > num_met and recomputed(tiered) == 0
    report(
        request, row, reached=num_met, detected=detected, recomputed=num_recomputed, wrong_unchecked=unchecked
    )  # fmt: skip


def test_files_that_end_too_early_give_the_right_tokens(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, raised: Counter[type]
) -> None:
    model, turns, real, ends = tiny(), plain_turns(tiny()), os.preadv, []

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = real(fd, buffers, offset)
        if not got:
            ends.append(offset)
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        for _ in range(3):
            cache = tiered.new_cache()
            for turn, (ids, expected) in enumerate(turns):
                if turn:
                    damage_files(tiered, truncate)
                assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, "blockwise")
                tiered.check_integrity()
        report(
            request, Row.MODEL_SHORT, reached=len(ends), detected=raised[ShortReadError], recomputed=recomputed(tiered)
        )  # fmt: skip


NAMED = (TransferTimeoutError, BlockLostError, CapacityError)


def test_calls_that_hang_give_the_right_tokens_or_the_error_that_names_it(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, turns = tiny(), plain_turns(tiny(), turns=2, prompt=200)
    config = small_config(model, tmp_path, io_timeout_s=0.4)
    counts = Counter[str]()
    with TieredKV(model, config) as tiered:
        stores: list[FaultyStore] = []

        def wrap(store: Any) -> FaultyStore:
            stores.append(FaultyStore(store, 1, hang_s=30))
            return stores[0]

        tiered._runtime.interpose(Tier.NVME, wrap)
        for attempt in range(12):
            store = stores[0]
            while True:  # a busy machine may be as slow as a disk that hangs
                try:
                    cache = tiered.new_cache()
                    assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], "blockwise")
                    break
                except NAMED:
                    time.sleep(0.05)
            before = len(store.injected), recomputed(tiered)
            store.at_calls = {store.num_calls + 7 * attempt: Fault.HANG}
            try:
                assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], "blockwise")
                seen = recomputed(tiered) > before[1]
            except NAMED as error:  # or no room without the tier that hangs
                assert "io_timeout_s" in str(error) or "hang" in str(error)
                seen = True
            store.release()
            if len(store.injected) > before[0]:
                counts["detected" if seen else "absorbed"] += 1
            while True:  # what hung ends, and the same conversation goes on
                try:
                    held = cache.get_seq_length()
                    if held > turns[0][1].sequences.shape[1] - 1:
                        cache.crop(turns[0][1].sequences.shape[1] - 1 - held)
                    out = tiered.generate(turns[1][0], cache=cache, **GREEDY)
                    break
                except NAMED:
                    time.sleep(0.05)
            assert_same(out, turns[1][1], "blockwise")
            tiered.check_integrity()
            store._released.clear()
        report(request, Row.MODEL_HANG, recomputed=recomputed(tiered), **counts)


def small_files(tiered: TieredKV, trouble: Trouble) -> str:
    """The limit really is reached: no file may be longer than what lies in front of the first slot's end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, hard))
    trouble.end = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "EFBIG"


@pytest.mark.parametrize("begin", [read_only, no_permission, no_descriptors, broken, small_files])
def test_writes_that_fail_cost_no_token(
    begin: Callable[[TieredKV, Trouble], str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, turns = tiny(), plain_turns(tiny(), turns=2, prompt=300)
    for turn in range(2):
        config = small_config(model, tmp_path / str(turn), **ROOMY)
        config["tiers"]["cpu"] |= {"high": 0.5, "low": 0.3}
        trouble = Trouble(monkeypatch)
        with TieredKV(model, config) as tiered:
            clock, cache = told_time(tiered), tiered.new_cache()
            begin(tiered, trouble)
            try:
                assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], "blockwise")
            finally:
                trouble.end()
            stats = tiered.stats()["tiers"]["nvme"]
            assert stats["state"] == "resting" or stats["num_slots"] == 0
            clock.now_s += 60
            assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], "blockwise")
            tiered.check_integrity()
    report(request, Row.MODEL_NO_WRITES, detected=2)
