"""Where and with what a report was made."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import kvtier


def versions() -> dict[str, str]:
    """Of what may change a token."""
    found = {}
    for package in ("kvtier", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def machine() -> dict[str, Any]:
    """The machine and the versions; `commit` only where kvtier runs from a git checkout of its own."""
    found: dict[str, Any] = {
        "system": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    found |= {"python": platform.python_version(), **versions()}
    commit = _commit()
    if commit:
        found["commit"] = commit
    return found


def _processor() -> str:
    try:
        names = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = None
    return names[1] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The checkout's commit, with `-dirty` after it where files differ; None for an installed package.

    What benchmarks write of their results does not count: the second of a series is of the same code as the first.
    """
    root = Path(kvtier.__file__).resolve().parents[1]
    if not (root / ".git").exists():  # a checkout further up is another project's
        return None
    git = ["git", "-C", str(root)]
    results = [":(exclude)benchmarks/results", ":(exclude)benchmarks/RESULTS.md"]
    commands = (
        [*git, "describe", "--always", "--abbrev=12", "--exclude=*"],
        [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", *results],
    )
    try:
        commit, changed = (
            subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit
