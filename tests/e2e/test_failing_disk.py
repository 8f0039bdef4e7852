"""A disk that is read-only, full or gone, or no descriptors, for a while: the right tokens meanwhile, writes after."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier import TieredKV
from kvtier.errors import CapacityError
from kvtier.testing import Fault
from kvtier.types import Tier
from tests.e2e.families import GREEDY, MODES, assert_same, plain_turns, small_config, tiny
from tests.e2e.test_recompute import faulty
from tests.small_tiers import FakeClock

ROOT = Path(__file__).parents[2]
ROOMY = {"gpu_slots": 6, "cpu_blocks": 24}
"""Tiers on which a conversation goes on for two turns without the nvme tier, and not for three."""


def told_time(tiered: TieredKV) -> FakeClock:
    """From here on the breaker and the growth of the nvme tier go by this clock."""
    clock, placement = FakeClock(), tiered._runtime.placement
    placement.breakers[Tier.NVME]._rest._clock = clock
    placement.regrowth[Tier.NVME]._rest._clock = clock
    return clock


def nvme(tiered: TieredKV) -> dict[str, Any]:
    stats: dict[str, Any] = tiered.stats()["tiers"]["nvme"]
    return stats


def written(tiered: TieredKV) -> int:
    moved = tiered.stats()["bytes_moved"]
    return int(moved["gpu_to_nvme"] + moved["cpu_to_nvme"])


def messages(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if text in record.getMessage()]


class Trouble:
    """Something that makes every write to the tier's files fail, with the error's name, until `end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.end: Callable[[], None] = monkeypatch.undo

    def fail(self, function: str, code: int) -> None:
        def failing(*_: Any, **__: Any) -> int:
            raise OSError(code, os.strerror(code))

        self.monkeypatch.setattr(f"os.{function}", failing)


def read_only(tiered: TieredKV, trouble: Trouble) -> str:
    for function in ("pwrite", "pwritev"):
        trouble.fail(function, errno.EROFS)
    return "Read-only file system"


def no_permission(tiered: TieredKV, trouble: Trouble) -> str:
    """No file can be made, as after a chmod of the folder; tests may run as root, whom that does not stop."""
    trouble.fail("open", errno.EACCES)
    return "Permission denied"


def no_descriptors(tiered: TieredKV, trouble: Trouble) -> str:
    """The limit really is reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    trouble.end = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return "Too many open files"


def broken(tiered: TieredKV, trouble: Trouble) -> str:
    store = faulty(tiered, {Fault.EIO: 1.0})
    store._check_readable = lambda slot: None  # type: ignore[method-assign]  # reads go on
    store.read, store.read_slice = store.inner.read, store.inner.read_slice  # type: ignore[method-assign]
    trouble.end = store.rates.clear
    return "[Errno 5]"


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("begin", [read_only, no_permission, no_descriptors, broken])
def test_generation_goes_on_while_writes_fail_and_writes_resume(
    begin: Callable[[TieredKV, Trouble], str],
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, turns = tiny(), plain_turns(tiny(), turns=3, prompt=300)
    config = small_config(model, tmp_path, mode, **ROOMY)
    config["tiers"]["cpu"] |= {"high": 0.5, "low": 0.3}
    trouble = Trouble(monkeypatch)
    with TieredKV(model, config) as tiered, caplog.at_level(logging.INFO, "kvtier"):
        clock, cache = told_time(tiered), tiered.new_cache()
        num_steps, reason = 0, ""

        def begin_in_the_middle(*_: Any) -> None:
            nonlocal num_steps, reason
            num_steps += 1
            if num_steps == 4:
                reason = begin(tiered, trouble)

        handle = model.lm_head.register_forward_hook(begin_in_the_middle)
        try:
            assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        finally:
            handle.remove()
            trouble.end()
        assert num_steps > 4
        before = nvme(tiered)
        assert before["state"] == "resting" and before["failures"] >= 3
        (warning,) = messages(caplog, "the nvme tier takes no blocks for now")
        assert warning.levelno == logging.WARNING and reason in warning.getMessage()
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING and r is not warning]
        moved = written(tiered)
        assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], mode)
        assert nvme(tiered)["state"] == "resting" and written(tiered) == moved  # time stands still
        clock.now_s += 60
        assert_same(tiered.generate(turns[2][0], cache=cache, **GREEDY), turns[2][1], mode)
        after = nvme(tiered)
        assert after["state"] == "ok" and after["failures"] == before["failures"]
        assert written(tiered) > moved
        assert len(messages(caplog, "the nvme tier takes blocks again")) == 1
        assert tiered.stats()["recomputed_blocks"] == 0
        tiered.check_integrity()


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_room_says_which_tier_is_broken_and_why(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, turns = tiny(), plain_turns(tiny(), turns=2, prompt=300)
    with TieredKV(model, small_config(model, tmp_path, mode)) as tiered:
        clock, cache = told_time(tiered), tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        held, trouble = cache.get_seq_length(), Trouble(monkeypatch)
        read_only(tiered, trouble)
        for _ in range(3):
            with pytest.raises(CapacityError, match=r"the nvme tier takes none for now, \d+ moves .*Read-only file sy"):
                tiered.generate(turns[1][0], cache=cache, **GREEDY)
            if cache.get_seq_length() > held:  # chunks for which there was room
                cache.crop(held - cache.get_seq_length())
            tiered.check_integrity()
            clock.now_s += 0.1
        trouble.end()
        clock.now_s += 1
        assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], mode)
        assert nvme(tiered)["state"] == "ok"
        tiered.check_integrity()


@pytest.mark.parametrize("mode", MODES)
def test_a_folder_that_is_deleted(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, turns = tiny(), plain_turns(tiny(), turns=3, prompt=300)
    config = small_config(model, tmp_path, mode, cpu_blocks=40)
    config["tiers"]["cpu"] |= {"high": 0.3, "low": 0.2}
    with TieredKV(model, config) as tiered:
        cache = tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        assert nvme(tiered)["used_slots"] > 0
        shutil.rmtree(nvme(tiered)["folder"])
        for ids, expected in turns[1:]:
            assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, mode)
            tiered.check_integrity()
        assert nvme(tiered)["budget_bytes"] >= nvme(tiered)["used_bytes"]
        assert len(messages(caplog, "the nvme tier takes no blocks for now")) <= 3


@contextmanager
def disk_of(monkeypatch: pytest.MonkeyPatch, free_bytes: list[int]) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr("kvtier.system.free_disk_bytes", lambda path: free_bytes[0])
        patch.setattr("kvtier.system.disk_total_bytes", lambda path: 100 << 20)
        yield


@pytest.mark.parametrize("mode", MODES)
def test_a_disk_without_room_that_gets_some(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, turns, free_bytes = tiny(), plain_turns(tiny(), turns=3, prompt=300), [50 << 20]
    config = small_config(model, tmp_path, mode, **ROOMY)
    config["tiers"]["cpu"] |= {"high": 0.5, "low": 0.3}
    config["tiers"]["nvme"]["budget"] = 1 << 20
    with disk_of(monkeypatch, free_bytes), TieredKV(model, config) as tiered, caplog.at_level(logging.INFO, "kvtier"):
        clock, cache = told_time(tiered), tiered.new_cache()
        num_slots = nvme(tiered)["num_slots"]
        free_bytes[0] = 5 << 20  # what must stay free
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        assert nvme(tiered)["num_slots"] == 0 and nvme(tiered)["state"] == "ok"
        free_bytes[0] = 50 << 20
        clock.now_s += 5
        for ids, expected in turns[1:]:
            assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, mode)
            assert nvme(tiered)["used_bytes"] <= nvme(tiered)["budget_bytes"]
        assert nvme(tiered)["num_slots"] == num_slots and written(tiered) > 0
        assert len(messages(caplog, "blocks again")) == 1
        assert len(messages(caplog, "blocks instead of")) == 1
        tiered.check_integrity()


# A child of its own, since the tmpfs needs a mount namespace.
FULL_TMPFS = """
    import sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from kvtier import TieredKV, system
    from kvtier.system import allocated_bytes
    from tests.e2e.families import GREEDY, assert_same, plain_turns, small_config, tiny
    from tests.e2e.test_failing_disk import nvme, told_time, written
    from tests.older_transformers import teach_plain_models

    teach_plain_models()
    folder = Path(sys.argv[1])
    system.is_memory_backed = lambda kind: False  # else half of the cpu tier's budget is the limit
    model, turns = tiny(), plain_turns(tiny(), turns=3)
    config = small_config(model, folder, gpu_slots=6, cpu_blocks=30, nvme=900_000)
    config["tiers"]["cpu"] |= {"high": 0.1, "low": 0.05}
    with TieredKV(model, config) as tiered:
        clock, cache = told_time(tiered), tiered.new_cache()
        other = folder / "other"
        other.write_bytes(bytes(800_000))  # another program's, and the reserve is 5 %
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], "blockwise")
        full = nvme(tiered)
        assert 0 < full["num_slots"] < 20 and full["used_slots"] == full["num_slots"], full
        other.unlink()
        clock.now_s += 5
        for ids, expected in turns[1:]:
            assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, "blockwise")
            used = allocated_bytes(Path(full["folder"]))
            assert used <= nvme(tiered)["budget_bytes"], used
        assert nvme(tiered)["num_slots"] > full["num_slots"], (full, nvme(tiered))
        assert nvme(tiered)["used_slots"] > full["used_slots"]
        assert nvme(tiered)["state"] == "ok"
        tiered.check_integrity()
        print("slots", full["num_slots"], nvme(tiered)["num_slots"])
"""


def test_a_tmpfs_that_is_full_and_gets_room(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=1m,mode=700 kvtier "$0"'
    probe = subprocess.run(["unshare", "-rm", "sh", "-c", mount, str(tmp_path)], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no mount namespaces here; a disk without room is simulated above")
    prefix = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', str(tmp_path)]
    command = [*prefix, sys.executable, "-c", textwrap.dedent(FULL_TMPFS), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slots" in done.stdout
