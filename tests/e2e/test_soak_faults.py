"""`kvtier soak --faults`: a disk that fails gives right tokens and counts, and one that lies fails the soak."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from kvtier.benchmarks import conversations, page, report, soak
from kvtier.benchmarks.checkpoint import CheckpointFile
from kvtier.benchmarks.faults import FaultRates, load_faults
from kvtier.benchmarks.models import LoadedModel
from kvtier.cli import main
from kvtier.errors import ConfigError
from kvtier.testing import Fault
from tests.e2e.soaking import CONFIG, soak_quietly, tiny_loaded

REPO = Path(__file__).parents[2]
loaded = pytest.fixture(scope="module")(tiny_loaded)

# A tiny soak has over 1,000 reads and writes, in an order that threads decide: so often that every kind must come up.
FAILING = {
    "seed": 3,
    "rates": {
        "bit_flip": 0.01, "short_read": 0.01, "eio": 0.01, "torn_write": 0.1, "delay": 0.02, "hang": 0.02,
    },
    "delay_s": 0.002,
    "hang_s": 0.01,
}  # fmt: skip


def write_yaml(path: Path, values: Any) -> str:
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return str(path)


@pytest.fixture
def arguments(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setattr(soak, "load_model", lambda path, console: loaded)
    config = write_yaml(tmp_path / "tiny.yaml", CONFIG)
    return ["soak", "--config", config, "--sessions", "3", "--turns", "3", "--context", "500", "--max-new-tokens", "6"]


def test_a_failing_disk_passes(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, html = tmp_path / "soak.json", tmp_path / "soak.html"
    given = write_yaml(tmp_path / "faults.yaml", FAILING)
    status = main([*arguments, "--faults", given, "--json", str(file), "--report", str(html)])
    document = json.loads(file.read_text())
    assert document["verdict"] == "pass" and status == 0, document["errors"]
    assert document["tokens"] == document["verified_tokens"] == 54
    assert document["recomputed_blocks"] > 0 and document["leaks"] == document["budget_violations"] == []
    injected = document["faults"]["injected"]
    assert set(injected) == {fault.value for fault in Fault}
    assert {name for name, count in injected.items() if count} == set(FAILING["rates"])  # type: ignore[call-overload]
    line = f"{document['recomputed_blocks']:,} blocks recomputed, 0 wrong tokens of 54 verified."
    for text in (capsys.readouterr().out, html.read_text(encoding="utf-8")):
        words = " ".join(re.sub(r"<[^>]+>", " ", text).split())
        assert f"{sum(injected.values()):,} faults were injected into the nvme tier" in words and line in words
    assert f"--faults {given}" in document["command"]


def test_a_lying_disk_fails(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "soak.json"
    given = write_yaml(tmp_path / "faults.yaml", {"rates": {"silent_bit_flip": 0.3}})
    assert main([*arguments, "--faults", given, "--json", str(file)]) == 1
    document = json.loads(file.read_text())
    assert document["verdict"] == "fail" and document["errors"] == []
    assert document["faults"]["injected"]["silent_bit_flip"] > 0 and document["recomputed_blocks"] == 0
    assert document["differing_tokens"] + document["steps_over_tolerance"] + document["non_finite_steps"] > 0
    out = " ".join(capsys.readouterr().out.split())
    assert " 0 wrong tokens" not in out and "negative control" in out  # "30 wrong tokens" may be


def test_a_run_that_meets_no_fault_says_so(loaded: LoadedModel) -> None:
    found = soak_quietly(loaded, sessions=1, turns=1, faults={"rates": {"no_space": 1e-9}}).document
    assert sum(found["faults"]["injected"].values()) == 0
    out = io.StringIO()
    report.print_summary(Console(file=out, width=200), found)
    assert "no fault was injected" in out.getvalue()


def test_without_faults_nothing_is_said_of_them(loaded: LoadedModel) -> None:
    found = soak_quietly(loaded, sessions=1, turns=1).document
    assert found["faults"] is None and "injected" not in page.render(found)


def test_counts_and_settings_go_on_with_a_resumed_run(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    turn = conversations.Run._turn

    def interrupted_turn(self: Any, *args: Any) -> None:
        if self.turns == 6:
            raise KeyboardInterrupt
        turn(self, *args)

    given = Path(write_yaml(tmp_path / "faults.yaml", FAILING))
    file = CheckpointFile(tmp_path / "soak.checkpoint.json")
    with monkeypatch.context() as patch:
        patch.setattr(conversations.Run, "_turn", interrupted_turn)
        soak_quietly(loaded, file=file, faults=str(given))
    saved = file.load()
    assert saved.faults and saved.faults["injected"]["delay"] > 0
    assert saved.soak_options({"faults": str(given)}) == saved.options
    with pytest.raises(ConfigError, match=r"--faults .* contradicts the checkpoint"):
        saved.soak_options({"faults": write_yaml(tmp_path / "other.yaml", {**FAILING, "seed": 4})})
    given.unlink()  # the checkpoint has what was in it
    whole = soak_quietly(loaded, file=file, saved=saved).document
    assert whole["verdict"] == "pass" and whole["turns"] == 9
    before, after = saved.faults["injected"], whole["faults"]["injected"]
    assert all(after[name] >= before[name] for name in before) and sum(after.values()) > sum(before.values())


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rates": {"bit_flp": 0.1}}, ["rates.bit_flp: unknown key (did you mean bit_flip?)"]),
        ({"rates": {"eio": 1.5}}, ["rates.eio: must be less than or equal to 1, got 1.5.", "Mend: give a chance"]),
        ({"rates": {"eio": -0.1}}, ["rates.eio:", "got -0.1", "Mend:"]),
        ({"rates": {"eio": "often"}}, ["rates.eio:", "got 'often'", "Mend:"]),
        ({"rates": {"eio": float("nan")}}, ["rates.eio:", "nan", "Mend:"]),
        ({"rates": {"eio": True}}, ["rates.eio: got True", "Mend:"]),
        ({"rates": {"eio": 0.0}}, ["rates: no fault has a rate above 0", "Mend:"]),
        ({"rates": 0.1}, ["rates: must be a mapping, got 0.1", "Mend:"]),
        ({"seed": 1}, ["rates: is missing", "Mend:"]),
        ({"rates": {"eio": 0.1}, "seed": 1.5}, ["seed:", "got 1.5", "Mend:"]),
        ({"rates": {"eio": 0.1}, "delay": 1}, ["delay: unknown key (did you mean delay_s?)"]),
        ({"rates": {"eio": 0.1}, "delay_s": 0}, ["delay_s:", "got 0", "Mend: give seconds"]),
        ({"rates": {"eio": 0.1}, "hang_s": float("inf")}, ["hang_s:", "inf", "Mend: give seconds"]),
        ("rates: {eio: 0.1, eio: 0.2}", ["line 1", "stands twice"]),
        ("rates: [", ["line 1"]),
        ("eio", ["must be a mapping such as `rates: {bit_flip: 0.001}`", "'eio'"]),
    ],
)
def test_a_bad_file_is_one_line_with_path_value_and_mend(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], values: Any, words: list[str]
) -> None:
    given = write_yaml(tmp_path / "faults.yaml", values)
    assert main([*arguments, "--faults", given]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvtier: --faults {given}") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


def test_no_file(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--faults", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: cannot be read (No such file or directory). Mend:" in capsys.readouterr().err


def test_a_config_without_an_nvme_tier(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write_yaml(tmp_path / "faults.yaml", FAILING)
    for tiers in ({"gpu": {"budget": "8MiB"}}, {"gpu": {"budget": "8MiB"}, "nvme": {"budget": 0}}):
        config = write_yaml(tmp_path / "memory.yaml", CONFIG | {"tiers": tiers})
        assert main([*arguments, "--config", config, "--faults", given]) == 2
        assert f"kvtier: --faults {given}: the config has no nvme tier" in capsys.readouterr().err


def test_the_negative_control_leaves_nothing_in_a_folder_that_stays(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "stays"
    nvme = {"budget": "16MiB", "path": str(folder)}
    config = write_yaml(tmp_path / "stays.yaml", CONFIG | {"tiers": {**CONFIG["tiers"], "nvme": nvme}})
    given = write_yaml(tmp_path / "faults.yaml", {"rates": {"silent_bit_flip": 0.3}})
    assert main([*arguments, "--config", config, "--faults", given]) == 2
    assert "rates.silent_bit_flip is 0.3" in capsys.readouterr().err and not folder.exists()


def test_the_sample_file_and_every_fault_has_a_rate() -> None:
    sample = REPO / "benchmarks" / "faults.yaml"
    settings = load_faults(sample)
    assert not settings.rates.silent_bit_flip and settings.rates.bit_flip and settings.rates.eio
    text = sample.read_text(encoding="utf-8")
    assert set(FaultRates.model_fields) == {fault.value for fault in Fault}
    assert all(f"{fault.value}:" in text for fault in Fault)
    assert all(f"`{fault.value}`" in (REPO / "docs" / "soak.md").read_text(encoding="utf-8") for fault in Fault)
