"""Results of benchmarks: what is kept, which run the page shows, and that nothing is left out in silence."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvtier.benchmarks import run_all
from kvtier.benchmarks.result_plots import draw
from kvtier.benchmarks.results import append, cell, latest, page

MACHINE = {"processor": "a processor", "cpus": 2, "torch": "2.13", "transformers": "5.24", "commit": "abc123"}


def decode(**changes: Any) -> dict[str, Any]:
    """A run of two contexts."""
    rows = [
        {"case": case, "context": context, "ms_per_token": ms, "ratio_to_dynamic": 100 / ms, "spread": [0.9, 1.1],
         "bound_frac": None if case == "dynamic" else 0.875, "bound_ms": 87.5, "stall_ms": 1.25,
         "read_bytes_per_token": 94_371_840.0, "is_valid": case != "all_gpu", "invalid": [], "max_logit_diff": 2e-5}
        for context in (512, 2048)
        for case, ms in (("dynamic", 100.0), ("all_gpu", 80.0))
    ]  # fmt: skip
    rows.append({"case": "hf_offloaded", "context": 512, "unavailable": "needs CUDA", "ms_per_token": None})
    return {"benchmark": "decode", "date": "2026-11-30T12:00:00+00:00", "model": "m", "rows": rows, "machine": MACHINE,
            "threads": 1, "load": [0.1, 0.2], **changes}  # fmt: skip


def test_each_run_is_one_more_line(tmp_path: Path) -> None:
    for number in range(3):
        append(decode(number=number), tmp_path / "results")
    lines = (tmp_path / "results" / "decode.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1, 2]


def test_the_page_is_of_the_last_whole_run_or_else_of_the_last_quick_one(tmp_path: Path) -> None:
    for number, quick in enumerate((True, False, False, True)):
        append(decode(number=number, quick=quick), tmp_path)
    append({**decode(), "benchmark": "scale", "quick": True, "number": 7}, tmp_path)
    append({**decode(), "benchmark": "another", "number": 8}, tmp_path)
    (tmp_path / "scale.jsonl").open("a").write('{"benchmark": "sca')  # a crash in the middle of a line
    found = latest(tmp_path, ("scale", "prefill", "decode"))
    assert {name: document["number"] for name, document in found.items()} == {"scale": 7, "decode": 2, "another": 8}
    assert list(found) == ["scale", "decode", "another"]
    text = page(found, {})
    assert text.index("## scale") < text.index("## decode") < text.index("## another")
    assert text.count("**quick run**") == 1


def test_the_page_says_where_figures_come_from_and_what_is_not_valid() -> None:
    text = page({"decode": decode(arguments=["--pairs", "9"])}, {"decode": ["results/decode-ratio_to_dynamic.svg"]})
    assert "2026-11-30T12:00:00+00:00; commit `abc123`; m; a processor, 2 cpus, no gpu; torch 2.13" in text
    assert "load 0.1 to 0.2; `--pairs 9`." in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[each.strip() for each in line.strip("|").split("|")] for line in rows]
    head = cells[0]
    assert all(len(line) == len(head) for line in cells)
    row = dict(zip(head, cells[3], strict=True))
    assert row["case"] == "all_gpu" and row["context"] == "512" and row["ratio to dynamic"] == "1.25"
    assert row["ms per token"] == "80.0" and row["spread"] == "0.90 … 1.10" and row["bound"] == "87.5%"
    assert row["read bytes per token"] == "94.4 MB" and row["max logit diff"] == "2e-05" and row["is valid"] == "NO"
    assert "- hf_offloaded: needs CUDA" in text
    assert "![decode: decode-ratio_to_dynamic](results/decode-ratio_to_dynamic.svg)" in text


def test_a_benchmark_without_columns_of_its_own_gets_all_that_fits_and_parts_get_tables() -> None:
    rows = [{"way": "a|b", "took_s": 0.5, "computed": [1, 2, 3], "nothing": None, "shares": {"gpu": 0.25, "cpu": 0.0}}]
    text = page({"new": {"benchmark": "new", "first": {"rows": rows}, "second": {"rows": rows}}}, {})
    assert text.count("| way | took, s | shares |") == 2 and "### first" in text and "### second" in text
    assert "| a\\|b | 0.50 | gpu 25% |" in text and "no date; no commit" in text


@pytest.mark.parametrize(("key", "value", "shown"), [
    ("peak_bytes", 12_345_678, "12.3 MB"), ("bytes_per_s", 2.5e9, "2.50 GB/s"), ("block_bytes", 812.25, "812.2 B"),
    ("cost_quartiles", [-0.012, 0.02], "-1.2% … 2.0%"), ("seconds", 123.456, "123.5"), ("pairs", 9, "9"),
    ("same_tokens", True, "yes"), ("target", None, ""), ("stall_ms", 0.04, "0.0"),
])  # fmt: skip
def test_values_are_shown_in_their_units(key: str, value: Any, shown: str) -> None:
    assert cell(key, value) == shown


def test_rows_of_different_kinds_get_tables_of_their_own_and_none_is_lost() -> None:
    rows = [
        {"case": "operation", "operation": "seal", "blocks": 1000, "us": 5.25},
        {"case": "metadata", "blocks": 1000, "block_bytes": 700.0},
        {"case": "all_gpu", "context": 1024, "ms_per_token": 2.0, "blocks": {"gpu": 4, "cpu": 0}},
        {"case": "of a later version"},
    ]
    text = page({"scale": {"benchmark": "scale", "rows": rows}}, {})
    assert all(title in text for title in ("### operations", "### metadata", "### contexts", "### others"))
    assert "| operation | seal | 1,000 | 5.25 |" in text and "| all_gpu | 1,024 | 2.0 | gpu 4 |" in text
    assert "| metadata | 1,000 | 700 B |" in text and "| of a later version |" in text
    assert set(draw({"benchmark": "scale", "rows": rows})) == {"us", "ms_per_token"}


# -- plots ------------------------------------------------------------------------------------------------------------


def test_plots_are_whole_pictures_and_the_same_for_the_same_figures() -> None:
    pictures = draw(decode())
    assert set(pictures) == {"ratio_to_dynamic", "ms_per_token", "bound_frac"}
    for svg in pictures.values():
        ElementTree.fromstring(svg)
    text = pictures["ratio_to_dynamic"]
    assert all(word in text for word in ("dynamic", "all_gpu", "2,048", "context"))
    assert "hf_offloaded" not in text, "it has no figures"
    assert re.search(r"\b20\d\d-\d\d-\d\dT", text) is None and draw(decode()) == pictures


def test_rows_of_one_context_become_bars_and_unknown_benchmarks_no_picture() -> None:
    one = decode()
    one["rows"] = [row for row in one["rows"] if row["context"] == 512]
    assert "1.25" in draw(one)["ratio_to_dynamic"] and "context" not in draw(one)["ratio_to_dynamic"]
    assert draw({**decode(), "benchmark": "unknown"}) == {}


# -- all of them ------------------------------------------------------------------------------------------------------


def started(answers: dict[str, tuple[int, str]], calls: list[tuple[str, list[str]]]) -> run_all.Start:
    def start(name: str, arguments: Sequence[str]) -> tuple[int, str]:
        calls.append((name, list(arguments)))
        return answers[name]

    return start


def test_results_are_kept_and_what_went_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "is_there", lambda name: name != "overlap")
    calls: list[tuple[str, list[str]]] = []
    document = decode()
    del document["date"]
    answers = {
        "decode": (0, json.dumps(document)),
        "prefix": (1, json.dumps({"benchmark": "prefix", "rows": document["rows"]})),
        "scale": (2, "Traceback\n"),
    }
    results = tmp_path / "results"
    names = ["decode", "overlap", "scale", "prefix"]
    wrong = run_all.run(names, ["--quick"], results, Console(quiet=True), started(answers, calls))
    assert calls == [(name, ["--quick"]) for name in ("decode", "scale", "prefix")]
    assert wrong == [
        "overlap: there is no benchmarks/overlap.py",
        "scale: ended with status 2",
        "scale: its last line is no JSON document",
        "prefix: ended with status 1",
    ]
    kept = json.loads((results / "decode.jsonl").read_text())
    assert kept["quick"] and kept["arguments"] == ["--quick"] and kept["date"].startswith("20")
    text = (tmp_path / "RESULTS.md").read_text()
    assert "## decode" in text and "## prefix" in text and "scale" not in text
    for picture in re.findall(r"\]\((results/[^)]+\.svg)\)", text):
        assert (tmp_path / picture).is_file()
    assert len(list(results.glob("decode-*.svg"))) == 3


def test_the_command_runs_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(run_all, "run", lambda names, arguments, *_: ran.append((names, arguments)) or [])
    given = ["--results", str(tmp_path), "--only", "prefill,decode,storage", "--without", "storage", "--", "--quick"]
    assert run_all.main(given) == 0
    assert ran == [(["decode", "prefill"], ["--quick"])]
    monkeypatch.setattr(run_all, "run", lambda *_: ["scale: there is no benchmarks/scale.py"])
    assert run_all.main(["--results", str(tmp_path)]) == 1
    with pytest.raises(SystemExit):
        run_all.main(["--only", "decoding"])


def test_a_benchmark_runs_in_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    status, last = run_all.start("compression", ["--help"])
    assert status == 0 and last.strip() and capfd.readouterr().out.startswith("usage:")


def test_the_list_names_every_benchmark_that_prints_a_document() -> None:
    folder = Path(run_all.__file__).parent
    modules = {
        path.stem for path in folder.glob("*.py")
        if "JSON document as the last line" in path.read_text() and "def main" in path.read_text()
    } - {"command", "run_all", "cuda"}  # fmt: skip
    assert modules - {"resume_child", "prefill_child", "soak"} <= set(run_all.NAMES)
