"""`kvtier selftest`: its report, and that what is wrong makes it fail."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import cli
from kvtier.attention import finish
from kvtier.selftest import exactness, parts, report
from kvtier.selftest.check import FailedCheck, run_check
from kvtier.types import Tier

BLOCKWISE = exactness.Way(torch.device("cpu"), torch.float32, "blockwise", 32)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    found = json.loads(lines[0])
    assert isinstance(found, dict)
    return found


def only(*wanted: str) -> Callable[[], Iterator[Any]]:
    every = report._checks
    return lambda: (check for check in every() if check[0] in wanted)


def test_all_of_it_passes_here_and_says_what_it_saw(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["selftest", "--json", "--folder", str(tmp_path)]) == 0
    found = document(capsys)
    assert found["selftest"] == 1 and found["ok"] is True and found["seconds"] > 0
    assert {"system", "cpus", "python", "kvtier", "torch", "transformers", "cuda", "gpus"} <= set(found["machine"])
    checks = {(check["name"], check["device"]): check for check in found["checks"]}
    assert len(checks) == len(found["checks"])
    for check in found["checks"]:
        assert check["outcome"] == "pass" or (check["outcome"] == "skip" and check["reason"])
    skipped = [check["name"] for check in found["checks"] if check["outcome"] == "skip"]
    assert skipped == ([] if torch.cuda.is_available() else ["copies"])
    for name in ("prompt and answer, blockwise", "prompt and answer, gathered", "crop, blockwise"):
        check = checks[f"{name}, float32", "cpu"]
        assert 0 <= check["max_difference"] <= check["tolerance"] and check["steps"] > 10
        assert all(check["slices_read"][tier.label] > 0 for tier in Tier)
    assert checks["session restart, float32", "cpu"]["nvme_sole_reads"] > 0
    assert checks["files and checksums", "host"]["read_bytes_per_s"] > 0
    assert not any(tmp_path.iterdir())


def test_a_wrong_logit_fails_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def slightly_wrong(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        output = finish(*arguments)
        return output * 1.05 if calls == 90 else output

    monkeypatch.setattr("kvtier.open_step.finish", slightly_wrong)
    monkeypatch.setattr(report, "_checks", only("prompt and answer, blockwise, float32", "attention, float32"))
    assert cli.main(["selftest", "--json"]) == 1
    found = document(capsys)
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    assert outcomes == {"attention, float32": "pass", "prompt and answer, blockwise, float32": "fail"}
    assert found["ok"] is False
    assert "a logit is off by" in found["checks"][1]["reason"] and "step " in found["checks"][1]["reason"]
    assert cli.main(["selftest"]) == 0, "the fault was of one call"
    assert "PASS: 2 pass" in capsys.readouterr().out


def test_tiers_that_are_not_used_prove_nothing(tmp_path: Path) -> None:
    with pytest.raises(FailedCheck, match="not every tier was read"):
        exactness.compare(BLOCKWISE, exactness.prompt_and_answer, tmp_path, 1, 3)


def test_a_damaged_file_that_nobody_sees_fails_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parts, "_damage", lambda store, block: None)
    found = run_check("files", "host", lambda: parts.files(tmp_path / "kv"))
    assert found.outcome.value == "fail" and found.reason == "a byte that was changed in a file was not seen"


def test_without_transformers_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transformers" else found(name))
    assert cli.main(["selftest"]) == 2
    assert "pip install 'kvtier[hf]'" in capsys.readouterr().err


def test_a_folder_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["selftest", "--folder", str(tmp_path / "none")]) == 2
    assert "not a folder" in capsys.readouterr().err
