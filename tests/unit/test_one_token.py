"""One new token in one row: how few calls of torch a layer takes, and that merging two pieces by a sigmoid is exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvtier.attention import Partial, finish, merge
from kvtier.errors import IntegrityError
from kvtier.open_step import OpenStep
from kvtier.places import WholeSlab, _together
from kvtier.stores.slab import LayerViews
from kvtier.types import AttentionMode, Tier
from tests.property.test_open_step import BLOCK_TOKENS, HEADS, KEY_DIM, KV_HEADS, LAYERS, World
from tests.small_tiers import columns

VIEWS = {"expand", "unsqueeze", "view", "detach", "_unsafe_view", "as_strided", "slice", "alias"}


class Calls(TorchDispatchMode):
    """Counts what reaches a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def decoded(held: int, *, joined: bool) -> Counter[str]:
    """What the second layer of a step calls but for views, of one new token behind `held` ones."""
    world = World(torch.float32, KEY_DIM, 2, 2, AttentionMode.BLOCKWISE, 1, joined=joined)
    world.select([0])
    world.step(held, (0xFFFF,) * 3)
    step = world.house.manager.begin_step(world.batch, [columns([1])])
    opened = OpenStep(world.memory, step, world.house.manager.plan(world.batch))
    for number, layer in enumerate(LAYERS):
        keys, values = torch.randn(1, KV_HEADS, 1, KEY_DIM), torch.randn(1, KV_HEADS, 1, KEY_DIM)
        query = torch.randn(1, HEADS, 1, KEY_DIM)
        with Calls() as calls:
            opened.append(layer, keys, values)
            opened.attend(layer, query, keys, values, 0.3)
        if number == len(LAYERS) - 1:
            world.house.manager.abort_step(step)
            return calls.counts
    raise AssertionError


def work(counts: Counter[str]) -> Counter[str]:
    return Counter({name: count for name, count in counts.items() if name not in VIEWS})


FLASH = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("num_blocks", [0, 1, 5])
def test_a_token_behind_neighbouring_blocks_is_one_kernel_call_and_no_merge(num_blocks: int) -> None:
    counts = decoded(num_blocks * BLOCK_TOKENS + 1, joined=True)
    assert work(counts) == {FLASH: 1, "copy_": 2}


def test_a_token_behind_blocks_by_slots_costs_a_kernel_call_a_run_and_a_merge_of_three() -> None:
    counts = decoded(BLOCK_TOKENS + 1, joined=False)  # a full block and a tail
    assert work(counts) == {FLASH: 2, "copy_": 2, "sub": 1, "sigmoid": 1, "lerp": 1}


def test_neighbouring_blocks_by_slots_are_one_kernel_call_however_many() -> None:
    counts = decoded(5 * BLOCK_TOKENS + 1, joined=False)
    assert work(counts) == {FLASH: 2, "copy_": 2, "cat": 2, "_softmax": 1, "mul_": 1, "sum": 1}


@pytest.mark.parametrize("joined", [True, False])
def test_a_token_makes_no_views_of_slots_layer_by_layer(joined: bool) -> None:
    counts = decoded(BLOCK_TOKENS + 1, joined=joined)
    assert not counts["slice"] and not counts["select"] and not counts["as_strided"]


@pytest.mark.parametrize("apart", [0.0, 3.0, 40.0, 1e4, float("inf")])
@pytest.mark.parametrize("less", [0, 1])
def test_two_pieces_merge_as_a_softmax_over_them(apart: float, less: int) -> None:
    """`inf`: one of them saw nothing, as padding does."""
    torch.manual_seed(0)
    output, lse = torch.randn(2, 1, 2, 3, 8), torch.randn(2, 1, 2, 3)
    lse[less] -= apart
    parts = [Partial(output[0], lse[0]), Partial(output[1], lse[1])]
    expected = (torch.softmax(lse.double(), 0).unsqueeze(-1) * output.double()).sum(0)
    assert (merge(parts).output - expected).abs().max() < 1e-6
    assert (merge(parts).lse - lse.logsumexp(0)).abs().max() < 1e-6 * max(1.0, min(apart, 1e4))
    assert (finish(parts, 6, torch.float32).reshape(-1) - expected.reshape(-1)).abs().max() < 1e-6


def test_a_merge_leaves_a_lone_part_of_several_pieces_as_it_was() -> None:
    output, lse = torch.randn(3, 2, 3, 8), torch.randn(3, 2, 3)
    before = output.clone()
    merge([Partial(output, lse)])
    assert torch.equal(output, before)


def test_a_cut_of_all_layers_is_the_cut_of_each() -> None:
    world = World(torch.float32, 4, 2, 2, AttentionMode.BLOCKWISE, 1)
    store = world.stores[Tier.GPU]
    views = LayerViews(store.keys, store.values)
    for number, (keys, values) in enumerate(WholeSlab(views).cut(3, 2, 1, 2)):
        for cut, layers in ((keys, store.keys), (values, store.values)):
            expected = layers[number][3:5, :, 1:3]
            assert cut.data_ptr() == expected.data_ptr()
            assert cut.shape == expected.shape and cut.stride() == expected.stride()


@pytest.mark.parametrize("num_tokens", [1, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 3])
def test_a_run_of_a_joined_slab_is_its_blocks_tokens(num_tokens: int) -> None:
    world = World(torch.float32, KEY_DIM, 2, 2, AttentionMode.BLOCKWISE, 1)
    store = world.stores[Tier.GPU]
    for layer in (*store.keys, *store.values):
        layer.normal_()
    slab = WholeSlab(LayerViews(store.keys, store.values))
    assert slab.is_joined
    for number, (keys, values) in enumerate(slab.run(3, num_tokens)):
        for run, layers in ((keys, store.keys), (values, store.values)):
            expected = torch.cat(list(layers[number][3:]), dim=1)[None, :, :num_tokens]
            assert torch.equal(run, expected) and run.data_ptr() == layers[number][3].data_ptr()


def test_a_run_of_a_slab_by_slots_is_a_row_a_block() -> None:
    world = World(torch.float32, KEY_DIM, 2, 2, AttentionMode.BLOCKWISE, 1, joined=False)
    store = world.stores[Tier.GPU]
    slab = WholeSlab(LayerViews(store.keys, store.values))
    assert not slab.is_joined
    for number, (keys, _) in enumerate(slab.run(3, 2 * BLOCK_TOKENS)):
        assert keys.data_ptr() == store.keys[number][3].data_ptr() and keys.shape == store.keys[number][3:5].shape


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0,)] * 3, [3]),
        ([(0,)] * 2 + [(1,)] * 3, [2, 3]),
        ([(0,), (1,), (0,)], [3]),
        ([(0,), (1,), (0,), (0,), (0,), (1,)], [6]),
        ([(0, 1)] * 4 + [(1, 2)], [4, 1]),
    ],
)
def test_neighbouring_slots_of_several_rows_are_as_few_pieces_as_pays(
    rows: list[tuple[int, ...]], expected: list[int]
) -> None:
    """Each row's blocks are one long piece, unless that makes a call of nearly each block."""
    groups = _together(rows)
    assert [len(group) for group in groups] == expected and [row for group in groups for row in group] == rows


def test_layers_that_do_not_lie_evenly_apart_are_refused() -> None:
    slab = torch.zeros(1000)
    layers = [slab.as_strided((2, 1, 4, 4), (200, 16, 4, 1), start) for start in (0, 40, 81)]
    with pytest.raises(IntegrityError, match="evenly"):
        WholeSlab(LayerViews(layers, layers))


@pytest.mark.parametrize("num_pieces", [1, 2, 3])
def test_pieces_of_a_model_in_fp64_merge(num_pieces: int) -> None:
    """Found by a whole run of the tests: two pieces did not, for their log-sum-exp is fp64 too."""
    parts = [Partial(torch.randn(1, 2, 3, 8).double(), torch.randn(1, 2, 3).double()) for _ in range(num_pieces)]
    weights = torch.softmax(torch.cat([part.lse for part in parts]), 0).unsqueeze(-1)
    expected = (weights * torch.cat([part.output for part in parts])).sum(0)
    found = finish(parts, 6, torch.float64)
    assert found.dtype == torch.float64 and (found.reshape(-1) - expected.reshape(-1)).abs().max() < 1e-6
    assert (merge(parts).output - expected).abs().max() < 1e-6
