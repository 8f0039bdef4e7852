"""The command line where the outside is hostile: standard streams, signals, homes, names, widths and encodings."""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rich.table import Table

from kvtier import cli
from kvtier.doctor.proposal import Line
from kvtier.errors import ConfigError
from kvtier.system import cache_folder
from kvtier.terminal import print_table, printable
from tests.fault.folders import filled

ROOT = Path(__file__).resolve().parents[2]
KVTIER = [sys.executable, "-m", "kvtier.cli"]
NAME = b"w\x1b[31m\n[red]\xff"  # an escape sequence, a line break, markup, and no UTF-8


def run(
    words: list[str], redirections: str = "", variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """`kvtier WORDS REDIRECTIONS`, by a shell, which is what redirects in real life."""
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", *KVTIER, *words]
    variables = os.environ | (variables or {})
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, timeout=100, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tier")
    filled(path / "kv", range(3))
    return path


@pytest.mark.parametrize("command", [["version"], ["--help"], ["fsck"], ["fsck", "--json"]], ids=" ".join)
@pytest.mark.parametrize(
    ("redirection", "message"), [(">/dev/full", b"No space left on device"), (">&-", b"it is closed")]
)
def test_standard_output_that_takes_nothing(folder: Path, command: list[str], redirection: str, message: bytes) -> None:
    words = [*command, str(folder)] if command[0] == "fsck" else command
    done = run(words, redirection)
    assert done.returncode == cli.EXIT_BAD_INPUT
    assert done.stderr.startswith(b"kvtier: standard output: ") and message in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_ends_it_without_a_word(folder: Path, options: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [*KVTIER, "fsck", str(folder), *options]
    done = subprocess.run(words, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, timeout=100, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (cli.EXIT_READER_LEFT, b"")


@pytest.mark.parametrize("redirection", ["2>/dev/full", "<&- 2>&-"])
def test_standard_error_that_takes_nothing_changes_no_status(folder: Path, redirection: str) -> None:
    done = run(["fsck", str(folder), "--json"], redirection)
    assert done.returncode == 0 and json.loads(done.stdout)["status"] == "clean"
    assert run(["fsck", "/no/such/folder"], redirection).returncode == cli.EXIT_BAD_INPUT
    assert run(["version"], f">/dev/full {redirection}").returncode == cli.EXIT_BAD_INPUT


def test_no_file_of_the_folder_becomes_a_closed_stream(tmp_path: Path) -> None:
    """The lock and the segments would be opened as number 0 or 2."""
    filled(tmp_path / "kv", range(3))
    code = (
        "import os; from kvtier import cli, fsck\nreal = fsck.check_folder\n"
        "def check_folder(*args, **kwargs):\n"
        "    for fd in range(3):\n        assert 'kv' not in os.readlink(f'/proc/self/fd/{fd}')\n"
        "    seen.append(sorted(fd for fd in (0, 2) if os.readlink(f'/proc/self/fd/{fd}') == os.devnull))\n"
        "    return real(*args, **kwargs)\n"
        "seen = []; fsck.check_folder = check_folder\n"
        f"status = cli.main(['fsck', {str(tmp_path)!r}, '--repair', '--json'])\nprint(status, seen)"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == b"0 [[0, 2]]"


# -- signals -----------------------------------------------------------------------------------------------------------

STOPPED = """
import os, signal, sys
from kvtier import cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background ignores it
real, told, waits = os.preadv, int(sys.argv[1]), int(sys.argv[2])
def preadv(fd, buffers, offset):
    os.write(told, b".")  # it reads: now
    os.read(waits, 1)
    return real(fd, buffers, offset)
os.preadv = preadv
sys.exit(cli.main(sys.argv[3:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [["--json"], ["--repair"]])
def test_a_signal_in_the_middle_of_fsck(tmp_path: Path, number: signal.Signals, options: list[str]) -> None:
    filled(tmp_path / "kv", range(6))
    tells, told = os.pipe()
    waits, go = os.pipe()
    words = [sys.executable, "-c", STOPPED, str(told), str(waits)]
    child = subprocess.Popen(
        [*words, "fsck", str(tmp_path), *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(told, waits),
    )  # fmt: skip
    os.close(told), os.close(waits)
    try:
        assert os.read(tells, 1) == b"."
        child.send_signal(number)
        os.close(go)  # reads go on
        out, err = child.communicate(timeout=100)
    finally:
        child.kill()
        child.wait()
        os.close(tells)
    assert (child.returncode, out, err) == (cli.EXIT_INTERRUPTED, b"", b"kvtier: interrupted\n")
    assert cli.main(["fsck", str(tmp_path), "--repair"]) == 0  # the lock was given back


@pytest.mark.parametrize("command", ["version", "fsck", "doctor", "soak"])
@pytest.mark.parametrize("how", [KeyboardInterrupt(), cli.typer.Exit(130), cli.typer.Abort()], ids=repr)
def test_interrupted_is_said_once_by_every_command(
    command: str, how: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for info in cli.app.registered_commands:
        assert info.callback

        @functools.wraps(info.callback)
        def interrupted(*_: Any, **__: Any) -> None:
            raise how

        monkeypatch.setattr(info, "callback", interrupted)
    assert cli.main([command, *["."] * (command == "fsck")]) == cli.EXIT_INTERRUPTED
    assert capsys.readouterr() == ("", "kvtier: interrupted\n")


# -- tables ------------------------------------------------------------------------------------------------------------


def printed(table: Table, width: int = 80) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width)
    print_table(table, console)
    assert console.width == width
    return out.getvalue().splitlines()


def test_a_table_keeps_every_figure_and_every_word_at_80_columns() -> None:
    """rich cut `10.02 GFL…` and `9,213.5 …`: what no_wrap columns lack was taken from their cells."""
    table = Table("what", "why")
    figures = [f"{number}9,213.5 ms" for number in range(5)]
    for _ in figures:
        table.add_column("figure", no_wrap=True)
    table.add_row("a name of several words", "a reason: " + "words " * 20, *figures)
    lines = printed(table)
    assert max(map(len, lines)) > 80 and "…" not in "".join(lines)
    assert any(all(figure in line for figure in figures) for line in lines)
    assert " ".join(lines).count("words") == 21


def test_columns_of_words_share_what_figures_leave() -> None:
    table = Table("what", "why")
    table.add_column("figure", no_wrap=True)
    table.add_row("prompt and answer, the host attends, float32", "off by 3.0e-05, allowed 1.0e-03 " * 2, "9,213.5 ms")
    table.add_row("x" * 100, "", "")
    lines = printed(table)
    assert {len(line) for line in lines} == {80}
    assert "".join(lines).count("x") == 100


def test_a_table_that_fits_is_no_wider_than_its_cells() -> None:
    table = Table("what", "why")
    table.add_row("a", "b")
    assert max(map(len, printed(table))) < 20


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["fsck", ""], "fsck"),
        (["fsck", ".", "--drop", ""], "--drop"),
        (["fsck", ".", "--drop="], "--drop"),
        (["doctor", "--path", ""], "--path"),
        (["soak", "--checkpoint="], "--checkpoint"),
        ([""], "kvtier"),
    ],
)
def test_an_empty_argument_is_refused_by_name(
    folder: Path, words: list[str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)  # where `fsck .` finds what it looks for
    assert cli.main(words) == cli.EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"kvtier: {name}: an empty argument") and err.count("\n") == 1


@pytest.mark.parametrize("command", ["doctor", "soak"])
def test_each_mistake_of_a_config_has_its_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / os.fsdecode(b"a\nb.yaml")  # whose line break makes no line
    config.write_text("io_threads: 0\nblock_tokens: 17\ntiers: {gpu: {budgte: 1GiB}}\n")
    assert cli.main([command, "--config", str(config)]) == cli.EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    keys = ["block_tokens: ", "tiers.gpu.budgte: ", "io_threads: "]
    assert not out and [line for line in err.splitlines() if not line.startswith("kvtier: ")] == []
    assert [key in line for key, line in zip(keys, err.splitlines(), strict=True)] == [True] * 3, err


def test_names_that_a_terminal_would_obey(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(os.fsdecode(bytes(tmp_path) + b"/" + NAME))
    filled(path / "kv", range(3))
    assert cli.main(["fsck", str(path)]) == 0
    assert "w\\x1b[31m\\n[red]\\udcff/kv" in capsys.readouterr().out
    assert cli.main(["fsck", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(path / "kv")
    for words in (
        ["fsck", f"{path}/no"],
        ["doctor", "--config", f"{path}/no.yaml"],
        ["doctor", "--path", f"{path}/no"],
    ):
        assert cli.main(words) == cli.EXIT_BAD_INPUT
        out, err = capsys.readouterr()
        assert not out and "\x1b" not in err and "[red]\\udcff/no" in err and err.count("\n") == 1


def test_the_doctor_of_such_a_name(tmp_path: Path) -> None:
    path = Path(os.fsdecode(bytes(tmp_path) + b"/" + NAME))
    path.mkdir()
    words = ["doctor", "--quick", "--path", str(path)]
    done = run(words, variables={"PYTHONIOENCODING": "ascii", "COLUMNS": "20", "NO_COLOR": "1"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout and b"[red]\\udcff" in done.stdout
    text = done.stdout.decode("ascii").split("Proposed config:\n")[1]
    proposal = yaml.safe_load(text.split("\nwarning:")[0])
    assert proposal["tiers"]["nvme"]["path"] == str(path)


def test_a_reason_in_the_proposal_stays_a_remark() -> None:
    line = Line(1, "", "", "a scratch file in /w\nevil: 1\x1b[2J: EACCES")
    assert str(line) == "  # a scratch file in /w\\nevil: 1\\x1b[2J: EACCES"
    assert yaml.safe_load(str(Line(0, "a", "1", line.reason))) == {"a": 1}


def test_printable() -> None:
    assert printable("grün ä/日本 [red] –") == "grün ä/日本 [red] –"
    assert printable("a\tb\x7f\x9b\u202e\udcff\r\n") == "a\\tb\\x7f\\x9b\\u202e\\udcff\\r\\n"


# -- surroundings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["0", "1", "20", "x"])
def test_a_narrow_terminal_loses_no_digits(
    folder: Path, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["fsck", str(folder), "--json"]) == cli.main(["fsck", str(folder)]) == 0
    document, page = capsys.readouterr().out.split("\n", 1)
    assert json.loads(document)["namespaces"][0]["namespace"][:12] in page


def test_json_stays_one_document_with_the_log_on(folder: Path) -> None:
    done = run(["fsck", str(folder), "--json"], variables={"KVTIER_LOG": "debug", "PYTHONWARNINGS": "always"})
    assert done.stdout.count(b"\n") == 1 and json.loads(done.stdout)["status"] == "clean"


def test_no_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/kvtier")
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(ConfigError, match="set HOME or XDG_CACHE_HOME"):
        cache_folder()
    assert cli.main(["doctor", "--quick"]) == cli.EXIT_BAD_INPUT
    assert "no home directory is known" in capsys.readouterr().err
