"""A message that repeats is logged a few times, then counted; nothing is shown unless KVTIER_LOG asks for it."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import cli, log
from kvtier.log import RateLimit, logger, rate_limit

PACKAGE = Path(log.__file__).parent


@pytest.fixture
def as_it_was() -> Iterator[None]:
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def _record(text: str) -> logging.LogRecord:
    return logging.LogRecord("kvtier", logging.WARNING, __file__, 1, text, (), None)


def test_repeats_are_kept_back_and_counted_when_the_window_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("kvtier.log.time.monotonic", lambda: now_s[0])
    limit = RateLimit(burst=2, window_s=10)
    assert [limit.filter(_record("a")) for _ in range(5)] == [True, True, False, False, False]
    assert limit.filter(_record("b")), "other messages are not held back"
    now_s[0] += 11
    record = _record("a")
    assert limit.filter(record)
    assert record.getMessage() == "a (3 more like this were not logged)"
    assert [limit.filter(_record("a")) for _ in range(2)] == [True, False]


def test_the_librarys_logger_has_it() -> None:
    assert rate_limit in logger.filters


@pytest.mark.usefixtures("as_it_was")
def test_a_level_shows_messages_from_there_on(capsys: pytest.CaptureFixture[str]) -> None:
    log.show("INFO")
    log.show("info")  # a second time adds no second handler
    logger.debug("too fine")
    logger.info("%d blocks", 7)
    assert capsys.readouterr().err == "kvtier: INFO: 7 blocks\n"
    for count in range(9):
        logger.error("again %d", count)
    assert capsys.readouterr().err.count("again") == rate_limit.burst


@pytest.mark.usefixtures("as_it_was")
def test_a_wrong_level_is_a_warning_in_the_library(caplog: pytest.LogCaptureFixture) -> None:
    handlers = list(logger.handlers)
    log.show("loud")
    assert logger.handlers == handlers
    assert "KVTIER_LOG=loud: give debug, info, warning, error" in caplog.text


def test_a_wrong_level_is_refused_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVTIER_LOG", "loud")
    assert cli.main(["version"]) == 2
    assert capsys.readouterr() == ("", "kvtier: KVTIER_LOG=loud: give debug, info, warning, error, or leave it unset\n")


def test_a_wrong_level_is_said_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtier.cli", "fsck", str(tmp_path)]
    done = subprocess.run(command, env={"KVTIER_LOG": "loud"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvtier: KVTIER_LOG=loud: give debug, info, warning, error, or leave it unset\n"


@pytest.mark.parametrize(("value", "handlers"), [(None, 0), ("", 0), ("debug", 1)])
def test_a_handler_is_there_only_if_the_variable_is_set(value: str | None, handlers: int) -> None:
    environment = {} if value is None else {"KVTIER_LOG": value}
    code = "import logging, kvtier.log; print(len(logging.getLogger('kvtier').handlers))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{handlers}\n"


def prints(source: str) -> list[str]:
    """What in a source writes to standard output or standard error by itself."""
    found = []
    for node in ast.walk(ast.parse(source)):
        words = ast.unparse(node)
        is_print = isinstance(node, ast.Call) and words.startswith(("print(", "pprint(", "typer.echo("))
        if is_print or words in ("sys.stdout", "sys.stderr"):
            found.append(words)
    return found


# log.py has the handler that KVTIER_LOG asks for.
MAY_PRINT = [
    PACKAGE / name
    for name in (
        "cli.py",
        "cli_chat.py",
        "cli_fsck.py",
        "cli_plan.py",
        "cli_selftest.py",
        "cli_sessions.py",
        "terminal.py",
        "log.py",
    )
]
LIBRARY = [file for file in PACKAGE.rglob("*.py") if file not in MAY_PRINT]


@pytest.mark.parametrize("file", LIBRARY, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_the_library_never_prints(file: Path) -> None:
    assert prints(file.read_text(encoding="utf-8")) == []


def test_what_a_print_looks_like() -> None:
    assert prints("def f():\n    print(1)\n    sys.stderr.write('x')") == ["print(1)", "sys.stderr"]
    assert prints((PACKAGE / "cli.py").read_text(encoding="utf-8"))
