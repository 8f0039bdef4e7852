"""`kvtier soak --report`, from the command line to the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvtier.benchmarks import conversations, soak
from kvtier.benchmarks.models import LoadedModel
from kvtier.cli import app, main
from tests.e2e.soaking import CONFIG, soak_quietly, tiny_loaded
from tests.unit.test_page import Reader

DOCS = (Path(__file__).parents[2] / "docs" / "soak.md").read_text(encoding="utf-8")
loaded = pytest.fixture(scope="module")(tiny_loaded)


@pytest.fixture
def arguments(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setattr(soak, "load_model", lambda path, console: loaded)
    config = tmp_path / "tiny.yaml"
    config.write_text(json.dumps(CONFIG))
    report = str(tmp_path / "soak.html")
    return ["soak", "--config", str(config), "--sessions", "2", "--turns", "1", "--context", "300", "--report", report]


def test_the_page_of_a_pass(arguments: list[str], tmp_path: Path) -> None:
    assert main([*arguments, "--json", str(tmp_path / "soak.json")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml", "soak.html", "soak.json"}
    html = (tmp_path / "soak.html").read_text(encoding="utf-8")
    text, document = Reader(html).text, json.loads((tmp_path / "soak.json").read_text())
    assert "Pass" in text and "session-1" in text and "48 of 48" in text and "http" not in html
    columns = document["timeline"]["columns"]
    assert columns["tokens"][-1] == 48 and max(columns["gpu_used_bytes"]) > 0 and max(columns["memory_bytes"]) > 0
    for name in ("gpu_to_cpu", "cpu_to_nvme"):
        assert columns[f"{name}_bytes"][-1] == document["bytes_moved"][name]
    assert document["command"] in text
    words = set(re.findall(r"`(\w+)`", DOCS))
    assert set(document) <= words, set(document) - words


def test_every_option_is_documented() -> None:
    options = {word for parameter in get_command(app).commands["soak"].params for word in parameter.opts}  # type: ignore[attr-defined]
    assert len(options) > 10 and all(f"`{word}" in DOCS for word in options), options


def test_the_page_of_a_failure(arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvtier.benchmarks.report.MEMORY_SLACK_BYTES", -(1 << 40))
    assert main(arguments) == 1
    text = Reader((tmp_path / "soak.html").read_text(encoding="utf-8")).text
    assert "Fail" in text and "A budget was exceeded" in text and "memory grew by" in text


def test_the_page_of_an_interrupted_run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = conversations.Run._turn

    def interrupted_turn(self: Any, *rest: Any) -> None:
        if self.turns:
            raise KeyboardInterrupt
        turn(self, *rest)

    monkeypatch.setattr(conversations.Run, "_turn", interrupted_turn)
    assert main(arguments) == 130
    line = f"to go on: kvtier soak --resume-from {tmp_path / 'soak.checkpoint.json'}\n"
    assert line in capsys.readouterr().out, "in one piece, to be copied"
    text = Reader((tmp_path / "soak.html").read_text(encoding="utf-8")).text
    assert "Interrupted" in text and f"kvtier soak --resume-from {tmp_path / 'soak.checkpoint.json'}" in text


def test_minutes_keep_the_load_going_one_session_after_another(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations.Run, "clock_s", property(lambda run: float(run.turns)))
    document = soak_quietly(loaded, minutes=0.3, sessions=3, turns=3, contexts=(200,), verify="none").document
    turns = [session["turns"] for session in document["sessions"]]
    assert document["turns"] == 18 and turns == [3, 2, 1, 3, 3, 3, 2, 1]
    assert document["errors"] == document["leaks"] == []
