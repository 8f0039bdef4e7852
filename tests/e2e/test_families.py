"""The tiny models are worth comparing on: they run, they wander, and what makes a family special changes its logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvtier import TieredKV
from kvtier.errors import UnsupportedModelError
from tests.e2e.families import FAMILIES, WINDOW, plain_turns, tiny, tiny_from, tokens
from tests.e2e.refused import REFUSED, refused_model

WINDOWED = ("gemma2", "gemma3", "gpt_oss")
HYBRID = ("granitemoehybrid",)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_finite_and_wanders(family: str) -> None:
    turns = plain_turns(tiny(family))
    answers = [out.sequences[0, -20:].tolist() for _, out in turns]
    assert all(torch.isfinite(logits).all() for _, out in turns for logits in out.logits)
    assert all(len(set(answer)) >= 4 for answer in answers)
    assert len(set().union(*answers)) >= 15


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_are_those_that_the_family_stands_for(family: str) -> None:
    kinds = [type(layer) for layer in DynamicCache(config=tiny(family).config).layers]
    assert DynamicLayer in kinds
    assert (DynamicSlidingWindowLayer in kinds) == (family in WINDOWED)
    assert (len(set(kinds)) > 1) == (family in WINDOWED + HYBRID)


@torch.no_grad()
def difference(model: Any, other: Any) -> float:
    ids = tokens(10 * WINDOW)
    return float((model(ids).logits - other(ids).logits).abs().max())


@pytest.mark.parametrize("family", WINDOWED)
def test_the_window_changes_logits(family: str) -> None:
    config, values = FAMILIES[family]
    wider = tiny_from(config, attention=tiny(family).config._attn_implementation, **values | dict(sliding_window=2048))
    assert difference(tiny(family), wider) > 0.1


def test_soft_capping_changes_logits_and_needs_eager() -> None:
    config, values = FAMILIES["gemma2"]
    uncapped = tiny_from(config, attention="eager", **values | dict(attn_logit_softcapping=None))
    assert difference(tiny("gemma2"), uncapped) > 0.1
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        tiny_from(config, attention="sdpa", **values)(tokens(5))


def test_sinks_change_logits() -> None:
    other = copy.deepcopy(tiny("gpt_oss"))
    for layer in other.model.layers:
        layer.self_attn.sinks.data.fill_(-100.0)
    assert difference(tiny("gpt_oss"), other) > 0.1


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_kvtier_refuses_run_without_it(name: str) -> None:
    model = refused_model(name)
    assert model.generate(tokens(20), max_new_tokens=2, do_sample=False).shape[1] >= 2
    with pytest.raises(UnsupportedModelError, match=REFUSED[name][2]):
        TieredKV(model, {"tiers": {"gpu": {"budget": "64MiB"}}})
    assert model.generate(tokens(20), max_new_tokens=2, do_sample=False).shape[1] >= 2
