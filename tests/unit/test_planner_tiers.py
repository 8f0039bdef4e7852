"""What a plan says of a machine: where blocks lie, what breaks first, the bound."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bound import Bound, Edge
from kvtier.config import load_config
from kvtier.config_files import preset_names
from kvtier.errors import ConfigError
from kvtier.planner.bound import decode_round, first_token, rows_at_once
from kvtier.planner.layout import lay_out
from kvtier.types import Tier
from tests.planning import a_machine, card, config, layout

# -- where blocks lie --------------------------------------------------------------------------------------------------


@given(st.integers(1, 400), st.integers(1, 100_000), st.sampled_from(["quickstart", "laptop", "server-80gb"]))
def test_every_block_has_one_place_and_no_tier_holds_more_than_it_can(users: int, context: int, name: str) -> None:
    made = lay_out(card("SmolLM2-135M"), load_config(name), context, None)
    placed = made.place(users)
    assert sum(placed.blocks.values()) + placed.missing == users * made.blocks_per_user
    for room in made.rooms:
        assert 0 <= placed.blocks[room.tier] <= room.num_slots
        assert room.num_slots * made.shape.block_bytes <= room.budget_bytes
    assert (placed.missing > 0) == (users * made.blocks_per_user > made.num_slots)
    assert (users > made.max_users) == any(limit.max_users < users for limit in made.limits)


@given(st.integers(1, 300), st.integers(1, 50_000))
def test_more_users_never_take_less(users: int, context: int) -> None:
    made = layout(card("SmolLM2-135M"), context, gpu="100MiB", cpu="200MiB", nvme="2GiB")
    before, after = made.place(users), made.place(users + 1)
    assert sum(after.blocks.values()) >= sum(before.blocks.values()) and after.missing >= before.missing
    assert made.max_users_without == 100 * (1 << 20) // made.card.kv_bytes(context)


def test_up_to_high_all_stays_and_above_it_goes_down_to_low() -> None:
    made = layout(gpu="4GiB", cpu="32GiB")
    gpu, cpu = made.rooms
    assert gpu.low_slots < gpu.high_slots < gpu.num_slots
    assert cpu.high_slots == cpu.num_slots  # nothing is below
    assert made.place(1).blocks == {Tier.GPU: gpu.low_slots, Tier.CPU: 128 - gpu.low_slots, Tier.NVME: 0}
    (alone,) = layout(gpu="8GiB").rooms
    assert alone.low_slots == alone.num_slots


@pytest.mark.parametrize("name", preset_names())
def test_every_config_preset_can_be_planned(name: str) -> None:
    made = lay_out(card("SmolLM2-135M"), load_config(name), 2048, None)
    assert made.gpu is not None and made.max_users > made.max_users_without >= 1


# -- what breaks first -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "name", "words"),
    [
        (lambda: layout(gpu="32MiB"), "gpu budget", "its minimum is .* scratch of"),
        (lambda: layout(gpu="4GiB"), "gpu full", "raise tiers.gpu.budget, or add a cpu tier"),
        (lambda: layout(gpu="4GiB", cpu="8GiB"), "cpu full", "or add a nvme tier"),
        (lambda: layout(gpu="4GiB", nvme="8GiB"), "nvme full", "gpu 1.* nvme .*raise tiers.nvme.budget"),
        (lambda: layout(gpu="4GiB", cpu="1MiB"), "cpu budget", "its minimum is .* one block of 256"),
        (lambda: layout(gpu="4GiB", cpu="100MiB", nvme="8GiB"), "cpu budget", "one block .* for staging"),
        (lambda: layout(gpu="64GiB", nvme="8GiB", threads=8), "page cache", "4MiB .* for files .* add a cpu tier"),
        (lambda: layout(gpu="4GiB", nvme="1MiB"), "nvme budget", "leave the tier out"),
        (lambda: layout(gpu="70GiB", rates=a_machine()), "device memory", "weights of 14.96GiB.* has 78GB"),
        (lambda: layout(gpu="4GiB", cpu="300GiB", rates=a_machine()), "host memory", "process may use 256GB"),
        (lambda: layout(gpu="4GiB", cpu="8GiB", rates=a_machine(cuda=False, host=20e9)), "device memory", "20GB"),
        (lambda: layout(card("Gemma-3-27B"), gpu="8GiB", cpu="2TB"), "windows in the gpu budget", "52 sliding-window"),
    ],
)  # fmt: skip
def test_the_first_limit_names_the_numbers_and_the_mend(made: Any, name: str, words: str) -> None:
    first = made().limits[0]
    assert first.name == name
    assert re.search(words, first.words), first.words


def test_gathered_needs_room_for_the_longest_context() -> None:
    gathered = load_config({"attention": "gathered", "tiers": {"gpu": {"budget": "4GiB"}, "cpu": {"budget": "64GiB"}}})
    fits, fails = (lay_out(card(), gathered, tokens, None) for tokens in (1 << 18, 1 << 20))
    assert fits.max_users >= 1
    assert fails.limits[0].name == "gathered layer" and fails.max_users == 0


def test_a_percentage_needs_a_machine() -> None:
    part = config(gpu="50%", cpu="10%")
    with pytest.raises(ConfigError, match=r"tiers.gpu.budget is 50%, of what is not known.*doctor --json"):
        lay_out(card(), part, 8192, None)
    gpu, cpu = lay_out(card(), part, 8192, a_machine()).rooms
    assert gpu.budget_bytes == (78_000_000_000 - card().weights_bytes) // 2
    assert cpu.budget_bytes == 25_600_000_000


# -- the bound ---------------------------------------------------------------------------------------------------------


def edges(bound: Bound) -> dict[str, Edge]:
    return {edge.name: edge for edge in bound.edges}


def test_what_is_resident_is_bound_by_the_devices_memory() -> None:
    made, rates = layout(context=8192, gpu="8GiB", rates=a_machine()), a_machine()
    bound = decode_round(made, rates, 1)
    read = 2 * (card().num_parameters - card().table_parameters) + card().kv_bytes(8192)
    assert edges(bound)["device memory"].amount == read
    assert bound.seconds == read / 100e9 and bound.binding == "device memory" and not bound.unmeasured


def test_what_spilled_is_bound_by_the_slowest_edge() -> None:
    rates = a_machine()
    made = layout(context=1 << 17, gpu="4GiB", cpu="4GiB", nvme="64GiB", rates=rates)
    placed, bound = made.place(1), decode_round(made, rates, 1)
    size = made.shape.block_bytes
    assert edges(bound)["host to device"].amount == (placed.blocks[Tier.CPU] + placed.blocks[Tier.NVME]) * size
    assert edges(bound)["nvme read"].seconds == placed.blocks[Tier.NVME] * size / 2e9
    assert edges(bound)["checksums"].per_s == 4 * 10e9  # io_threads
    assert bound.binding == "nvme read" and bound.seconds == max(edge.seconds or 0 for edge in bound.edges)


def test_without_cuda_the_cpu_tier_is_the_same_memory() -> None:
    rates = a_machine(cuda=False)
    bound = decode_round(layout(context=1 << 16, gpu="2GiB", cpu="16GiB", rates=rates), rates, 1)
    assert "host to device" not in edges(bound) and bound.binding == "device memory"


def test_compression_moves_fewer_bytes_and_decodes_all() -> None:
    values = {"gpu": {"budget": "4GiB"}, "nvme": {"budget": "64GiB", "compression": "zstd"}}
    rates = a_machine()
    made = lay_out(card(), load_config({"tiers": values}), 1 << 17, rates)
    found = edges(decode_round(made, rates, 1))
    assert found["nvme read"].amount == pytest.approx(0.6 * found["decompression"].amount)
    assert found["decompression"].amount == found["host to device"].amount > 0


def test_an_edge_that_nobody_measured_is_named_and_not_guessed() -> None:
    rates = dataclasses.replace(a_machine(), disk=())
    made = layout(context=1 << 17, gpu="4GiB", nvme="64GiB", rates=rates)
    bound = decode_round(made, rates, 1)
    assert bound.unmeasured == ["nvme read"] and bound.binding == "host to device"
    nothing = dataclasses.replace(rates, rows={("gpu 0", "memory"): 1.0})
    assert decode_round(made, nothing, 1).seconds is None
    assert decode_round(made, nothing, 1).binding == ""


def test_a_step_has_no_more_rows_than_tails_have_slots() -> None:
    rates = a_machine()
    made = layout(context=256, gpu="512MiB", cpu="64GiB", rates=rates)
    assert made.gpu is not None
    at_once = rows_at_once(made, 1000)
    assert 1 <= at_once <= made.gpu.num_slots
    assert made.gpu.cost.scratch_bytes(1, made.gpu.num_pieces, at_once) <= made.gpu.scratch_bytes
    one, two = (edges(decode_round(made, rates, users))["device memory"].amount for users in (at_once, at_once + 1))
    assert two - one == made.card.read_parameters * 2 + made.card.kv_bytes(256)  # the weights once more


@given(st.integers(1, 60), st.integers(1, 1 << 15), st.booleans())
def test_more_users_or_tokens_are_never_less_to_do(users: int, context: int, cuda: bool) -> None:
    rates = a_machine(cuda=cuda)

    def work(users: int, context: int) -> float:
        made = layout(card("SmolLM2-135M"), context, rates, gpu="256MiB", cpu="1GiB", nvme="500GiB")
        return decode_round(made, rates, users).edges[0].amount + made.place(users).blocks[Tier.NVME]

    assert work(users, context) <= work(users + 1, context)
    assert work(users, context) <= work(users, context + 1000)


def test_the_first_token_computes_every_parameter_for_every_token() -> None:
    rates = a_machine()
    made = layout(context=8192, gpu="8GiB", rates=rates)
    found = edges(first_token(made, rates, 1))
    model = made.card
    attention = 4 * model.heads * model.head_dim * model.num_full * 8192 * 8193 // 2
    head = model.table_parameters  # of the last token alone
    assert found["compute"].amount == 2 * (8192 * model.layer_parameters + head) + attention
    assert found["nvme read" if "nvme read" in found else "host to device"].amount == 0
    chunks = 8192 // made.gpu.max_chunk if made.gpu else 0
    assert found["device memory"].amount > chunks * model.read_parameters * 2


def test_a_long_prompt_reads_back_what_spilled_and_sends_down_what_it_displaced() -> None:
    rates = a_machine()
    made = layout(context=1 << 17, gpu="4GiB", cpu="4GiB", nvme="64GiB", rates=rates)
    alone, crowded = (edges(first_token(made, rates, users)) for users in (1, 3))
    assert alone["nvme read"].amount == crowded["nvme read"].amount > 0
    assert 0 < alone["device to host"].amount < crowded["device to host"].amount
    assert crowded["device to host"].amount == made.blocks_per_user * made.shape.block_bytes
