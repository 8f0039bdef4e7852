"""Processes with a model and a folder that are killed while they generate, that fork, that meet on one folder."""

from __future__ import annotations

import atexit
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.errors import FolderInUseError, UnsupportedError
from kvtier.fsck import check_folder
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.slot_check import SlotState
from kvtier.stores.temporary_folders import sweep_stale, temporary_folder
from kvtier.system import allocated_bytes
from kvtier.types import Slot, Tier
from tests.e2e.families import small_config, tiny, tokens
from tests.fault.folders import filled, open_store, served
from tests.fault.starter import say, starter
from tests.fault.table import Row, report
from tests.fault.test_upgrade import computed, is_right

BRIEF: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
PROMPTS = [tokens(150 + 40 * seed, seed) for seed in range(4)]


# --- kills


def generate_until_killed(folder: str) -> None:
    """In the child: say what is found and how a prompt goes on, then generate on three threads for ever."""
    model = tiny()
    tiered = TieredKV(model, small_config(model, Path(folder), rows=3))
    say("found", tiered.stats()["tiers"]["nvme"]["found"], tiered.stats()["tiers"]["nvme"]["quarantined"])
    say("tokens", *tiered.generate(PROMPTS[0], **BRIEF)[0].tolist())
    executor = tiered._runtime.executor
    commit = executor.commit

    def committed(opened: Any) -> None:  # not by a hook, under which no KV is labelled
        commit(opened)
        say("step")

    executor.commit = committed  # type: ignore[method-assign]

    def work(number: int) -> None:
        for turn in range(1 << 30):
            tiered.generate(PROMPTS[(number + turn) % 4], **BRIEF)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_kills_while_sessions_generate_leave_nothing_wrong(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model, chance = tiny(), random.Random(3)
    expected = [model.generate(prompt, **BRIEF) for prompt in PROMPTS]
    right_blocks = [block for out in expected for block in computed(model, out[:, :-1])]
    with TieredKV(model, small_config(model, tmp_path / "other", rows=3)) as tiered:
        shape, budget_bytes = tiered._runtime.group.shape, tiered.stats()["tiers"]["nvme"]["budget_bytes"]
    folder = tmp_path / "nvme" / "kv"
    counts = {"detected": 0, "absorbed": 0, "wrong": 0}
    num_found = 0
    with ExitStack() as stack:
        starters = [stack.enter_context(starter(hash_seed)) for hash_seed in (0, 12345)]
        for turn in range(10):
            steps_left, pid, status = chance.randrange(3, 30), 0, ""
            lines = starters[turn % 2].start("tests.fault.test_processes:generate_until_killed", folder=str(tmp_path))
            for line in lines:
                word, *rest = line.split()
                if word == "pid":
                    pid = int(rest[0])
                elif word == "found":
                    assert int(rest[0]) == num_found  # all that the one who was killed had left, and nothing else
                elif word == "tokens":
                    assert list(map(int, rest)) == expected[0][0].tolist()
                elif word == "step":
                    steps_left -= 1
                    if steps_left == 0:
                        time.sleep(chance.random() * 0.02)
                        os.kill(pid, signal.SIGKILL)  # it ends by this alone, so the pid is still its own
                elif word == "died":
                    status = rest[0]
            assert status == str(-signal.SIGKILL), status
            slots = check_folder(folder).slots
            assert slots[SlotState.DAMAGED] == 0
            store = NvmeStore(shape, budget_bytes, folder, True, reserve_free_frac=0.0)
            num_found = len(store.found())
            for slot in store.found():
                label, out = store.label(Slot(slot)), torch.empty(shape.block_bytes, dtype=torch.uint8)
                assert label is not None and store.find(label) == slot
                store.read(Slot(slot), out)
                # The plain model's own KV differs by 4e-5 between two ways to cut a prompt; blocks differ by 8.
                counts["wrong"] += not is_right(out.view(torch.float32), right_blocks, 1e-4)
            counts["detected" if store.num_quarantined else "absorbed"] += 1
            store.check_integrity()
            store.close()
            assert allocated_bytes(folder) <= budget_bytes
    assert num_found > 10
    assert counts["wrong"] == 0
    report(request, Row.KILL_MODEL, **counts)


# --- forks


def refused(call: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedError, match="belongs to process"):
        call()


def fork_again(tiered: TieredKV) -> None:
    pid = os.fork()
    if pid == 0:
        in_child(lambda: refused(lambda: tiered.generate(PROMPTS[0], **BRIEF)))
    assert os.waitpid(pid, 0)[1] == 0


def open_it_too(tiered: TieredKV) -> None:
    folder = Path(tiered.stats()["tiers"]["nvme"]["folder"])
    with pytest.raises(FolderInUseError):
        NvmeStore(tiered._runtime.group.shape, 4 << 20, folder, True)


ACTS: dict[str, Callable[[TieredKV], Any]] = {
    "nothing": lambda tiered: None,
    "generate": lambda tiered: refused(lambda: tiered.generate(PROMPTS[0], **BRIEF)),
    "call": lambda tiered: refused(lambda: tiered(PROMPTS[0][:, :3])),
    "session": lambda tiered: refused(lambda: tiered.session("bob").generate(input_ids=PROMPTS[1], **BRIEF)),
    "close": lambda tiered: tiered.close(),
    "close the store": lambda tiered: tiered._runtime.stores[Tier.NVME].close(),
    "stats": lambda tiered: tiered.stats(),
    "fork again": fork_again,
    "open it too": open_it_too,
    "finalizers": lambda tiered: atexit._run_exitfuncs(),
    "another program": lambda tiered: os.execv("/bin/true", ["true"]),
    "an end by force": lambda tiered: os._exit(0),
}


def in_child(act: Callable[[], Any]) -> None:
    status = 1
    try:
        act()
        status = 0
    finally:
        os._exit(status)


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[TieredKV]:
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        yield tiered


def test_a_forked_child_takes_nothing_from_its_parent(
    tiered: TieredKV, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = tiered.generate(PROMPTS[3], **BRIEF)
    cache = tiered.new_cache()
    out = tiered.generate(PROMPTS[3], cache=cache, **BRIEF)
    for name, act in ACTS.items():
        pid = os.fork()
        if pid == 0:
            in_child(lambda act=act: act(tiered))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, name
        assert torch.equal(out, expected)
        longer = torch.cat([out, tokens(20, 50)], dim=1)
        assert tiered.generate(longer, cache=cache, **BRIEF).shape[1] == longer.shape[1] + 5
        cache.crop(out.shape[1] - 1 - cache.get_seq_length())
        tiered.check_integrity()
        assert list((tmp_path / "nvme" / "kv").glob("segment-*"))
    assert torch.equal(tiered.generate(PROMPTS[3], **BRIEF), expected)
    report(request, Row.FORK, detected=5, absorbed=len(ACTS) - 5)


def test_a_forked_child_looks_no_prompt_up_in_the_tiers_of_its_parent(tmp_path: Path) -> None:
    """Found by a hostile tester: it labelled and moved the parent's blocks, or waited for threads that it has not."""
    model = tiny()

    def touched() -> None:
        raise AssertionError("the child moves blocks")

    def look(tiered: TieredKV) -> None:
        tiered._runtime.manager.poll = touched
        refused(lambda: tiered.generate(PROMPTS[3], **BRIEF))

    with TieredKV(model, small_config(model, tmp_path, prefix_cache=True)) as tiered:
        tiered.generate(PROMPTS[3], **BRIEF)
        pid = os.fork()
        if pid == 0:
            in_child(lambda: look(tiered))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_child_that_lives_on_keeps_no_lock(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The folder was in use for as long as any child lived, such as a worker that loads data."""
    filled(tmp_path / "kv", range(3))
    store = open_store(tmp_path / "kv")
    temporary = open_store(temporary_folder(tmp_path))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        in_child(lambda: (os.read(reading, 1), store.used_bytes(), store.close(), temporary.close()))
    os.close(reading)
    for owned in (store, temporary):
        with pytest.raises(FolderInUseError):
            open_store(owned.folder)  # it is the parent's all the same
        owned.close()
    store = open_store(tmp_path / "kv")
    assert served(store, range(3))[0] == {0, 1, 2}
    store.close()
    assert sweep_stale(tmp_path) == [temporary.folder]  # the one that keeps its files here
    os.close(writing)
    assert os.waitpid(pid, 0)[1] == 0
    report(request, Row.FORK, absorbed=1)
