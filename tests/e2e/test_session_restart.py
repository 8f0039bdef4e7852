"""Sessions over several wrappers of one folder: what was said is not computed again, and no logit is another."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.errors import SessionExistsError, UnsupportedError
from kvtier.labels import Labels
from kvtier.runtime import Runtime
from kvtier.session import Session
from kvtier.types import Tier
from tests.e2e.families import BLOCK, GREEDY, occupied, small_config, tiny, tokens
from tests.e2e.test_session import ask, edited

NEW = GREEDY["max_new_tokens"] - 1  # the last one is not computed


@pytest.fixture
def model() -> Any:
    return tiny("llama")


def keeping(model: Any, folder: Path, **values: Any) -> dict[str, Any]:
    """Budgets of a few blocks of memory; sessions outlive the wrapper."""
    return small_config(model, folder, **{"prefix_cache": True, **values})


def talk(
    tiered: TieredKV, chat: Session, ids: torch.Tensor, said: int, seed: int, expected: int, more: int = 0
) -> torch.Tensor:
    """One turn longer, `expected` tokens of it computed, or up to `more` beyond; the transcript with its answer."""
    ids = torch.cat([ids, tokens(said, seed)], dim=1)
    out, computed = ask(tiered, chat, ids)
    assert expected <= computed - NEW <= expected + more
    return out.sequences


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def _files_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is used, however long the machine takes for it today: computed tokens are counted here."""
    monkeypatch.setattr(Runtime, "load_s", lambda _: 1e-9)


# -- what is resumed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["blockwise", "gathered"])
def test_a_conversation_goes_on_over_five_wrappers_its_tail_too(model: Any, tmp_path: Path, mode: str) -> None:
    ids = torch.zeros((1, 0), dtype=torch.long)
    for number in range(5):
        with TieredKV(model, keeping(model, tmp_path, mode=mode)) as tiered:
            chat = tiered.session("alice")
            assert chat.token_ids == ids[0, :-1].tolist(), "all, the tail too"
            ids = talk(tiered, chat, ids, 200 if number == 0 else 10, number, 200 if number == 0 else 11)
            ids = talk(tiered, chat, ids, 7, 50 + number, 1 + 7)
            if number:
                assert tiered.stats()["nvme_sole_reads"] > 0, "some of it came from files"


@pytest.mark.parametrize("length", [1, BLOCK - 19, BLOCK - 18, 3 * BLOCK - 19, 3 * BLOCK - 18, 3 * BLOCK - 17])
def test_lengths_around_a_whole_block_are_resumed_to_the_last_token(model: Any, tmp_path: Path, length: int) -> None:
    ids = tokens(max(1, length))
    for _ in range(2):
        with TieredKV(model, keeping(model, tmp_path)) as tiered:
            out, _ = ask(tiered, tiered.session("x"), ids)
        with TieredKV(model, keeping(model, tmp_path)) as tiered:
            chat = tiered.session("x")
            assert chat.token_ids == out.sequences[0, :-1].tolist()
            out, computed = ask(tiered, chat, out.sequences)
            assert computed - NEW == 1
            ids = out.sequences


def test_edits_anywhere_after_a_restart_keep_what_lies_before(model: Any, tmp_path: Path) -> None:
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        ids = ask(tiered, tiered.session("x"), tokens(300))[0].sequences
    for at in (ids.shape[1] - 2, 200, 37, BLOCK, BLOCK - 1, 0):
        with TieredKV(model, keeping(model, tmp_path)) as tiered:
            chat = tiered.session("x")
            assert chat.token_ids == ids[0, :-1].tolist()
            ids = edited(ids, at)[:, : max(at + 1, 250)]
            out, computed = ask(tiered, chat, ids)
            assert computed - NEW == ids.shape[1] - at
            ids = out.sequences
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        out, computed = ask(tiered, tiered.session("x"), ids[:, :100])
        assert computed - NEW == 1, "shorter than what was kept"


def test_forks_are_sessions_of_their_own_after_a_restart(model: Any, tmp_path: Path) -> None:
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        base = ask(tiered, tiered.session("a"), tokens(200))[0].sequences
        tiered.session("a").fork("b").fork("c")
    transcripts = dict.fromkeys("abc", base)
    for number in range(3):
        with TieredKV(model, keeping(model, tmp_path)) as tiered:
            with pytest.raises(SessionExistsError, match="'b' already"):
                tiered.session("a").fork("b")
            for name, ids in transcripts.items():
                seed = 10 * number + ord(name)
                # The last tokens of a block are there for the first that goes on; the others compute them.
                more = 0 if number or name == "a" else BLOCK - 1
                transcripts[name] = talk(tiered, tiered.session(name), ids, 20, seed, 1 + 20, more)
            assert [info.name for info in tiered.sessions()] == ["c", "b", "a"]
        with TieredKV(model, keeping(model, tmp_path)) as tiered:
            if number == 1:
                tiered.session("a").delete()
                del transcripts["a"]
            for name, ids in transcripts.items():
                assert tiered.session(name).token_ids == ids[0, :-1].tolist()


def test_sessions_that_begin_alike_share_their_head_in_files_too(model: Any, tmp_path: Path) -> None:
    head = tokens(10 * BLOCK)
    names = [f"user {number}" for number in range(4)]
    transcripts = {}
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        for number, name in enumerate(names):
            expected = 50 if number else 10 * BLOCK + 50
            transcripts[name] = talk(tiered, tiered.session(name), head, 50, number, expected)
        alone = -(-(10 * BLOCK + 50 + NEW) // BLOCK)
        assert tiered.stats()["tiers"]["nvme"]["used_slots"] <= 10 + 4 * (alone - 10)
    for number in range(3):
        with TieredKV(model, keeping(model, tmp_path)) as tiered:
            for name in names:
                transcripts[name] = talk(tiered, tiered.session(name), transcripts[name], 11, number, 1 + 11)
            tables = [tiered.session(name).cache.state.batch.tables[0] for name in names]
            assert len({tuple(table.blocks[:10]) for table in tables}) == 1


def test_what_could_not_be_proven_at_the_end_of_a_turn_is_kept_by_close_its_tail_too(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by this test: of a model that takes long to hash `close` kept full blocks alone, and turns complained."""
    monkeypatch.setattr(Labels, "_may_hash_now", lambda *_: False)
    monkeypatch.setattr(Labels, "_may_hash_beside", lambda *_: False)
    ids, short = torch.zeros((1, 0), dtype=torch.long), tokens(3)
    for number in range(2):
        with caplog.at_level(logging.WARNING), TieredKV(model, keeping(model, tmp_path)) as tiered:
            for turn in range(2):
                expected = 1 + 71 if number + turn else 71
                ids = talk(tiered, tiered.session("x"), ids, 71, 10 * number + turn, expected)
            short = tiered.session("short").generate(short, max_new_tokens=2, do_sample=False)
        with TieredKV(model, keeping(model, tmp_path)) as tiered:
            assert tiered.session("x").token_ids == ids[0, :-1].tolist()
            assert tiered.session("short").token_ids == short[0, :-1].tolist()
    assert warnings(caplog) == []


def test_a_session_is_resumed_beside_a_prompt_of_the_same_head_that_lies_in_memory(model: Any, tmp_path: Path) -> None:
    """Found by this test: blocks without a copy in files were listed as kept there."""
    config = keeping(model, tmp_path, gpu_slots=40, cpu_blocks=8)
    with TieredKV(model, config) as tiered:
        ids = ask(tiered, tiered.session("x"), tokens(100))[0].sequences
    for path in (tmp_path / "nvme").rglob("segment-*"):
        path.unlink()
    with TieredKV(model, config) as tiered:
        tiered.generate(tokens(100), max_new_tokens=2, do_sample=False)
        chat = tiered.session("x")
        assert len(chat.cache.token_ids) == 100 // BLOCK * BLOCK
        tiered.check_integrity()
        ask(tiered, chat, ids)
        for seed in range(30):
            tiered.generate(tokens(150, seed + 1), max_new_tokens=2, do_sample=False)
            tiered.check_integrity()


# -- whose it is ------------------------------------------------------------------------------------------------------


def test_the_same_name_under_two_salts_is_two_conversations_after_a_restart_too(model: Any, tmp_path: Path) -> None:
    transcripts: dict[Any, torch.Tensor] = {}
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        for number, salt in enumerate(("", "one", "two", b"one")):
            _, computed = out = ask(tiered, tiered.session("alice", salt=salt), tokens(100))
            assert computed - NEW == 100, "nothing of another salt is found"
            transcripts[salt] = talk(tiered, tiered.session("alice", salt=salt), out[0].sequences, 20, number, 21)
    for _ in range(2):
        with TieredKV(model, keeping(model, tmp_path)) as tiered:
            for number, (salt, ids) in enumerate(transcripts.items()):
                chat = tiered.session("alice", salt=salt)
                assert chat.token_ids == ids[0, :-1].tolist()
                assert [info.name for info in tiered.sessions(salt=salt)] == ["alice"]
                transcripts[salt] = talk(tiered, chat, ids, 9, 70 + number, 1 + 9)
            assert tiered.sessions(salt="three") == []
    assert not any("one" in path.name or b"one" in path.read_bytes()[:4096] for path in tmp_path.rglob("session-*"))


NAMES = [
    "alice", "Alice", "ünï 漢字 🎈", "'quoted' \"twice\" `thrice`", "a/b\\c", "..", ".", "../../etc/passwd", "-rf",
    "%s %d", "session-00", " ", "x" * 10_000, "x" * 9_999 + "y", "$(id)", "'; DROP TABLE sessions; --",
]  # fmt: skip


def test_any_printable_name_is_a_session_and_never_a_path(model: Any, tmp_path: Path) -> None:
    roomy = keeping(model, tmp_path, nvme=16 << 20)
    with TieredKV(model, roomy) as tiered:
        for number, name in enumerate(NAMES):
            tiered.session(name).generate(tokens(20 + number, number), max_new_tokens=2, do_sample=False)
    with TieredKV(model, roomy) as tiered:
        assert {info.name: info.tokens for info in tiered.sessions()} == {
            name: 21 + number for number, name in enumerate(NAMES)
        }
        for number, name in enumerate(NAMES):
            assert tiered.session(name).token_ids[: 20 + number] == tokens(20 + number, number)[0].tolist()
        for name in ("a\nb", "a\x00b", "\x1b[2J", "", "a\u2028b", "\ud800", 7, None, b"alice"):
            with pytest.raises(UnsupportedError, match="printable"):
                tiered.session(name)  # type: ignore[arg-type]
        assert len(tiered.sessions()) == len(NAMES)
        for name in NAMES:
            tiered.session(name).delete()
    known = ("segment-", "namespace-", "lock", "session-", "writes")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.name.startswith(known) for path in files) and not list(tmp_path.rglob("session-*"))


def test_what_is_listed_of_sessions(model: Any, tmp_path: Path) -> None:
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        assert tiered.sessions() == []
        for name, count in (("long", 300), ("short", 10)):
            ask(tiered, tiered.session(name), tokens(count))
        long = next(info for info in tiered.sessions() if info.name == "long")
        block_bytes = tiered._runtime.group.shape.block_bytes
        assert long.tokens == 300 + NEW
        assert long.bytes_per_tier["nvme"] == -(-(300 + NEW) // BLOCK) * block_bytes, "the tail too"
        assert 0 <= long.age_s < 60 and long.created_s <= long.used_s
        assert not long.is_pinned and long.ttl_s == float("inf")
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        again = {info.name: info for info in tiered.sessions()}
        assert list(again) == ["short", "long"], "last used first"
        assert again["long"].tokens == long.tokens and again["long"].used_s == long.used_s
        assert again["long"].bytes_per_tier == {"gpu": 0, "cpu": 0, "nvme": long.bytes_per_tier["nvme"]}
        assert tiered.session("short").info == again["short"]


# -- another model ----------------------------------------------------------------------------------------------------


def test_a_session_of_a_model_that_changed_by_one_weight_begins_anew(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TieredKV(model, keeping(model, tmp_path)) as tiered:
        ids = ask(tiered, tiered.session("alice"), tokens(300))[0].sequences
    weight = model.model.layers[1].self_attn.k_proj.weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[0, 0] += 0.5
        with caplog.at_level(logging.WARNING), TieredKV(model, keeping(model, tmp_path)) as tiered:
            chat = tiered.session("alice")
            out, computed = ask(tiered, chat, ids)
            assert computed - NEW == ids.shape[1]
            talk(tiered, chat, out.sequences, 20, 1, 21)
        assert (
            len(warnings(caplog)) == 1 and "'alice'" in warnings(caplog)[0] and "another model" in warnings(caplog)[0]
        )
        with TieredKV(model, keeping(model, tmp_path)) as tiered:
            assert len(tiered.session("alice").token_ids) == ids.shape[1] + 19 + 20 + 20
    finally:
        with torch.no_grad():
            weight.copy_(before)


@pytest.mark.parametrize("without", ["path", "nvme"])
def test_where_nothing_is_kept_a_restart_begins_anew_without_a_word(
    model: Any, tmp_path: Path, without: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = keeping(model, tmp_path)
    if without == "path":
        del config["tiers"]["nvme"]["path"]
    else:
        config = keeping(model, tmp_path, gpu_slots=40, nvme=0)
    for _ in range(2):
        with caplog.at_level(logging.WARNING), TieredKV(model, config) as tiered:
            assert tiered.sessions() == []
            chat = tiered.session("alice", ttl="7d")
            ids = talk(tiered, chat, torch.zeros((1, 0), dtype=torch.long), 300, 0, 300)
            chat.pin()
            talk(tiered, chat, ids, 20, 1, 21)
            chat.unpin()
            assert [info.ttl_s for info in tiered.sessions()] == [7 * 86400]
            chat.fork("twin")
            chat.delete()
            assert [info.name for info in tiered.sessions()] == ["twin"]
    assert not list(tmp_path.rglob("session-*")) and warnings(caplog) == []


def test_without_the_prefix_cache_sessions_are_kept_and_deleted_all_the_same(model: Any, tmp_path: Path) -> None:
    config, ids = keeping(model, tmp_path, prefix_cache=False), torch.zeros((1, 0), dtype=torch.long)
    for number in range(3):
        with TieredKV(model, config) as tiered:
            chat = tiered.session("alice")
            assert chat.token_ids == ids[0, :-1].tolist()
            ids = talk(tiered, chat, ids, 100, number, 100 + (number > 0))
            chat.pin()
    with TieredKV(model, config) as tiered:
        tiered.session("alice").delete()
        assert occupied(tiered) == 0 and tiered.sessions() == []
    with TieredKV(model, config) as tiered:
        assert tiered.session("alice").token_ids == [] and tiered.stats()["tiers"]["nvme"]["found"] == 0


def test_a_share_of_a_folder_keeps_nothing_and_the_owner_everything(model: Any, tmp_path: Path) -> None:
    other = tiny("qwen2")

    def config(of: Any) -> dict[str, Any]:
        values = keeping(of, tmp_path)
        values["tiers"]["nvme"]["on_locked"] = "subfolder"
        return values

    with TieredKV(model, config(model)) as first, TieredKV(other, config(other)) as second:
        kept = ask(first, first.session("alice"), tokens(300))[0].sequences
        assert second.sessions() == []
        ask(second, second.session("alice"), tokens(300))
        second.session("alice").delete()
    with TieredKV(model, config(model)) as first:
        assert first.session("alice").token_ids == kept[0, :-1].tolist()
        talk(first, first.session("alice"), kept, 20, 1, 21)


def test_threads_on_sessions_of_their_own_are_all_resumed(model: Any, tmp_path: Path) -> None:
    transcripts = {f"user {number}": tokens(80 + 30 * number, number) for number in range(3)}
    for _ in range(3):
        wrong: list[BaseException] = []
        with TieredKV(model, keeping(model, tmp_path, rows=3)) as tiered:

            def work(name: str, tiered: TieredKV = tiered, wrong: list[BaseException] = wrong) -> None:
                try:
                    out = tiered.session(name).generate(transcripts[name], **GREEDY)
                    transcripts[name] = torch.cat([out.sequences, tokens(10, len(name))], dim=1)
                except BaseException as error:  # whatever it is, it is looked at later
                    wrong.append(error)

            threads = [threading.Thread(target=work, args=(name,)) for name in transcripts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not wrong
            tiered.check_integrity()
    with TieredKV(model, keeping(model, tmp_path, rows=3)) as tiered:
        for name, ids in transcripts.items():
            _, computed = ask(tiered, tiered.session(name), ids)
            assert computed - NEW == 1 + 10


def test_the_page_on_sessions_has_an_example_that_runs(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    page = (Path(__file__).parents[2] / "docs" / "sessions.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {"model": model, "torch": torch, "TieredKV": TieredKV}
    names |= {"alice_ids": tokens(40), "next_question_ids": tokens(9)}
    exec(compile(example, "docs/sessions.md", "exec"), names)
    assert capsys.readouterr().out.startswith("alice 88 {")
    assert list(tmp_path.rglob("segment-*")) and not list(tmp_path.rglob("session-*"))


def test_what_a_deleted_session_left_behind_a_tail_is_not_written_with_it(model: Any, tmp_path: Path) -> None:
    with TieredKV(model, keeping(model, tmp_path, gpu_slots=40)) as tiered:
        secret = tiered.session("secret")
        secret.generate(tokens(40 * BLOCK - 30, 77), **GREEDY)
        runtime = tiered._runtime
        slabs = runtime.stores[Tier.GPU]
        found = [runtime.placement.residency[block].copies for block in secret.cache.state.batch.tables[0].blocks]
        slots = [copies[Tier.GPU] for copies in found if Tier.GPU in copies]
        shape = runtime.group.shape
        data, ends = torch.empty(shape.block_bytes, dtype=torch.uint8), []
        for slot in slots:
            slabs.read(slot, data)
            ends.append(data[shape.key_bytes - 64 : shape.key_bytes].numpy().tobytes())
        assert any(any(end) for end in ends)
        secret.delete()
        others = [tiered.session(f"other {number}") for number in range(6)]
        for number, other in enumerate(others):
            other.generate(tokens(3, number), max_new_tokens=2)
        used = {copies[Tier.GPU] for o in others if (copies := _copies(runtime, o)) and Tier.GPU in copies}
        assert used & set(slots), "a tail lies where the secret was"
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("segment-*"))
    assert not any(end in written for end in ends if any(end))


def _copies(runtime: Any, session: Any) -> Any:
    return runtime.placement.residency[session.cache.state.batch.tables[0].blocks[-1]].copies


def test_a_conversation_whose_blocks_are_gone_keeps_its_words(model: Any, tmp_path: Path) -> None:
    config = keeping(model, tmp_path)
    with TieredKV(model, config) as tiered:
        ids = talk(tiered, tiered.session("alice"), torch.zeros((1, 0), dtype=torch.long), 100, 0, 100)
    for path in tmp_path.rglob("segment-*"):
        path.unlink()
    with TieredKV(model, config) as tiered:
        chat = tiered.session("alice")
        assert chat.token_ids == ids[0, :-1].tolist() and chat.cache.token_ids == []
        assert tiered.session("alice").token_ids == chat.token_ids
        ids = talk(tiered, chat, ids, 20, 1, ids.shape[1] + 20)
        assert chat.token_ids == chat.cache.token_ids == ids[0, :-1].tolist()


def test_where_files_have_less_room_the_session_used_last_is_kept_whole(model: Any, tmp_path: Path) -> None:
    """Found wrong: conversations that were not used for longest kept all room, the latest one found nothing, and what
    was written of one took the slots of what had just been written of it."""
    values = keeping(model, tmp_path, cpu_blocks=0, gpu_slots=40, nvme=96 * 12 * 1024)
    names = [f"user {number}" for number in range(5)]
    with TieredKV(model, values) as tiered:
        num_slots = tiered.stats()["tiers"]["nvme"]["num_slots"]
        num_tokens = BLOCK * (num_slots // 4) + 5
        for number, name in enumerate(names):
            tiered.session(name).generate(tokens(num_tokens, number), **GREEDY)
            if number == 1:
                tiered.session(name).pin()
    with TieredKV(model, values) as tiered:
        held = {info.name: info.bytes_per_tier["nvme"] for info in tiered.sessions()}
        assert held["user 4"] == held["user 3"] <= held["user 1"] and held["user 4"] > held["user 0"], held
        before = tiered.stats()["tokens"]
        ids = tiered.session("user 4").token_ids
        tiered.session("user 4").generate(torch.cat([torch.tensor([ids]), tokens(3, 99)], dim=1), **GREEDY)
        assert tiered.stats()["tokens"] - before == 3 + GREEDY["max_new_tokens"] - 1


@pytest.mark.parametrize("why", ["takes nothing", "no label"])
def test_nobody_lets_go_for_a_session_that_room_would_not_help(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    values = keeping(model, tmp_path, cpu_blocks=0, gpu_slots=40, nvme=96 * 12 * 1024)
    with TieredKV(model, values) as tiered:
        num_tokens = BLOCK * (tiered.stats()["tiers"]["nvme"]["num_slots"] // 4) + 5
        for number in range(5):
            tiered.session(f"user {number}").generate(tokens(num_tokens, number), **GREEDY)
        placement, let_go = tiered._runtime.placement, list[Any]()
        if why == "takes nothing":
            monkeypatch.setattr(placement, "takes", lambda tier, early=False: False)
        else:
            monkeypatch.setattr(placement, "label_of", lambda sealed: None)
        monkeypatch.setattr(tiered._runtime.manager, "truncate", lambda *of: let_go.append(of))
        assert tiered._sessions.keeper.behind
    assert not let_go
