"""The run that makes the table of faults: gathers what all tests say, judges it, and leaves it for `make docs`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fault.table import UNJUDGED, cells, merged, problems

ROOT = Path(__file__).parents[2]
RESULT = ROOT / ".reliability.json"
"""Of the last run of all tests of tests/fault that passed; not in git."""
_SELECTIONS = (
    "keyword",
    "markexpr",
    "deselect",
    "ignore",
    "ignore_glob",
    "lf",
    "last_failed",
    "stepwise",
    "collectonly",
)


class FaultTable:
    """A pytest plugin, of the process that reports (with xdist: not of the workers)."""

    def __init__(self, is_whole: bool, result: Path = RESULT) -> None:
        """`is_whole`: all of tests/fault was asked for; of any other run nothing is judged."""
        self._is_whole, self._result = is_whole, result
        self._properties: list[tuple[str, Any]] = []
        self._told: list[str] = []
        self._has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each phase of each test; the last has all that the test said."""
        self._has_failed |= report.failed and report.nodeid.startswith("tests/fault/")
        if report.when == "teardown":
            self._properties += report.user_properties

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Judge a whole run in which no test of a fault failed, and leave its table if it passes.

        Others may fail: that docs/reliability.md has the rows of this run is one of them.
        """
        is_over = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if self._has_failed or not is_over or not self._is_whole:
            return
        reasons = [reason for name, reason in self._properties if name == UNJUDGED]
        rows = merged(self._properties)
        found = problems(rows)
        if reasons:
            self._told = [f"not judged: {reason}" for reason in reasons]
        elif found:
            self._told = found
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        else:
            document = {**where(), "rows": [cells(row, met) for row, met in rows.items()]}
            self._result.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            self._told = [f"every row passes; {self._result.name} is for `make docs`"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """A line for each row that does not pass."""
        for line in self._told:
            terminalreporter.write_line(f"table of faults: {line}")


def is_whole(config: pytest.Config) -> bool:
    """Whether all of tests/fault was asked for."""
    if any(getattr(config.option, name, None) for name in _SELECTIONS):
        return False
    base = config.rootpath if config.args_source is pytest.Config.ArgsSource.TESTPATHS else config.invocation_params.dir
    return any((ROOT / "tests" / "fault").is_relative_to(Path(base, each).resolve()) for each in config.args)


def where() -> dict[str, str]:
    """When, of what and on what the run was."""
    import torch
    import transformers

    system = f"{platform.system()} {platform.release()}"
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _git("rev-parse", "--short=12", "HEAD") + (" and changes" if _git("status", "--porcelain") else ""),
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), {system}, no GPU",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
