"""For every test: one torch thread (two xdist workers share two cores) and no look-ups of models on the network.

Hypothesis draws the same examples in each run, so that a run that fails fails again; with KVTIER_TEST_EXAMPLES=N in the
environment it draws others, N where the test has no number of its own. With KVTIER_TEST_SAMPLE=1, as in `make test`,
tests marked `sampled` run a part of their cases (tests/sample.py).
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from kvtier.log import rate_limit
from tests.sample import IS_SAMPLE, left_out

settings.register_profile("the same examples", derandomize=True, deadline=None)
settings.register_profile("others", max_examples=int(os.environ.get("KVTIER_TEST_EXAMPLES", "100")), deadline=None)
settings.load_profile("others" if "KVTIER_TEST_EXAMPLES" in os.environ else "the same examples")

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

try:
    import torch
except ImportError:  # the pure modules are tested without it too
    pass
else:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first, so that no worker waits for it at the end; a sample of what is marked, where one is wanted."""
    items.sort(key=lambda item: item.path.parent.name != "stateful")
    if IS_SAMPLE and (gone := left_out(items)):
        config.hook.pytest_deselected(items=[item for item in items if item in gone])
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish() -> None:
    """What was imported stays: the collector, which many tests run, need not look at it each time (0.2 s)."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """The table of faults is made where all tests' reports come together: not on the workers of xdist."""
    if hasattr(config, "workerinput"):
        return
    from tests.fault.run import FaultTable, is_whole

    config.pluginmanager.register(FaultTable(is_whole(config)))


@pytest.fixture(autouse=True)
def _every_message_is_logged_anew() -> None:
    rate_limit.reset()


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """Python's own SIGINT handler, which a shell that starts us in the background has switched off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that `pwrite` puts into the nvme tier's segment files from here on, one entry a call."""
    counts: list[int] = []
    original = os.pwrite

    def counting(fd: int, data: Any, offset: int) -> int:
        done = original(fd, data, offset)
        if "segment-" in os.readlink(f"/proc/self/fd/{fd}"):
            counts.append(done)
        return done

    monkeypatch.setattr("os.pwrite", counting)
    return counts
