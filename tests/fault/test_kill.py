"""Processes that are killed, that share a folder, that fork: real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from kvtier import TieredKV
from kvtier.errors import FolderInUseError
from kvtier.types import Slot, Survives
from tests import crash
from tests.e2e.families import small_config, tiny, tokens
from tests.fault.folders import filled, open_store, served, write
from tests.fault.table import Row, report

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_three_kills_in_the_middle_of_writing_lose_no_committed_block(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What `make crash` does two hundred times."""
    result = crash.run(tmp_path / "kv", 3, seed=2, say=lambda line: None)
    assert result.num_kills == 3
    assert result.num_found == result.num_looked_for > 60
    assert result.num_wrong == 0
    assert result.fewest_new_blocks >= crash.MIN_NEW_BLOCKS
    report(request, Row.KILL_STORE, absorbed=3)


def test_the_verdict_of_make_crash_can_fail() -> None:
    good = crash.Crash(10, 9, 400, 30, 100, 100, 0, 0, 0, 0.1, [5, 5, 5, 5])
    assert good.problems() == [] and good.verdict().startswith("pass: 10 kills")
    for change in (
        {"num_during_write": 4},
        {"fewest_new_blocks": 19},
        {"num_found": 98},
        {"num_wrong": 1},
        {"slowest_open_s": 2.5},
        {"disk_bytes": [5, 5, 6, 6]},
        {"num_looked_for": 0},
        {"disk_bytes": [crash.BUDGET_BYTES + 1] * 4},
    ):
        bad = crash.Crash(10, 9, 400, 30, 100, 100, 0, 0, 0, 0.1, [5, 5, 5, 5])
        for name, value in change.items():
            setattr(bad, name, value)
        assert len(bad.problems()) == 1, change
        assert bad.verdict().startswith("FAIL (")


@pytest.mark.parametrize("survives", Survives)
@pytest.mark.parametrize("hash_seed", ["0", "1", "12345"])
def test_a_killed_owner_leaves_its_blocks_and_no_lock(
    tmp_path: Path, survives: Survives, hash_seed: str, request: pytest.FixtureRequest
) -> None:
    code = f"""
        import sys, time
        from pathlib import Path
        from kvtier.types import Survives
        from tests.fault.folders import open_store, write
        store = open_store(Path({str(tmp_path / "kv")!r}), survives=Survives({survives.value!r}))
        write(store, range(12))
        print("ready", flush=True)
        number = 100
        while True:
            write(store, [number], first_slot=12 + number % 8)
            number += 1
    """
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for _ in range(2):
            with pytest.raises(FolderInUseError, match=str(child.pid)):
                open_store(tmp_path / "kv")
        child.send_signal(signal.SIGKILL)
    store = open_store(tmp_path / "kv")
    labels = [store.label(Slot(slot)) for slot in store.found()]
    numbers = [int(each.content.removeprefix(b"tokens of ")) for each in labels if each is not None]
    right, refused, wrong = served(store, numbers)
    assert set(range(12)) <= right == set(numbers) and not refused and not wrong
    assert len(right) == store.num_found
    assert store.num_quarantined <= 1
    report(request, Row.KILL_STORE, detected=store.num_quarantined, absorbed=1 - store.num_quarantined)
    report(request, Row.TWO_PROCESSES, detected=2)
    write(store, range(20))
    store.check_integrity()
    store.close()


def test_a_forked_child_that_exits_takes_nothing_away(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    write(store, range(3))
    pid = os.fork()
    if pid == 0:  # its copy of the descriptors closes, and no handler of pytest's runs
        store.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert served(store, range(3))[0] == {0, 1, 2}
    with pytest.raises(FolderInUseError):
        open_store(tmp_path / "kv")
    store.close()
    store = open_store(tmp_path / "kv")
    assert served(store, range(3))[0] == {0, 1, 2}
    store.close()


def on_path(model: object, path: Path, on_locked: str) -> TieredKV:
    config = small_config(model, path)
    config["tiers"]["nvme"]["on_locked"] = on_locked
    return TieredKV(model, config)


def test_a_second_wrapper_gets_a_share_of_its_own_that_goes_with_it(tmp_path: Path) -> None:
    models = [tiny("llama"), tiny("qwen2"), tiny("mistral")]
    with on_path(models[0], tmp_path, "subfolder") as first, on_path(models[1], tmp_path, "subfolder") as second:
        with pytest.raises(FolderInUseError):
            on_path(models[2], tmp_path, "error")
        folders = [Path(tiered.stats()["tiers"]["nvme"]["folder"]) for tiered in (first, second)]
        assert folders[0] != folders[1] and folders[1].parent.name == "shares"
        for tiered, model in ((first, models[0]), (second, models[1])):
            out = tiered.generate(tokens(300), max_new_tokens=3, do_sample=False)
            assert torch.equal(out, model.generate(tokens(300), max_new_tokens=3, do_sample=False))
            assert tiered.stats()["tiers"]["nvme"]["used_bytes"] > 64 << 10
        with on_path(models[2], tmp_path, "subfolder") as third:  # does not sweep a live owner's
            assert folders[1].is_dir() and list(folders[1].glob("segment-*"))
            assert Path(third.stats()["tiers"]["nvme"]["folder"]) not in folders
            second.check_integrity()
        labels = [each._runtime.labels for each in (first, second)]
        assert [each is not None and each.outlives for each in labels] == [True, False]  # no share is hashed for
    assert folders[0].is_dir() and not folders[1].exists()
    assert not list(folders[1].parent.iterdir())


def test_a_share_of_a_process_that_died_is_swept(tmp_path: Path) -> None:
    code = f"""
        import os
        from pathlib import Path
        from tests.fault.test_kill import on_path, tiny, tokens
        first = on_path(tiny("llama"), Path({str(tmp_path)!r}), "subfolder")
        second = on_path(tiny("qwen2"), Path({str(tmp_path)!r}), "subfolder")
        second.generate(tokens(300), max_new_tokens=2)
        os.kill(os.getpid(), 9)
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, timeout=100, check=False)
    assert child.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "nvme" / "shares").iterdir())) == 1
    with on_path(tiny("llama"), tmp_path, "error") as tiered:
        assert not list((tmp_path / "nvme" / "shares").iterdir())
        assert tiered.stats()["tiers"]["nvme"]["folder"] == str(tmp_path / "nvme" / "kv")


def test_a_wrapper_keeps_the_blocks_of_an_earlier_process_as_long_as_there_is_other_room(tmp_path: Path) -> None:
    model = tiny("llama")
    with on_path(model, tmp_path, "error") as tiered:
        shape = tiered._runtime.group.shape
        budget_bytes = tiered.stats()["tiers"]["nvme"]["budget_bytes"]
    filled(tmp_path / "nvme" / "kv", range(6), shape=shape, budget_bytes=budget_bytes)
    with on_path(model, tmp_path, "error") as tiered:
        assert tiered.stats()["tiers"]["nvme"]["found"] == 6
        out = tiered.generate(tokens(300), max_new_tokens=3, do_sample=False)
        assert torch.equal(out, model.generate(tokens(300), max_new_tokens=3, do_sample=False))
        stats = tiered.stats()
        assert stats["bytes_moved"]["gpu_to_nvme"] + stats["bytes_moved"]["cpu_to_nvme"] > 0
        assert stats["tiers"]["nvme"]["found"] == 6 and stats["tiers"]["nvme"]["quarantined"] == 0
        tiered.check_integrity()
    store = open_store(tmp_path / "nvme" / "kv", budget_bytes, shape)
    assert served(store, range(6))[0] == set(range(6))
    store.close()


@pytest.mark.parametrize("survives", ["kill", "power_loss"])
def test_what_a_wrapper_leaves_is_found_by_the_next_and_used_by_nothing_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: str
) -> None:
    model, syncs, real = tiny("llama"), [], os.fdatasync

    def syncing(fd: int) -> None:
        syncs.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", syncing)
    config = small_config(model, tmp_path)
    config["tiers"]["nvme"]["survives"] = survives
    with TieredKV(model, config) as tiered:
        cache = tiered.new_cache()
        first = tiered.generate(tokens(300), cache=cache, max_new_tokens=3, do_sample=False)
    assert bool(syncs) is (survives == "power_loss")
    with TieredKV(model, config) as tiered:
        assert tiered.stats()["tiers"]["nvme"]["found"] > 0
        cache = tiered.new_cache()
        again = tiered.generate(tokens(300), cache=cache, max_new_tokens=3, do_sample=False)
        assert tiered.stats()["tokens"] >= 300  # all were computed anew
        tiered.check_integrity()
    assert torch.equal(first, again)
    assert torch.equal(first, model.generate(tokens(300), max_new_tokens=3, do_sample=False))
