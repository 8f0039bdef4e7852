"""All checks on all devices, and the report."""

from __future__ import annotations

import functools
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvtier.selftest import exactness, parts
from kvtier.selftest.check import Check, Figures, Outcome, run_check

_NUM_BLOCKS = 24
_BLOCK_TOKENS = 32
_PAGE_TOKENS = 256
"""What CUDA's paged kernel takes, and what kvtier's configs have."""


@dataclass(frozen=True, slots=True)
class Report:
    """What ran where. `machine` has versions and devices."""

    machine: dict[str, Any]
    checks: tuple[Check, ...]
    seconds: float

    @property
    def is_ok(self) -> bool:
        """Whether nothing failed, and something passed."""
        outcomes = [check.outcome for check in self.checks]
        return Outcome.FAIL not in outcomes and Outcome.PASS in outcomes

    def document(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "selftest": 1,
            "ok": self.is_ok,
            "machine": self.machine,
            "seconds": round(self.seconds, 1),
            "checks": [check.document() for check in self.checks],
        }


def run_all(folder: Path | None = None, began: Callable[[str], None] = lambda name: None) -> Report:
    """Run everything that this machine has the devices for.

    Args:
        folder: where files go, removed afterwards; the system's temporary folder by default.
        began: is told the name of each check.

    Cost: under 3 minutes, 100 MB of disk and a few hundred MB of memory.
    """
    started_s = time.monotonic()
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-selftest-", dir=folder) as name:
        for number, (title, device, check) in enumerate(_checks()):
            began(f"{title} ({device})")
            own = Path(name) / f"{number:02}"
            own.mkdir(mode=0o700)
            checks.append(run_check(title, device, functools.partial(check, own)))
    return Report(machine(), tuple(checks), time.monotonic() - started_s)


_Step = tuple[str, str, Callable[[Path], Figures]]


def _checks() -> Iterator[_Step]:
    yield "files and checksums", "host", parts.files
    yield "copies", "host", lambda folder: parts.copies()
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", 0))
    for device in devices:
        dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if device.type == "cuda" else [])
        for dtype in dtypes:
            yield f"attention, {_short(dtype)}", str(device), functools.partial(_attention, device, dtype)
        yield from _comparisons(device)


def _attention(device: torch.device, dtype: torch.dtype, folder: Path) -> Figures:
    return parts.attention(device, dtype)


def _comparisons(device: torch.device) -> Iterator[_Step]:
    def compared(way: exactness.Way, course: exactness.Course, rows: int = 1, blocks: int = _NUM_BLOCKS) -> Any:
        return lambda folder: exactness.compare(way, course, folder, rows, blocks)

    for mode in ("blockwise", "gathered"):
        way = exactness.Way(device, torch.float32, mode, _BLOCK_TOKENS)
        yield f"prompt and answer, {mode}, float32", str(device), compared(way, exactness.prompt_and_answer)
    beside = exactness.Way(device, torch.float32, "blockwise", _BLOCK_TOKENS, host_attention="always")
    yield "prompt and answer, the host attends, float32", str(device), compared(beside, exactness.prompt_and_answer)
    way = exactness.Way(device, torch.float32, "blockwise", _BLOCK_TOKENS)
    yield "crop, blockwise, float32", str(device), compared(way, exactness.crop_and_go_on)
    yield "padded batch, blockwise, float32", str(device), compared(way, exactness.padded_batch, rows=3)
    yield "session restart, float32", str(device), lambda folder: exactness.session_restart(way, folder, _NUM_BLOCKS)
    narrow = exactness.Way(
        device, torch.bfloat16, "blockwise", _PAGE_TOKENS if device.type == "cuda" else _BLOCK_TOKENS
    )
    yield "prompt and answer, blockwise, bfloat16", str(device), compared(narrow, exactness.prompt_and_answer)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def machine() -> dict[str, Any]:
    """What a report is worth nothing without."""
    found: dict[str, Any] = {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count() or 0,
        "python": platform.python_version(),
    }
    for package in ("kvtier", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    found["cuda"] = torch.version.cuda
    found["gpus"] = [
        {
            "name": torch.cuda.get_device_name(index),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
            "memory_bytes": int(torch.cuda.mem_get_info(index)[1]),
        }
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    return found
