"""Mistakes on the command line that many make: a line that says what to type instead."""

from __future__ import annotations

import pytest

from kvtier import cli


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (["doctor", "--json", "my rates.json"], "Mend: kvtier doctor --json > 'my rates.json'"),
        (["doctor", "--json=rates.json", "--quick"], "Mend: kvtier doctor --quick --json > rates.json"),
        (["fsck", "/a/b", "--json", "x"], "Mend: kvtier fsck /a/b --json > x"),
        (["fsck", "--json", "x", "/a/b"], "Mend: kvtier fsck /a/b --json > x"),
        (["sessions", "list", "/a/b", "--json", "x"], "Mend: kvtier sessions list /a/b --json > x"),
        (["sessions", "show", "/a/b", "al", "--json=x"], "Mend: kvtier sessions show /a/b al --json > x"),
        (["plan", "--model", "m", "--context", "9", "--config", "laptop", "--json", "x"], "laptop --json > x"),
        (["selftest", "--json", "x"], "Mend: kvtier selftest --json > x"),
        (["soak", "--json"], "Mend: --json FILE, or --json - for standard output"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_file_for_json_is_refused_with_the_mend(
    words: list[str], mend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == cli.EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and mend in err and err.count("\n") == 1


def test_a_command_that_is_not_there_and_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve"]) == cli.EXIT_BAD_INPUT
    assert "No such command 'serve'. `kvtier --help` lists them\n" in capsys.readouterr().err
    assert cli.main(["--version"]) == cli.main(["version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second != ""


@pytest.mark.parametrize(
    "words",
    [["doctor", "more", "--json"], ["doctor", "--jsn"], ["chat", "--json", "x"], ["fsck", "--json"], ["soak", "--jsn"]],
    ids=" ".join,
)
def test_other_mistakes_are_not_said_to_be_that_one(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == cli.EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and "Mend" not in err and err.count("\n") == 1
