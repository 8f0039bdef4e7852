"""`kvtier fsck` on sessions: what it tells, what it mends, what it leaves."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import resource
import tempfile
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier import cli
from kvtier.errors import FolderInUseError
from kvtier.fsck import check_folder
from kvtier.fsck_report import Outcome
from kvtier.fsck_session_report import SessionReport
from kvtier.session_record import CHECKSUM_BYTES, SessionRecord, encode
from kvtier.stores.folder_entries import session_name
from kvtier.stores.session_files import MAX_FILE_BYTES
from kvtier.system import allocated_bytes
from kvtier.types import Slot
from tests.fault.folders import HEADER_BYTES, SHAPE, block, flip, open_store, place, segments
from tests.fault.test_fsck import as_nobody, snapshot
from tests.fault.test_fsck_command import PAGE
from tests.sessions import record

TOKENS = SHAPE.block_tokens


def left(kv: Path, *records: SessionRecord, num_blocks: int = 99) -> None:
    """A process saved these, and the first blocks of each."""
    store = open_store(kv)
    slot = 0
    for each in records:
        for label in each.labels()[:num_blocks]:
            store.write(Slot(slot), block(slot), label)
            slot += 1
        store.sessions.save(each)
    store.close()


def path_of(kv: Path, kept: SessionRecord) -> Path:
    return kv / session_name(kept.key())


def told(kv: Path, **more: bool) -> dict[str, SessionReport]:
    return {each.name: each for each in check_folder(kv, **more).sessions}


def test_each_session_is_told_with_the_blocks_that_are_there(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    alice = record("alice", 3 * TOKENS + 5, TOKENS, used_s=1.75e9, is_pinned=True)
    bob = record("bob", 2 * TOKENS, TOKENS)
    left(kv, alice, bob)
    left(kv, record("carol", 10 * TOKENS, TOKENS), num_blocks=0)
    left(kv, replace(alice, name="alice's fork"), num_blocks=0)  # of the same blocks
    report = check_folder(kv)
    assert report.outcome is Outcome.CLEAN and not report.notices
    assert report.used_bytes == allocated_bytes(kv)
    found = {each.name: (each.num_tokens, each.num_found, each.num_blocks) for each in report.sessions}
    assert found == {
        "alice": (3 * TOKENS + 5, 4, 4), "alice's fork": (3 * TOKENS + 5, 4, 4), "bob": (2 * TOKENS, 2, 2),
        "carol": (10 * TOKENS, 0, 10),
    }  # fmt: skip
    flip(segments(kv)[0], place(1, HEADER_BYTES))
    assert told(kv)["alice"].num_found == 3 and told(kv)["bob"].num_found == 2
    assert told(kv, repair=True)["alice"].num_found == 3
    assert check_folder(kv, drop=alice.namespace.hex()).num_dropped == 5
    assert [each.num_found for each in check_folder(kv).sessions] == [0] * 4  # they stay


def test_json_has_all_and_the_page_tells_the_fields(tmp_path: Path) -> None:
    kept = record("alice", 20, TOKENS, used_s=1.0, ttl_s=5.0)
    left(tmp_path / "kv", kept, record("b", used_s=1e300, created_s=-1e300))
    document = json.loads(CliRunner().invoke(cli.app, ["fsck", str(tmp_path), "--json"]).stdout)
    by_name = {each["name"]: each for each in document["sessions"]}
    assert by_name["alice"] == {
        "name": "alice", "key": kept.key().hex(), "namespace": kept.namespace.hex(), "tokens": 20,
        "block_tokens": TOKENS, "blocks": 2, "blocks_found": 2, "created": "2023-11-14T22:13:20+00:00",
        "last_used": "1970-01-01T00:00:01+00:00", "ttl_s": 5.0, "pinned": False, "expired": True,
    }  # fmt: skip
    assert (by_name["b"]["created"], by_name["b"]["last_used"], by_name["b"]["ttl_s"]) == (None, None, None)
    assert document["future_sessions"] == 0
    fields = set(re.findall(r"`([a-z_]+)`", PAGE.split("## The JSON document")[1]))
    assert {"sessions", "future_sessions", *by_name["alice"]} <= fields


def test_names_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    names = ["\x1b[2Jgone", "two\nlines", "[red]markup", "\udcff", "\u202eright to left", "x" * 5000, ""]
    left(tmp_path / "kv", *(record(name, 3) for name in names))
    result = CliRunner().invoke(cli.app, ["fsck", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for shown in (r"\x1b[2Jgone", r"two\nlines", "[red]markup", r"\udcff", r"\u202eright to left"):
        assert shown in result.stdout, shown
    assert "\x1b" not in result.stdout and "\u202e" not in result.stdout
    assert 200 < result.stdout.count("x") < 300 and "…" in result.stdout, "a name is shown up to 240 characters"
    assert "sessions: 7" in result.stdout
    document = json.loads(CliRunner().invoke(cli.app, ["fsck", str(tmp_path), "--json"]).stdout)
    assert {each["name"] for each in document["sessions"]} == set(names)


def test_many_are_counted_and_those_used_last_are_shown(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv", 16 << 20)
    for number in range(30):
        store.sessions.save(record(f"number {number:02}", 3, used_s=1e9 + number))
    store.close()
    result = CliRunner().invoke(cli.app, ["fsck", str(tmp_path)])
    assert "sessions: 30" in result.stdout
    assert re.findall(r"number (\d\d)", result.stdout) == [str(number) for number in range(29, 9, -1)]


def later(kept: SessionRecord) -> bytes:
    data = bytearray(encode(kept)[:-CHECKSUM_BYTES])
    data[8] = 2
    return bytes(data) + hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def test_damaged_ones_are_named_and_removed_by_a_repair_alone(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    kept = [record(name, 10 * number) for number, name in enumerate("abcdefgh")]
    left(kv, *kept, num_blocks=0)
    flip(path_of(kv, kept[0]), 70)
    os.truncate(path_of(kv, kept[1]), 40)
    path_of(kv, kept[2]).rename(path_of(kv, record("z")))
    path_of(kv, kept[3]).chmod(0o644)
    os.truncate(path_of(kv, kept[4]), MAX_FILE_BYTES + 1)
    path_of(kv, kept[5]).write_bytes(later(kept[5]))
    unfinished = kv / (session_name(kept[7].key()) + ".new")
    unfinished.write_bytes(b"KVT")
    before = snapshot(kv)
    report = check_folder(kv)
    assert snapshot(kv) == before
    assert report.outcome is Outcome.DAMAGED and report.num_problems == report.num_mendable == 5
    assert {each.file: each.what for each in report.problems} == {
        path_of(kv, kept[0]).name: "does not have the checksum that it ends with",
        path_of(kv, kept[1]).name: "is of 40 bytes, too few for a session",
        path_of(kv, record("z")).name: "is of another session than its name says",
        path_of(kv, kept[3]).name: "has a mode that lets others at it, so it is not read",
        path_of(kv, kept[4]).name: f"is of 64.01MiB ({MAX_FILE_BYTES + 1} bytes), more than any session",
    }
    assert {each.name for each in report.sessions} == {"g", "h"} and report.future_sessions == 1
    assert any("1 session was being saved" in each for each in report.notices)
    assert any("sessions of a later format version" in each for each in report.notices)
    result = CliRunner().invoke(cli.app, ["fsck", str(tmp_path), "--repair"])
    assert result.exit_code == 0 and result.stdout.count("; removed\n") == 5
    ours = {path_of(kv, kept[number]).name for number in (5, 6, 7)}
    assert {path.name for path in kv.glob("session-*")} == ours
    assert path_of(kv, kept[5]).read_bytes() == later(kept[5])
    assert check_folder(kv).outcome is Outcome.CLEAN
    store = open_store(kv)
    assert {each.name for each in store.sessions.load()} == {"g", "h"}
    store.close()


def test_what_is_not_ours_is_a_stranger_and_stays(tmp_path: Path) -> None:
    kv, outside = tmp_path / "kv", tmp_path / "outside"
    left(kv, record("a"))
    outside.write_bytes(encode(record("b")))
    path_of(kv, record("b")).symlink_to(outside)
    path_of(kv, record("c")).mkdir()
    os.mkfifo(path_of(kv, record("d")))
    (kv / "session-alice").write_bytes(encode(record("e")))
    report = check_folder(kv, repair=True)
    assert report.num_problems == 4 and not report.num_mended
    assert {each.name for each in report.sessions} == {"a"}
    assert len(list(kv.glob("session-*"))) == 5 and outside.read_bytes() == encode(record("b"))


def test_one_that_cannot_be_read_is_told_and_stays(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    left(kv, record("a"), record("b"))
    path_of(kv, record("a")).chmod(0)
    for parent in (tmp_path, *tmp_path.parents):
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    with as_nobody(kv, *kv.iterdir()):
        report = check_folder(kv, repair=True)
    (problem,) = report.problems
    assert problem.file == path_of(kv, record("a")).name and problem.reason == "Permission denied"
    assert not problem.is_mended and path_of(kv, record("a")).exists()


def test_a_folder_in_use_is_told_and_never_written(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    store = open_store(kv)
    store.sessions.save(record("a"))
    (kv / (session_name(record("b").key()) + ".new")).write_bytes(b"KVT")  # it is saving now
    report = check_folder(kv)
    assert {each.name for each in report.sessions} == {"a"} and report.outcome is Outcome.CLEAN
    assert not any("being saved" in each for each in report.notices)
    with pytest.raises(FolderInUseError):
        check_folder(kv, repair=True)
    store.close()


def test_a_folder_of_sessions_alone_is_found(tmp_path: Path) -> None:
    left(tmp_path, record("a"), num_blocks=0)
    assert {path.name for path in tmp_path.iterdir()} == {"lock", session_name(record("a").key())}
    (tmp_path / "lock").unlink()
    assert set(told(tmp_path)) == {"a"}


def test_crafted_records_cost_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block a token: what is looked for is bounded."""
    kept = record("many", block_tokens=1, token_ids=array("i", [7]) * 3_000_000)
    store = open_store(tmp_path / "kv", 2 << 30)
    store.sessions.save(kept)
    store.sessions.save(record("few", 40, TOKENS))
    store.close()
    before = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    sessions = told(tmp_path / "kv")
    assert int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) - before < 200 << 10
    assert sessions["many"].num_found is None and sessions["many"].num_blocks == 3_000_000
    assert not math.isnan(sessions["many"].ttl_s)
    result = CliRunner().invoke(cli.app, ["fsck", str(tmp_path)])
    assert "? of 3000000" in result.stdout
