"""`benchmarks/scale.py` from the command line, in small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvtier.benchmarks import scale, scale_context


def test_it_prints_tables_and_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale_context, "TOKENS", 2)
    folder = Path.cwd()  # tmp_path may lie in memory, which is refused
    arguments = ["scale", "--sizes", "300,600", "--contexts", "512,2048", "--rounds", "5", "--count", "40"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--folder", str(folder)])
    scale.main()
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])["rows"]
    operations = [row for row in rows if row["case"] == "operation"]
    assert {row["blocks"] for row in operations} == {300, 600}
    assert all(row["us"] > 0 and row["instructions"] > 0 for row in operations)
    metadata = [row for row in rows if row["case"] == "metadata"]
    assert [row["blocks"] for row in metadata] == [300, 600]
    contexts = {(row["case"], row["context"]): row for row in rows if row["case"] in scale_context.CASES}
    assert contexts.keys() == {(case, length) for case in scale_context.CASES for length in (512, 2048)}
    for (case, length), row in contexts.items():
        assert row["ms_per_token"] > 0
        if case != "dynamic":
            assert row["control_us_per_token"] > 0
            assert sum(row["blocks"].values()) >= length // scale_context.BLOCK_TOKENS
            assert bool(row["blocks"]["cpu"]) is (case == "spilled")
    assert any("a step of one token" in line for line in lines)


def test_a_spilled_context_lies_mostly_on_the_cpu_tier() -> None:
    row = scale_context.measure("spilled", 8192, 5)
    blocks = row["blocks"]
    assert blocks["cpu"] >= 0.7 * (8192 // scale_context.BLOCK_TOKENS)
    assert blocks["gpu"] <= 0.35 * (8192 // scale_context.BLOCK_TOKENS)


def test_a_median_of_a_few_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scale", "--rounds", "3", "--folder", str(Path.cwd())])
    with pytest.raises(SystemExit):
        scale.main()
