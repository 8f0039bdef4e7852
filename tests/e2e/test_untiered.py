"""Layers that are not tiered (windows, linear attention), padding and positions: what went past the tiers unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtier import TieredKV
from kvtier.errors import BudgetError, UnsupportedError
from tests.e2e.families import CHUNK, GREEDY, assert_same, plain_forward, small_config, tiny, tokens

WINDOWED = ("gemma2", "gemma3", "gpt_oss")
ANSWER = {**GREEDY, "max_new_tokens": 4}


def plain(model: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
    """What the model answers to the whole transcript with nothing held."""
    cache = DynamicCache(config=model.config)
    kwargs = {**ANSWER, **kwargs}
    return model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, prefill_chunk_size=CHUNK, **kwargs)


def wrap(family: str, folder: Path, rows: int = 1, **values: Any) -> TieredKV:
    model = tiny(family)
    return TieredKV(model, small_config(model, folder, rows=rows, **values))


# -- windows after a lookup --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [6, 12, 17, 20, 30])
@pytest.mark.parametrize("family", WINDOWED)
def test_a_session_goes_back_behind_a_lookup(family: str, cut: int, tmp_path: Path) -> None:
    with wrap(family, tmp_path) as tiered:
        session = tiered.session("x")
        out = session.generate(tokens(30), max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=2)
        for new in (1, 2):
            full = torch.cat([out[:, :cut], tokens(new, 9)], dim=1)
            expected = plain(tiered.model, full)
            for _ in range(2):
                assert_same(session.generate(full, **ANSWER), expected, "blockwise")


@pytest.mark.parametrize("cut", [6, 12, 17, 20, 30])
@pytest.mark.parametrize("family", WINDOWED)
def test_a_crop_behind_a_lookup_is_exact_or_refused(family: str, cut: int, tmp_path: Path) -> None:
    with wrap(family, tmp_path) as tiered:
        cache = tiered.new_cache()
        out = tiered.generate(
            tokens(30), cache=cache, max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=2
        )  # fmt: skip
        tiered.generate(torch.cat([out, tokens(3, 1)], dim=1), cache=cache, max_new_tokens=2, do_sample=False)
        held = cache.token_ids
        try:
            cache.crop(cut - len(held))
        except UnsupportedError as error:
            assert "start a new cache" in str(error) and cache.token_ids == held
            full = torch.cat([torch.tensor([held]), tokens(2, 9)], dim=1)
        else:
            full = torch.cat([out[:, :cut], tokens(2, 9)], dim=1)
        assert_same(tiered.generate(full, cache=cache, **ANSWER), plain(tiered.model, full), "blockwise")


def test_untiered_bytes_do_not_grow_after_a_lookup(tmp_path: Path) -> None:
    with wrap("gemma3", tmp_path) as tiered:
        sizes: list[list[object]] = []
        for how in ({}, {"prompt_lookup_num_tokens": 3}):
            session = tiered.session("x")
            ids, sizes = tokens(60), [*sizes, []]
            for turn in range(6):
                out = session.generate(ids, max_new_tokens=4, do_sample=False, **(how if turn == 0 else {}))
                if turn:
                    sizes[-1].append(session.cache.stats()["untiered_bytes"])
                ids = torch.cat([out, tokens(10, turn)], dim=1)
            session.delete()
        assert sizes[0] == sizes[1]


# -- past the wrapper --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [20, 60])
@pytest.mark.parametrize("family", [*WINDOWED, "granitemoehybrid", "llama"])
def test_the_inner_model_is_refused_before_it_changes_a_cache(family: str, length: int, tmp_path: Path) -> None:
    ids, new = tokens(length), tokens(10, 4)
    with wrap(family, tmp_path) as tiered, torch.no_grad():
        model, cache, held = tiered.model, tiered.new_cache(), DynamicCache(config=tiered.model.config)
        tiered(ids, cache=cache)
        plain_forward(model, ids, held)
        untiered = cache.stats()["untiered_bytes"]
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="outside of its wrapped model"):
                model.model(tokens(3, 8), cache=cache)
        assert cache.get_seq_length() == length and cache.stats()["untiered_bytes"] == untiered
        difference = (tiered(new, cache=cache).logits - plain_forward(model, new, held)).abs().max()
        assert difference < 1e-4
        tiered.check_integrity()


@pytest.mark.parametrize("family", ["granitemoehybrid", "gemma3"])
def test_forks_and_repeats_beyond_the_budget_change_nothing(family: str, tmp_path: Path) -> None:
    ids, new = tokens(30), tokens(10, 4)
    with wrap(family, tmp_path) as tiered, torch.no_grad():
        runtime, cache, held = tiered._runtime, tiered.new_cache(), DynamicCache(config=tiered.model.config)
        room = runtime.gpu_budget.untiered_bytes
        tiered(ids, cache=cache)
        tiered.model(ids, cache=held)
        with pytest.raises(BudgetError, match="not tiered"):
            cache.batch_repeat_interleave(1000)
        assert cache.batch_size == 1 and runtime.untiered.used_bytes() <= room
        twins = []
        with pytest.raises(BudgetError, match="not tiered"):
            for _ in range(1000):
                twins.append(cache.fork())
        assert runtime.untiered.used_bytes() <= room
        del twins
        difference = (tiered(new, cache=cache).logits - tiered.model(new, cache=held).logits).abs().max()
        assert difference < 1e-4
        cache.fork()
        tiered.check_integrity()


# -- chunks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(("length", "chunk"), [(65, 32), (33, 32), (64, 32), (7, 2), (3, 3), (7, 3), (5, 4)])
def test_padding_alone_in_a_chunk_stays_out_of_linear_layers(
    length: int, chunk: int, left: bool, tmp_path: Path
) -> None:
    ids, new = tokens(length).repeat(2, 1), tokens(4, 3).repeat(2, 1)
    mask = torch.ones_like(ids)
    hidden = min(5, length - 1)
    mask[1, slice(0, hidden) if left else slice(length - hidden, length)] = 0
    longer = torch.cat([mask, torch.ones_like(new)], dim=1)
    with wrap("granitemoehybrid", tmp_path, rows=2, gpu_slots=40, prefill_chunk=chunk) as tiered, torch.no_grad():
        cache, held = tiered.new_cache(), DynamicCache(config=tiered.model.config)
        try:
            tiered(ids, attention_mask=mask, cache=cache)
        except BudgetError:  # chunks that small cannot be cut without one of a single column
            assert chunk < 4 and cache.get_seq_length() == 0
            return
        tiered.model(ids, attention_mask=mask, cache=held)
        ours = tiered(new, attention_mask=longer, cache=cache).logits
        expected = tiered.model(new, attention_mask=longer, cache=held).logits
        assert (ours - expected).abs().max() < 1e-4
        tiered.check_integrity()


def test_router_logits_are_not_joined_over_chunks(tmp_path: Path) -> None:
    with wrap("mixtral", tmp_path, rows=2) as tiered, torch.no_grad():
        cache = tiered.new_cache()
        with pytest.raises(UnsupportedError, match="output_router_logits"):
            tiered(tokens(100), output_router_logits=True, cache=cache)
        assert cache.get_seq_length() == 0
        ours = tiered(tokens(8), output_router_logits=True, cache=cache)
        expected = tiered.model(tokens(8), output_router_logits=True)
        for got, wanted in zip(ours.router_logits, expected.router_logits, strict=True):
            assert got.shape == wanted.shape and (got - wanted).abs().max() < 1e-4
        tiered.check_integrity()


# -- positions and token types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(20)[None] / 2.0,
        torch.arange(20)[None] + 2**33,
        torch.full((1, 20), float("nan")),
        torch.full((1, 20), -(2**63)),
    ],
    ids=["half", "huge", "nan", "lowest"],
)
def test_positions_that_are_no_small_integers_are_refused(positions: torch.Tensor, tmp_path: Path) -> None:
    with wrap("llama", tmp_path, cpu_blocks=4, nvme=0) as tiered, torch.no_grad():
        for _ in range(30):  # each took slots once, until none was left
            cache = tiered.new_cache()
            with pytest.raises(UnsupportedError, match="position_ids"):
                tiered(tokens(20), position_ids=positions, cache=cache)
            del cache
        tiered.check_integrity()
        full = tokens(30)
        assert_same(tiered.generate(full, **ANSWER), plain(tiered.model, full), "blockwise")


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "position_ids"), ("gpt2", "token_type_ids"), ("gpt2", "position_ids")]
)
def test_a_session_takes_ids_alone(family: str, name: str, tmp_path: Path) -> None:
    full = torch.cat([tokens(48), tokens(8, 3)], dim=1)
    with wrap(family, tmp_path) as tiered:
        session = tiered.session("x")
        session.generate(full[:, :48], max_new_tokens=1, do_sample=False)
        with pytest.raises(UnsupportedError, match=name):
            session.generate(full, **{name: torch.ones_like(full)}, **ANSWER)
        assert session.token_ids == full[0, :48].tolist()
        assert_same(session.generate(full, **ANSWER), plain(tiered.model, full), "blockwise")
