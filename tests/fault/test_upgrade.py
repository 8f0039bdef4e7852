"""Blocks of the model as it was lie on disk: whatever changed since, none is found; if nothing did, all are.

What makes a namespace, one by one, is in tests/e2e/test_fingerprint.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvtier.hf import describe
from kvtier.hf.fingerprint import fingerprint
from kvtier.identity import FORMATS
from kvtier.stores.nvme import NvmeStore
from tests.e2e.families import BLOCK, CHUNK, tokens
from tests.e2e.test_fingerprint import (
    adapted,
    buffer,
    demote_all,
    llama,
    minus_zero,
    one_ulp,
    plain_attribute,
    watched,
    yarn,
)  # fmt: skip
from tests.fault.table import Row, report

IDS = tokens(10 * BLOCK + 3)


class Left:
    """What a process left, and the one that looks into it."""

    def __init__(self, folder: Path) -> None:
        self.model = llama()
        with watched(self.model, folder) as (tiered, written), torch.no_grad():
            cache = tiered.new_cache()
            tiered(IDS, cache=cache)
            demote_all(tiered)
            shape = tiered._runtime.group.shape
        self.labels = list({label.identity: label for label in written if label is not None}.values())
        self.store = NvmeStore(shape, 4 << 20, folder / "nvme" / "kv", True, reserve_free_frac=0.0)

    def found(self, namespace: bytes | None = None) -> list[torch.Tensor]:
        """KV of the blocks that are found under their labels, or with another namespace in its place.

        Their identity stays, though that of the same tokens would be another: the namespace alone must do.
        """
        blocks = []
        for label in self.labels:
            slot = self.store.find(label if namespace is None else replace(label, namespace=namespace))
            if slot is not None:
                out = torch.empty(self.store.shape.block_bytes, dtype=torch.uint8)
                self.store.read(slot, out)
                blocks.append(out.view(torch.float32))
        return blocks


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    left = Left(tmp_path_factory.mktemp("upgrade"))
    yield left
    left.store.close()


@torch.no_grad()
def computed(model: Any, ids: torch.Tensor = IDS) -> list[torch.Tensor]:
    """KV of all full blocks of `ids`, as the plain model makes it, laid out as a block is."""
    cache = DynamicCache(config=model.config)
    for chunk in ids.split(CHUNK, dim=1):
        model(chunk, cache=cache)
    held = [tensor[0].float() for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return [
        torch.cat([tensor[:, at : at + BLOCK].flatten() for tensor in held])
        for at in range(0, ids.shape[1] - BLOCK + 1, BLOCK)
    ]


def is_right(block: torch.Tensor, of: list[torch.Tensor], atol: float = 1e-5) -> bool:
    """Whether it is one of these, that were computed chunk by chunk as it was."""
    return any(block.shape == each.shape and torch.allclose(block, each, atol=atol) for each in of)


def with_change(change: Callable[[Any], None]) -> Callable[[], Any]:
    def make() -> Any:
        model = llama()
        change(model)
        return model

    return make


def large_weight(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data[0, 0] += 0.5


def rope(**values: Any) -> Callable[[], Any]:
    return lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **values})


def with_adapter() -> Any:
    return adapted().get_base_model()


def with_other_adapter() -> Any:
    model = adapted()
    model.set_adapter("other")
    return model.get_base_model()


UPGRADES: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: llama().bfloat16(),
    "float64": lambda: llama().double(),
    "rope_theta": rope(rope_theta=20000.0),
    "rope scaling": lambda: llama(rope_parameters=yarn(2.0)),
    "linear rope": rope(rope_type="linear", factor=2.0),
    "one weight": with_change(large_weight),
    "one weight by one ulp": with_change(one_ulp),
    "a sign of zero": with_change(minus_zero),
    "a buffer": with_change(buffer),
    "an attribute": with_change(plain_attribute),
    "an activation": lambda: llama(hidden_act="gelu"),
    "an adapter": with_adapter,
    "another adapter": with_other_adapter,
}
UNSEEN = {"one weight by one ulp"}
"""Too small to be told in the KV of this model."""


@pytest.mark.parametrize("change", UPGRADES)
def test_an_upgraded_model_finds_nothing_of_the_old_one(
    change: str, left: Left, request: pytest.FixtureRequest
) -> None:
    model = UPGRADES[change]()
    assert left.found(fingerprint(model, describe(model, BLOCK)).namespace) == []
    # The control: without the fingerprint, all blocks would be found, and be those of another model.
    of_new = computed(model)
    wrong = sum(not is_right(block, of_new) for block in left.found())
    assert len(left.found()) == 10 and bool(wrong) is (change not in UNSEEN)
    report(request, Row.UPGRADE, detected=1, wrong_unchecked=wrong)


def test_another_block_size_salt_or_version_finds_nothing(
    left: Left, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = describe(left.model, BLOCK)
    found = [
        fingerprint(left.model, describe(left.model, 2 * BLOCK)).namespace,
        fingerprint(left.model, group, b"tenant").namespace,
    ]
    for name in FORMATS:
        with monkeypatch.context() as patch:
            patch.setattr("kvtier.hf.fingerprint.FORMATS", {**FORMATS, name: FORMATS[name] + 1})
            found.append(fingerprint(left.model, group).namespace)
    with monkeypatch.context() as patch:
        patch.setattr("transformers.__version__", "99.0.0")
        found.append(fingerprint(left.model, group).namespace)
    assert len(set(found)) == len(found) == 3 + len(FORMATS)
    for namespace in found:
        assert left.found(namespace) == []
    report(request, Row.UPGRADE, detected=len(found))


def test_the_same_model_finds_all_of_its_blocks(left: Left, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    left.model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa").eval()
    of_new = computed(again)
    for model in (again, llama()):
        blocks = left.found(fingerprint(model, describe(model, BLOCK)).namespace)
        assert len(blocks) == len(of_new) == 10
        assert all(is_right(block, of_new) for block in blocks)
    report(request, Row.NO_UPGRADE, absorbed=20)
