"""What needs a CUDA device: `make test-cuda`, under 3 minutes. Nobody has run it yet (README, Verified on)."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvtier import TieredKV, attention_cuda
from kvtier.attention import Kernel, causal_attention, merge, pack, partial_attention
from kvtier.attention_cuda import Case, Way, definition
from kvtier.cuda_device import CudaDevice
from kvtier.device import DONE, Copy, Event
from kvtier.hf import describe
from kvtier.selftest import exactness, parts
from kvtier.stores.cpu import CpuStore
from kvtier.stores.gpu import GpuStore
from kvtier.testing import Wait
from kvtier.types import BlockShape, Slot, Tier
from tests.device_house import attend_over_tiers

# The one thing this folder tests cannot be had on a machine without the device.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA = torch.device("cuda", 0)
LAG_CYCLES = 20_000_000
"""Of the device's clock, for which the compute stream does nothing: about 10 ms, far more than any copy here takes."""
TINY: dict[str, Any] = {
    "block_tokens": 16,
    "prefill_chunk": 48,
    "tiers": {"gpu": {"budget": "512KiB"}, "cpu": {"budget": "128KiB"}, "nvme": {"budget": "16MiB"}},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def lag() -> None:
    torch.cuda._sleep(LAG_CYCLES)


class Careless(CudaDevice):
    """A CudaDevice that leaves waits out, to see that the tests of order can fail."""

    def __init__(self, leaves_out: Collection[Wait]) -> None:
        super().__init__(CUDA)
        self.leaves_out = leaves_out

    def copy_up(self, copies: Sequence[Copy], after: Event) -> Event:
        return super().copy_up(copies, DONE if Wait.LOAD_FOR_READER in self.leaves_out else after)

    def copy_down(self, copies: Sequence[Copy], after: Event) -> Event:
        return super().copy_down(copies, DONE if Wait.STORE_FOR_PRODUCER in self.leaves_out else after)

    def compute_waits_for(self, event: Event) -> None:
        if Wait.COMPUTE_FOR_ARRIVAL not in self.leaves_out:
            super().compute_waits_for(event)


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lags", [True, False])
def test_ring_engine_and_attention_are_in_order(lags: bool) -> None:
    for seed in range(5 if lags else 50):
        device = CudaDevice(CUDA)
        off = attend_over_tiers(
            device, seed, contextlib.nullcontext, synchronize=torch.cuda.synchronize, lag=lag if lags else lambda: None
        )
        device.close()
        assert off <= 1e-4, f"seed {seed}"


@pytest.mark.parametrize("wait", [Wait.LOAD_FOR_READER, Wait.STORE_FOR_PRODUCER])
def test_each_wait_is_needed_where_kernels_lag(wait: Wait) -> None:
    device = Careless([wait])
    off = attend_over_tiers(
        device, 1, contextlib.nullcontext, synchronize=torch.cuda.synchronize, lag=lag, checks_bytes=False
    )
    device.close()
    assert not off <= 1e-2  # NaN is wrong


def test_kernels_wait_for_a_copy_that_lags() -> None:
    """The copy waits for a long kernel of another CUDA stream; what reads its destination must wait for the copy."""
    for leaves_out in ([], [Wait.COMPUTE_FOR_ARRIVAL]):
        device, other = Careless(leaves_out), torch.cuda.Stream(CUDA)
        there = torch.full((1024,), float("nan"), device=CUDA)
        host = torch.ones(1024).pin_memory()
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            lag()
            begun = device.record()
        arrived = device.copy_up([(there, host)], begun)
        assert not arrived.is_done()
        device.compute_waits_for(arrived)
        seen = there * 1
        torch.cuda.synchronize()
        assert bool(seen.isnan().all()) == bool(leaves_out)
        device.close()


def test_events_are_used_again() -> None:
    device = CudaDevice(CUDA)
    for _ in range(2000):
        device.record().synchronize()
    assert len(device._events) <= 4
    device.close()


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_arena_is_pinned_and_given_back() -> None:
    shape = BlockShape(num_layers=2, kv_heads=2, block_tokens=256, key_dim=64, value_dim=64, element_bytes=2)
    store = CpuStore(shape, 9, pin=True)
    slab = store.slab()
    assert store.pinned and slab.is_pinned() and not slab.any(), "touched, with zeros"
    device, gpu = CudaDevice(CUDA), GpuStore(shape, 2, torch.bfloat16, CUDA)
    slab[3].random_()
    device.copy_up([(gpu.block(Slot(1)), store.block(Slot(3)))], DONE).synchronize()
    device.copy_down([(store.block(Slot(4)), gpu.block(Slot(1)))], device.record()).synchronize()
    assert torch.equal(store.block(Slot(4)), store.block(Slot(3))) and store.block(Slot(3)).any()
    device.close()
    store.close()
    assert not slab.is_pinned()


def test_staging_is_pinned_used_again_and_given_back() -> None:
    device = CudaDevice(CUDA)
    for _ in range(10):
        with device.staging().buffer(1 << 20) as buffer:
            assert buffer.host.is_pinned()
    assert device.staging().num_bytes == 1 << 20
    device.close()
    assert device.staging().num_bytes == 0


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("length", [1, 100, 256, 512])
def test_pieces_and_their_merge_agree_with_the_definition(dtype: torch.dtype, dim: int, length: int) -> None:
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.manual_seed(length)
    slab = torch.randn(7, 4, 2, length, dim, device=CUDA).to(dtype)
    for rows in (1, 33):
        query = torch.randn(1, 8, rows, dim, device=CUDA).to(dtype)
        keys, values = slab[2:6, 1], slab[2:6, 3]
        part = merge([partial_attention(pack(query, 2), keys, values, Kernel(dim**-0.5))])
        whole_keys, whole_values = (p.transpose(0, 1).reshape(1, 2, 4 * length, dim) for p in (keys, values))
        output, lse = definition(pack(query, 2), whole_keys, whole_values, dim**-0.5, False)
        assert float((part.output - output).abs().max()) <= tolerance
        assert float((part.lse - lse).abs().max()) <= tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_causal_tile_agrees_with_the_definition(dtype: torch.dtype) -> None:
    query, keys, values = (torch.randn(1, heads, 65, 64, device=CUDA).to(dtype) for heads in (8, 2, 2))
    part = causal_attention(query, keys, values, Kernel(0.125))
    output, lse = definition(query, keys, values, 0.125, True)
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    assert float((part.output - output.reshape(part.output.shape)).abs().max()) <= tolerance
    assert float((part.lse - lse.reshape(part.lse.shape)).abs().max()) <= tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_is_found_for_each_dtype(dtype: torch.dtype) -> None:
    for length, causal in ((256, False), (100, False), (100, True)):
        assert attention_cuda.way_of(Case(CUDA, dtype, 64, length, causal)) is not Way.REFERENCE


# -- models -----------------------------------------------------------------------------------------------------------


def _model(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=128, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", dtype).eval()


@pytest.mark.parametrize("mode", ["blockwise", "gathered"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.2)])
def test_three_turns_on_cuda_agree_with_the_plain_cache(mode: str, dtype: torch.dtype, tolerance: float) -> None:
    model = _model(dtype)
    plain, ids = DynamicCache(config=model.config), torch.randint(1, 256, (1, 300), device="cuda")
    gpu = 80 * dtype.itemsize if mode == "blockwise" else 400  # KiB: gathered needs scratch for whole chunks
    budgets = {"gpu": gpu << 10, "cpu": 16 * dtype.itemsize << 10, "nvme": 16 << 20}
    tiers = {tier: {"budget": budget} for tier, budget in budgets.items()}
    config = {**TINY, "tiers": tiers, "attention": mode}
    with TieredKV(model, exactness.with_staging(config, describe(model, 16))) as tiered:
        cache = tiered.new_cache()
        for _ in range(3):
            arguments = {
                "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False,
                "return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0,
            }  # fmt: skip
            ours = tiered.generate(input_ids=ids, cache=cache, **arguments)
            theirs = model.generate(input_ids=ids, cache=plain, prefill_chunk_size=48, **arguments)
            # Token by token, up to the first near tie that low precision turns over.
            for step, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
                assert (a - b).abs().max() <= tolerance, f"step {step}"
                if ours.sequences[0, ids.shape[1] + step] != theirs.sequences[0, ids.shape[1] + step]:
                    plain = DynamicCache(config=model.config)
                    break
            tiered.check_integrity()
            ids = torch.cat([ours.sequences, torch.randint(1, 256, (1, 40), device="cuda")], dim=1)
        assert tiered.stats()["nvme_sole_reads"] > 0


@pytest.mark.parametrize(
    ("mode", "host_attention"), [("blockwise", "never"), ("blockwise", "always"), ("gathered", "never")]
)
@torch.no_grad()
def test_steps_are_in_order_on_a_busy_device_whose_memory_was_nan(mode: str, host_attention: str) -> None:
    """Two conversations take turns, without a look at any logit before the end, behind kernels that take long."""
    model = _model(torch.float32)
    ids = [torch.randint(1, 256, (1, 340), device="cuda") for _ in range(2)]
    pieces = [each.split((300, *[1] * 40), 1) for each in ids]
    plain = []
    for each in pieces:
        cache = DynamicCache(config=model.config)
        plain += [model(piece, cache=cache).logits for piece in each]
    tiers = {**TINY["tiers"], "gpu": {"budget": "320KiB" if mode == "blockwise" else "512KiB"}}
    config = {**TINY, "tiers": tiers, "attention": mode, "host_attention": host_attention}
    with TieredKV(model, exactness.with_staging(config, describe(model, 16))) as tiered:
        runtime = tiered._runtime
        store, ring = runtime.stores[Tier.GPU], runtime.executor.ring
        assert isinstance(store, GpuStore) and ring is not None
        store.slab().fill_(0xFF)
        ring._bytes.fill_(0xFF)
        caches: list[Any] = [tiered.new_cache() for _ in ids]
        ours: list[list[torch.Tensor]] = [[], []]
        for step in range(len(pieces[0])):
            for number, cache in enumerate(caches):
                if step % 7 == 0:
                    lag()
                ours[number].append(model(pieces[number][step], cache=cache).logits)
        torch.cuda.synchronize()
        tiered.check_integrity()
        moved = tiered.stats()["bytes_moved"]
    assert moved["gpu_to_cpu"] and moved["nvme_to_gpu"], moved
    assert moved["cpu_to_gpu"] or host_attention == "always", moved
    for step, (a, b) in enumerate(zip([*ours[0], *ours[1]], plain, strict=True)):
        assert float((a - b).abs().max()) <= 1e-3, f"step {step}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_tokens", [32, 256])
def test_the_selftests_courses(dtype: torch.dtype, block_tokens: int, tmp_path: Path) -> None:
    """Blockwise on every kernel that may be chosen: 256 tokens are what the paged one takes."""
    way = exactness.Way(CUDA, dtype, "blockwise", block_tokens)
    for course in (exactness.prompt_and_answer, exactness.crop_and_go_on):
        folder = tmp_path / course.__name__
        folder.mkdir()
        exactness.compare(way, course, folder, 1, 24)


def test_copies_have_a_rate_both_ways() -> None:
    assert all(rate["bytes_per_s"] > 1e8 for rate in parts.copies()["copies"])
