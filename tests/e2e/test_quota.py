"""What one salt may keep: its own oldest blocks go first, and nobody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import KVTierConfig, TieredKV
from kvtier.errors import ConfigError
from tests.e2e.families import BLOCK, GREEDY, assert_same, small_config, tiny, tokens

QUOTA = 12  # blocks


@pytest.fixture
def model() -> Any:
    return tiny("llama")


def config(model: Any, folder: Path) -> dict[str, Any]:
    values = small_config(model, folder, prefix_cache=True, gpu_slots=14, nvme="8MiB")
    with TieredKV(model, values) as tiered:
        block_bytes = tiered.stats()["block_bytes"]
    return {**values, "salt_quota": QUOTA * block_bytes + 5}


def ask(tiered: TieredKV, ids: torch.Tensor, salt: str) -> int:
    before = tiered.stats()["tokens"]
    ours = tiered.generate(ids, attention_mask=torch.ones_like(ids), salt=salt, **GREEDY)
    plain = tiered.model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert_same(ours, plain, "blockwise")
    tiered.check_integrity()
    return tiered.stats()["tokens"] - before - GREEDY["max_new_tokens"] + 1


def kept(tiered: TieredKV, salt: str) -> tuple[int, int]:
    """Blocks of a salt in the index, and in files."""
    runtime, name = tiered._runtime, b"str:" + salt.encode()
    labels, store = runtime.labels, runtime.stores[2]  # type: ignore[index]
    assert labels is not None
    origin = labels.origin(runtime.weights_mark(), runtime.source.seen(), name)  # type: ignore[union-attr]
    assert origin is not None
    return runtime.placement.prefixes.num_of_salt(name), store.num_in(origin.fingerprint.namespace)  # type: ignore


def test_a_greedy_tenant_takes_its_own_room_alone_in_memory_and_files(model: Any, tmp_path: Path) -> None:
    values = config(model, tmp_path)
    modest = tokens(6 * BLOCK, 99)
    for round_ in range(3):
        with TieredKV(model, values) as tiered:
            assert ask(tiered, modest, "modest") == (6 * BLOCK if round_ == 0 else 1)
            for seed in range(6):
                ask(tiered, tokens(5 * BLOCK, 10 * round_ + seed), "greedy")
                index, files = kept(tiered, "greedy")
                assert index <= QUOTA and files <= QUOTA
            assert ask(tiered, modest, "modest") == 1, "nothing of it was taken"
            assert ask(tiered, tokens(5 * BLOCK, 10 * round_ + 5), "greedy") == 1, "its latest is there"
        with TieredKV(model, values) as tiered:
            assert kept(tiered, "greedy")[1] <= QUOTA


def test_more_than_the_quota_is_served_and_not_kept(model: Any, tmp_path: Path) -> None:
    with TieredKV(model, config(model, tmp_path)) as tiered:
        ids = tokens(20 * BLOCK)
        assert ask(tiered, ids, "greedy") == 20 * BLOCK
        assert ask(tiered, ids, "greedy") == 20 * BLOCK - QUOTA * BLOCK
        session = tiered.session("long", salt="greedy")
        session.generate(ids, **GREEDY)
        assert max(kept(tiered, "greedy")) <= QUOTA
    with TieredKV(model, config(model, tmp_path)) as tiered:
        held = tiered.session("long", salt="greedy").cache.token_ids
        assert len(held) <= QUOTA * BLOCK and held == ids[0, : len(held)].tolist()


def test_who_names_no_salt_is_not_limited(model: Any, tmp_path: Path) -> None:
    with TieredKV(model, config(model, tmp_path)) as tiered:
        ids = tokens(20 * BLOCK)
        ask(tiered, ids, "")
        assert ask(tiered, ids, "") == 1


@pytest.mark.parametrize("bad", ["30%", 0, "many"])
def test_a_quota_is_a_number_of_bytes(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"salt_quota: .*Mend: give a size such as 2GiB"):
        KVTierConfig(salt_quota=bad)
