"""The prediction test on a tiny model: written down before anything runs, for what lies where it runs, and judged."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kvtier.benchmarks import predict
from kvtier.benchmarks.budgets import layout
from kvtier.benchmarks.decode_sides import Given, tiered
from kvtier.benchmarks.models import LoadedModel
from kvtier.benchmarks.predict import Case
from kvtier.planner.rates import Rates
from kvtier.types import Tier
from tests.e2e.soaking import tiny_loaded
from tests.unit.test_planner_expected import machine, one_thread

CASES = (Case("all_gpu", 256), Case("gpu25_cpu75", 256), Case("gpu25_cpu25_nvme50", 512))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Rates:
    """In the doctor's place: it takes long, and its figures are not what is tested here."""
    found = one_thread(machine(cores=2.0))
    monkeypatch.setattr(predict, "measure_machine", lambda folder, *, quick: (found, {"quick": quick}))
    return found


def options(folder: Path, **changes: Any) -> argparse.Namespace:
    values = {"folder": folder, "quick": True, "rounds": 5, "tokens": 2, "seed": 0, "threads": 1}
    return argparse.Namespace(**{**values, **changes})


def test_predictions_are_in_a_file_before_anything_is_run(
    loaded: LoadedModel, rates: Rates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def run_nothing(*_: Any, **__: Any) -> Any:
        (file,) = tmp_path.glob("kvtier-predictions-*.json")
        seen.append(json.loads(file.read_text()))
        raise KeyboardInterrupt

    monkeypatch.setattr(predict, "measure", run_nothing)
    with pytest.raises(KeyboardInterrupt):
        predict.run(loaded, CASES, options(tmp_path), Console(quiet=True))
    (written,) = seen
    assert [(each["case"], each["context"]) for each in written["predictions"]] == [
        (case.placement, case.context) for case in CASES
    ]
    assert all(each["predicted_ms"] > each["bound_ms"] > 0 for each in written["predictions"])
    assert written["doctor"] == {"quick": True} and written["written_at"]
    assert len(list(tmp_path.iterdir())) == 1  # the run's own files are gone, the predictions stay


def test_what_is_judged_is_what_was_written_down(loaded: LoadedModel, rates: Rates, tmp_path: Path) -> None:
    document = predict.run(loaded, CASES, options(tmp_path), Console(quiet=True))
    written = json.loads(Path(document["predictions"]["file"]).read_text())
    assert document["predictions"]["written_at"] == written["written_at"] < document["predictions"]["run_began_at"]
    assert len(document["rows"]) == len(CASES)
    for row, said in zip(document["rows"], written["predictions"], strict=True):
        assert said.items() <= row.items()
        assert row["ms_per_token"] > 0 and row["ms_spread"][0] <= row["ms_per_token"] <= row["ms_spread"][1]
        assert row["measured_to_predicted"] == pytest.approx(row["ms_per_token"] / row["predicted_ms"])
        assert isinstance(row["within_30"], bool)
        assert not [reason for reason in row["invalid"] if not reason.startswith("warm")]
    assert document["rows"][2]["file_bytes_per_token"] == 256 * 512 and "nvme read" in document["rows"][2]["terms"]
    assert predict.table(document).row_count == len(CASES)
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.placement)
def test_what_lies_where_is_what_was_predicted_for(
    case: Case, loaded: LoadedModel, rates: Rates, tmp_path: Path
) -> None:
    said = predict.predict(loaded, case, 8, rates, 1)
    with torch.no_grad():
        side = tiered(Given(loaded.model, case.context, 8, 0, tmp_path), "case", case.placement)
        try:
            side.step(torch.zeros((1, 1), dtype=torch.long))
            lies = list(side.placed())
        finally:
            side.close()
    assert said["blocks"] == {tier.label: lies.count(tier) + (tier is Tier.GPU) for tier in Tier}  # and the tail
    assert sum(said["blocks"].values()) == case.context // layout(case.placement, case.context, 8).block_tokens + 1


@pytest.mark.parametrize(("predicted", "within"), [(100.0, True), (70.0, True), (130.0, True), (69.9, False),
                                                   (130.1, False), (None, None)])  # fmt: skip
def test_within_30_is_of_what_was_measured(predicted: float | None, within: bool | None) -> None:
    row = predict.judge({"predicted_ms": predicted}, {"ms_per_token": 100.0})
    assert row["within_30"] is within
    assert row["measured_to_predicted"] == (None if predicted is None else pytest.approx(100 / predicted))


def test_six_placements_of_which_two_read_files() -> None:
    assert len({case.name for case in predict.CASES}) == 6
    assert sum("nvme" in case.placement for case in predict.CASES) == 2


def test_fewer_than_five_rounds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        predict.main(["--rounds", "4", "--folder", str(tmp_path)])
    assert "fewer than 5 is noise" in capsys.readouterr().err
