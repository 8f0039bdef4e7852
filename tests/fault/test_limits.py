"""A disk that is full, a file system that is read-only, rights and descriptors that are missing: real ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.table import UNJUDGED, Row, report

ROOT = Path(__file__).parents[2]
IN_NAMESPACE = [Row.FULL, Row.READ_ONLY]
AS_WE_ARE = [Row.NO_DESCRIPTORS, Row.FILE_SIZE, Row.NO_PERMISSION]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where another user can get to, which pytest's folders are not."""
    made = Path(tempfile.mkdtemp(prefix="kvtier-limits-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("rows", [IN_NAMESPACE, AS_WE_ARE], ids=["mounted", "limited"])
def test_limits_are_named_errors(rows: list[Row], folder: Path, request: pytest.FixtureRequest) -> None:
    prefix = ["unshare", "-rm"] if rows is IN_NAMESPACE else []
    if prefix and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        request.node.user_properties.append((UNJUDGED, "there are no mount namespaces"))
        pytest.skip("no mount namespaces here; limits of the process stand for full disks, below")
    command = [*prefix, sys.executable, "-m", "tests.fault.limits", str(folder), *(row.name for row in rows)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines())
    for row in rows:
        report(request, row, detected=int(counts[row.name]))
