"""The modes, plain against plain: they run, they compare what they should, and what is broken in a cache fails them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.e2e.cells import PLAIN_REFUSALS, Refused, check, reference
from tests.e2e.families import FAMILIES, tiny
from tests.e2e.modes import ANSWER, MODES_BY_NAME
from tests.e2e.sides import FP32_TOLERANCE, Side, compare, plain_side, tolerance_for, tolerance_of
from tests.sample import rounds

# Each mode with two families and the other way round, in a sample with one; `make matrix` has them all.
SAMPLE = [
    (mode, family)
    for number, mode in enumerate(MODES_BY_NAME)
    for family in (list(FAMILIES)[(number + step) % len(FAMILIES)] for step in (0, 7)[: rounds(2, 1)])
]


@pytest.mark.parametrize(("mode", "family"), SAMPLE)
def test_whole_prompts_against_chunks(mode: str, family: str) -> None:
    chunked = reference(mode, family, "fp32")
    if isinstance(chunked, Refused):
        return  # reference has seen that it is the refusal that PLAIN_REFUSALS names
    whole = plain_side(tiny(family), chunk=None)
    MODES_BY_NAME[mode].run(whole, family)
    check(compare(whole, chunked, FP32_TOLERANCE), mode)


@pytest.mark.parametrize("mode", ["sampling", "beams", "beam_sampling", "left_padded", "prompt_lookup", "cropped"])
def test_whole_prompts_against_chunks_in_bfloat16(mode: str) -> None:
    chunked = reference(mode, "gemma3", "bf16")
    assert isinstance(chunked, Side)
    whole = plain_side(tiny("gemma3", torch.bfloat16), chunk=None, follow=chunked)
    MODES_BY_NAME[mode].run(whole, "gemma3")
    difference = compare(whole, chunked, math.inf).difference
    check(compare(whole, chunked, tolerance_for(difference, whole.model)), mode)


@pytest.mark.parametrize(("mode", "family"), PLAIN_REFUSALS)
def test_what_plain_transformers_refuses(mode: str, family: str) -> None:
    assert isinstance(reference(mode, family, "fp32"), Refused)


@pytest.mark.parametrize("mode", ["prompt_lookup", "assistant_often_right", "assistant_rarely_right"])
def test_candidates_are_accepted_and_rejected(mode: str) -> None:
    forwards: list[int] = []
    hook = tiny().register_forward_hook(lambda *_: forwards.append(1))
    side = plain_side(tiny())
    try:
        MODES_BY_NAME[mode].run(side, "llama")
    finally:
        hook.remove()
    steps = sum(len(call.steps) for call in side.calls)
    assert steps > 3 * ANSWER, "no candidate was rejected"
    assert (len(forwards) < 3 * ANSWER) == (mode != "assistant_rarely_right"), "not the acceptance that it is named for"


@pytest.mark.parametrize("mode", ["left_padded", "right_padded"])
def test_rows_end_apart(mode: str) -> None:
    side = reference(mode, "llama", "fp32")
    assert isinstance(side, Side)
    first = side.calls[0].ids
    assert first is not None
    ended = (first[:, -1] == 0).tolist()
    assert any(ended) and not all(ended)


@pytest.mark.parametrize("mode", ["beams", "beams_continued"])
def test_rows_that_a_beam_search_leaves_are_those_it_returns(mode: str) -> None:
    """So continuing on its cache is what a fresh cache gives."""
    side = reference(mode, "llama", "fp32")
    assert isinstance(side, Side)
    first = side.calls[-1].steps[0]
    logits = tiny()(first.history).logits[:, -1]
    assert (logits - first.logits).abs().max() <= FP32_TOLERANCE


# -- what is broken must fail ------------------------------------------------------------------------------------------


class NeverReorders(DynamicCache):
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        pass


class ForgetsALayer(DynamicCache):
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        for layer in self.layers[:-1]:
            layer.reorder_cache(beam_idx)


class CropsOneTooMany(DynamicCache):
    """In one layer; the length is kept by a second copy of the first token."""

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if tokens_to_remove:
            last = self.layers[-1]
            last.keys, last.values = (torch.cat([x[:, :, :1], x[:, :, :-1]], dim=2) for x in (last.keys, last.values))


class RepeatsInTheWrongOrder(DynamicCache):
    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self.layers:
            layer.keys, layer.values = (x.repeat(repeats, 1, 1, 1) for x in (layer.keys, layer.values))


class SelectsTheFirstRows(DynamicCache):
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(torch.arange(len(indices)))


class TakesAnotherBlock(DynamicCache):
    """Far back, in one layer: 16 tokens are another's."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == 1 and keys.shape[2] > 200:
            keys, values = keys.clone(), values.clone()
            keys[:, :, 96:112], values[:, :, 96:112] = keys[:, :, 112:128], values[:, :, 112:128]
        return keys, values


class NoMask(Side):
    """Attends to padding."""

    def generate(self, ids: torch.Tensor, cache: Any, **kwargs: Any) -> torch.Tensor:
        return super().generate(ids, cache, **kwargs | {"attention_mask": torch.ones_like(kwargs["attention_mask"])})

    def _chunks(self, ids: torch.Tensor, cache: Any, held: int, kwargs: dict[str, torch.Tensor]) -> torch.Tensor:
        ones = torch.ones_like(kwargs["attention_mask"])
        return super()._chunks(ids, cache, held, kwargs | {"attention_mask": ones})


BATCHES = ("left_padded", "right_padded", "left_padded_by_hand", "right_padded_by_hand")
BROKEN: dict[type, tuple[str, ...]] = {
    NeverReorders: ("beams", "beams_continued", "beam_sampling", "padded_beams", "reordered"),
    ForgetsALayer: ("beams", "beams_continued", "beam_sampling", "padded_beams", "reordered"),
    CropsOneTooMany: (
        *("prompt_lookup", "assistant_often_right", "assistant_rarely_right"),
        *("cropped", "crop_and_answer_again"),
    ),
    RepeatsInTheWrongOrder: ("rows_come_and_go",),
    SelectsTheFirstRows: ("rows_come_and_go",),
    TakesAnotherBlock: tuple(MODES_BY_NAME),
    NoMask: (*BATCHES, "padded_beams"),
}


# In a sample each mode finds the one that breaks in all of them, and each of the others is found in two.
@pytest.mark.parametrize(
    ("broken", "mode"),
    [
        (broken, mode)
        for broken, modes in BROKEN.items()
        for mode in modes[: rounds(len(modes), len(modes) if broken is TakesAnotherBlock else 2)]
    ],
)
def test_what_is_broken_is_found(broken: Callable[..., Any], mode: str) -> None:
    """In 16 bits, whose tolerance is a thousand times that of 32."""
    model, plain = tiny("llama", torch.bfloat16), reference(mode, "llama", "bf16")
    assert isinstance(plain, Side)
    if broken is NoMask:
        side: Side = NoMask(model, model, lambda: DynamicCache(config=model.config), 32, plain)
    else:
        side = plain_side(model, kind=broken, follow=plain)  # type: ignore[arg-type]
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        MODES_BY_NAME[mode].run(side, "llama")
        check(compare(side, plain, tolerance_of("llama", torch.bfloat16)), mode)


@pytest.mark.parametrize("mode", ["sampling", "beams", "beam_sampling", "prompt_lookup"])
def test_a_run_that_follows_makes_the_same_choices_and_keeps_its_own_logits(mode: str) -> None:
    plain = reference(mode, "llama", "fp32")
    assert isinstance(plain, Side)
    other = plain_side(tiny("llama", torch.bfloat16), follow=plain)
    MODES_BY_NAME[mode].run(other, "llama")
    verdict = check(compare(other, plain, 10.0), mode)
    assert verdict.difference > 0.05
