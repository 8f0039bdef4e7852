"""An interpreter that ends without close(), in every state: soon, with its own status, without a word of ours."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.testing import Fault, FaultyStore
from kvtier.types import Tier
from tests.e2e.families import small_config, tiny, tokens
from tests.fault.starter import Starter, say, starter
from tests.fault.table import Row, report

KEPT: list[Any] = []
"""Whatever a program still holds when it ends."""


def used(folder: str, persistent: bool, **more: Any) -> TieredKV:
    """A wrapper whose tiers, the files too, hold a conversation."""
    model = tiny()
    config = small_config(model, Path(folder), **more)
    if not persistent:
        del config["tiers"]["nvme"]["path"]
    tiered = TieredKV(model, config)
    cache = tiered.new_cache()
    tiered.generate(tokens(300), cache=cache, max_new_tokens=3, do_sample=False)
    assert tiered.stats()["tiers"]["nvme"]["used_slots"] > 0
    KEPT.append(cache)
    return tiered


def hanging(tiered: TieredKV, where: str) -> None:
    """From here on the disk hangs; and something is on its way to or from it."""
    stores: list[FaultyStore] = []

    def wrap(store: Any) -> FaultyStore:
        stores.append(FaultyStore(store, 1, {Fault.HANG: 1.0}, hang_s=1000))
        return stores[0]

    tiered._runtime.interpose(Tier.NVME, wrap)

    def generate() -> None:
        cache = KEPT[0] if where == "reads" else tiered.new_cache()
        ids = tokens(5, 9) if where == "reads" else tokens(300, 9)
        with torch.no_grad():
            tiered(ids, cache=cache)

    threading.Thread(target=generate, daemon=True).start()
    while not stores[0].injected:
        time.sleep(0.01)


def at_the_end(tiered: TieredKV) -> None:
    KEPT.append(tiered)


def dropped(tiered: TieredKV) -> None:
    KEPT.clear()


def in_a_cycle(tiered: TieredKV) -> None:
    gc.disable()
    tiered.itself = tiered  # type: ignore[attr-defined]


def sys_exit(tiered: TieredKV) -> None:
    KEPT.append(tiered)
    say("leaving")
    sys.exit(0)


def exit_inside_with(tiered: TieredKV) -> None:
    with tiered:
        say("leaving")
        sys.exit(0)


def exception(tiered: TieredKV) -> None:
    KEPT.append(tiered)
    say("leaving")
    raise RuntimeError("the program's own")


def exit_inside_a_step(tiered: TieredKV) -> None:
    def leave(*_: Any) -> None:
        say("leaving")
        sys.exit(0)

    tiered.model.lm_head.register_forward_hook(leave)
    tiered.generate(tokens(30, 3), max_new_tokens=3)


def sessions(tiered: TieredKV) -> None:
    KEPT.append([tiered.session(name) for name in ("alice", "bob")])
    for session in KEPT[-1]:
        session.generate(input_ids=tokens(100), max_new_tokens=2)


def daemon_generating(tiered: TieredKV) -> None:
    def generate() -> None:
        while True:
            tiered.generate(tokens(200), max_new_tokens=50, do_sample=False)

    begun = threading.Event()
    tiered.model.lm_head.register_forward_hook(lambda *_: begun.set())
    threading.Thread(target=generate, daemon=True).start()
    begun.wait()
    KEPT.append(tiered)


def hanging_reads(tiered: TieredKV) -> None:
    KEPT.append(tiered)
    hanging(tiered, "reads")


def hanging_writes(tiered: TieredKV) -> None:
    KEPT.append(tiered)
    hanging(tiered, "writes")


WAYS: list[Callable[[TieredKV], None]] = [
    at_the_end, dropped, in_a_cycle, sys_exit, exit_inside_with, exception, exit_inside_a_step, sessions,
    daemon_generating, hanging_reads, hanging_writes,
]  # fmt: skip


def leave(way: str, folder: str, persistent: bool) -> None:
    """In the child: do that, and end."""
    tiered = used(folder, persistent)
    globals()[way](tiered)
    del tiered
    say("leaving")


@pytest.fixture(scope="module")
def children() -> Iterator[Starter]:
    with starter() as it:
        yield it


CASES = [(way, True) for way in WAYS] + [(way, False) for way in (at_the_end, daemon_generating, hanging_writes)]


@pytest.mark.parametrize(("way", "persistent"), CASES)
def test_a_program_that_ends_without_close_ends(
    way: Callable[[TieredKV], None],
    persistent: bool,
    children: Starter,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    ended = children.run("tests.fault.test_exit:leave", way=way.__name__, folder=str(tmp_path), persistent=persistent)
    print(f"{way.__name__}: status {ended.status} after {ended.leaving_s:.2f} s")
    assert ended.lines == ["leaving"], ended
    if way is exception:
        assert ended.status == 1 and ended.errors.count("Traceback") == 1 and "the program's own" in ended.errors
    else:
        assert ended.status == 0 and "Traceback" not in ended.errors, ended
    report(request, Row.EXIT, absorbed=1)
