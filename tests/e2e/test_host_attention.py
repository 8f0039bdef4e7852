"""Blocks of the cpu tier that the CPU attends to where they lie: the same logits in every placement, and no copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.host_attention import HostAttender, HostShare
from tests.e2e.families import BLOCK, GREEDY, assert_same, plain_turns, small_config, tiny, tokens

FAMILIES = ("llama", "gemma2", "gpt_oss")  # plain, soft-capping, sinks


def config_of(model: Any, folder: Path, way: str, mode: str = "blockwise", **values: Any) -> dict[str, Any]:
    return small_config(model, folder, mode, cpu_blocks=6, host_attention=way, **values)


def turn_by_turn(tiered: TieredKV, turns: list[Any], mode: str = "blockwise") -> dict[str, Any]:
    cache = tiered.new_cache()
    for ids, expected in turns:
        assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, mode)
        tiered.check_integrity()
    return tiered.stats()


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["never", "auto"])
@pytest.mark.parametrize("mode", ["blockwise", "gathered"])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_turns_in_every_way(family: str, mode: str, way: str, tmp_path: Path) -> None:
    model = tiny(family)
    with TieredKV(model, config_of(model, tmp_path, way, mode)) as tiered:
        stats = turn_by_turn(tiered, plain_turns(model), mode)
        assert stats["tiers"]["cpu"]["slices_read"] > 0 and stats["nvme_sole_reads"] > 0


class _Reads:
    """Every slice that crosses to the compute device, by tier."""

    def __init__(self, tiered: TieredKV, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tiers: list[str] = []
        ring = tiered._runtime.executor.ring
        assert ring is not None
        begin_slices = ring._reads._begin_slices

        def noted(tier: Any, slots: Any, *arguments: Any) -> Any:
            self.tiers += [tier.label] * len(slots)
            return begin_slices(tier, slots, *arguments)

        monkeypatch.setattr(ring._reads, "_begin_slices", noted)


@pytest.mark.parametrize(("way", "crosses"), [("never", True), ("always", False), ("auto", False)])
def test_only_never_copies_slices_of_the_cpu_tier(
    way: str, crosses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    with TieredKV(model, config_of(model, tmp_path, way)) as tiered:
        reads = _Reads(tiered, monkeypatch)
        stats = turn_by_turn(tiered, plain_turns(model))
        assert ("cpu" in reads.tiers) == crosses and "nvme" in reads.tiers
        assert stats["tiers"]["cpu"]["slices_read"] > 0


@pytest.mark.sampled
@pytest.mark.parametrize("frac", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_beside_a_device_every_share_gives_the_same_logits(
    family: str, frac: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a CUDA device: a thread attends to its share, and the ring brings the rest."""
    model = tiny(family)
    monkeypatch.setattr(HostShare, "frac", lambda self: frac)
    with TieredKV(model, config_of(model, tmp_path, "auto")) as tiered:
        memory = tiered._runtime.executor.memory
        memory.attender = HostAttender(torch.device("cpu"), memory.share)
        reads = _Reads(tiered, monkeypatch)
        turn_by_turn(tiered, plain_turns(model))
        assert memory.share.host.per_s is not None
        assert (tiered._runtime._link_slices_s() is not None) == (frac < 1.0)  # what `auto` solves the share from
        assert ("cpu" in reads.tiers) == (frac < 1.0)


@pytest.mark.parametrize("beside", [False, True])
def test_padded_rows_and_beams(beside: bool, tmp_path: Path) -> None:
    model = tiny()
    ids = tokens(90, seed=3).repeat(3, 1)
    mask = torch.ones_like(ids)
    mask[1, :40], mask[2, :7] = 0, 0
    how = {**GREEDY, "num_beams": 2, "attention_mask": mask, "pad_token_id": 0}
    expected = model.generate(ids, **how)
    with TieredKV(model, config_of(model, tmp_path, "always", rows=6)) as tiered:
        memory = tiered._runtime.executor.memory
        if beside:
            memory.attender = HostAttender(torch.device("cpu"), memory.share)
        for _ in range(3):
            out = tiered.generate(ids, **how)
            assert torch.equal(out.sequences, expected.sequences)
            tiered.check_integrity()
        assert tiered.stats()["tiers"]["cpu"]["slices_read"] > 0


def test_a_step_that_is_broken_off_waits_for_what_reads_its_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    with TieredKV(model, config_of(model, tmp_path, "always")) as tiered, torch.no_grad():
        memory = tiered._runtime.executor.memory
        attender = memory.attender = HostAttender(torch.device("cpu"), memory.share)
        cache, ids = tiered.new_cache(), tokens(20 * BLOCK)
        tiered(ids[:, :-1], cache=cache, logits_to_keep=1)
        begun: list[Any] = []
        start = attender.start
        monkeypatch.setattr(attender, "start", lambda *a: begun.append(start(*a)) or begun[-1])

        def broken(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("kvtier.open_step.partial_attention", broken)
        with pytest.raises(KeyboardInterrupt):
            tiered(ids[:, -1:], cache=cache)
        assert begun and all(future.done() for future in begun)
        monkeypatch.undo()
        tiered.check_integrity()
        logits = tiered(ids[:, -1:], cache=cache).logits
        assert torch.allclose(logits[:, -1], model(ids).logits[:, -1], atol=1e-4)
