"""How long slices should be for copies to a device, and what is said of those that are shorter."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import load_config
from kvtier.copy_length import LONG_BYTES, copy_rate, long_block_tokens
from kvtier.planner.copies import short_copies
from kvtier.planner.expected import expected_round
from kvtier.planner.layout import Layout, lay_out
from kvtier.planner.rates import Rates
from tests.planning import a_machine, card

MIB = 1 << 20


@pytest.mark.parametrize(
    ("layer_token_bytes", "context", "block_tokens"),
    [
        (4096, 131_072, 256),  # 8 KV heads of 128 in 16 bits
        (1536, 8192, 1024),  # SmolLM2 in fp32
        (768, 8192, 1024),  # in 16 bits: 2,048 would be a quarter of its context
        (768, None, 2048),
        (1, None, 2048),
        (1, 100, 256),
    ],
)
def test_the_least_power_of_two_within_an_eighth_of_the_context(
    layer_token_bytes: int, context: int | None, block_tokens: int
) -> None:
    assert long_block_tokens(layer_token_bytes, context) == block_tokens


@given(st.integers(1, 1 << 20), st.none() | st.integers(1, 1 << 20))
def test_a_proposal_can_be_configured_and_is_no_longer_than_it_must_be(each: int, context: int | None) -> None:
    found = long_block_tokens(each, context)
    assert load_config({"block_tokens": found, "tiers": {"gpu": {"budget": "1GiB"}}}).block_tokens == found <= 2048
    assert found == 256 or (found // 2 * each < LONG_BYTES and found * 8 <= (context or found * 8))


def test_a_copys_time_is_a_line_in_its_length() -> None:
    known = {MIB: 44e9, 64 * MIB: 51e9}
    for size, rate in known.items():
        assert copy_rate(size, known) == pytest.approx(rate)
    assert copy_rate(64 << 10, known) == pytest.approx(14.2e9, rel=0.01)  # DESIGN.md section 8: 14.5
    assert copy_rate(16 * MIB, known) == pytest.approx(50.6e9, rel=0.01)  # 51
    assert copy_rate(MIB, {MIB: 44e9}) is None
    assert copy_rate(MIB, {MIB: 900e9, 64 * MIB: 10e9}) == pytest.approx(10e9, rel=0.1)  # no cost beside bytes
    assert copy_rate(MIB, {MIB: 1e6, 64 * MIB: 1e9}) is None  # 64 times as long for a 64th: nothing follows


def _smol(rates: Rates | None = None, block_tokens: int | None = 256, **tiers: object) -> Layout:
    values: dict[str, object] = {"tiers": {"gpu": {"budget": "1GiB"}, "cpu": {"budget": "4GiB"}} | tiers}
    if block_tokens is not None:
        values["block_tokens"] = block_tokens
    model = dataclasses.replace(card("SmolLM2-135M"), dtype="float32", element_bytes=4)
    return lay_out(model, load_config(values), 8192, rates)


def test_the_plan_says_what_short_slices_cost_and_what_makes_them_longer() -> None:
    rates = a_machine(short_copies=10e9)
    words = short_copies(_smol(rates), rates)
    assert words.startswith("slices are 384KiB (block_tokens: 256): copies of that size to the device reach about 5.4 ")
    assert "of 20.0 GB/s. block_tokens: 1024 makes them 1536KiB (12.0" in words
    assert "not found" not in words  # there is no folder
    kept = short_copies(_smol(rates, None, nvme={"budget": "8GiB", "path": "/data"}), rates)
    assert "(block_tokens: 256, as it is left out)" in kept and "blocks of 256 tokens in tiers.nvme.path" in kept
    assert "less than the bus gives" in short_copies(_smol(), None)


def test_nothing_is_said_where_slices_are_long_or_nothing_is_copied() -> None:
    assert short_copies(_smol(block_tokens=1024), None) == ""
    assert short_copies(lay_out(card(), load_config("server-80gb"), 8192, None), None) == ""
    no_cuda = a_machine(cuda=False)
    assert short_copies(_smol(no_cuda), no_cuda) == ""
    alone = load_config({"tiers": {"gpu": {"budget": "1GiB"}}})
    assert short_copies(lay_out(card("SmolLM2-135M"), alone, 8192, None), None) == ""


def test_the_longest_allowed_blocks_get_no_advice() -> None:
    half = dataclasses.replace(card("SmolLM2-135M"), max_tokens=8192)
    config = load_config({"block_tokens": 1024, "tiers": {"gpu": {"budget": "1GiB"}, "cpu": {"budget": "4GiB"}}})
    words = short_copies(lay_out(half, config, 8192, None), None)
    assert "768KiB" in words and "Longer blocks would be more than 2,048 tokens, or than an eighth" in words


def test_the_expected_time_takes_what_copies_of_a_slice_reach() -> None:
    slow, fast = a_machine(short_copies=10e9, decoding=True), a_machine(decoding=True)
    of = [
        next(term.seconds for term in found.beside if term.name == "host to device")
        for rates in (slow, fast)
        if (found := expected_round(_smol(rates), rates, 5)) is not None
    ]
    assert of[0] is not None and of[1] is not None and of[0] == pytest.approx(of[1] * 20 / 5.4, rel=0.02)
