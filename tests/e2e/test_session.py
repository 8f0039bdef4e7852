"""Sessions: whole transcripts in, only what differs computed, whatever was edited, with the plain model's logits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from kvtier import TieredKV
from kvtier.errors import ClosedError, KVTierError, SessionExistsError, UnsupportedError
from kvtier.session import Session
from tests.e2e.families import (
    CHUNK,
    FAMILIES,
    GREEDY,
    MODES,
    assert_same,
    mode_of,
    occupied,
    small_config,
    tiny,
    tiny_from,
    tokens,
)  # fmt: skip


def plain(model: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
    """What the model answers to the whole transcript with nothing held."""
    mask = torch.ones_like(ids)
    cache = DynamicCache(config=model.config)
    return model.generate(ids, attention_mask=mask, cache=cache, prefill_chunk_size=CHUNK, **{**GREEDY, **kwargs})


def ask(tiered: TieredKV, chat: Session, ids: torch.Tensor, **kwargs: Any) -> tuple[Any, int]:
    """The session's answer, compared with the plain model's, and how many tokens were computed for it."""
    before = tiered.stats()["tokens"]
    out = chat.generate(input_ids=ids, **{**GREEDY, **kwargs})
    # Where a session goes on inside what was one chunk, other kernels ran: the bits are not promised, the tolerance is.
    assert_same(out, plain(tiered.model, ids, **kwargs), "blockwise")
    tiered.check_integrity()
    return out, tiered.stats()["tokens"] - before


@pytest.fixture(params=MODES)
def tiered(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredKV]:
    """As everywhere, with slots for the chunk of three rows."""
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path, request.param, gpu_slots=12)) as wrapper:
        yield wrapper
        wrapper.check_integrity()


def edited(ids: torch.Tensor, at: int) -> torch.Tensor:
    return ids.index_fill(1, torch.tensor([at]), int(ids[0, at]) % 200 + 7)


def test_only_what_differs_is_computed(tiered: TieredKV) -> None:
    chat = tiered.session("alice")
    ids = tokens(300)
    out, computed = ask(tiered, chat, ids)
    assert computed == 300 + 19
    assert chat.token_ids == out.sequences[0, :-1].tolist()
    # One turn longer.
    ids = torch.cat([out.sequences, tokens(30, 1)], dim=1)
    out, computed = ask(tiered, chat, ids)
    assert computed == 1 + 30 + 19
    # The same again, as a retry does: only the last token's logits are missing.
    again, computed = ask(tiered, chat, ids)
    assert computed == 1 + 19 and torch.equal(again.sequences, out.sequences)
    # Edited in the tail, in a full block, at the first token; then shorter than what is held.
    for at in (ids.shape[1] - 2, 37, 0):
        _, computed = ask(tiered, chat, edited(ids, at))
        assert computed == ids.shape[1] - at + 19
    _, computed = ask(tiered, chat, edited(ids, 0)[:, :100])
    assert computed == 1 + 19
    assert tiered.stats()["nvme_sole_reads"] > 0


def reused(tiered: TieredKV) -> int:
    return sum(tiered.stats()["reused_tokens"].values())


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=str)
def test_what_sessions_and_caches_hold_counts_as_reused(how: dict[str, Any], tmp_path: Path) -> None:
    """The prompt's tokens are those that were computed and those that were reused, whoever held or found them."""
    model, ids = tiny(), tokens(120)
    values = small_config(model, tmp_path, rows=3, gpu_slots=12, prefix_cache=True)
    for _ in range(2):  # in the second process the session is found in files
        with TieredKV(model, values) as tiered:
            chat, held = tiered.session("alice"), 0
            found = tiered.stats()["prefix_cache"]["reused_tokens"]
            for seed in range(3):
                held, before = chat.cache.get_seq_length(), reused(tiered)
                out = chat.generate(ids, **{**GREEDY, **how})
                assert reused(tiered) - before == min(held, ids.shape[1] - 1)
                ids = torch.cat([out.sequences, tokens(30, seed + 1)], dim=1)
            assert held > 150 and tiered.stats()["prefix_cache"]["reused_tokens"] == found, "nothing was looked up"
            # Edited: what lies behind the edit is not reused.
            before = reused(tiered)
            chat.generate(edited(ids, 100), **GREEDY)
            assert reused(tiered) - before == 100
            chat.generate(ids, **GREEDY)  # 100 held
            # A cache of its own, turn after turn; at first it finds what the session has computed.
            cache, before = tiered.new_cache(), reused(tiered)
            out = tiered.generate(ids, cache=cache, **GREEDY)
            looked_up = sum(tiered.stats()["prefix_cache"]["reused_tokens"].values()) - sum(found.values())
            assert reused(tiered) - before == looked_up > 0
            held = cache.get_seq_length()
            tiered.generate(torch.cat([out.sequences, tokens(9)], dim=1), cache=cache, **GREEDY)
            assert reused(tiered) - before == looked_up + held == sum(cache.stats()["reused_tokens"].values())


@pytest.mark.parametrize("at", [0, 1, 15, 16, 17, 150, 318])
def test_an_edit_anywhere_keeps_exactly_what_lies_before(at: int, tmp_path: Path) -> None:
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        chat = tiered.session("x")
        out, _ = ask(tiered, chat, tokens(300))
        _, computed = ask(tiered, chat, edited(out.sequences, at))
        assert computed == out.sequences.shape[1] - at + 19
        out, computed = ask(tiered, chat, out.sequences)
        assert computed == out.sequences.shape[1] - 20 - at + 19


@pytest.mark.parametrize("how", [
    {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 4},
], ids=str)  # fmt: skip
@pytest.mark.sampled
def test_other_modes_go_on_with_what_is_held(how: dict[str, Any], tiered: TieredKV) -> None:
    chat, ids = tiered.session("x"), tokens(120)
    for turn in range(3):
        out, computed = ask(tiered, chat, ids, **how)
        assert chat.cache.batch_size == 1
        assert chat.token_ids == out.sequences[0, : len(chat.token_ids)].tolist()
        assert len(chat.token_ids) >= ids.shape[1]
        if turn and "num_beams" not in how:
            assert computed <= 31 + 20 * 5
        ids = torch.cat([out.sequences[:1], tokens(30, turn)], dim=1)
    # One row again, greedy.
    _, computed = ask(tiered, chat, ids)
    assert computed <= 31 + 19


def test_an_assistant_model_in_a_session(tiered: TieredKV) -> None:
    chat, ids = tiered.session("x"), tokens(120)
    for turn in range(3):
        out, _ = ask(tiered, chat, ids, assistant_model=tiny("qwen2"))
        ids = torch.cat([out.sequences, tokens(30, turn)], dim=1)


def test_close_keeps_and_delete_frees(tiered: TieredKV) -> None:
    with tiered.session("alice") as chat:
        out, _ = ask(tiered, chat, tokens(100))
    for use in (lambda: chat.token_ids, lambda: chat.generate(tokens(3)), lambda: chat.fork("other")):
        with pytest.raises(ClosedError, match=r"alice.*tiered\.session"):
            use()
    again = tiered.session("alice")
    assert again.token_ids == out.sequences[0, :-1].tolist()
    _, computed = ask(tiered, again, out.sequences)
    assert computed == 1 + 19
    other = tiered.session("alice")
    again.delete()
    again.delete()
    assert occupied(tiered) == 0
    with pytest.raises(ClosedError, match="was deleted"):
        _ = other.token_ids
    assert tiered.session("alice").token_ids == []


def test_a_fork_shares_blocks_and_goes_its_own_way(tiered: TieredKV) -> None:
    chat = tiered.session("a")
    out, _ = ask(tiered, chat, tokens(200))
    before = occupied(tiered)
    twin = chat.fork("b")
    assert occupied(tiered) == before and twin.token_ids == chat.token_ids
    with pytest.raises(SessionExistsError, match="'b' already"):
        chat.fork("b")
    for turn in range(2):
        for session, seed in ((chat, 1), (twin, 2)):
            _, computed = ask(tiered, session, torch.cat([out.sequences, tokens(20, 10 * seed + turn)], dim=1))
            assert computed == (turn == 0) + 20 + 19  # the answer's last token is held since the first turn
    chat.delete()
    assert twin.token_ids
    ask(tiered, twin, torch.cat([out.sequences, tokens(9, 9)], dim=1))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) & {"gemma2", "gemma3", "gpt_oss", "granitemoehybrid"}))
def test_untiered_layers_go_back_or_start_again(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    with TieredKV(model, small_config(model, tmp_path, gpu_slots=12)) as tiered:
        chat = tiered.session("x")
        out, _ = ask(tiered, chat, tokens(120))
        _, computed = ask(tiered, chat, torch.cat([out.sequences, tokens(10, 1)], dim=1))
        assert computed == 1 + 10 + 19
        ask(tiered, chat, edited(out.sequences, 100))
        ask(tiered, chat, tokens(10))
        ask(tiered, chat, tokens(5))


def test_changed_weights_start_the_session_again(tmp_path: Path) -> None:
    model = tiny_from(LlamaConfig, **FAMILIES["llama"][1])
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        chat = tiered.session("x")
        out, _ = ask(tiered, chat, tokens(100))
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        _, computed = ask(tiered, chat, out.sequences)
        assert computed == out.sequences.shape[1] + 19


def test_a_failed_turn_keeps_what_was_computed_before(tiered: TieredKV) -> None:
    chat = tiered.session("x")
    out, _ = ask(tiered, chat, tokens(100))

    def fail(*_: Any) -> None:
        raise RuntimeError("no more")

    longer = torch.cat([out.sequences, tokens(40, 1)], dim=1)
    for how in ({}, {"num_beams": 3}):
        handle = tiered.model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="no more"):
            chat.generate(longer, **GREEDY, **how)
        handle.remove()
        assert chat.cache.batch_size == 1 and chat.token_ids == out.sequences[0, :-1].tolist()
        tiered.check_integrity()
    ask(tiered, chat, longer)


def test_what_a_session_refuses(tiered: TieredKV) -> None:
    chat = tiered.session("x")
    out, _ = ask(tiered, chat, tokens(60))
    held = chat.token_ids
    for ids, kwargs, message in (
        (tokens(60).repeat(2, 1), {}, r"\(2, 60\).*\[1, tokens\]"),
        (tokens(60)[0], {}, r"\(60,\).*\[1, tokens\]"),
        ([1, 2, 3], {}, r"list.*\[1, tokens\]"),
        (tokens(0), {}, "empty"),
        (tokens(60), {"attention_mask": torch.zeros(1, 60)}, "padding"),
        (tokens(60), {"attention_mask": torch.ones(1, 61)}, "padding"),
        (tokens(60), {"cache": tiered.new_cache()}, "own cache"),
        (tokens(60), {"inputs_embeds": torch.zeros(1, 60, 96)}, "ids only|input_ids only"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            chat.generate(ids, **kwargs)
    for name in ("", "a\nb", "\x00", 7, None):
        with pytest.raises(UnsupportedError, match="printable"):
            tiered.session(name)
        with pytest.raises(UnsupportedError, match="printable"):
            chat.fork(name)
    with pytest.raises(UnsupportedError, match=r"needs a name.*fork\('x-2'\).*session\.cache\.fork\(\)"):
        chat.fork()
    assert chat.token_ids == held
    assert [each.name for each in tiered.sessions()] == ["x"] and chat.cache.fork().token_ids == held
    ask(tiered, tiered.session("x / ../ü"), out.sequences)


def test_a_session_after_close_says_so(tmp_path: Path) -> None:
    """And not that it holds nothing."""
    with TieredKV(tiny(), small_config(tiny(), tmp_path)) as tiered:
        chat, cache = tiered.session("alice"), tiered.new_cache()
        ask(tiered, chat, tokens(40))
    for use in (
        lambda: chat.token_ids, lambda: chat.info, lambda: chat.fork("bob"), lambda: chat.export(tmp_path / "file"),
        chat.pin, chat.unpin, chat.delete, lambda: chat.generate(tokens(9)), lambda: chat.set_ttl("1d"),
        lambda: tiered.session("alice"), lambda: tiered.generate(tokens(9), cache=cache), tiered.stats,
    ):  # fmt: skip
        with pytest.raises(ClosedError, match=r"wrap|new wrapper"):
            use()
    chat.close()
    tiered.close()


def test_two_threads_on_one_session_answer_or_are_refused(tiered: TieredKV) -> None:
    ids = [tokens(60), torch.cat([tokens(40), tokens(30, 1)], dim=1)]
    expected = [plain(tiered.model, each) for each in ids]
    wrong: list[object] = []
    answered: list[int] = []

    def work(number: int) -> None:
        for _ in range(4):
            try:
                out = tiered.session("shared").generate(ids[number], **GREEDY)
                assert_same(out, expected[number], "blockwise")
                answered.append(number)
            except KVTierError:
                pass
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and answered
    tiered.check_integrity()


@pytest.mark.parametrize("mode", MODES)
def test_sessions_of_several_users_under_one_budget(mode: str, tmp_path: Path) -> None:
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path, mode)) as tiered:
        transcripts = {f"user {number}": tokens(80 + 20 * number, number) for number in range(4)}
        for turn in range(3):
            for name, ids in transcripts.items():
                out, _ = ask(tiered, tiered.session(name), ids)
                transcripts[name] = torch.cat([out.sequences, tokens(25, turn)], dim=1)
        assert mode_of(tiered) == mode
        for name in transcripts:
            tiered.session(name).delete()
        assert occupied(tiered) == 0


@pytest.mark.parametrize("mode", ["gathered", "blockwise"])
def test_sessions_survive_a_restart_without_the_prefix_cache_too(tmp_path: Path, mode: str) -> None:
    """In gathered mode to the bit: what comes back is what was written."""
    model = tiny("llama")
    values, ids = small_config(model, tmp_path, mode), tokens(100)
    cache = DynamicCache(config=model.config)
    for seed in range(3):
        with TieredKV(model, values) as tiered:
            assert not tiered._runtime.shares
            ours = tiered.session("alice").generate(ids, **GREEDY)
            assert tiered.stats()["tokens"] < (160 if seed == 0 else 70)
        plain = model.generate(ids, cache=cache, prefill_chunk_size=values["prefill_chunk"], **GREEDY)
        assert_same(ours, plain, mode)
        ids = torch.cat([ours.sequences, tokens(30, seed + 1)], dim=1)


def test_a_new_question_alone_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Found by a new user: the conversation was replaced, without a word."""
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path)) as tiered, caplog.at_level("WARNING", logger="kvtier"):
        chat, ids = tiered.session("a"), tokens(80)
        out, _ = ask(tiered, chat, ids)
        out, _ = ask(tiered, chat, torch.cat([out.sequences, tokens(9, seed=5)], dim=1))
        ask(tiered, chat, out.sequences[:, :60])  # edited, and cut
        ask(tiered, chat, torch.cat([ids[:, :20], tokens(30, seed=6)], dim=1))  # most of it is another
        assert not caplog.records
        ask(tiered, chat, tokens(9, seed=7))
        (record,) = caplog.records
        assert record.getMessage().startswith("session 'a': the transcript of 9 tokens begins with 0 of the ")
        ask(tiered, chat, tokens(30, seed=8))  # little was held
        assert len(caplog.records) == 1


def test_a_session_given_as_a_cache_says_what_to_call(tmp_path: Path) -> None:
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        with pytest.raises(UnsupportedError, match="cache is a Session: call its own generate"):
            tiered.generate(tokens(9), cache=tiered.session("a"), **GREEDY)
        with pytest.raises(UnsupportedError, match=r"a session for each row, or tiered\.generate for a batch"):
            tiered.session("a").generate(torch.cat([tokens(9), tokens(9)]), **GREEDY)
