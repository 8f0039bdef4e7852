"""The benchmarks of speed on a tiny model: their rows, what makes one invalid, and that all cases compute the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from kvtier import TieredKV
from kvtier.benchmarks import decode, decode_code, decode_sides, lookup, prefill, prefill_child
from kvtier.benchmarks.budgets import SHARES, layout, tier_config
from kvtier.benchmarks.fio import ReadPeak
from kvtier.benchmarks.models import LoadedModel, twin
from kvtier.benchmarks.naive_lru import NaiveLru
from kvtier.benchmarks.residence import residence, spread
from kvtier.benchmarks.synthetic import fill, fill_plain
from kvtier.hf import cache_keyword
from kvtier.types import Tier
from tests.e2e.soaking import tiny_loaded


@pytest.fixture(scope="module", autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded()


class OneDisk(ReadPeak):
    """A disk that reads 1 GB a second, whoever asks."""

    def __init__(self) -> None:
        self.rates, self.version = [], "none"

    def measure(self) -> None:
        self.rates.append(1e9)


# -- placement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("placement", "num_tokens"), list(itertools.product(SHARES, (128, 512, 700))))
def test_blocks_are_spread_as_asked_and_stay_so(
    placement: str, num_tokens: int, loaded: LoadedModel, tmp_path: Path
) -> None:
    wanted, model = layout(placement, num_tokens, 40), twin(loaded.model)
    with TieredKV(model, tier_config(model, wanted, tmp_path)) as tiered:
        cache = tiered.new_cache()
        fill(tiered, cache, torch.zeros((1, num_tokens), dtype=torch.long), torch.Generator().manual_seed(0))
        spread(tiered, cache, wanted.num_blocks)
        placed = residence(cache)
        assert placed == [t for t in sorted(wanted.num_blocks, reverse=True) for _ in range(wanted.num_blocks[t])]
        assert wanted.shares == {tier.label: placed.count(tier) / len(placed) for tier in wanted.num_blocks}
        for token in range(40):
            tiered(torch.tensor([[token]]), **{cache_keyword(loaded.model.forward): cache})
        assert residence(cache)[: len(placed)] == placed
        assert all(
            len(tiered._runtime.placement.residency[block].copies) == 1 for block in cache.state.batch.tables[0].blocks
        )
        tiered.check_integrity()


def test_spreading_what_is_not_there_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    wanted, model = layout("gpu25_cpu75", 128, 8), twin(loaded.model)
    with TieredKV(model, tier_config(model, wanted, tmp_path)) as tiered:
        cache = tiered.new_cache()
        fill(tiered, cache, torch.zeros((1, 128), dtype=torch.long), torch.Generator().manual_seed(0))
        with pytest.raises(RuntimeError, match="the cache has 8"):
            spread(tiered, cache, {Tier.GPU: 2, Tier.CPU: 7})


# -- decode -----------------------------------------------------------------------------------------------------------


def test_decode_has_a_row_for_each_case_and_all_compute_the_same(loaded: LoadedModel, tmp_path: Path) -> None:
    rows = decode.measure(
        loaded, list(decode_sides.SIDES), 512, num_tokens=2, num_pairs=5, seed=1, folder=tmp_path, disk=OneDisk()
    )
    by_case = {row["case"]: row for row in rows}
    assert list(by_case) == list(decode_sides.SIDES)
    assert "CUDA" in by_case.pop("hf_offloaded")["unavailable"] or torch.cuda.is_available()
    for case, row in by_case.items():
        assert row["context"] == 512 and row["ms_per_token"] > 0 and row["spread"][0] <= row["ratio_to_dynamic"]
        assert row["max_logit_diff"] < 1e-4, case
        assert not [reason for reason in row["invalid"] if not reason.startswith("warm")], case
    assert by_case["dynamic"]["ratio_to_dynamic"] == 1 and by_case["dynamic"]["max_logit_diff"] == 0
    assert by_case["gpu25_cpu75"]["placement"] == {"gpu": 0.25, "cpu": 0.75}
    assert by_case["gpu25_cpu75"]["label"] == "host_memory" or torch.cuda.is_available()
    half = by_case["gpu25_cpu25_nvme50"]
    assert half["placement"] == {"gpu": 0.25, "cpu": 0.25, "nvme": 0.5}
    # 512 bytes of KV a token, 256 of them in files; its bound is the larger of compute and reading them.
    assert half["file_bytes_per_token"] == by_case["naive_lru"]["file_bytes_per_token"] == 256 * 512
    assert half["read_bound_ms"] == pytest.approx(256 * 512 / 1e9 * 1e3)
    assert half["bound_ms"] == max(half["read_bound_ms"], by_case["all_gpu"]["ms_per_token"])
    assert half["bound_frac"] > 0 and by_case["all_gpu"]["bound_frac"] == 1
    assert {"ratio_to_static", "ratio_to_all_gpu", "ratio_to_naive_lru"} <= set(half)
    code = decode_code.measure_code(loaded.model, 5)
    assert code is not None and code["num_layers"] == loaded.model.config.num_hidden_layers
    assert code["us_per_layer"] == code["us_per_token"] / code["num_layers"] and len(code["us_spread"]) == 2
    document = {"model": "m", "pairs": 5, "tokens": 2, "rows": rows, "disk_bytes_per_s": 1e9, "code": code}
    assert decode.table(document).row_count == len(rows)
    json.dumps(document)


def side(**values: Any) -> decode_sides.Side:
    return decode_sides.Side(lambda token: token, **values)


def samples(*times_ms: float, read_bytes: float = 0.0, logits: float = 0.0) -> list[decode_sides.Sample]:
    return [decode_sides.Sample(ms, ms, read_bytes, 0.0, torch.tensor([logits])) for ms in times_ms]


@pytest.mark.parametrize(("read_bytes", "has_moved", "logits", "reason"), [
    (1000, False, 0.0, None), (949, False, 0.0, "warm"), (1000, True, 0.0, "moved"), (1000, False, 2e-2, "logits"),
    (1000, False, float("nan"), "logits"),
])  # fmt: skip
def test_what_makes_a_row_invalid(read_bytes: int, has_moved: bool, logits: float, reason: str | None) -> None:
    measured = {
        "dynamic": samples(10, 20, 30),
        "all_gpu": samples(10, 20, 30),
        "gpu25_cpu25_nvme50": samples(20, 20, 20, read_bytes=read_bytes, logits=logits),
    }
    row = decode.to_row("gpu25_cpu25_nvme50", 512, side(file_bytes=1000), measured, has_moved, 1e5)
    assert row["ratio_to_dynamic"] == 1.0 and row["spread"] == [0.5, 1.5]
    assert (row["bound_ms"], row["bound_by"], row["bound_frac"]) == (20.0, "compute", 1.0)
    assert row["is_valid"] is (reason is None)
    assert all(reason is not None and reason in each for each in row["invalid"])
    row = decode.to_row("gpu25_cpu25_nvme50", 512, side(file_bytes=1000), measured, has_moved, 2.5e4)
    assert (row["bound_ms"], row["bound_by"], row["bound_frac"]) == (40.0, "reads", 2.0)
    row = decode.to_row("gpu25_cpu25_nvme50", 512, side(file_bytes=1000), measured, has_moved, None)
    assert row["bound_ms"] is None, "without fio no bound is told"


def test_tokens_are_measured_one_by_one_behind_a_first_that_is_not() -> None:
    seen: list[int] = []

    def step(token: torch.Tensor) -> torch.Tensor:
        seen.append(int(token))
        return torch.tensor([[[float(token)]]])

    sample = decode_sides.Side(step).measure(torch.tensor([[7, 8, 9]]))
    assert seen == [7, 8, 9] and sample.logits.tolist() == [9.0] and sample.ms > 0


# -- the straw man ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "num_readers"), [("slice", 1), ("slice", 4), ("block", 1)])
@pytest.mark.parametrize(("memory_frac", "hits"), [(0.5, 0), (0.9, 0), (1.0, 16)])
def test_a_loop_hits_nothing_behind_lru_unless_all_fits(
    memory_frac: float,
    hits: int,
    unit: Literal["slice", "block"],
    num_readers: int,
    loaded: LoadedModel,
    tmp_path: Path,
) -> None:
    plain = fill_plain(loaded.model, 140, torch.Generator().manual_seed(0))
    naive = NaiveLru(
        twin(loaded.model), plain, tmp_path / "files", block_tokens=16, memory_frac=memory_frac, num_more=3,
        unit=unit, num_readers=num_readers,
    )  # fmt: skip
    try:
        for token in range(3):
            given = torch.tensor([[token]])
            expected = loaded.model(given, use_cache=True, **{cache_keyword(loaded.model.forward): plain}).logits
            before = naive.num_hits, naive.num_misses
            assert (naive.step(given) - expected).abs().max() < 1e-4
        # 8 full blocks of 2 layers, each of which touches its slice or the whole block; the last token finds what the
        # others left.
        assert (naive.num_hits - before[0], naive.num_misses - before[1]) == (hits, 16 - hits)
        with pytest.raises(RuntimeError, match="room for 15 tokens"):
            naive.step(given)
    finally:
        naive.close()
    assert not (tmp_path / "files").exists()


def test_the_straw_man_needs_memory_for_a_layer(loaded: LoadedModel, tmp_path: Path) -> None:
    plain = fill_plain(loaded.model, 128, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="a layer has 8"):
        NaiveLru(twin(loaded.model), plain, tmp_path, block_tokens=16, memory_frac=0.4, num_more=1)


# -- prefill ----------------------------------------------------------------------------------------------------------


def test_prefill_has_a_row_for_each_case(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tasks = []

    def child(task: dict[str, Any], folder: Path) -> dict[str, Any]:
        tasks.append(json.loads(json.dumps(task)))  # what a new process would be told
        return prefill_child.measure(tiny_loaded().model, tasks[-1])

    rows = prefill.measure(
        loaded,
        prefill.CASES,
        300,
        chunk=64,
        num_rounds=5,
        folder=tmp_path,
        child={"model": None, "threads": 1},
        start=child,
    )
    by_case = {row["case"]: row for row in rows}
    assert list(by_case) == list(prefill.CASES) and len(tasks) == len(rows)
    for case, row in by_case.items():
        assert row["is_valid"] and row["max_logit_diff"] < 1e-4, case
        assert row["seconds"] > 0 and row["peak_bytes"] >= 0 and row["model_bytes"] > 0
        assert row["ratio_to_one_call"] > 0
    assert by_case["plain_chunked"]["ratio_to_chunked"] == by_case["plain_one_call"]["ratio_to_one_call"] == 1
    assert by_case["all_gpu"]["placement"] == {"gpu": 1.0, "cpu": 0.0, "nvme": 0.0}
    assert by_case["gpu25_cpu25_nvme50"]["placement"]["nvme"] > 0
    document = {"model": "m", "chunk": 64, "rounds": 5, "rows": rows}
    assert prefill.table(document).row_count == len(rows)


def test_the_peak_is_of_what_was_held_since(tmp_path: Path) -> None:
    before = prefill_child.resident_bytes()
    prefill_child.forget_peak()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    del held
    assert prefill_child.resident_bytes("VmHWM") - before >= 60 << 20
    prefill_child.forget_peak()
    assert prefill_child.resident_bytes("VmHWM") - before < 60 << 20


# -- lookup -----------------------------------------------------------------------------------------------------------


def test_lookup_gives_the_tokens_of_greedy_in_every_placement(loaded: LoadedModel, tmp_path: Path) -> None:
    rows = lookup.measure(loaded, lookup.CASES, 300, num_new=8, num_rounds=5, folder=tmp_path)
    assert [row["case"] for row in rows] == list(lookup.CASES)
    for row in rows:
        assert row["same_tokens"] and row["new_tokens"] == 8 and row["ratio_to_greedy"] > 0
        assert "blocks moved while it was measured" not in row["invalid"]
    assert lookup.table({"model": "m", "context": 300, "rows": rows}).row_count == 3
    json.dumps(rows)


def test_a_lookup_that_is_wrong_or_copies_nothing_is_invalid() -> None:
    def turns(tokens: tuple[int, ...], seconds: float, num_forwards: int) -> list[lookup.Turn]:
        return [lookup.Turn(seconds, tokens, num_forwards, 4000)] * 3

    side = lookup.Side(lambda: None, lambda: 0, lambda: None, file_bytes=1000)
    measured = {"greedy": turns((1, 2, 3, 4), 4.0, 4), "lookup": turns((1, 2, 3, 4), 2.0, 1)}
    row = lookup.to_row("gpu25_cpu25_nvme50", 9, side, measured, (1, 2, 3, 4), (1, 2, 3, 4), False)
    assert row["is_valid"] and row["ratio_to_greedy"] == 2 and row["tokens_per_forward"] == 4
    assert row["accepted_frac"] == 0.3 and row["copied_frac"] == 1 and row["greedy_ms_per_token"] == 1000
    row = lookup.to_row("gpu25_cpu25_nvme50", 9, side, measured, (1, 2, 3, 5), (9, 9, 9, 9), True)
    assert row["invalid"] == ["other tokens", "blocks moved while it was measured", "the model does not copy"]
    warm = {**measured, "greedy": [lookup.Turn(4.0, (1, 2, 3, 4), 4, 3000)] * 3}
    row = lookup.to_row("gpu25_cpu25_nvme50", 9, side, warm, (1, 2, 3, 4), (1, 2, 3, 4), False)
    assert row["invalid"] == ["warm"]
