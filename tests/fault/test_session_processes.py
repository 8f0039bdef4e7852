"""Sessions and several processes: forks, two on one folder, interpreters that end without close()."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.errors import FolderInUseError
from tests.e2e.families import tiny, tokens
from tests.e2e.test_session import ask
from tests.e2e.test_session_restart import keeping
from tests.fault.starter import Starter, say, starter
from tests.fault.test_processes import in_child, refused

BRIEF: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
KEPT: list[Any] = []


@pytest.fixture(scope="module")
def children() -> Iterator[Starter]:
    with starter() as it:
        yield it


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("session-*"))


def test_a_forked_child_takes_no_session_from_its_parent(tmp_path: Path) -> None:
    """Found by this test: `delete` in a child erased its parent's files."""
    model = tiny()
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        chat, other = tiered.session("alice"), tiered.session("bob", ttl="7d")
        ids = ask(tiered, chat, tokens(200))[0].sequences
        ask(tiered, other, tokens(50, 1))
        before, held = names_of(tmp_path), chat.token_ids
        acts: list[Callable[[], Any]] = [
            chat.delete, chat.pin, lambda: chat.set_ttl(0), lambda: chat.fork("twin"), tiered.sessions,
            lambda: chat.info,
            lambda: chat.generate(tokens(10), **BRIEF), lambda: tiered.session("new"), lambda: chat.token_ids,
            lambda: tiered.session("bob", ttl=0), other.delete,
        ]  # fmt: skip
        for number, act in enumerate(acts):
            pid = os.fork()
            if pid == 0:
                in_child(lambda act=act: (refused(act), chat.close(), tiered.close()))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, number
            assert names_of(tmp_path) == before
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert chat.token_ids == held
        ids = ask(tiered, chat, torch.cat([ids, tokens(20, 2)], dim=1))[0].sequences
        tiered.check_integrity()
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        assert tiered.session("alice").token_ids == ids[0, :-1].tolist()
        assert {info.name for info in tiered.sessions()} == {"alice", "bob"}


def talk_and_leave(folder: str, way: str) -> None:
    """In the child: a turn of a session, then the program's end."""
    model = tiny()
    tiered = TieredKV(model, keeping(model, Path(folder)))
    chat = tiered.session("alice")
    out = chat.generate(torch.tensor([[*chat.token_ids, *tokens(70, len(way))[0].tolist()]]), **BRIEF)
    tiered.session("twin").generate(tokens(60), **BRIEF)
    say("ids", *out[0].tolist())
    KEPT.append((tiered, chat))
    if way == "dropped":
        KEPT.clear()
        del tiered, chat
    elif way == "sys_exit":
        sys.exit(0)
    elif way == "exception":
        raise RuntimeError("the program's own")
    elif way == "by force":
        os._exit(0)


@pytest.mark.parametrize("way", ["the end", "dropped", "sys_exit", "exception", "by force"])
def test_a_program_that_ends_without_close_has_kept_its_sessions(way: str, children: Starter, tmp_path: Path) -> None:
    model = tiny()
    for _ in range(2):
        ended = children.run("tests.fault.test_session_processes:talk_and_leave", folder=str(tmp_path), way=way)
        (line,) = ended.lines
        ids = [int(each) for each in line.split()[1:]]
        assert ("Traceback" in ended.errors) is (way == "exception") and ended.status == (way == "exception"), ended
    assert len(ids) == 2 * 75 - 1
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        chat = tiered.session("alice")
        assert chat.token_ids == ids[:-1]
        ask(tiered, chat, torch.tensor([[*ids, 5, 6, 7]]))


def open_it_too(folder: str) -> None:
    """In the child: the folder is somebody's."""
    model = tiny()
    try:
        TieredKV(model, keeping(model, Path(folder)))
    except FolderInUseError as error:
        say("in use", "belongs to process" in str(error))
    config = keeping(model, Path(folder))
    config["tiers"]["nvme"]["on_locked"] = "subfolder"
    with TieredKV(model, config) as tiered:
        say("sessions", len(tiered.sessions()))
        tiered.session("alice").generate(tokens(300, 3), **BRIEF)
        tiered.session("alice").delete()


def test_of_two_processes_on_one_folder_one_has_its_sessions(children: Starter, tmp_path: Path) -> None:
    model = tiny()
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        chat = tiered.session("alice")
        ids = ask(tiered, chat, tokens(200))[0].sequences
        before = names_of(tmp_path)
        ended = children.run("tests.fault.test_session_processes:open_it_too", folder=str(tmp_path))
        assert ended.lines == ["in use True", "sessions 0"] and ended.status == 0, ended
        assert names_of(tmp_path) == before
        ids = ask(tiered, chat, torch.cat([ids, tokens(20, 2)], dim=1))[0].sequences
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        assert tiered.session("alice").token_ids == ids[0, :-1].tolist()
