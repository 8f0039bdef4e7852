"""`kvtier sessions`: what a wrapper left in a folder is listed, shown, erased, exported and taken in, with no model."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV, cli
from kvtier.session_archive import ArchiveReader
from kvtier.session_folder import SessionFolder
from kvtier.stores import slot_check
from kvtier.stores.folder_view import FolderView
from tests.archives import archive, header
from tests.e2e.families import BLOCK, small_config, tiny, tokens

SYSTEM = tokens(5 * BLOCK, 9)


def config_at(folder: Path, **more: Any) -> dict[str, Any]:
    return small_config(tiny(), folder, nvme="4MiB", prefix_cache=True, **more)


def nvme(config: dict[str, Any]) -> Path:
    return Path(config["tiers"]["nvme"]["path"])


def talked(config: dict[str, Any], *names: str, salt: str = "") -> dict[str, list[int]]:
    """Sessions that begin alike and go on each in its own way, a tail included, as a process leaves them."""
    held = {}
    with TieredKV(tiny(), config) as tiered:
        for name in names:
            ids = torch.cat([SYSTEM, tokens(50, sum(name.encode()))], dim=1)
            tiered.session(name, salt=salt).generate(input_ids=ids, max_new_tokens=4, do_sample=False)
            held[name] = tiered.session(name, salt=salt).token_ids
    return held


def goes_on(config: dict[str, Any], name: str, held: list[int], salt: str = "") -> tuple[int, list[int]]:
    """How many tokens a later process computes for one more, and what it answers."""
    with TieredKV(tiny(), config) as tiered:
        ids = torch.tensor([[*held, 3]])
        out = tiered.session(name, salt=salt).generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        tiered.check_integrity()
        return tiered.stats()["tokens"], out[0].tolist()


def answer(held: list[int]) -> list[int]:
    ids = torch.tensor([[*held, 3]])
    out: torch.Tensor = tiny().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    return out[0].tolist()


@pytest.fixture
def sessions(capsys: pytest.CaptureFixture[str]) -> Any:
    """`kvtier sessions …`: the status, standard output and standard error."""

    def run(*words: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli.main(["sessions", *map(str, words)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_list_and_show_say_what_is_there_and_not_what_was_said(tmp_path: Path, sessions: Any) -> None:
    config = config_at(tmp_path)
    held = talked(config, "alice", "b\u00f6b")
    talked(config, "alice", salt="a secret")
    status, out, err = sessions("list", nvme(config), "--json")
    document = json.loads(out)
    assert status == 0 and not err and document["unusable"] == 0 and document["in_use_by"] is None
    assert sorted((each["name"], each["salted"]) for each in document["sessions"]) == [
        ("alice", False), ("alice", True), ("b\u00f6b", False),
    ]  # fmt: skip
    for each in document["sessions"]:
        assert each["tokens"] == len(held["alice"]) and each["blocks"] == each["blocks_found"] == 9
        assert each["bytes"] > 0 and each["ttl_s"] is None and not each["pinned"] and not each["expired"]
    status, out, _ = sessions("list", nvme(config) / "kv")
    assert status == 0 and "b\u00f6b" in out and "9 of 9" in out and "(salted)" in out and "a secret" not in out

    status, out, err = sessions("show", nvme(config), "alice")
    keys = [each["key"] for each in document["sessions"] if each["name"] == "alice"]
    assert status == 2 and err.count("\n") == 1 and "--key" in err and all(key[:12] in err for key in keys)
    plain_key = next(each["key"] for each in document["sessions"] if each["name"] == "alice" and not each["salted"])
    status, out, _ = sessions("show", nvme(config), "alice", "--key", plain_key[:12], "--json", "--tokens")
    shown = json.loads(out)
    assert status == 0 and shown["token_ids"] == held["alice"] and shown["resumable_tokens"] == len(held["alice"])
    status, out, _ = sessions("show", nvme(config), "b\u00f6b")
    assert status == 0 and "token_ids" not in out and "resumable_tokens" in out
    assert sessions("show", nvme(config), "nobody")[0] == 2


def test_the_list_says_what_can_be_resumed_and_cuts_no_cell(
    tmp_path: Path, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    config = config_at(tmp_path)
    names = "support conversation of 14 November", "one-word-that-is-longer-than-its-column-can-be"
    held = talked(config, *names)
    with SessionFolder(nvme(config), owned=True) as folder:
        session = folder.find(names[0])
        place = session.places[7][0]  # of its own: the first five are of both
        fd = folder.view.open_file(place.segment.name, writable=True)
        slot_check.erase_slot(fd, place.segment.geometry, place.slot)
        os.close(fd)
    document = json.loads(sessions("list", nvme(config), "--json")[1])
    resumable = {each["name"]: each["resumable_tokens"] for each in document["sessions"]}
    assert resumable == {names[0]: 7 * BLOCK, names[1]: len(held[names[1]])}
    status, out, _ = sessions("list", nvme(config))
    assert status == 0 and "…" not in out and max(map(len, out.splitlines())) <= 80
    num_tokens = len(held[names[0]])
    assert f"{7 * BLOCK} of {num_tokens}" in out and f"{num_tokens} of {num_tokens}" in out
    shown = "".join(line.split("  ")[0] for line in out.splitlines())
    assert names[1] in shown and all(word in shown for word in names[0].split())


def test_delete_erases_what_no_other_session_has(tmp_path: Path, sessions: Any) -> None:
    config = config_at(tmp_path)
    held = talked(config, "alice", "bob")
    status, _, err = sessions("delete", nvme(config), "alice")
    assert status == 2 and "--yes" in err
    status, out, _ = sessions("delete", nvme(config), "alice", "--yes")
    assert status == 0 and "4 blocks erased, 5 blocks of other sessions too kept" in out
    (left,) = json.loads(sessions("list", nvme(config), "--json")[1])["sessions"]
    assert left["name"] == "bob" and left["blocks_found"] == 9
    assert cli.main(["fsck", str(nvme(config))]) == 0
    computed, out_ids = goes_on(config, "bob", held["bob"])
    assert computed == 1 + 3 and out_ids == answer(held["bob"])
    assert goes_on(config, "alice", held["alice"])[0] == len(held["alice"]) - 5 * BLOCK + 1 + 3


@pytest.mark.parametrize("is_known", [True, False])
def test_no_byte_of_a_deleted_session_is_left_in_the_files(
    tmp_path: Path, sessions: Any, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Also where the file system cannot make pages zero by itself."""

    def unknown(*args: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    if not is_known:
        monkeypatch.setattr(slot_check, "zero_pages", unknown)
    config = config_at(tmp_path, gpu_slots=40)
    talked(config, "alice")
    files = list((nvme(config) / "kv").glob("segment-*"))
    assert any(any(file.read_bytes()[4096:]) for file in files)
    allocated = [file.stat().st_blocks for file in files]
    assert sessions("delete", nvme(config), "alice", "--yes")[0] == 0
    assert not any(any(file.read_bytes()[4096:]) for file in files)
    assert [file.stat().st_blocks for file in files] == allocated, "the room stays the tier's"


def test_a_session_goes_on_in_the_folder_that_it_was_imported_to(tmp_path: Path, sessions: Any) -> None:
    here, there = config_at(tmp_path / "here"), config_at(tmp_path / "there")
    held, file = talked(here, "alice", "bob"), tmp_path / "alice.kvsession"
    talked(there, "carol")  # so that there are slots of that size, and the shared beginning
    status, out, _ = sessions("export", nvme(here), "alice", file)
    assert status == 0 and "exported: session alice" in out and file.stat().st_mode & 0o777 == 0o600
    assert sessions("export", nvme(here), "alice", file)[0] == 2
    assert sessions("export", nvme(here), "alice", file, "--overwrite")[0] == 0
    status, out, err = sessions("import", nvme(there), file, "--budget", "4MiB")
    assert status == 0, err
    assert "4 blocks written, 5 were there" in out
    status, _, err = sessions("import", nvme(there), file, "--budget", "4MiB")
    assert status == 2 and "has one of that name and salt" in err and err.count("\n") == 1
    assert sessions("import", nvme(there), file, "--name", "alice again")[0] == 0
    assert cli.main(["fsck", str(nvme(there))]) == 0
    # The second finds the tail of both gone, since the first has appended to it: that is computed again.
    for name, most_again in (("alice", 0), ("alice again", len(held["alice"]) % BLOCK)):
        computed, ids = goes_on(there, name, held["alice"])
        assert 1 + 3 <= computed <= 1 + 3 + most_again and ids == answer(held["alice"])


def test_the_library_takes_what_the_command_exports(tmp_path: Path, sessions: Any) -> None:
    config, file = config_at(tmp_path / "here"), tmp_path / "alice.kvsession"
    held = talked(config, "alice")
    assert sessions("export", nvme(config), "alice", file)[0] == 0
    with TieredKV(tiny(), config_at(tmp_path / "there")) as tiered:
        session = tiered.import_session(file)
        assert session.token_ids == held["alice"]
        ids = torch.tensor([[*held["alice"], 3]])
        out = session.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        assert out[0].tolist() == answer(held["alice"]) and tiered.stats()["tokens"] == 1 + 3


def test_what_others_left_behind_a_tail_is_not_exported(tmp_path: Path, sessions: Any) -> None:
    config, file = config_at(tmp_path), tmp_path / "alice.kvsession"
    held = talked(config, "bob", "alice")
    assert sessions("export", nvme(config), "alice", file)[0] == 0
    with ArchiveReader(file) as reader:
        *_, tail = reader.blocks()
        about = reader.header
    num_tokens = len(held["alice"]) % BLOCK
    layers = torch.frombuffer(bytearray(tail), dtype=torch.float32).view(3, 2, 2, BLOCK, 16)  # K and V, 2 heads of 16
    assert about.dtype == "float32" and bool((layers[..., :num_tokens, :] != 0).any())
    assert num_tokens and not bool((layers[..., num_tokens:, :] != 0).any())


def test_blocks_that_are_gone_are_told_and_the_beginning_can_be_had(tmp_path: Path, sessions: Any) -> None:
    config, file = config_at(tmp_path), tmp_path / "alice.kvsession"
    held = talked(config, "alice")
    with SessionFolder(nvme(config), owned=True) as folder:
        (place,) = folder.find("alice").places[6]
        with folder._opened(place.segment.name, writable=True) as fd:
            slot_check.erase_slot(fd, place.segment.geometry, place.slot)
    shown = json.loads(sessions("show", nvme(config), "alice", "--json")[1])
    assert shown["missing_blocks"] == [6] and shown["resumable_tokens"] == 6 * BLOCK
    status, _, err = sessions("export", nvme(config), "alice", file)
    assert status == 2 and "1 of 9 blocks" in err and "--partial" in err and not file.exists()
    assert sessions("export", nvme(config), "alice", file, "--partial")[0] == 0
    with ArchiveReader(file) as reader:
        assert list(reader.header.token_ids) == held["alice"][: 6 * BLOCK]


def test_a_folder_in_use_is_read_and_not_written(tmp_path: Path, sessions: Any) -> None:
    config, file = config_at(tmp_path), tmp_path / "alice.kvsession"
    talked(config, "alice")
    with TieredKV(tiny(), config):
        status, out, _ = sessions("list", nvme(config))
        assert status == 0 and f"in use by process {os.getpid()}" in out
        assert sessions("export", nvme(config), "alice", file)[0] == 0
        for words in (("delete", nvme(config), "alice", "--yes"), ("import", nvme(config), file, "--name", "b")):
            status, _, err = sessions(*words)
            assert status == 2 and "in use by a process that is alive" in err and err.count("\n") == 1
    assert json.loads(sessions("list", nvme(config), "--json")[1])["sessions"][0]["blocks_found"] == 9


def test_an_import_never_takes_a_sessions_slots(tmp_path: Path, sessions: Any) -> None:
    here, there = config_at(tmp_path / "here"), config_at(tmp_path / "there")
    there["tiers"]["nvme"]["budget"] = "512KiB"
    names = [f"guest {number}" for number in range(6)]
    talked(here, *names)
    talked(there, "carol", "dave")

    def listed() -> dict[str, tuple[int, int]]:
        document = json.loads(sessions("list", nvme(there), "--json")[1])
        return {each["name"]: (each["blocks_found"], each["blocks"]) for each in document["sessions"]}

    statuses = []
    for name in names:
        file, before = tmp_path / name, listed()
        assert sessions("export", nvme(here), name, file)[0] == 0
        status, _, err = sessions("import", nvme(there), file, "--budget", "512KiB")
        statuses.append(status)
        if status:
            assert "find room within" in err and err.count("\n") == 1 and listed() == before
        else:
            assert listed() == before | {name: (9, 9)}
    assert statuses[0] == 0 and statuses[-1] == 2, "some had room, and nothing was taken from others"
    assert cli.main(["fsck", str(nvme(there))]) == 0
    used_bytes = sum(path.stat().st_blocks * 512 for path in (nvme(there) / "kv").iterdir())
    assert used_bytes <= 512 * 1024


def test_what_does_not_fit_the_folder_is_refused(tmp_path: Path, sessions: Any) -> None:
    config, file = config_at(tmp_path), tmp_path / "other.kvsession"
    talked(config, "alice")
    file.write_bytes(archive(tmp_path, header()))
    before = {path: path.read_bytes() for path in (nvme(config) / "kv").iterdir()}
    cases = (
        (("import", nvme(config), file), "blocks are of 4 tokens"),
        (("import", nvme(config), tmp_path / "nothing"), "cannot be read"),
        (("import", nvme(config), file, "--budget", "much"), "--budget much"),
        (("import", nvme(config), file, "--budget", "50%"), "percentage"),
        (("import", nvme(config), file, "--max-writes", "5"), "--max-writes 5"),
        (("import", nvme(config), file, "--name", "a\x1b[31m"), "printable"),
        (("list", tmp_path / "nothing"), "No such file"),
        (("list", tmp_path), "not a folder of kvtier's"),
    )
    for words, message in cases:
        status, out, err = sessions(*words)
        assert status == 2 and message in err and err.count("\n") == 1 and not out, words
    assert sessions("export", nvme(config), "alice", tmp_path / "a")[0] == 0
    status, _, err = sessions("import", nvme(config), tmp_path / "a", "--name", "b", "--budget", "100KiB")
    assert status == 2 and "would be removed" in err
    assert {path: path.read_bytes() for path in (nvme(config) / "kv").iterdir() if path.name != "lock"} == {
        path: data for path, data in before.items() if path.name != "lock"
    }


def test_an_import_into_a_folder_that_no_model_used_says_to_use_it_first(tmp_path: Path, sessions: Any) -> None:
    config, there = config_at(tmp_path / "here"), config_at(tmp_path / "there")
    talked(config, "alice")
    file, empty = tmp_path / "alice.kvsession", tmp_path / "empty"
    empty.mkdir()
    assert sessions("export", nvme(config), "alice", file)[0] == 0
    use_it = f"have a session there once, with the archive's model and block_tokens: {BLOCK}"
    for path, why in ((tmp_path / "nothing", "No such file or directory"), (empty, "not a folder of kvtier's")):
        status, out, err = sessions("import", path, file)
        assert status == 2 and not out and err.count("\n") == 1 and why in err and use_it in err
        assert not path.exists() or list(path.iterdir()) == []
    with TieredKV(tiny(), there):
        pass
    status, _, err = sessions("import", nvme(there), file)
    assert status == 2 and f"{nvme(there) / 'kv'} has none yet" in err and use_it in err
    talked(there, "carol")  # as it was told to
    assert sessions("import", nvme(there), file, "--budget", "4MiB")[0] == 0


def test_compressed_folders(tmp_path: Path, sessions: Any) -> None:
    config, there = config_at(tmp_path / "here"), config_at(tmp_path / "there")
    for each in (config, there):
        each["tiers"]["nvme"]["compression"] = "zstd"
    held, file = talked(config, "alice"), tmp_path / "alice.kvsession"
    talked(there, "carol")
    assert sessions("export", nvme(config), "alice", file)[0] == 0
    status, _, err = sessions("import", nvme(there), file)
    assert status == 2 and "is compressed" in err
    status, _, err = sessions("import", nvme(there), file, "--budget", "4MiB")
    assert status == 0, err
    computed, ids = goes_on(there, "alice", held["alice"])
    assert computed == 1 + 3 and ids == answer(held["alice"])
    assert sessions("delete", nvme(config), "alice", "--yes")[0] == 0
    assert cli.main(["fsck", str(nvme(config))]) == 0


def test_a_damaged_block_is_not_exported(tmp_path: Path, sessions: Any) -> None:
    config, file = config_at(tmp_path), tmp_path / "alice.kvsession"
    talked(config, "alice")
    with SessionFolder(nvme(config)) as folder:
        (place,) = folder.find("alice").places[2]
    path = nvme(config) / "kv" / place.segment.name
    data = bytearray(path.read_bytes())
    geometry = place.segment.geometry
    data[4096 + place.slot * geometry.slot_bytes + geometry.header_bytes + 7] ^= 1
    path.write_bytes(data)
    status, _, err = sessions("export", nvme(config), "alice", file)
    assert status == 2 and "block 2 is not there, or not whole" in err and err.count("\n") == 1 and not file.exists()


def test_a_deletion_that_fails_can_be_repeated(tmp_path: Path, sessions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_at(tmp_path)
    talked(config, "alice")

    def failing(self: FolderView, name: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(FolderView, "unlink", failing)
        status, _, err = sessions("delete", nvme(config), "alice", "--yes")
        assert status == 2 and "Read-only file system; some of it is still there" in err and err.count("\n") == 1
    (left,) = json.loads(sessions("list", nvme(config), "--json")[1])["sessions"]
    assert left["blocks_found"] == 0
    assert sessions("delete", nvme(config), "alice", "--yes")[0] == 0
    assert "no sessions in" in sessions("list", nvme(config))[1]


def test_writes_that_are_counted_are_counted_here_too(tmp_path: Path, sessions: Any) -> None:
    here, there = config_at(tmp_path / "here"), config_at(tmp_path / "there")
    there["tiers"]["nvme"]["max_writes"] = "1GB/day"
    file = tmp_path / "alice.kvsession"
    talked(here, "alice")
    talked(there, "carol")
    assert sessions("export", nvme(here), "alice", file)[0] == 0
    status, _, err = sessions("import", nvme(there), file, "--budget", "4MiB")
    assert status == 2 and "give --max-writes" in err
    status, _, err = sessions("import", nvme(there), file, "--budget", "4MiB", "--max-writes", "100kB/day")
    assert status == 2 and "is used up" in err
    assert [each["name"] for each in json.loads(sessions("list", nvme(there), "--json")[1])["sessions"]] == ["carol"]
    status, _, err = sessions("import", nvme(there), file, "--budget", "4MiB", "--max-writes", "1GB/day")
    assert status == 0, err


def test_records_that_cannot_be_read_are_counted_and_left(tmp_path: Path, sessions: Any) -> None:
    config = config_at(tmp_path)
    talked(config, "alice", "bob")
    damaged = next((nvme(config) / "kv").glob("session-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    document = json.loads(sessions("list", nvme(config), "--json")[1])
    assert document["unusable"] == 1 and len(document["sessions"]) == 1
    assert "1 record cannot be used: `kvtier fsck` names them" in sessions("list", nvme(config))[1]
    assert damaged.exists()
