"""A soak that was interrupted goes on: the same tokens, counts and timeline as one that was not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.benchmarks import conversations, proof, soak
from kvtier.benchmarks.checkpoint import CheckpointFile
from kvtier.benchmarks.models import LoadedModel
from kvtier.benchmarks.verify import replay, replay_tokens
from kvtier.cli import main
from kvtier.errors import ConfigError
from tests.e2e.soaking import CONFIG, soak_quietly, tiny_loaded

loaded = pytest.fixture(scope="module")(tiny_loaded)
COUNTS = ("turns", "tokens", "verified_tokens", "verdict", "differing_tokens", "errors", "leaks")


class Killed(BaseException):
    """What no code catches."""


def interrupt(monkeypatch: pytest.MonkeyPatch, after_turns: int, how: BaseException) -> None:
    turn = conversations.Run._turn

    def interrupted_turn(self: Any, *args: Any) -> None:
        if self.turns == after_turns:
            raise how
        turn(self, *args)

    monkeypatch.setattr(conversations.Run, "_turn", interrupted_turn)


def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, ...]]]:
    """Filled with every session's answers when a run is verified."""
    found: dict[str, list[tuple[int, ...]]] = {}
    prove = soak.prove

    def note(run: Any, *args: Any) -> bool:
        found.update({one.record.name: [turn.answer for turn in one.record.turns] for one in run.conversations})
        return prove(run, *args)

    monkeypatch.setattr(soak, "prove", note)
    return found


@contextlib.contextmanager
def told_bar(bar: Any, total: int, done: list[int]) -> Iterator[Callable[[int], None]]:
    """Adds up in `done` what is told of work done, beside the total."""
    done[1] = total
    with bar as advance:

        def both(amount: int) -> None:
            done[0] += amount
            advance(amount)

        yield both


def test_a_resumed_run_ends_with_the_same_tokens(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = answers(monkeypatch)
    small = {"contexts": (300, 200), "turns": 2}
    whole = soak_quietly(loaded, **small).document
    expected = dict(told)
    told.clear()
    file = CheckpointFile(tmp_path / "run.json")
    with monkeypatch.context() as patch:
        interrupt(patch, 2, Killed())
        with pytest.raises(Killed):
            soak_quietly(loaded, file=file, **small)
    saved = file.load()
    assert saved.counts["turns"] == 2
    with monkeypatch.context() as patch:  # and once more, after it was resumed
        interrupt(patch, 4, KeyboardInterrupt())
        first = soak_quietly(loaded, file=file, saved=saved, **small)
        assert first.exit_status == 130 and first.document["tokens"] == 24
    saved = file.load()
    assert saved.counts["turns"] == 4
    done, bar = [0, 0], proof.bar
    with monkeypatch.context() as patch:
        patch.setattr(proof, "bar", lambda console, text, total: told_bar(bar(console, text, total), total, done))
        document = soak_quietly(loaded, file=file, saved=saved, **small).document
    assert done[0] == done[1] > 0  # what was read twice is verified twice: 100 %, not more
    assert told == expected and [len(turns) for turns in told.values()] == [2, 2, 2]
    assert {name: document[name] for name in COUNTS} == {name: whole[name] for name in COUNTS}
    assert document["verdict"] == "pass" and document["prompt_tokens"] > whole["prompt_tokens"]
    columns = document["timeline"]["columns"]
    assert len(document["timeline"]["resumed_at_s"]) == 2
    for counter in ("tokens", "committed_tokens", "gpu_to_cpu_bytes", "stall_s"):
        assert columns[counter] == sorted(columns[counter]), counter
    assert columns["tokens"][-1] == document["tokens"] == 36
    bound, of_first = document["bound"], first.document["bound"]
    assert bound["steps"] > of_first["steps"] > whole["bound"]["steps"] // 3 and bound["bound_frac"] <= 1.0001
    assert sum(bound["stalls"].values()) == pytest.approx(document["stall_s"])
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_reread_turn_is_verified_as_it_was_computed(loaded: LoadedModel) -> None:
    """The plain model reads the whole transcript again there, in the same chunks."""
    record = conversations.SessionRecord("a", [1, 2, 3, 4, 5, 6, 7, 8])
    turn = conversations.TurnRecord
    record.turns = [turn(3, (4, 5), Path(), None), turn(7, (8,), Path(), None, True)]
    chunks: list[int] = []
    assert len(list(replay(loaded.model, record, 4, chunks.append))) == 3
    assert chunks == [3, 1, 4, 3] and replay_tokens(record) == 11


def test_verification_goes_on_where_it_was_interrupted(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = CheckpointFile(tmp_path / "run.json")
    prove = soak.prove

    def interrupted(run: Any, chunk: int, verified: Any, console: Any, finished: Any) -> bool:
        def finished_one() -> None:
            finished()
            raise KeyboardInterrupt

        return prove(run, chunk, verified, console, finished_one)

    with monkeypatch.context() as patch:
        patch.setattr(soak, "prove", interrupted)
        document = soak_quietly(loaded, file=file, contexts=(200,), turns=1).document
    assert document["interrupted"] and 0 < document["verified_tokens"] < document["tokens"]
    compared: list[str] = []
    whole = soak_quietly(loaded, contexts=(200,), turns=1).document
    monkeypatch.setattr("kvtier.benchmarks.verify.replay", lambda model, record, *rest: (
        compared.append(record.name), replay(model, record, *rest))[1])  # fmt: skip
    document = soak_quietly(loaded, file=file, saved=file.load(), contexts=(200,), turns=1).document
    assert document["verdict"] == "pass" and compared == ["session-1", "session-2"]
    assert document["tolerance"] == whole["tolerance"] and document["facts_asked"] == whole["facts_asked"]


def test_a_fault_before_the_interruption_stays_a_fault(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = CheckpointFile(tmp_path / "run.json")
    with monkeypatch.context() as patch:
        interrupt(patch, 1, KeyboardInterrupt())
        patch.setattr("kvtier.benchmarks.report.MEMORY_SLACK_BYTES", -(1 << 40))
        soak_quietly(loaded, file=file, sessions=1, contexts=(200,))
    document = soak_quietly(loaded, file=file, saved=file.load(), sessions=1, contexts=(200,)).document
    assert document["budget_violations"] and document["verdict"] == "fail"


def test_sigterm_ends_a_think_time_at_once_and_reports(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminate(seconds: float) -> None:
        assert 1000 < seconds < 9000, "one long sleep, not many short ones"
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # a moment in which Python runs the signal's handler

    monkeypatch.setattr(conversations, "time", SimpleNamespace(monotonic=time.monotonic, sleep=terminate))
    report = soak_quietly(loaded, sessions=1, arrival="5000")
    assert report.document["turns"] == 1 and report.exit_status == 130
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_think_times_let_sessions_sleep(loaded: LoadedModel) -> None:
    document = soak_quietly(loaded, sessions=1, turns=2, contexts=(200,), arrival="0.05").document
    assert document["verdict"] == "pass" and document["turns"] == 2 and document["think_s"] > 0


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """A run's arguments, and the folder of its checkpoint after one turn."""
    folder = tmp_path_factory.mktemp("stopped")
    config = tmp_path_factory.mktemp("config") / "tiny.yaml"
    config.write_text(json.dumps(CONFIG))
    arguments = ["soak", "--config", str(config), "--sessions", "1", "--turns", "2", "--context", "300"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "load_model", lambda path, console: loaded)
        interrupt(patch, 1, KeyboardInterrupt())
        assert main([*arguments, "--checkpoint", str(folder / "run.json")]) == 130
    return arguments, folder


@pytest.fixture
def interrupted(
    loaded: LoadedModel, stopped: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[list[str], Path]:
    """A run's arguments, and its checkpoint after one turn, a copy for each test."""
    monkeypatch.setattr(soak, "load_model", lambda path, console: loaded)
    shutil.copytree(stopped[1], tmp_path, dirs_exist_ok=True)
    return stopped[0], tmp_path / "run.json"


def test_the_command_line_resumes_and_tidies_up(interrupted: tuple[list[str], Path], tmp_path: Path) -> None:
    arguments, file = interrupted
    assert main([*arguments, "--checkpoint", str(file)]) == 2, "it would be overwritten"
    result = tmp_path / "result.json"
    assert main(["soak", "--resume-from", str(file), "--json", str(result)]) == 0
    assert json.loads(result.read_text())["turns"] == 2
    assert not file.exists() and not CheckpointFile(file).logits.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", "1"], "--seed 1 contradicts the checkpoint, whose run was begun with 0: leave --seed out"),
        (["--context", "300,400"], "--context 300,400 contradicts"),
        (["--arrival", "3"], "--arrival 3 contradicts"),
        (["--minutes", "3"], "--minutes 3 contradicts"),
        (["--config", "laptop"], "--config laptop contradicts"),
        (["--checkpoint", "other.json"], "leave it out"),
    ],
)
def test_arguments_that_contradict_the_checkpoint(
    interrupted: tuple[list[str], Path], capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(["soak", "--resume-from", str(interrupted[1]), *more]) == 2
    assert message in capsys.readouterr().err


def test_arguments_that_agree_with_the_checkpoint(interrupted: tuple[list[str], Path]) -> None:
    arguments, file = interrupted
    assert main([*arguments, "--seed", "0", "--resume-from", str(file)]) == 0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", 2, "not a checkpoint that this version reads"),
        ("surprise", 1, "not a checkpoint that this version reads"),
        ("counts", {}, "contradicts itself"),
        ("timeline", {}, "contradicts itself"),
    ],
)
def test_a_damaged_checkpoint(
    interrupted: tuple[list[str], Path], capsys: pytest.CaptureFixture[str], key: str, value: Any, message: str
) -> None:
    file = interrupted[1]
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    assert main(["soak", "--resume-from", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_other_text_or_another_model_is_noticed(interrupted: tuple[list[str], Path]) -> None:
    file = CheckpointFile(interrupted[1])
    saved = file.load()
    for name in ("documents", "model", "torch"):
        other = saved.model_copy(update={"identity": saved.identity | {name: "other"}})
        with pytest.raises(ConfigError, match=f"{name} is"):
            soak_quietly(soak.load_model(None, None), file=file, saved=other)  # type: ignore[arg-type]
    (conversation,) = saved.conversations
    other = saved.model_copy(update={"conversations": (conversation.model_copy(update={"digest": "other"}),)})
    with pytest.raises(ConfigError, match="reads otherwise"):
        soak_quietly(soak.load_model(None, None), file=file, saved=other, sessions=1, contexts=(300,))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [None, "", "{}", "no JSON"])
def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None) -> None:
    file = tmp_path / "run.json"
    if text is not None:
        file.write_text(text)
    assert main(["soak", "--resume-from", str(file)]) == 2
    assert f"kvtier: --resume-from {file}: " in capsys.readouterr().err
