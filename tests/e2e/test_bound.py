"""`stats()["bound"]` of a model whose KV lies on three tiers: edges, causes, windows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.bound import bound_between
from kvtier.testing import Fault, FaultyStore
from kvtier.types import Tier
from tests.e2e.families import MODES, small_config, tiny, tokens

PROMPT = 300
STREAMS: dict[str, Any] = {"host_attention": "never"}  # the cpu tier is streamed, and not attended to where it lies


def check(bound: dict[str, Any]) -> None:
    """What holds of every such document."""
    kinds = bound["decode"], bound["prefill"]
    for name in ("steps", "compute_s"):
        assert bound[name] == pytest.approx(sum(kind[name] for kind in kinds))
    for kind in kinds:
        assert 0 <= kind["compute_s"] <= kind["took_s"]
    assert sum(kind["took_s"] for kind in kinds) <= bound["took_s"] * (1 + 1e-9)
    times = {"compute": bound["compute_s"]} | {name: edge["seconds_at_peak"] for name, edge in bound["edges"].items()}
    assert bound["bound_s"] == max(times.values()) == times[bound["binding"]]
    assert bound["bound_frac"] == pytest.approx(bound["bound_s"] / bound["took_s"])
    assert 0 < bound["bound_frac"] <= 1 + 1e-9
    for edge in bound["edges"].values():
        assert edge["peak_bytes_s"] > 0 and 0 <= edge["busy_s"] <= bound["took_s"] * (1 + 1e-9)
        assert edge["seconds_at_peak"] <= edge["busy_s"] * (1 + 1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_three_tiers(mode: str, tmp_path: Path) -> None:
    model = tiny("llama")
    with TieredKV(model, small_config(model, tmp_path, mode, **STREAMS)) as tiered:
        first = tiered.stats()
        assert first["bound"]["binding"] == "none" and first["bound"]["edges"] == {}
        cache = tiered.new_cache()
        ids = tiered.generate(tokens(PROMPT), past_key_values=cache, max_new_tokens=8, do_sample=False)
        middle = tiered.stats()
        tiered.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
        stats = tiered.stats()
    bound = stats["bound"]
    check(bound)
    moved = {edge for edge, num_bytes in stats["bytes_moved"].items() if num_bytes}
    assert {"nvme_to_gpu", "cpu_to_gpu"} <= moved <= set(bound["edges"])
    assert bound["edges"]["nvme_to_gpu"]["bytes"] > 0 and bound["edges"]["cpu_to_gpu"]["bytes"] > 0
    assert bound["steps"] == stats["steps"]
    assert bound["decode"]["steps"] >= 14 and bound["prefill"]["steps"] >= PROMPT // stats["max_chunk"]
    assert sum(bound["stalls"].values()) == pytest.approx(stats["stall_s"], abs=1e-6)
    assert bound["stalls"]["stream_nvme"] > 0

    windows = [bound_between(first, middle), bound_between(middle, stats)]
    for window in windows:
        check(window)
    for name in ("steps", "took_s", "compute_s"):
        assert sum(window[name] for window in windows) == pytest.approx(bound[name])
    for name, edge in bound["edges"].items():
        parts = [window["edges"].get(name, {"bytes": 0})["bytes"] for window in windows]
        assert sum(parts) == edge["bytes"], name
    for cause, seconds in bound["stalls"].items():
        assert sum(window["stalls"][cause] for window in windows) == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize(("slow", "cause"), [(Tier.NVME, "stream_nvme"), (Tier.CPU, "stream_cpu")])
def test_a_slow_tier_is_what_is_waited_for_and_what_binds(slow: Tier, cause: str, tmp_path: Path) -> None:
    model = tiny("llama")
    expected = model.generate(tokens(PROMPT), max_new_tokens=8, do_sample=False)
    with TieredKV(model, small_config(model, tmp_path, "blockwise", **STREAMS)) as tiered:
        # From the first call, so that no peak is of a time when the tier was fast.
        late = {"seed": 1, "rates": {Fault.DELAY: 1.0}, "delay_s": 0.01}
        tiered._runtime.interpose(slow, lambda inner: FaultyStore(inner, **late))
        answer = tiered.generate(tokens(PROMPT), max_new_tokens=8, do_sample=False)
        bound = tiered.stats()["bound"]
    assert torch.equal(answer, expected)
    check(bound)
    assert bound["stalls"][cause] == max(bound["stalls"].values())
    slowest = max(bound["edges"], key=lambda name: bound["edges"][name]["seconds_at_peak"])
    assert slowest == f"{slow.label}_to_gpu" and bound["binding"] in (
        slowest,
        "compute",
    )  # a busy machine computes long


def test_the_engine_and_the_bookkeeping_count_the_same_bytes(tmp_path: Path) -> None:
    model = tiny("llama")
    # Nothing is read ahead that no step asks for in the end.
    config = small_config(model, tmp_path, **STREAMS, prefetch={"policy": "no_prefetch"})
    with TieredKV(model, config) as tiered:
        tiered.generate(tokens(PROMPT), max_new_tokens=4, do_sample=False)
        deadline_s = time.monotonic() + 30
        while (stats := tiered.stats())["moves_in_flight"] and time.monotonic() < deadline_s:
            time.sleep(0.005)
        metered = {
            f"{source.label}_to_{dest.label}": tiered._runtime.edges[source, dest]._bytes
            for source in Tier for dest in Tier if source is not dest
        }  # fmt: skip
    assert stats["moves_failed"] == stats["moves_in_flight"] == 0
    assert metered == stats["bytes_moved"]
    for name, edge in stats["bound"]["edges"].items():
        assert edge["bytes"] <= metered[name]


def test_all_on_the_gpu_tier_is_bound_by_compute() -> None:
    model = tiny("llama")
    with TieredKV(model, {"block_tokens": 16, "tiers": {"gpu": {"budget": "8MiB"}}}) as tiered:
        tiered.generate(tokens(40), max_new_tokens=4, do_sample=False)
        stats = tiered.stats()
    bound = stats["bound"]
    check(bound)
    assert (bound["binding"], bound["edges"], stats["stall_s"]) == ("compute", {}, 0.0)
    assert bound["prefill"]["steps"] == 1 and bound["decode"]["steps"] == 3


def test_what_a_hook_calls_inside_a_step_is_no_step_and_the_step_goes_on() -> None:
    model = tiny("llama")
    seen: list[dict[str, Any]] = []
    with TieredKV(model, {"block_tokens": 16, "tiers": {"gpu": {"budget": "8MiB"}}}) as tiered:
        cache = tiered.new_cache()

        def hook(*_: Any) -> None:
            seen.append(tiered.stats()["bound"])
            with pytest.raises(Exception, match="do not call it from inside its own forward"):
                model(tokens(4), past_key_values=cache)
            seen.append(tiered.stats()["bound"])

        handle = model.model.layers[0].register_forward_hook(hook)
        try:
            with torch.no_grad():
                model(tokens(40), past_key_values=cache)
        finally:
            handle.remove()
        bound = tiered.stats()["bound"]
    check(bound)
    assert 0 < seen[0]["took_s"] < seen[1]["took_s"] < bound["took_s"]  # it runs on
    assert (seen[0]["steps"], seen[1]["steps"], bound["steps"]) == (0, 0, 1)


def test_a_generation_that_is_broken_off_takes_time_and_computes_nothing() -> None:
    model = tiny("llama")
    with TieredKV(model, {"block_tokens": 16, "tiers": {"gpu": {"budget": "8MiB"}}}) as tiered:
        tiered.generate(tokens(8), max_new_tokens=2, do_sample=False)
        before = tiered.stats()

        def hook(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = model.model.layers[0].register_forward_hook(hook)
        try:
            with pytest.raises(KeyboardInterrupt):
                tiered.generate(tokens(8), max_new_tokens=2, do_sample=False)
        finally:
            handle.remove()
        window = bound_between(before, tiered.stats())
    assert (window["steps"], window["compute_s"], window["binding"]) == (0, 0.0, "none")
    assert window["took_s"] > 0 and window["bound_frac"] == 0.0
