"""A plan's numbers against what they are about: transformers' models and caches, and the runtime under a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvtier import TieredKV
from kvtier.config import load_config
from kvtier.planner.layout import lay_out
from kvtier.planner.models import find_card, presets
from kvtier.planner.rates import Rates
from tests.e2e.families import FAMILIES, tiny, tokens

BY_FORMULA = ("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "olmo2", "gemma2", "gemma3")


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def kinds(config: Any) -> tuple[int, int]:
    layers = [type(layer) for layer in DynamicCache(config=config).layers]
    return layers.count(DynamicLayer), layers.count(DynamicSlidingWindowLayer)


@pytest.mark.parametrize("name", presets())
def test_a_presets_parameters_and_layers_are_those_of_transformers(name: str) -> None:
    card, _ = find_card(name)
    values = dict(presets()[name]["config"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    assert sum(parameter.numel() for parameter in on_meta(config).parameters()) == card.num_parameters
    assert kinds(config) == (card.num_full, card.num_window)


@pytest.mark.parametrize("family", BY_FORMULA)
def test_a_saved_config_tells_the_familys_parameters_and_layers(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path)
    card, _ = find_card(str(tmp_path))
    assert sum(parameter.numel() for parameter in model.parameters()) == card.num_parameters
    assert kinds(model.config) == (card.num_full, card.num_window)
    assert card.family == model.config.model_type


def test_every_family_by_formula_is_among_those_that_are_compared() -> None:
    assert set(BY_FORMULA) <= set(FAMILIES)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("persists", [False, True])
def test_the_runtime_has_the_slots_that_the_plan_says(family: str, persists: bool, tmp_path: Path) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path)
    nvme = {"budget": "8MiB", "path": str(tmp_path / "nvme")} if persists else {"budget": "8MiB"}
    tiers = {"gpu": {"budget": "1MiB"}, "cpu": {"budget": "2MiB"}, "nvme": nvme}
    config = load_config({"block_tokens": 16, "prefill_chunk": 32, "tiers": tiers})
    card, _ = find_card(str(tmp_path))
    here = Rates("a test", {("memory", "may be used"): 1e12}, ())  # no CUDA device
    plan = lay_out(card, config, 300, here)
    with TieredKV(model, config) as tiered:
        for room in plan.rooms:
            stats = tiered.stats()["tiers"][room.tier.label]
            assert (stats["num_slots"], stats["budget_bytes"]) == (room.num_slots, room.budget_bytes)
        assert tiered.stats()["block_bytes"] == plan.shape.block_bytes
        cache = tiered.new_cache()
        ids = tokens(300)
        with torch.no_grad():
            tiered(ids, cache=cache)
            tiered(ids[:, :1], cache=cache)
        assert tiered.stats()["blocks"] == -(-301 // 16)
        assert tiered.stats()["untiered_bytes"] == card.window_bytes(301) + 8 * card.num_window
