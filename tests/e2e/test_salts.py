"""Two salts on one wrapper: nothing is shared between them, and what one of them sees says nothing of the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from kvtier import TieredKV
from kvtier.hf import TieredCache, describe
from kvtier.hf.fingerprint import fingerprint
from kvtier.origin import namespace_of
from kvtier.stores.nvme import NvmeStore
from kvtier.types import Tier
from tests.e2e.families import BLOCK, small_config, tiny_from, tokens
from tests.e2e.test_fingerprint import demote_all

SALTS = ("alice", "bob")
LENGTH = 2 * BLOCK + 8
SYSTEM = tokens(BLOCK, 1000)
PROMPTS = [torch.cat([SYSTEM, tokens(LENGTH - BLOCK, seed)], dim=1) for seed in range(10)]
NUM_REQUESTS = 1000


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_from(
        LlamaConfig, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1,
        intermediate_size=32,
    )  # fmt: skip


def wrapped(model: Any, folder: Path, **values: Any) -> TieredKV:
    return TieredKV(model, small_config(model, folder, **{"prefix_cache": True, "nvme": 4 << 20, **values}))


def ask(tiered: TieredKV, ids: torch.Tensor, salt: str, cache: TieredCache | None = None) -> int:
    """How many tokens were computed."""
    before = tiered._runtime.metrics.tokens
    how: dict[str, Any] = {"salt": salt} if cache is None else {"cache": cache}
    tiered.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, **how)
    return tiered._runtime.metrics.tokens - before


def namespaces(model: Any, salts: tuple[str, ...] = SALTS) -> dict[str, bytes]:
    found = fingerprint(model, describe(model, BLOCK))
    return {salt: namespace_of(found.weights, found.adapters, b"str:" + salt.encode()) for salt in salts}


def check_apart(tiered: TieredKV, caches: dict[str, list[TieredCache]], spaces: dict[str, bytes]) -> int:
    """No block and no slot is of both salts, in caches and in the index; returns how many blocks were looked at."""
    placement = tiered._runtime.placement
    blocks: dict[str, set[int]] = {}
    for salt, space in spaces.items():
        held = {block for cache in caches[salt] for table in cache.state.batch.tables for block in table.blocks}
        indexed = {
            block for block in placement.prefixes.blocks() if placement.prefixes.sealed(block).label.namespace == space
        }
        blocks[salt] = held | indexed
    alice, bob = (blocks[salt] for salt in SALTS)
    assert not alice & bob
    for tier in Tier:
        slots = [{placement.residency[block].copies.get(tier) for block in each} - {None} for each in (alice, bob)]
        assert not slots[0] & slots[1]
    assert set(placement.prefixes.blocks()) <= alice | bob
    return len(alice | bob)


@pytest.mark.timeout(600)
def test_a_thousand_requests_of_two_salts_share_nothing_and_each_shares_all_with_itself(
    model: Any, tmp_path: Path
) -> None:
    rng, spaces = random.Random(4), namespaces(model)
    caches: dict[str, list[TieredCache]] = {salt: [] for salt in SALTS}
    computed, seen = dict.fromkeys(SALTS, 0), dict[str, set[int]]({salt: set() for salt in SALTS})
    expected = dict.fromkeys(SALTS, 0)
    with wrapped(model, tmp_path) as tiered:
        for number in range(NUM_REQUESTS):
            salt, prompt = rng.choice(SALTS), rng.randrange(len(PROMPTS))
            cache = tiered.new_cache(salt=salt)
            computed[salt] += ask(tiered, PROMPTS[prompt], salt, cache)
            known = 2 * BLOCK if prompt in seen[salt] else BLOCK if seen[salt] else 0
            expected[salt] += LENGTH - known
            seen[salt].add(prompt)
            caches[salt] = [*caches[salt][-3:], cache]
            if number % 50 == 49:
                tiered.check_integrity()
                assert check_apart(tiered, caches, spaces) > 20
        assert computed == expected, "all that its own salt had computed, and no more"
        used = [tier["used_slots"] for tier in tiered.stats()["tiers"].values()]
        assert all(used), "blocks of both lie on every tier"
        caches = {salt: [] for salt in SALTS}
        demote_all(tiered)
        store = tiered._runtime.stores[Tier.NVME]
        assert isinstance(store, NvmeStore)
        folder, shape = store.folder, store.shape
    files = NvmeStore(shape, 4 << 20, folder, True, reserve_free_frac=0.0)
    found = list(files.found().values())
    files.close()
    identities = {salt: {each.identity for each in found if each.namespace == space} for salt, space in spaces.items()}
    assert {each.namespace for each in found} == set(spaces.values())
    assert not identities["alice"] & identities["bob"]
    assert len(identities["alice"]) == len(identities["bob"]) == 1 + len(PROMPTS)
    with wrapped(model, tmp_path) as tiered:
        for prompt in PROMPTS:
            assert ask(tiered, prompt, "bob") == LENGTH - 2 * BLOCK
        for prompt in PROMPTS:
            assert ask(tiered, prompt, "alice") == LENGTH - 2 * BLOCK
        assert ask(tiered, PROMPTS[0], "") == ask(tiered, PROMPTS[0], "carol") == LENGTH
        tiered.check_integrity()


# -- what one of them sees --------------------------------------------------------------------------------------------


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    for key, each in value.items():
        if isinstance(each, dict):
            yield from numbers(each, f"{path}{key}.")
        else:
            yield f"{path}{key}", each


def seen_by_bob(model: Any, folder: Path, asked: list[torch.Tensor], salts: tuple[str, str]) -> list[dict[str, Any]]:
    """What the counters say of each of bob's requests, after another's, and between them."""
    told = []
    with wrapped(model, folder, gpu_slots=200, cpu_blocks=0, nvme=0) as tiered:
        for number, prompt in enumerate([*PROMPTS, *PROMPTS]):
            if asked:
                ask(tiered, asked[number % len(asked)], salts[0])
            before = tiered.stats()
            cache = tiered.new_cache(salt=salts[1])
            ask(tiered, prompt, salts[1], cache)
            after = tiered.stats()
            was = dict(numbers(before["prefix_cache"]))
            told.append(
                {key: count - was[key] for key, count in numbers(after["prefix_cache"])}
                | {key: after[key] - before[key] for key in ("steps", "tokens", "moves_failed", "recomputed_blocks")}
                | {f"cache.{key}": count for key, count in numbers(cache.stats())}
            )
    return told


def test_counters_of_one_salt_are_the_same_whatever_another_has_asked(model: Any, tmp_path: Path) -> None:
    others = [tokens(LENGTH, seed) for seed in range(50, 60)]
    same = seen_by_bob(model, tmp_path / "a", PROMPTS, SALTS)
    assert same == seen_by_bob(model, tmp_path / "b", others, SALTS)
    assert same == seen_by_bob(model, tmp_path / "c", PROMPTS[::-1], SALTS)
    assert sum(each["tokens"] for each in same) == LENGTH + 9 * (LENGTH - BLOCK) + 10 * (LENGTH - 2 * BLOCK)


def test_of_a_salt_that_nobody_else_uses_the_wrapper_with_only_the_first_miss_has_another_name(
    model: Any, tmp_path: Path
) -> None:
    """`salt` says that something is kept of others, `unknown` that nothing is."""
    among, alone = seen_by_bob(model, tmp_path / "a", PROMPTS, SALTS), seen_by_bob(model, tmp_path / "b", [], SALTS)
    first, second = among[0], alone[0]
    assert (first.pop("misses.salt"), second.pop("misses.salt")) == (1, 0)
    assert (first.pop("misses.unknown"), second.pop("misses.unknown")) == (0, 1)
    assert among == alone


def test_without_salts_the_counters_tell_what_others_have_asked(model: Any, tmp_path: Path) -> None:
    """The control."""
    others = [tokens(LENGTH, seed) for seed in range(50, 60)]
    same = seen_by_bob(model, tmp_path / "a", PROMPTS, ("", ""))
    apart = seen_by_bob(model, tmp_path / "b", others, ("", ""))
    assert same != apart
    assert sum(each["tokens"] for each in same) < sum(each["tokens"] for each in apart)
