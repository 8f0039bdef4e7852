"""How long sessions stay: time to live, pins, deletion down to the bytes in files; and disks that fail at a save."""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.errors import CapacityError, ClosedError, StoreError, UnsupportedError
from kvtier.runtime import Runtime
from kvtier.session import Session
from kvtier.stores.nvme import NvmeStore
from kvtier.types import SlotLabel, Tier
from tests.e2e.families import BLOCK, GREEDY, occupied, small_config, tiny, tokens
from tests.e2e.test_session import ask, edited
from tests.e2e.test_session_restart import NEW, keeping, talk, warnings

FEW_SLOTS = 600_000
"""Bytes of an nvme tier of some thirty blocks."""


@pytest.fixture(autouse=True)
def _files_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "load_s", lambda _: 1e-9)


@pytest.fixture
def model() -> Any:
    return tiny("llama")


def store_of(tiered: TieredKV) -> NvmeStore:
    store = tiered._runtime.stores[Tier.NVME]
    assert isinstance(store, NvmeStore)
    return store


def labels_of(tiered: TieredKV, name: str) -> list[SlotLabel]:
    """What the blocks of a session that is kept are found by."""
    (record,) = [each for each in tiered._sessions.keeper.records() if each.name == name]
    return record.labels()


def payloads(tiered: TieredKV, labels: list[SlotLabel]) -> list[bytes]:
    """Some bytes of each block as it lies in the files."""
    store, found = store_of(tiered), []
    for slot in store.find_all(labels):
        assert slot is not None
        block = torch.empty(store.shape.block_bytes, dtype=torch.uint8)
        store.read(slot, block)
        found.append(bytes(block[:64].tolist()))
    assert all(any(piece) for piece in found) and len(set(found)) == len(found)
    return found


def num_in_files(folder: Path, pieces: list[bytes]) -> int:
    """How many of them are anywhere in the folder."""
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return sum(any(piece in data for data in files) for piece in pieces)


def flood(tiered: TieredKV, first_seed: int = 1000) -> None:
    """Other prompts, together larger than all tiers."""
    stats = tiered.stats()["tiers"]
    room = sum(tier["num_slots"] for tier in stats.values())
    for number in range(2 * room // 9 + 1):
        tiered.generate(tokens(9 * BLOCK, first_seed + number), max_new_tokens=2, do_sample=False)
    tiered.check_integrity()


def later(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    monkeypatch.setattr("kvtier.session_registry.time", SimpleNamespace(time=lambda: time.time() + by_s))


# -- time to live -----------------------------------------------------------------------------------------------------


def test_what_nobody_used_for_its_time_to_live_is_gone_here_and_after_a_restart(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        for number, (name, ttl) in enumerate((("day", "1d"), ("two", 2 * 86400), ("ever", None), ("pinned", "1h"))):
            ask(tiered, tiered.session(name, ttl=ttl), tokens(100, number))
        tiered.session("pinned").pin()
        pieces = payloads(tiered, labels_of(tiered, "two"))
        later(monkeypatch, 86400 - 60)
        assert len(tiered.sessions()) == 4
        day, two = tiered.session("day"), tiered.session("two")
        later(monkeypatch, 86400 + 60)
        assert {info.name for info in tiered.sessions()} == {"two", "ever", "pinned"}
        with pytest.raises(ClosedError, match="was deleted"):
            day.generate(tokens(10), max_new_tokens=2)
        talk(tiered, two, tokens(100, 1)[:, :0], 100, 1, 1)  # used: from here on it has two days again
    later(monkeypatch, 2.5 * 86400)
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        assert {info.name for info in tiered.sessions()} == {"two", "ever", "pinned"}
        tiered.session("pinned").unpin()
    later(monkeypatch, 3.5 * 86400)
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        assert tiered.session("two").token_ids == []
        assert {info.name for info in tiered.sessions()} == {"two", "ever"}
        assert num_in_files(tmp_path, pieces) == 0
        tiered.session("ever").set_ttl(0)
        later(monkeypatch, 3.6 * 86400)
        tiered.session("two").set_ttl(None)
        assert [info.ttl_s for info in tiered.sessions()] == [math.inf]
        for ttl in (-1, "soon", True, float("nan"), float("inf"), [], "7 parsecs"):
            with pytest.raises(UnsupportedError, match="ttl"):
                tiered.session("two").set_ttl(ttl)  # type: ignore[arg-type]


def test_a_session_that_generates_does_not_expire_meanwhile(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        chat = tiered.session("x", ttl="1h")
        out, _ = ask(tiered, chat, tokens(40))
        seen = []

        def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: seen.append([info.name for info in tiered.sessions()]))
            later(monkeypatch, 2 * 3600)
            thread.start()
            thread.join(30)
            return scores

        chat.generate(out.sequences, max_new_tokens=2, do_sample=False, logits_processor=[look])
        assert seen == [["x"]] * 2
        assert [info.name for info in tiered.sessions()] == ["x"]


def test_an_expired_session_that_cannot_be_deleted_is_in_nobodys_way(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        ask(tiered, tiered.session("old", ttl="1h"), tokens(100))
        later(monkeypatch, 7200)

        def refuse(*_: Any) -> None:
            raise StoreError(5, "no", "there")

        with monkeypatch.context() as patch:
            patch.setattr(NvmeStore, "erase", refuse)
            with caplog.at_level(logging.WARNING):
                ask(tiered, tiered.session("new"), tokens(100, 1))
        assert [text for text in warnings(caplog) if "'old' has expired" in text]
        assert [info.name for info in tiered.sessions()] == ["new"]


# -- pins -------------------------------------------------------------------------------------------------------------


def test_a_pinned_session_survives_a_flood_here_and_where_it_is_not_opened(model: Any, tmp_path: Path) -> None:
    config = keeping(model, tmp_path, nvme=FEW_SLOTS)
    with TieredKV(model, config) as tiered:
        chat = tiered.session("kept")
        ids = talk(tiered, chat, tokens(0), 100, 0, 100)
        loose = talk(tiered, tiered.session("loose"), tokens(0), 100, 1, 100)
        chat.pin()
        flood(tiered)
        ids = talk(tiered, chat, ids, 10, 1, 1 + 10)
        flood(tiered)
    for number in range(2):
        with TieredKV(model, config) as tiered:
            flood(tiered, 2000 + 100 * number)
            assert {info.name: info.is_pinned for info in tiered.sessions()} == {"kept": True, "loose": False}
    with TieredKV(model, config) as tiered:
        ids = talk(tiered, tiered.session("kept"), ids, 10, 2, 1 + 10)
        assert len(tiered.session("loose").cache.token_ids) < loose.shape[1] - 1, "the flood was one"
        tiered.session("kept").unpin()
        flood(tiered)
    with TieredKV(model, config) as tiered:
        flood(tiered, 3000)
    with TieredKV(model, config) as tiered:
        assert len(tiered.session("kept").cache.token_ids) < ids.shape[1] - 1


def test_no_room_for_pinned_sessions_counts_their_blocks_and_says_unpin(model: Any, tmp_path: Path) -> None:
    """`gpu 5/5 blocks (0 pinned)` was said of nothing but pinned ones."""
    config = small_config(model, tmp_path, gpu_slots=5, prefix_cache=True)
    config["tiers"] = {tier: config["tiers"][tier] for tier in ("gpu", "cpu")}
    with TieredKV(model, config) as tiered:
        with pytest.raises(
            CapacityError, match=r"gpu (\d)/\1 blocks \([1-9]\d* pinned\), cpu .*unpin\(\) sessions, drop"
        ):
            for number in range(100):
                session = tiered.session(f"{number}")
                session.generate(tokens(30, number), max_new_tokens=2, do_sample=False)
                session.pin()
        assert number and tiered.session("0").info.is_pinned
        for info in tiered.sessions():
            tiered.session(info.name).unpin()
        session.generate(tokens(30, number), max_new_tokens=2, do_sample=False)
        tiered.check_integrity()


def test_what_a_prompt_took_over_of_a_pinned_session_stays_too(model: Any, tmp_path: Path) -> None:
    """Found by this test: a prompt with the same beginning adopted the blocks, and they were nobody's then."""
    config = keeping(model, tmp_path, nvme=FEW_SLOTS)
    with TieredKV(model, config) as tiered:
        ids = talk(tiered, tiered.session("kept"), tokens(0), 100, 0, 100)
        tiered.session("kept").pin()
    with TieredKV(model, config) as tiered:
        tiered.generate(ids, max_new_tokens=2, do_sample=False)
        flood(tiered)
    with TieredKV(model, config) as tiered:
        talk(tiered, tiered.session("kept"), ids, 10, 2, 1 + 10)


@pytest.mark.parametrize("how", ["unpin", "delete", "edit"])
def test_of_two_pinned_sessions_one_that_goes_takes_nothing_of_the_other(model: Any, tmp_path: Path, how: str) -> None:
    """Found by this test: what they share was pinned no longer."""
    config = keeping(model, tmp_path, nvme=FEW_SLOTS * 3 // 2)

    def goes(chat: Session, ids: torch.Tensor) -> None:
        if how == "edit":
            chat.generate(edited(ids, 20), **GREEDY)
        else:
            getattr(chat, how)()

    with TieredKV(model, config) as tiered:
        ids = talk(tiered, tiered.session("one"), tokens(0), 100, 0, 100)
        tiered.session("one").pin()
        tiered.session("one").fork("two").fork("three")
        goes(tiered.session("two"), ids)
        flood(tiered)
        ids = talk(tiered, tiered.session("one"), ids, 10, 2, 1 + 10)
    with TieredKV(model, config) as tiered:
        goes(tiered.session("three"), ids)
        flood(tiered)
        ids = talk(tiered, tiered.session("one"), ids, 10, 3, 1 + 10)


def test_pins_do_not_pile_up_over_edits(model: Any, tmp_path: Path) -> None:
    """Found by this test: what was edited away stayed pinned, until no tier took another block."""
    config = keeping(model, tmp_path, nvme=FEW_SLOTS)
    with TieredKV(model, config) as tiered:
        chat = tiered.session("x")
        chat.pin()
        ids = tokens(150)
        for number in range(12):
            ask(tiered, chat, edited(ids, 5 + number))
            assert len(tiered._runtime.placement.pinned) <= 2 * len(chat.cache.state.batch.tables[0].blocks)
        flood(tiered)
    with TieredKV(model, config) as tiered:
        assert len(tiered.session("x").token_ids) == 150 + NEW
        assert len(tiered._runtime.placement.reserved) == 0
        chat = tiered.session("x")
        ask(tiered, chat, edited(ids, 1))
        flood(tiered)


@pytest.mark.parametrize("cpu_blocks", [0, 12])
def test_without_files_a_pinned_session_is_not_dropped_either(model: Any, tmp_path: Path, cpu_blocks: int) -> None:
    """Found by this test: only what it held when it was pinned was."""
    with TieredKV(model, keeping(model, tmp_path, gpu_slots=24, cpu_blocks=cpu_blocks, nvme=0)) as tiered:
        chat = tiered.session("x")
        chat.pin()
        ids = talk(tiered, chat, tokens(0), 100, 0, 100)
        caches = []
        for number in range(6):
            caches.append(tiered.new_cache())
            tiered.generate(tokens(5 * BLOCK, number + 1), cache=caches[-1], max_new_tokens=2, do_sample=False)
        assert tiered.stats()["dropped_blocks"] > 0, "others were"
        recomputed = tiered.stats()["recomputed_blocks"]
        talk(tiered, chat, ids, 5, 7, 1 + 5)
        assert tiered.stats()["recomputed_blocks"] == recomputed


# -- delete -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["same process", "opened", "not used"])
def test_what_is_deleted_is_in_no_slot_and_no_file_any_more(model: Any, tmp_path: Path, where: str) -> None:
    config = keeping(model, tmp_path)
    with TieredKV(model, config) as tiered:
        ask(tiered, tiered.session("bob"), tokens(200, 9))
        before = occupied(tiered), tiered.stats()["tiers"]["nvme"]["used_slots"]
        chat = tiered.session("alice")
        ids = talk(tiered, chat, tokens(0), 200, 0, 200)
        ids = talk(tiered, chat, ids, 40, 1, 41)
        labels, others = labels_of(tiered, "alice"), labels_of(tiered, "bob")
        pieces, theirs = payloads(tiered, labels), payloads(tiered, others)
        assert len(pieces) == -(-(ids.shape[1] - 1) // BLOCK)
        if where == "same process":
            chat.delete()
            assert (occupied(tiered), tiered.stats()["tiers"]["nvme"]["used_slots"]) == before
            assert store_of(tiered).copies(labels) == [] and num_in_files(tmp_path, pieces) == 0
    with TieredKV(model, config) as tiered:
        if where != "same process":
            assert num_in_files(tmp_path, pieces) == len(pieces)
            chat = tiered.session("alice")
            assert where == "not used" or chat.token_ids
            chat.delete()
            assert store_of(tiered).copies(labels) == [] and num_in_files(tmp_path, pieces) == 0
            assert occupied(tiered) == 0
        assert [info.name for info in tiered.sessions()] == ["bob"]
        assert num_in_files(tmp_path, theirs) == len(theirs)
        assert ask(tiered, tiered.session("alice"), ids)[1] - NEW == ids.shape[1]
    assert num_in_files(tmp_path, theirs) == len(theirs)


def test_what_is_deleted_is_gone_with_its_earlier_wordings(model: Any, tmp_path: Path) -> None:
    """Found by this test: after an edit its blocks were continued by others in the index, and all stayed; and what was
    computed twice lay in two slots, of which the older one was found again by the next process."""
    config = keeping(model, tmp_path)
    with TieredKV(model, config) as tiered:
        chat = tiered.session("alice")
        ids = ask(tiered, chat, tokens(200))[0].sequences
        labels = labels_of(tiered, "alice")
        pieces = payloads(tiered, labels)
        for at in (150, 100, 50):
            ask(tiered, chat, edited(ids, at))
            labels += labels_of(tiered, "alice")
            pieces += payloads(tiered, labels_of(tiered, "alice"))
            ask(tiered, chat, ids)
        chat.delete()
        assert num_in_files(tmp_path, pieces) == 0 and store_of(tiered).copies(labels) == []
        assert occupied(tiered) == 0
    with TieredKV(model, config) as tiered:
        assert store_of(tiered).copies(labels) == [] and tiered.stats()["tiers"]["nvme"]["found"] == 0
    assert num_in_files(tmp_path, pieces) == 0


def test_what_others_share_stays_until_the_last_of_them_is_deleted(model: Any, tmp_path: Path) -> None:
    config = keeping(model, tmp_path)
    with TieredKV(model, config) as tiered:
        base = ask(tiered, tiered.session("a"), tokens(200))[0].sequences
        tiered.session("a").fork("b")
        ask(tiered, tiered.session("c"), torch.cat([tokens(200)[:, : 5 * BLOCK], tokens(50, 1)], dim=1))
        pieces = payloads(tiered, labels_of(tiered, "a"))
    with TieredKV(model, config) as tiered:
        tiered.session("a").delete()
        assert num_in_files(tmp_path, pieces) == len(pieces), "the fork has them"
        own = talk(tiered, tiered.session("b"), base, 10, 1, 1 + 10)
        assert own.shape[1] > base.shape[1]
    with TieredKV(model, config) as tiered:
        tiered.session("b").delete()
        assert num_in_files(tmp_path, pieces) == 5, "the head that another session begins with"
        tiered.session("c").delete()
        assert num_in_files(tmp_path, pieces) == 0 and tiered.sessions() == []


def test_a_delete_that_failed_is_finished_by_the_next(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by this test: the second one knew nothing any more of what the first had left."""
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        chat = tiered.session("alice")
        ask(tiered, chat, tokens(200))
        labels = labels_of(tiered, "alice")
        pieces = payloads(tiered, labels)
        real, calls = NvmeStore.erase, []

        def erase(store: NvmeStore, slot: Any) -> None:
            calls.append(slot)
            if len(calls) == 4:
                raise StoreError(5, "Input/output error", "there")
            real(store, slot)

        monkeypatch.setattr(NvmeStore, "erase", erase)
        with pytest.raises(StoreError):
            chat.delete()
        tiered.check_integrity()
        assert [info.name for info in tiered.sessions()] == ["alice"]
        assert num_in_files(tmp_path, pieces) == len(pieces) - 3
        chat.delete()
        assert num_in_files(tmp_path, pieces) == 0 and tiered.sessions() == []
        assert store_of(tiered).copies(labels) == []
        tiered.check_integrity()


def test_delete_while_another_thread_generates_is_refused_or_waits(model: Any, tmp_path: Path) -> None:
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        ended, wrong = [], []
        refused = deleted = 0
        expected = model.generate(tokens(60), attention_mask=torch.ones(1, 60), **GREEDY).sequences

        def work() -> None:
            for _ in range(1000):  # on a busy machine most of them are deleted before they have begun
                try:
                    out = tiered.session("x").generate(tokens(60), **GREEDY)
                    ended.append(torch.equal(out.sequences, expected))
                except (ClosedError, UnsupportedError):
                    pass
                except BaseException as error:  # whatever it is, it is looked at later
                    wrong.append(error)
                time.sleep(0.01)  # nobody generates meanwhile
                if wrong or (len(ended) >= 10 and refused and deleted):
                    return

        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            try:
                tiered.session("x").delete()
                deleted += 1
            except UnsupportedError as error:
                assert "another thread" in str(error)
                refused += 1
            time.sleep(0.003)
        thread.join()
        assert not wrong and all(ended) and ended and refused and deleted
        tiered.session("x").delete()
        assert tiered.sessions() == []
        tiered.check_integrity()


# -- disks that fail --------------------------------------------------------------------------------------------------


def damage(folder: Path, how: str) -> None:
    (session,) = folder.rglob("session-*")
    segments = list(folder.rglob("segment-*"))
    if how == "session":
        data = bytearray(session.read_bytes())
        data[len(data) // 2] ^= 1
        session.write_bytes(bytes(data))
    elif how == "missing":
        for path in segments:
            path.unlink()
    elif how == "truncated":
        for path in segments:
            with path.open("r+b") as file:
                file.truncate(5 * 20_000)
    else:
        for path in segments:  # every third page: some headers, some payloads
            with path.open("r+b") as file:
                for at in range(4096, path.stat().st_size, 3 * 4096):
                    file.seek(at + 100)
                    file.write(b"\xa5" * 100)


@pytest.mark.parametrize("how", ["session", "missing", "truncated", "garbled"])
def test_what_is_damaged_is_computed_again(
    model: Any, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        ids = ask(tiered, tiered.session("alice"), tokens(300))[0].sequences
        tiered.session("alice").pin()
    damage(tmp_path, how)
    with caplog.at_level(logging.WARNING), TieredKV(model, keeping(model, tmp_path)) as tiered:
        chat = tiered.session("alice")
        held = chat.cache.token_ids
        assert held == ids[0, : len(held)].tolist() and (how == "garbled" or len(held) < ids.shape[1] - 1)
        ids = ask(tiered, chat, ids)[0].sequences
    if how == "session":
        assert len([text for text in warnings(caplog) if "session files cannot be used" in text]) == 1
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        assert tiered.session("alice").token_ids == ids[0, :-1].tolist()
        ask(tiered, tiered.session("alice"), ids)


def test_a_full_disk_at_a_save_is_one_warning_and_the_older_state_stands(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = keeping(model, tmp_path, gpu_slots=40, cpu_blocks=8)
    with TieredKV(model, config) as tiered:
        chat = tiered.session("alice")
        older = ids = talk(tiered, chat, tokens(0), 100, 0, 100)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN, "Python ignores it, so that it is an error"
        with caplog.at_level(logging.WARNING):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            try:
                ids = talk(tiered, chat, ids, 20, 1, 21)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        ours = [text for text in warnings(caplog) if "'alice'" in text]
        assert len(ours) == 1 and "is not kept" in ours[0], "the others are the tier's own"
        (record,) = tiered._sessions.keeper.records()
        assert record.token_ids.tolist() == older[0, :-1].tolist()
        time.sleep(1.1)  # the tier rests for a second
        for seed in range(2, 5):  # and then tries one write before it takes more
            ids = talk(tiered, chat, ids, 20, seed, 21)
    with TieredKV(model, config) as tiered:
        assert tiered.session("alice").token_ids == ids[0, :-1].tolist(), "there was room again"


def test_a_disk_that_is_full_for_a_while_costs_what_was_said_meanwhile_at_most(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here; a limit of the process stands for a full disk, above")
    (tmp_path / "disk").mkdir()
    command = ["unshare", "-rm", sys.executable, "-m", "tests.fault.session_limits", str(tmp_path / "disk")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_folder_that_turns_read_only_refuses_deletions_and_keeps_what_it_has(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with TieredKV(model, keeping(model, tmp_path, gpu_slots=40)) as tiered:
        chat = tiered.session("alice")
        older = talk(tiered, chat, tokens(0), 100, 0, 100)

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        with monkeypatch.context() as patch:
            for function in ("pwrite", "rename", "unlink"):
                patch.setattr(os, function, refuse)
            with caplog.at_level(logging.WARNING):
                ids = talk(tiered, chat, older, 20, 1, 21)
            assert len([text for text in warnings(caplog) if "'alice' is not kept" in text]) == 1
            for change in (chat.pin, lambda: chat.set_ttl("1d"), tiered.session("alice").delete):
                with pytest.raises(StoreError, match="Read-only file system"):
                    change()
            (info,) = tiered.sessions()
            assert info.name == "alice" and not info.is_pinned and info.ttl_s == math.inf
            tiered.check_integrity()
        assert ask(tiered, chat, ids)[1] > 0
        tiered.session("alice").delete()
        assert tiered.sessions() == [] and not list(tmp_path.rglob("session-*"))
        tiered.check_integrity()


def test_a_limit_to_writes_that_is_used_up_is_one_warning_a_turn(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = keeping(model, tmp_path, gpu_slots=60, cpu_blocks=8)
    config["tiers"]["nvme"]["max_writes"] = "200kB/day"
    with caplog.at_level(logging.WARNING), TieredKV(model, config) as tiered:
        chat = tiered.session("alice")
        ids = talk(tiered, chat, tokens(0), 300, 0, 300)
        talk(tiered, chat, ids, 20, 1, 21)
    assert any("'alice'" in text for text in warnings(caplog))
    with TieredKV(model, config) as tiered:
        held = tiered.session("alice").cache.token_ids
        assert held == ids[0, : len(held)].tolist()
        ask(tiered, tiered.session("alice"), ids)
