"""The time that a plan expects of a decode step: what one core does one after the other, and what goes on beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvtier.config import load_config
from kvtier.planner.bound import decode_round
from kvtier.planner.card import ModelCard
from kvtier.planner.expected import Expected, Term, expected_round
from kvtier.planner.layout import Layout, Placement, lay_out
from kvtier.planner.rates import DiskRow, Rates
from kvtier.types import IoMode, Tier
from tests.planning import a_machine, card, layout

SMOL = card("SmolLM2-135M", dtype="float32", element_bytes=4)


def machine(**changes: Any) -> Rates:
    """Without CUDA, 8 cores unless said otherwise, with what the expected time needs."""
    cores = changes.pop("cores", 8.0)
    rates = a_machine(cuda=changes.pop("cuda", False), decoding=1.0)
    return dataclasses.replace(rates, rows={**rates.rows, ("processor", "cores"): cores}, **changes)


def expected(made: Layout, rates: Rates, users: int = 1, **more: Any) -> Expected:
    found = expected_round(made, rates, users, **more)
    assert found is not None
    return found


def terms(found: Expected) -> dict[str, float | None]:
    return {term.name: term.seconds for term in (*found.computing, *found.beside)}


def placed(gpu: int, cpu: int = 0, nvme: int = 0) -> Placement:
    return Placement(1, {Tier.GPU: gpu, Tier.CPU: cpu, Tier.NVME: nvme}, 0)


# -- computing ---------------------------------------------------------------------------------------------------------


def test_what_one_core_does_comes_one_after_the_other() -> None:
    rates = machine()
    made = layout(SMOL, 2048, rates, gpu="1GiB")
    assert made.gpu is not None and made.gpu.num_pieces == 8
    found = expected(made, rates)
    by_name = terms(found)
    # 9 query heads of 64 on 3: rows of 576 elements, nearer to 512 (50 GB/s) than to 4,096 (100).
    share = (1 / 576 - 1 / 4096) / (1 / 512 - 1 / 4096)
    assert by_name["weights"] == pytest.approx(SMOL.read_parameters * 4 * (1 + share) / 100e9)
    assert by_name["attention"] == pytest.approx(SMOL.kv_bytes(2048) / 25e9)  # 3 heads on one: nearer to 4
    assert by_name["layers"] == pytest.approx(1e-3 + 30 * 100e-6)
    assert by_name["calls of attention"] == 0.0  # 7 full blocks in one call, and the tail: in the layer's figure
    assert not found.beside and found.binding == "computing"
    assert found.seconds == pytest.approx(sum(by_name[name] or 0.0 for name in by_name))
    bound = decode_round(made, rates, 1)
    assert bound.seconds is not None and found.seconds is not None and found.seconds > bound.seconds


@pytest.mark.parametrize(("heads", "per_s"), [(1, 50e9), (2, 25e9), (3, 25e9), (8, 25e9)])
def test_attention_is_taken_at_the_nearest_number_of_heads(heads: int, per_s: float) -> None:
    # 2 is as far from 1 as from 4; with more than one it computes, so 4 is more like it.
    assert machine().attention("float32", None, heads) == per_s


@pytest.mark.parametrize(("elements", "per_s"), [(4096, 100e9), (8192, 100e9), (512, 50e9)])
def test_weights_are_read_as_rows_of_their_length(elements: int, per_s: float) -> None:
    assert machine().read_weights("float32", None, elements) == pytest.approx(per_s)
    between = machine().read_weights("float32", None, 1024)
    assert between is not None and 50e9 < between < 100e9


def test_blocks_beyond_one_call_cost_calls() -> None:
    rates = machine()
    made = layout(SMOL, 8192, rates, gpu="1GiB", cpu="1GiB")
    assert made.gpu is not None and made.gpu.num_pieces == 8
    found = expected(made, rates, placed=placed(1 + 9, 17))  # the tail, two calls, three calls
    assert terms(found)["calls of attention"] == pytest.approx(30 * (6 - 2) * 10e-6)


def test_users_of_one_step_share_the_weights_and_not_the_products() -> None:
    rates = machine()
    made = layout(SMOL, 512, rates, gpu="1GiB")
    one, four = (terms(expected(made, rates, users)) for users in (1, 4))
    assert four["weights"] == one["weights"] and four["layers"] == one["layers"]
    assert four["attention"] == pytest.approx(4 * (one["attention"] or 0.0))
    assert four["products of further users"] == pytest.approx(3 * 2 * SMOL.read_parameters / 10e12)


# -- reading -----------------------------------------------------------------------------------------------------------


def with_files(rates: Rates, io: str = "direct", threads: int = 4) -> Layout:
    values = {"gpu": {"budget": "512MiB"}, "nvme": {"budget": "4GiB", "io": io}}
    return lay_out(SMOL, load_config({"tiers": values, "io_threads": threads}), 8192, rates)


def test_where_every_core_computes_the_work_of_reading_comes_on_top() -> None:
    rates = machine()
    made = with_files(rates)
    num_bytes = 16 * made.shape.block_bytes
    found = expected(made, rates, placed=placed(17, 0, 16))
    # All 8 cores compute: what reading costs a core is theirs to do.
    assert terms(found)["work of reading"] == pytest.approx(num_bytes * (1 / 4e9 + 1 / 10e9))
    assert terms(found)["nvme read"] == pytest.approx(num_bytes / 2e9)
    assert found.seconds == pytest.approx(sum(term.seconds or 0.0 for term in found.computing))


def one_thread(rates: Rates) -> Rates:
    """The same rates for one thread: others of the 8 cores are free."""
    renamed = {(place, name.replace("all threads", "one thread")): value for (place, name), value in rates.rows.items()}
    return dataclasses.replace(rates, rows={**rates.rows, **renamed})


@pytest.mark.parametrize(("cores", "threads", "readers"), [(8.0, 4, 4), (2.0, 4, 1), (8.0, 2, 2)])
def test_the_work_of_reading_is_shared_by_cores_that_compute_nothing(cores: float, threads: int, readers: int) -> None:
    rates = one_thread(machine(cores=cores))
    made = with_files(rates, threads=threads)
    num_bytes = 16 * made.shape.block_bytes
    found = expected(made, rates, num_threads=1, placed=placed(17, 0, 16))
    assert "work of reading" not in terms(found)
    work_s = num_bytes * (1 / 4e9 + 1 / 10e9)
    assert terms(found)["nvme read"] == pytest.approx(max(num_bytes / 2e9, work_s / readers))
    assert terms(found)["hand-overs of slices"] == pytest.approx(16 * 30 * 20e-6)


def test_a_slow_disk_decides() -> None:
    slow = tuple(dataclasses.replace(row, bytes_per_s=1e8) for row in machine().disk)
    rates = machine(disk=slow)
    made = with_files(rates)
    found = expected(made, rates, placed=placed(17, 0, 16))
    assert found.binding == "nvme read" and found.seconds == pytest.approx(16 * made.shape.block_bytes / 1e8)


def test_reads_are_taken_at_as_many_at_a_time_as_there_are_threads() -> None:
    rows = tuple(DiskRow("direct", "read", 384 << 10, depth, 1e9 * depth, 4e9) for depth in (1, 4, 32))
    rates = machine(disk=rows)
    assert rates.disk_rate("read", IoMode.DIRECT, 400_000) == 32e9  # the bound's
    for threads, depth in ((1, 1), (4, 4), (6, 4), (64, 32)):
        reads = rates.disk_reads(IoMode.AUTO, 400_000, threads)
        assert reads is not None and reads.depth == depth
    assert rates.disk_reads(IoMode.MMAP, 400_000, 4) is None


def test_blocks_of_the_cpu_tier_are_read_where_they_lie_unless_there_is_a_device() -> None:
    for cuda in (False, True):
        rates = machine(cuda=cuda)
        made = layout(SMOL, 8192, rates, gpu="512MiB", cpu="1GiB")
        found = expected(made, rates, placed=placed(17, 16))
        assert ("host to device" in terms(found)) == cuda
        assert (terms(found)["hand-overs of slices"] != 0.0) == cuda


# -- what is not known -------------------------------------------------------------------------------------------------


def test_rates_of_an_older_doctor_expect_nothing_and_say_what_is_missing() -> None:
    rates = a_machine(cuda=False)
    made = layout(SMOL, 2048, rates, gpu="1GiB")
    found = expected(made, rates)
    assert found.seconds is None and found.binding == ""
    assert found.unmeasured == ["weights", "attention", "layers"]
    assert found.document(1)["ms"] is None and found.document(1)["tokens_per_s"] is None
    assert decode_round(made, rates, 1).seconds is not None


def test_a_disk_whose_reads_were_not_timed_on_a_core_expects_nothing() -> None:
    old = tuple(dataclasses.replace(row, core_bytes_per_s=None) for row in machine().disk)
    for threads, missing in ((None, ["work of reading"]), (1, ["nvme read"])):
        rates = one_thread(machine(disk=old))
        found = expected(with_files(rates), rates, num_threads=threads, placed=placed(17, 0, 16))
        assert found.unmeasured == missing and found.seconds is None


def test_gathered_attention_is_the_models_own_and_not_measured() -> None:
    rates = machine()
    gathered = load_config({"attention": "gathered", "tiers": {"gpu": {"budget": "1GiB"}}})
    assert expected_round(lay_out(SMOL, gathered, 2048, rates), rates, 1) is None


def test_never_less_than_the_bound() -> None:
    assert Expected((Term("weights", 1.0),), (Term("nvme read", 0.5),), 2.0).seconds == 2.0
    assert Expected((Term("weights", 1.0),), (), None).seconds is None


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Gemma-3-27B", "Llama-3.1-8B"])
def test_every_kind_of_model_has_an_expected_time(name: str) -> None:
    model: ModelCard = card(name)
    rates = machine()
    found = expected(layout(model, 4096, rates, gpu="64GiB"), rates)
    assert found.seconds is not None and not found.unmeasured
