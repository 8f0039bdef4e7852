"""The command `kvtier fsck`: exit statuses, what goes where, and what a terminal sees."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier import TieredKV, cli
from tests.e2e.families import small_config, tiny, tokens
from tests.fault.folders import HEADER_BYTES, filled, flip, namespace, open_store, place, segments

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "fsck.md").read_text(encoding="utf-8")


def damaged(folder: Path) -> None:
    filled(folder / "kv", range(6))
    flip(segments(folder / "kv")[0], place(2, HEADER_BYTES))


def test_statuses_of_a_folder_that_is_sound_damaged_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path / "kv", range(6))
    assert cli.main(["fsck", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "clean: every slice" in out and namespace(0).hex()[:12] in out and not err
    flip(segments(tmp_path / "kv")[0], place(2, HEADER_BYTES))
    for _ in range(2):  # checking mends nothing
        assert cli.main(["fsck", str(tmp_path / "kv")]) == 1
        out, err = capsys.readouterr()
        assert "segment-00000.kvt, slot 2: damaged, 1 of 3 slices (slice 0)" in out
        assert "damaged: problems: 1, repaired: 0; --repair mends all of them" in out and not err
    assert cli.main(["fsck", str(tmp_path), "--repair"]) == 0
    assert "repaired: all of 1 found" in capsys.readouterr().out
    assert cli.main(["fsck", str(tmp_path), "--drop", namespace(0).hex()[:8]]) == 0
    assert f"dropped: 5 slots of {namespace(0).hex()}" in capsys.readouterr().out


def test_what_a_repair_does_is_said_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged(tmp_path)
    segments(tmp_path / "kv")[0].with_name("segment-00007.kvt").write_bytes(b"")
    (tmp_path / "kv" / "segment-00007.kvt").chmod(0o600)
    (tmp_path / "kv" / "notes.txt").touch()
    assert cli.main(["fsck", str(tmp_path)]) == 1
    assert "damaged: problems: 3, repaired: 0; --repair mends 2 of them" in capsys.readouterr().out
    assert cli.main(["fsck", str(tmp_path), "--repair"]) == 1
    out = capsys.readouterr().out
    assert "(slice 0); repaired\n" in out and re.search(r"segment-00007.kvt: .*; removed\n", out)
    assert "damaged: problems: 1, repaired: 2;" in out and "--repair" not in out


def test_what_a_wrapper_leaves_is_clean_and_gone_after_a_drop(tmp_path: Path) -> None:
    model = tiny("llama")
    config = small_config(model, tmp_path)
    path = config["tiers"]["nvme"]["path"]
    with TieredKV(model, config) as tiered:
        cache = tiered.new_cache()
        tiered.generate(tokens(300), cache=cache, max_new_tokens=3, do_sample=False)
        document = json.loads(CliRunner().invoke(cli.app, ["fsck", path, "--json"]).stdout)
        assert document["in_use_by"] == str(os.getpid()) and document["status"] == "clean"
    document = json.loads(CliRunner().invoke(cli.app, ["fsck", path, "--json"]).stdout)
    (each,) = document["namespaces"]
    assert document["status"] == "clean" and each["blocks"] == document["slots"]["good"] > 0
    result = CliRunner().invoke(cli.app, ["fsck", path, "--drop", each["namespace"][:10]])
    assert result.exit_code == 0
    with TieredKV(model, config) as tiered:
        assert tiered.stats()["tiers"]["nvme"]["found"] == tiered.stats()["tiers"]["nvme"]["quarantined"] == 0


def test_bad_input_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "a" / "kv", range(3))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "kv").symlink_to(tmp_path / "a" / "kv")
    (tmp_path / "empty").mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "lock").touch()
    (tmp_path / "project" / "main.c").touch()
    (tmp_path / "file").touch()
    for words, message in (
        (["nowhere"], "No such file or directory"),
        (["file"], "Not a directory"),
        (["empty"], "is not a folder of kvtier's"),
        (["project"], "is not a folder of kvtier's"),
        (["b"], "kv is a symlink, which is not followed"),
        (["a", "--drop", "zz"], "no namespace of"),
        (["~nobody-of-that-name/x"], "home directory"),
    ):
        path = words[0] if words[0].startswith("~") else str(tmp_path / words[0])
        assert cli.main(["fsck", path, *words[1:], "--json"]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1 and err.startswith("kvtier: ") and message in err
    assert cli.main(["fsck"]) == 2
    assert cli.main(["fsck", str(tmp_path / "a"), "--mend"]) == 2
    assert "no such option" in capsys.readouterr().err.lower()
    assert sorted(path.name for path in (tmp_path / "project").iterdir()) == ["lock", "main.c"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged(tmp_path)
    os.chown(segments(tmp_path / "kv")[0], 12345, -1)
    assert cli.main(["fsck", str(tmp_path), "--repair"]) == 1
    assert "of user 12345" in capsys.readouterr().out
    os.chown(tmp_path / "kv", 12345, -1)
    assert cli.main(["fsck", str(tmp_path)]) == 2
    assert "belongs to user 12345, not to 0: run this as that user" in capsys.readouterr().err


def test_a_folder_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged(tmp_path)
    store = open_store(tmp_path / "kv")
    assert cli.main(["fsck", str(tmp_path), "--repair"]) == 2
    assert "end it before --repair or --drop" in capsys.readouterr().err
    assert cli.main(["fsck", str(tmp_path)]) == 1
    assert f"note: in use by process {os.getpid()}" in capsys.readouterr().out
    store.close()


def test_json_is_one_document_whose_fields_the_page_tells(tmp_path: Path) -> None:
    damaged(tmp_path)
    result = CliRunner().invoke(cli.app, ["fsck", str(tmp_path), "--json"])
    assert result.exit_code == 1 and not result.stderr
    document = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert document["path"] == str(tmp_path / "kv") and document["status"] == "damaged"
    assert document["slots"]["good"] == 5 and document["slots"]["damaged"] == 1
    (problem,) = document["problems"]
    assert (problem["slot"], problem["slices"], problem["namespace"]) == (2, [0], namespace(0).hex())
    told = set(re.findall(r"`([a-z_]+)`", PAGE.split("## The JSON document")[1]))
    parts = (document, problem, document["namespaces"][0], document["geometries"][0], document["slots"])
    assert {key for part in parts for key in part} <= told
    result = CliRunner().invoke(cli.app, ["fsck", str(tmp_path), "--json", "--repair", "--drop", namespace(0).hex()])
    assert json.loads(result.stdout)["dropped"] == {"namespace": namespace(0).hex(), "slots": 6}


def test_names_of_strangers_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    for name in (b"\x1b[2Jgone", b"\xff\xfe", b"[red]markup", b"two\nlines"):
        Path(os.fsdecode(bytes(tmp_path / "kv") + b"/" + name)).touch()
    result = CliRunner().invoke(cli.app, ["fsck", str(tmp_path)])
    assert result.exit_code == 1
    assert "\x1b" not in result.stdout and "\\x1b[2Jgone: is in the way" in result.stdout
    assert "[red]markup: is in the way" in result.stdout and "two\\nlines: is in the way" in result.stdout
    document = json.loads(CliRunner().invoke(cli.app, ["fsck", str(tmp_path), "--json"]).stdout)
    assert len(document["problems"]) == 4


def test_many_problems_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(30))
    for path in segments(tmp_path / "kv"):
        for slot in range((path.stat().st_size - place(0)) // (place(1) - place(0))):
            flip(path, place(slot, 70))
    result = CliRunner().invoke(cli.app, ["fsck", str(tmp_path)])
    assert result.stdout.count(": torn") == 20 and "and 10 more (--json names 1000)" in result.stdout
    assert "damaged: problems: 30, repaired: 0" in result.stdout


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.parametrize("options", [[], ["--repair"]])
def test_ctrl_c_ends_the_command_and_no_thread_reads_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    filled(tmp_path / "kv", range(30))
    real, offsets = os.preadv, []

    def reading(fd: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        if len(offsets) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # long enough for the signal to find the others at work
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", reading)
    assert cli.main(["fsck", str(tmp_path), *options]) == 130
    num_read = len(offsets)
    out, err = capsys.readouterr()
    assert not out and err == "kvtier: interrupted\n" and 0 < num_read < 2 * 30  # it did not read to the end
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier-fsck"):
            thread.join(timeout=60)
            assert not thread.is_alive()
    assert len(offsets) == num_read
    assert cli.main(["fsck", str(tmp_path), "--repair"]) == 0  # the lock was given back


@pytest.mark.parametrize("json_", [False, True])
def test_the_bar_is_for_terminals_and_on_stderr(tmp_path: Path, json_: bool) -> None:
    filled(tmp_path / "kv", range(30))
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "kvtier.cli", "fsck", str(tmp_path), *(["--json"] if json_ else [])]
    result = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=theirs, timeout=100, env=os.environ | {"TERM": "xterm"}, check=False
    )
    os.close(theirs)
    try:
        seen = os.read(ours, 1 << 20)
    except OSError:  # nothing was written, and nobody can any more
        seen = b""
    os.close(ours)
    assert result.returncode == 0
    assert (b"\xe2\x94\x81" in seen) != json_  # the bar's heavy line
    assert b"\x1b" not in result.stdout
    assert (b"clean" in result.stdout) and (not json_ or json.loads(result.stdout)["status"] == "clean")


def test_it_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    code = (
        "import sys; from kvtier import cli; status = cli.main(['fsck', sys.argv[1], '--json']); "
        "sys.exit(status or 7 * bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=100, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
