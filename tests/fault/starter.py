"""Children of a process that has imported torch and transformers once: each calls a function and ends as Python does.

A child is forked before any thread or wrapper is there, so that its end is that of any interpreter.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HANG_S = 60.0
"""A child that takes longer is killed, and is a hang."""


@dataclass
class Ended:
    """How a child ended: what `say` said, what it left on stderr, its status and how long it took from `leaving`."""

    lines: list[str]
    errors: str
    status: int
    leaving_s: float


def say(*words: object) -> None:
    """A line to the parent, at once and from any thread."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Starter:
    """One process that forks children, one at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, function: str, **arguments: Any) -> Iterator[str]:
        """Call `module:function` in a child; its lines as they come, the first its pid, the last `died STATUS`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, arguments]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            yield line.rstrip("\n")
            if line.startswith("died "):
                return
        raise RuntimeError("the starter died")

    def run(self, function: str, **arguments: Any) -> Ended:
        """A child from its beginning to its end."""
        lines: list[str] = []
        left_s = time.monotonic()
        with tempfile.NamedTemporaryFile() as errors:
            for line in self.start(function, stderr=errors.name, **arguments):
                lines.append(line)
                if line == "leaving":
                    left_s = time.monotonic()
            text = Path(errors.name).read_text(encoding="utf-8", errors="replace")
        return Ended(lines[1:-1], text, int(lines[-1].split()[1]), time.monotonic() - left_s)


@contextmanager
def starter(hash_seed: int = 0) -> Iterator[Starter]:
    """A starter whose children have that PYTHONHASHSEED."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.fault.starter"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield Starter(process)


def _wait(pid: int) -> int:
    """The child's status; killed after HANG_S."""
    until_s = time.monotonic() + HANG_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until_s:
            os.kill(pid, 9)
            until_s += HANG_S
        time.sleep(0.005)


def _serve() -> None:
    import torch

    import tests.e2e.families  # noqa: F401  # what takes long
    from tests.older_transformers import teach_plain_models

    torch.set_num_threads(1)
    teach_plain_models()
    gc.collect()
    gc.freeze()  # what was imported: going through it takes most of a child's time
    for line in iter(sys.stdin.readline, ""):
        name, arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            if (errors := arguments.pop("stderr", None)) is not None:
                os.dup2(os.open(errors, os.O_WRONLY), 2)
            say("pid", os.getpid())
            module, _, function = name.partition(":")
            getattr(importlib.import_module(module), function)(**arguments)
            return  # to the end of the program
        say("died", _wait(pid))


if __name__ == "__main__":
    _serve()
