"""Prompts whose beginning was computed before: found, counted, and the tokens of the plain model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.errors import UnsupportedError
from kvtier.generate import _Call
from tests.e2e.families import BLOCK, FAMILIES, GREEDY, assert_same, occupied, small_config, tiny, tiny_from, tokens


def config(model: Any, folder: Path, **values: Any) -> dict[str, Any]:
    return small_config(model, folder, **{"prefix_cache": True, **values})


@pytest.fixture
def model() -> Any:
    return tiny("llama")


@pytest.fixture
def tiered(model: Any, tmp_path: Path) -> Iterator[TieredKV]:
    with TieredKV(model, config(model, tmp_path)) as tiered:
        yield tiered
        gc.collect()
        tiered.check_integrity()


def ask(tiered: TieredKV, ids: torch.Tensor, mask: torch.Tensor | None = None, **kwargs: Any) -> tuple[Any, int]:
    """Generate, compare with the plain model, and say how many tokens were computed."""
    mask = torch.ones_like(ids) if mask is None else mask
    salt = {"salt": kwargs.pop("salt")} if "salt" in kwargs else {}
    before = tiered.stats()["tokens"]
    ours = tiered.generate(ids, attention_mask=mask, **{**GREEDY, **kwargs}, **salt)
    plain = tiered.model.generate(ids, attention_mask=mask, **{**GREEDY, **kwargs})
    assert_same(ours, plain, "blockwise")
    tiered.check_integrity()
    return ours, tiered.stats()["tokens"] - before


def reused(tiered: TieredKV) -> int:
    return sum(tiered.stats()["prefix_cache"]["reused_tokens"].values())


def misses(tiered: TieredKV) -> dict[str, int]:
    return {kind: count for kind, count in tiered.stats()["prefix_cache"]["misses"].items() if count}


NEW = GREEDY["max_new_tokens"] - 1  # the last one is not computed


def test_a_prompt_is_computed_once(tiered: TieredKV) -> None:
    ids = tokens(300)
    _, first = ask(tiered, ids)
    _, second = ask(tiered, ids)
    _, third = ask(tiered, ids)
    assert (first, second, third) == (300 + NEW, 300 % BLOCK + NEW, 300 % BLOCK + NEW)
    assert tiered.stats()["nvme_sole_reads"] > 0, "some of it came back from files"


def test_a_prompt_of_whole_blocks_is_found_but_for_its_last_token(tiered: TieredKV) -> None:
    ids = tokens(4 * BLOCK)
    ask(tiered, ids)
    assert ask(tiered, ids)[1] == 1 + NEW
    assert ask(tiered, torch.cat([ids, tokens(40, 9)], 1))[1] == 40 + NEW, "the block that was copied is as it was"


def test_a_stateless_chat_computes_only_what_is_new_and_at_most_a_block(tiered: TieredKV) -> None:
    ids = tokens(100)
    out, _ = ask(tiered, ids)
    for turn in range(4):
        ids = torch.cat([out.sequences, tokens(33, turn + 1)], dim=1)
        out, computed = ask(tiered, ids)
        assert 33 <= computed - NEW <= 33 + BLOCK


def test_a_system_prompt_is_shared_by_other_questions_and_is_not_copied(tiered: TieredKV) -> None:
    system = tokens(10 * BLOCK)
    for question in range(6):
        _, computed = ask(tiered, torch.cat([system, tokens(20, question + 1)], dim=1))
        assert computed - NEW == (10 * BLOCK if question == 0 else 0) + 20
    caches = [tiered.new_cache() for _ in range(4)]
    for number, cache in enumerate(caches):
        ids = torch.cat([system, tokens(20, number + 50)], dim=1)
        tiered.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **GREEDY)
    shared = {tuple(cache.state.batch.tables[0].blocks[:10]) for cache in caches}
    assert len(shared) == 1


def test_rows_of_a_padded_batch_are_found_too_in_or_out_of_one(tiered: TieredKV) -> None:
    ids = torch.zeros((3, 200), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate((200, 150, 190)):
        ids[row, 200 - length :], mask[row, 200 - length :] = tokens(length, row), 1
    _, first = ask(tiered, ids, mask)
    _, again = ask(tiered, ids, mask)
    assert first == 200 + 150 + 190 + 3 * NEW
    assert again - 3 * NEW <= 3 * 2 * BLOCK, "of every row all but what the shortest match leaves"
    _, alone = ask(tiered, ids[1:2, 50:])
    assert alone - NEW <= BLOCK, "padding plays no part"


def test_a_call_that_fails_before_it_computes_leaves_an_empty_cache_empty(tiered: TieredKV) -> None:
    """Found wrong: it had the prompt's beginning, and the next prompt was another conversation's."""
    ids, other = tokens(100), tokens(90, 5)
    ask(tiered, ids)
    cache = tiered.new_cache()
    for _ in range(2):
        with pytest.raises(ValueError, match="nonsense"):
            tiered.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, nonsense=1, **GREEDY)
        assert cache.get_seq_length() == 0 and cache.stats()["blocks"] == 0
    for given in (ids, torch.cat([ids, other], dim=1)):
        out = tiered.generate(given, attention_mask=torch.ones_like(given), cache=cache.fork(), **GREEDY)
        assert_same(out, tiered.model.generate(given, attention_mask=torch.ones_like(given), **GREEDY), "blockwise")
    out = tiered.generate(other, attention_mask=torch.ones_like(other), cache=cache, **GREEDY)
    assert_same(out, tiered.model.generate(other, attention_mask=torch.ones_like(other), **GREEDY), "blockwise")


@pytest.mark.parametrize(
    "kwargs",
    [{"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}, {"prompt_lookup_num_tokens": 3}],
    ids="+".join,
)
def test_found_prompts_go_on_in_every_mode(model: Any, tmp_path: Path, kwargs: dict[str, Any]) -> None:
    with TieredKV(model, config(model, tmp_path, rows=3)) as tiered:
        ids = tokens(200).repeat(1, 1)
        ask(tiered, ids)
        before = reused(tiered)
        ask(tiered, ids, **kwargs)
        ask(tiered, torch.cat([ids, tokens(20, 3)], dim=1), **kwargs)
        assert reused(tiered) > before + 2 * 150


def test_an_answer_that_is_sent_again_is_found_with_the_prompt(tiered: TieredKV) -> None:
    ids = tokens(50)
    out, _ = ask(tiered, ids, max_new_tokens=100)
    _, computed = ask(tiered, torch.cat([out.sequences, tokens(5, 2)], dim=1))
    assert computed - NEW <= 5 + 1 + BLOCK


# -- what must not be found -------------------------------------------------------------------------------------------


def test_another_salt_finds_nothing_and_the_same_one_everything(tiered: TieredKV) -> None:
    ids = tokens(200)
    assert ask(tiered, ids, salt="alice")[1] == 200 + NEW
    assert ask(tiered, ids, salt="bob")[1] == 200 + NEW
    assert ask(tiered, ids)[1] == 200 + NEW
    assert misses(tiered) == {"unknown": 1, "salt": 2}
    for salt in ("alice", "bob", b""):
        assert ask(tiered, ids, salt=salt)[1] == 200 % BLOCK + NEW
    cache = tiered.new_cache(salt="alice")
    with pytest.raises(UnsupportedError, match=r"new_cache\(salt=…\)"):
        tiered.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, salt="bob")
    with pytest.raises(UnsupportedError, match="salt=7"):
        tiered.generate(ids, salt=7)


def test_a_weight_written_in_place_makes_another_model(model: Any, tiered: TieredKV) -> None:
    ids, weight = tokens(200), next(iter(model.model.layers[0].parameters()))
    ask(tiered, ids)
    kept = weight.detach().clone()
    with torch.no_grad():
        weight += 0.05
    try:
        assert ask(tiered, ids)[1] == 200 + NEW
        assert "namespace" in misses(tiered)
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_what_is_set_on_a_module_makes_another_model(model: Any, tiered: TieredKV) -> None:
    ids, attention = tokens(200), model.model.layers[1].self_attn
    ask(tiered, ids)
    before = attention.scaling
    attention.scaling = before * 1.5
    try:
        assert ask(tiered, ids)[1] == 200 + NEW
    finally:
        attention.scaling = before
    assert ask(tiered, ids)[1] < 200 + NEW, "it is the first one again, and some blocks of it were proven meanwhile"


def test_under_a_hook_nothing_is_found_nor_kept(model: Any, tiered: TieredKV) -> None:
    ids = tokens(200)
    ask(tiered, ids)
    handle = model.model.layers[0].register_forward_hook(lambda *args: args[2] * 1.1)
    try:
        assert ask(tiered, ids)[1] == 200 + NEW
    finally:
        handle.remove()
    assert ask(tiered, ids)[1] == 200 % BLOCK + NEW


@pytest.mark.parametrize(
    "given",
    [{"inputs_embeds": True}, {"output_hidden_states": True}, {"position_ids": True}],
    ids=lambda given: next(iter(given)),
)
def test_calls_that_ids_do_not_tell_everything_of_are_computed(
    model: Any, tiered: TieredKV, given: dict[str, bool]
) -> None:
    ids = tokens(200)
    ask(tiered, ids)
    before = tiered.stats()["prefix_cache"]["lookups"]
    kwargs: dict[str, Any] = dict(GREEDY)
    if "inputs_embeds" in given:
        kwargs["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
    elif "position_ids" in given:
        kwargs |= {"input_ids": ids, "position_ids": torch.arange(7, 207)[None]}
    else:
        kwargs |= {"input_ids": ids, "output_hidden_states": True}
    mask = torch.ones_like(ids)
    ours, plain = tiered.generate(attention_mask=mask, **kwargs), model.generate(attention_mask=mask, **kwargs)
    assert_same(ours, plain, "blockwise")
    assert tiered.stats()["prefix_cache"]["lookups"] == before
    if "output_hidden_states" in given:
        assert ours.hidden_states[0][0].shape == plain.hidden_states[0][0].shape


def test_padding_that_transformers_finds_by_its_id_is_not_taken_for_tokens(tiered: TieredKV) -> None:
    ids = tokens(200)
    ids[0, :9] = 0
    how = {**GREEDY, "pad_token_id": 0}
    for _ in range(2):
        assert_same(tiered.generate(ids, **how), tiered.model.generate(ids, **how), "blockwise")
    assert tiered.stats()["prefix_cache"]["lookups"] == 0


# -- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", [{"cpu_blocks": 0, "nvme": 0, "gpu_slots": 16}, {"cpu_blocks": 12, "nvme": 0}, {}])
def test_prompts_that_never_repeat_take_each_others_room_and_nothing_is_refused(
    model: Any, tmp_path: Path, tiers: dict[str, Any]
) -> None:
    with TieredKV(model, config(model, tmp_path, **tiers)) as tiered:
        for seed in range(12):
            ask(tiered, tokens(150, seed))
        stats = tiered.stats()
        assert stats["dropped_blocks"] == 0 and stats["moves_failed"] == 0
        assert stats["prefix_cache"]["blocks"] <= sum(tier["num_slots"] for tier in stats["tiers"].values())
        ask(tiered, tokens(150, 11))
        assert reused(tiered) >= 8 * BLOCK, "the latest is there"
        ask(tiered, tokens(150, 0))
        if tiers:
            assert misses(tiered).get("evicted", 0) >= 1


def test_a_shared_head_goes_last(model: Any, tmp_path: Path) -> None:
    with TieredKV(model, config(model, tmp_path, cpu_blocks=0, nvme=0, gpu_slots=24)) as tiered:
        head = tokens(4 * BLOCK)
        for seed in range(30):
            _, computed = ask(tiered, torch.cat([head, tokens(50, seed + 1)], dim=1))
            assert computed - NEW == 50 + (4 * BLOCK if seed == 0 else 0), "its latest user keeps it"


def test_without_the_prefix_cache_nothing_is_kept(model: Any, tmp_path: Path) -> None:
    with TieredKV(model, config(model, tmp_path, prefix_cache=False)) as tiered:
        for _ in range(2):
            assert ask(tiered, tokens(200))[1] == 200 + NEW
        gc.collect()
        assert occupied(tiered) == 0 == tiered.stats()["prefix_cache"]["blocks"]


def test_gathered_promises_bits_and_so_finds_nothing_unless_asked_to(model: Any, tmp_path: Path) -> None:
    asked = config(model, tmp_path / "a", mode="gathered")
    left_out = {
        key: value for key, value in config(model, tmp_path / "b", mode="gathered").items() if key != "prefix_cache"
    }
    for values, expected in ((asked, 200 % BLOCK), (left_out, 200)):
        with TieredKV(model, values) as tiered:
            ask(tiered, tokens(200))
            assert ask(tiered, tokens(200))[1] == expected + NEW


# -- after a restart --------------------------------------------------------------------------------------------------


def test_what_lay_in_memory_alone_is_found_after_a_restart(model: Any, tmp_path: Path) -> None:
    roomy = config(model, tmp_path, gpu_slots=40, cpu_blocks=8)
    with TieredKV(model, roomy) as tiered:
        ask(tiered, tokens(200))
        ask(tiered, tokens(100, 1))
        assert tiered.stats()["tiers"]["nvme"]["used_slots"] == 0, "nothing had to go there"
    for _ in range(3):
        with TieredKV(model, roomy) as tiered:
            assert ask(tiered, tokens(200))[1] == 200 % BLOCK + NEW
            assert ask(tiered, tokens(100, 1))[1] == 100 % BLOCK + NEW
            assert misses(tiered) == {}


def test_where_files_have_less_room_the_latest_prompt_is_kept_whole(model: Any, tmp_path: Path) -> None:
    roomy = config(model, tmp_path, gpu_slots=60, cpu_blocks=0, nvme=16 * 13_000 + 100_000)
    with TieredKV(model, roomy) as tiered:
        room = tiered.stats()["tiers"]["nvme"]["num_slots"]
        assert 7 <= room < 22
        for seed in range(4):
            ask(tiered, tokens(6 * BLOCK, seed))
    with TieredKV(model, roomy) as tiered:
        assert ask(tiered, tokens(6 * BLOCK, 3))[1] == 1 + NEW


# -- load or recompute ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load_s", "computed", "slower"), [(100.0, 300, 1), (1e-9, 300 % BLOCK, 0), (1.0, None, 0)], ids=str
)
def test_what_is_found_in_files_is_loaded_or_computed_whichever_is_measured_faster(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_s: float, computed: int | None, slower: int
) -> None:
    with TieredKV(model, config(model, tmp_path)) as tiered:
        ask(tiered, tokens(300))
    for attempt in range(3):
        with TieredKV(model, config(model, tmp_path)) as tiered:
            runtime = tiered._runtime
            monkeypatch.setattr(runtime, "load_s", lambda: load_s)
            monkeypatch.setattr(runtime, "compute_s", lambda: 1.0)
            _, count = ask(tiered, tokens(300))
            if computed is None:  # of 18 blocks in files the first 9 are computed while the others are loaded
                assert count - NEW == 9 * BLOCK + 300 % BLOCK
                assert reused(tiered) == 9 * BLOCK
            else:
                assert count - NEW == computed
            assert misses(tiered).get("slower_than_recomputing", 0) == slower
            ask(tiered, torch.cat([tokens(300), tokens(50, attempt + 1)], dim=1))


def test_an_error_while_the_front_is_computed_leaves_nothing_waiting(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TieredKV(model, config(model, tmp_path)) as tiered:
        ask(tiered, tokens(300))
    with TieredKV(model, config(model, tmp_path)) as tiered:
        monkeypatch.setattr(tiered._runtime, "load_s", lambda: 1.0)
        monkeypatch.setattr(tiered._runtime, "compute_s", lambda: 1.0)
        calls = [3]

        def fail(*_: Any) -> None:
            calls[0] -= 1
            if not calls[0]:
                raise KeyboardInterrupt

        handle = model.lm_head.register_forward_hook(fail)
        monkeypatch.setattr(tiered._runtime.source, "is_plain", lambda _: True)  # the hook changes nothing
        with pytest.raises(KeyboardInterrupt):
            tiered.generate(tokens(300), attention_mask=torch.ones(1, 300, dtype=torch.long), **GREEDY)
        handle.remove()
        gc.collect()
        tiered.check_integrity()
        assert tiered.stats()["sequences"] == 0
        ask(tiered, tokens(300))


def test_a_model_that_changes_while_the_front_is_computed_gets_no_old_back(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found wrong: the front was the new model's, and the old one's blocks were attached behind it."""
    model = tiny_from(FAMILIES["llama"][0], **FAMILIES["llama"][1])
    ids = tokens(300)
    with TieredKV(model, config(model, tmp_path)) as tiered:
        ask(tiered, ids)
    with TieredKV(model, config(model, tmp_path)) as tiered:
        monkeypatch.setattr(tiered._runtime, "load_s", lambda: 1.0)
        monkeypatch.setattr(tiered._runtime, "compute_s", lambda: 1.0)
        original, num_fronts = _Call._compute, []

        def changed(self: _Call, token_ids: list[int]) -> None:  # as by another thread, between the look and the step
            num_fronts.append(len(token_ids))
            with torch.no_grad():
                model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
            original(self, token_ids)

        with monkeypatch.context() as patch:
            patch.setattr(_Call, "_compute", changed)
            assert ask(tiered, ids)[1] == 300 + NEW and num_fronts
        for _ in range(2):
            ask(tiered, ids)
        assert reused(tiered) > 0


@pytest.mark.parametrize("how", ["fused SGD", "fused AdamW", "data", "numpy"])
def test_one_weight_that_no_counter_of_torch_sees_written_makes_another_model(tmp_path: Path, how: str) -> None:
    """Fused optimizers, as transformers' Trainer has them by default, leave the versions of what they write alone."""
    model = tiny_from(FAMILIES["llama"][0], **FAMILIES["llama"][1])
    weight = model.model.layers[1].self_attn.k_proj.weight
    ids = tokens(100)
    values = config(model, tmp_path)
    del values["tiers"]["nvme"]["path"]
    with TieredKV(model, values) as tiered:
        assert [ask(tiered, ids)[1] for _ in range(2)] == [100 + NEW, 100 % BLOCK + NEW]
        version = weight._version
        if how.startswith("fused"):
            kind = torch.optim.SGD if "SGD" in how else torch.optim.AdamW
            optimizer = kind([weight], lr=0.05, fused=True)
            weight.grad = torch.zeros_like(weight)
            weight.grad[0] = 1.0  # none of the few values that are looked at
            optimizer.step()
        elif how == "data":
            weight.data.mul_(1.5)
        else:
            weight.detach().numpy()[:] *= 1.5
        assert weight._version == version
        assert ask(tiered, ids)[1] == 100 + NEW


def test_a_change_that_is_only_seen_closely_is_seen_by_a_call_that_finds_nothing_too(tmp_path: Path) -> None:
    model = tiny_from(FAMILIES["llama"][0], **FAMILIES["llama"][1])
    ids, others = tokens(100), tokens(100, 1)
    values = config(model, tmp_path)
    del values["tiers"]["nvme"]["path"]
    with TieredKV(model, values) as tiered:
        ask(tiered, ids)
        model.model.layers[1].self_attn.k_proj.weight.data.mul_(1.5)
        assert [ask(tiered, others)[1] for _ in range(2)] == [100 + NEW, 100 % BLOCK + NEW]
        assert [ask(tiered, ids)[1] for _ in range(2)] == [100 + NEW, 100 % BLOCK + NEW]
        model.model.layers[1].self_attn.k_proj.weight.data.div_(1.25)
        assert [ask(tiered, ids)[1] for _ in range(2)] == [100 + NEW, 100 % BLOCK + NEW]


def test_an_optimizer_of_another_model_leaves_this_one_as_it_is(tiered: TieredKV) -> None:
    ids = tokens(100)
    ask(tiered, ids)
    other = torch.nn.Parameter(torch.ones(8))
    other.grad = torch.ones(8)
    torch.optim.SGD([other], lr=0.1).step()
    assert ask(tiered, ids)[1] == 100 % BLOCK + NEW


def test_a_mask_of_other_numbers_than_0_and_1_makes_other_positions_and_finds_nothing(tiered: TieredKV) -> None:
    ids = tokens(100)
    ask(tiered, ids)
    assert ask(tiered, ids, 2 * torch.ones_like(ids))[1] == 100 + NEW
    assert ask(tiered, ids, torch.ones_like(ids).bool())[1] == 100 % BLOCK + NEW
