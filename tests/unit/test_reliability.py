"""The table of faults: when a run of all tests passes, and that docs/reliability.md is what such a run left."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fault.run import FaultTable
from tests.fault.table import LEAST_REACHED, PROPERTY, UNJUDGED, Control, Mends, Met, Row, cells, merged, problems

ROOT = Path(__file__).parents[2]
DOCS = runpy.run_path(str(ROOT / "docs" / "reliability.py"))
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
COLUMNS = list(cells(Row.EXIT, Met()))


def good(row: Row) -> Met:
    """What passes, and no more."""
    kind = row.value
    return Met(
        injected=LEAST_REACHED,
        reached=LEAST_REACHED,
        detected=LEAST_REACHED,
        recomputed=int(kind.mends is Mends.MODEL),
        wrong_unchecked=int(kind.control is Control.WRONG_BYTES),
    )


def test_a_table_that_passes_is_only_just_one() -> None:
    rows = {row: good(row) for row in Row}
    assert problems(rows) == []
    for changes, word in (
        ({"reached": 9, "detected": 9}, "reached 9 times"),
        ({"detected": 9}, "9 were detected and 0 absorbed"),
        ({"absorbed": 1}, "10 were detected and 1 absorbed"),
        ({"wrong": 1}, "1 served wrong"),
    ):
        for row in Row:
            (problem,) = problems({**rows, row: Met(**{**asdict(good(row)), **changes})})
            assert problem.startswith(row.value.name) and word in problem
    bare = {row: Met(reached=10, injected=10, detected=10) for row in Row}
    assert sum("nothing was recomputed" in problem for problem in problems(bare)) == 3
    assert sum("switched off" in problem for problem in problems(bare)) == sum(
        row.value.control is Control.WRONG_BYTES for row in Row
    )


def test_what_tests_say_is_added_up_by_row() -> None:
    said = [("other", 1), *[(PROPERTY, (Row.EIO.name, asdict(Met(reached=2, detected=1, absorbed=1))))] * 3]
    rows = merged(said)
    assert rows[Row.EIO] == Met(reached=6, detected=3, absorbed=3)
    assert list(rows) == list(Row) and rows[Row.EXIT] == Met()


def ended(
    result: Path, rows: dict[Row, Met], *, whole: bool = True, status: int = 0, failed: str = "", more: Any = ()
) -> tuple[int, str]:
    """The exit status and what is told of a run in which these were met."""
    plugin, lines = FaultTable(whole, result), []
    session = SimpleNamespace(exitstatus=status)
    said = [(PROPERTY, (row.name, asdict(met))) for row, met in rows.items()]
    for when in ("setup", "call", "teardown"):
        phase = SimpleNamespace(when=when, user_properties=[*said, *more], failed=bool(failed), nodeid=failed)
        plugin.pytest_runtest_logreport(phase)  # type: ignore[arg-type]
    plugin.pytest_sessionfinish(session, status)  # type: ignore[arg-type]
    plugin.pytest_terminal_summary(SimpleNamespace(write_line=lines.append))
    return int(session.exitstatus), "\n".join(lines)


def test_a_whole_run_is_judged_and_leaves_its_table(tmp_path: Path) -> None:
    result, rows = tmp_path / "result.json", {row: good(row) for row in Row}
    assert ended(result, rows, whole=False) == (0, "") and not result.exists()
    assert ended(result, rows, status=1, failed="tests/fault/test_x.py::test") == (1, "") and not result.exists()
    assert ended(result, rows, status=2) == (2, "") and not result.exists()
    status, told = ended(result, rows, status=1, failed="tests/unit/test_reliability.py::test")
    assert status == 1 and "every row passes" in told
    result.unlink()
    status, told = ended(result, {**rows, Row.FORK: Met()})
    assert status == 1 and told == f"table of faults: {Row.FORK.value.name}: reached 0 times, and 10 is the least"
    assert not result.exists()
    assert ended(result, {}, more=[(UNJUDGED, "no x")]) == (0, "table of faults: not judged: no x")
    status, told = ended(result, rows)
    assert status == 0 and "every row passes" in told
    document = json.loads(result.read_text())
    assert [row["fault"] for row in document["rows"]] == [row.value.name for row in Row]
    assert {"date", "commit", "machine", "versions"} < document.keys()


def test_make_docs_copies_the_table_and_without_a_run_keeps_it(tmp_path: Path) -> None:
    result, page = tmp_path / "result.json", tmp_path / "reliability.md"
    page.write_text(PAGE, encoding="utf-8")
    assert "keeps its table" in DOCS["main"](page, result) and page.read_text(encoding="utf-8") == PAGE
    ended(result, {row: good(row) for row in Row})
    for _ in range(2):
        assert "wrote" in DOCS["main"](page, result)
        text = page.read_text(encoding="utf-8")
        assert rows_of(text)[0]["reached"] == "10" and len(rows_of(text)) == len(Row)
        assert text.split(DOCS["BEGIN"])[0] == PAGE.split(DOCS["BEGIN"])[0]
        assert text.split(DOCS["END"])[1] == PAGE.split(DOCS["END"])[1]
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(SystemExit, match="marks"):
        DOCS["main"](page, result)


def rows_of(page: str) -> list[dict[str, str]]:
    """The rows of the page's table, by its columns."""
    section = page.split(DOCS["BEGIN"])[1].split(DOCS["END"], maxsplit=1)[0]
    header, _, *lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_the_page_has_every_row_of_a_run_that_passed() -> None:
    rows = rows_of(PAGE)
    assert [row["fault"] for row in rows] == [row.value.name for row in Row], "run the tests, then `make docs`"
    assert [row["how it is made"] for row in rows] == [row.value.how for row in Row]
    for row in rows:
        assert list(row) == COLUMNS and row["wrong"] == "0"
        assert int(row["reached"].replace(",", "")) >= LEAST_REACHED
        assert row["wrong without checks"] != "0"
    for column in COLUMNS:
        assert re.search(rf"^\| {column} \|", PAGE, re.MULTILINE) or column in ("fault", "how it is made")
