"""Which calls may begin with blocks that are there, and with which tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtier.reuse import Prompt, is_plain_call, read_prompts

KNOWN = {"max_new_tokens", "do_sample", "num_beams", "logits_processor"}
IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])


def plain(asked: dict[str, Any] | None = None, **arguments: Any) -> bool:
    return is_plain_call(arguments, KNOWN, (asked or {}).get)


def test_ids_a_mask_and_how_to_generate_tell_everything() -> None:
    assert plain(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, num_beams=2, use_cache=True)
    assert plain(inputs=IDS, negative_prompt_ids=IDS, logits_processor=[print], position_ids=None)


@pytest.mark.parametrize(
    "others",
    [{"token_type_ids": IDS}, {"position_ids": IDS}, {"adapter_names": ["a", "b"]}, {"scale": 2.0}, {"skip": [1]}],
    ids=lambda others: next(iter(others)),
)
def test_whatever_else_goes_to_the_model_may_change_its_kv(others: dict[str, Any]) -> None:
    assert not plain(input_ids=IDS, **others)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions", "output_router_logits"])
def test_what_is_wanted_of_all_tokens_is_not_there_of_those_that_are_not_computed(name: str) -> None:
    assert not plain({name: True}, input_ids=IDS) and plain({name: False}, input_ids=IDS)


def mask(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [Prompt(0, [5, 6, 7]), Prompt(0, [8, 9, 10])]),
        (mask([1, 1, 1], [0, 0, 1]), [Prompt(0, [5, 6, 7]), Prompt(2, [10])]),
        (mask([1, 1, 1], [0, 0, 0]), [Prompt(0, [5, 6, 7]), Prompt(3, [])]),
        (mask([1, 1, 0], [1, 1, 1]), None),  # on the right
        (mask([1, 0, 1], [1, 1, 1]), None),
        (mask([1, 1, 1, 1], [1, 1, 1, 1]), None),
    ],
)
def test_prompts_are_read_where_padding_is_on_the_left(
    given: torch.Tensor | None, expected: list[Prompt] | None
) -> None:
    assert read_prompts(IDS, given, None, True) == expected


def test_without_a_mask_padding_may_be_among_the_ids() -> None:
    assert read_prompts(IDS, None, 9, True) is None
    assert read_prompts(IDS, None, 77, True) is not None


def test_a_model_that_is_told_no_positions_may_count_padding() -> None:
    padded = mask([1, 1, 1], [0, 1, 1])
    assert read_prompts(IDS, padded, None, False) is None
    assert read_prompts(IDS, mask([1, 1, 1], [1, 1, 1]), None, False) is not None
