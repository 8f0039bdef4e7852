"""Every step's logits on a device that does all it is told late and in any order that the waits allow.

The device is `kvtier.testing.FakeDevice`: kernels and copies are queued, memory is NaN until what belongs there has
arrived. Everything else is the real thing: stores, threads, ring, manager, model. A wait that is left out is seen.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvtier import TieredKV
from kvtier.attention import Kernel, Partial
from kvtier.host_attention import HostAttender, HostShare, Pieces
from kvtier.stores.gpu import GpuStore
from kvtier.testing import FakeDevice, Wait
from kvtier.types import Tier
from tests.sample import rounds

CONFIG = {
    "block_tokens": 16,
    "prefill_chunk": 24,
    "io_threads": 2,
    "host_attention": "never",  # all through the ring, unless a test says otherwise
    # cpu: two blocks of 4 KiB, and staging of two blocks and two slices, each in whole pages
    "tiers": {"gpu": {"budget": "40KiB"}, "cpu": {"budget": "25KiB"}, "nvme": {"budget": "1MiB"}},
}
CHUNKS = (88, 1, 1, 20, 1)
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(1, 64, (1, sum(CHUNKS))) for _ in range(2)]


@pytest.fixture(scope="module")
def plain(model: LlamaForCausalLM, prompts: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The plain cache's logits, by conversation and step."""
    found: list[list[torch.Tensor]] = []
    for ids in prompts:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            found.append([model(piece, cache=cache).logits for piece in ids.split(CHUNKS, 1)])
    return found


class FakeAttender(HostAttender):
    """Attention by the host, beside a device whose queries have to be waited for."""

    def __init__(self, device: FakeDevice, share: HostShare) -> None:
        super().__init__(device.torch_device, share)
        self._fake = device

    def start(self, query: torch.Tensor, pieces: Pieces, kernel: Kernel) -> Future[Partial]:
        self._fake.flush()  # as a query on CUDA is waited for when it is copied
        return super().start(query, pieces, kernel)


class Run:
    """Two conversations that take turns, each step queued before anything of the one before need have run."""

    def __init__(self, model: Any, prompts: list[torch.Tensor], device: FakeDevice, **config: Any) -> None:
        with TieredKV(model, {**CONFIG, **config}) as tiered:
            _poison(tiered)
            if config.get("host_attention", "never") != "never":
                memory = tiered._runtime.executor.memory
                memory.attender = FakeAttender(device, memory.share)
            caches = [tiered.new_cache() for _ in prompts]
            self.logits: list[list[torch.Tensor]] = [[] for _ in prompts]
            with torch.no_grad(), device.kernels():
                for pieces in zip(*(ids.split(CHUNKS, 1) for ids in prompts), strict=True):
                    for number, piece in enumerate(pieces):
                        self.logits[number].append(model(piece, cache=caches[number]).logits)
            self.num_late = device.num_late
            device.synchronize()
            tiered.check_integrity()
            self.stats = tiered.stats()

    def difference(self, plain: list[list[torch.Tensor]]) -> float:
        """The largest over all steps; NaN if one is."""
        pairs = [
            pair for ours, theirs in zip(self.logits, plain, strict=True) for pair in zip(ours, theirs, strict=True)
        ]
        return float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())


def _poison(tiered: TieredKV) -> None:
    """What was never written is NaN, as garbage of another program on a real device may be."""
    runtime = tiered._runtime
    store, ring = runtime.stores[Tier.GPU], runtime.executor.ring
    assert isinstance(store, GpuStore) and ring is not None
    store.slab().fill_(0xFF)
    ring._bytes.fill_(0xFF)


def _device(monkeypatch: pytest.MonkeyPatch, seed: int, leaves_out: Collection[Wait] = (), **how: Any) -> FakeDevice:
    device = FakeDevice(seed, leaves_out, **how)
    monkeypatch.setattr("kvtier.runtime.open_device", lambda _: device)
    return device


# Any one schedule sees a wait that is missing: test_a_wait_that_is_left_out_gives_wrong_logits.
@pytest.mark.parametrize(
    ("mode", "first"), [*(("blockwise", n) for n in range(0, rounds(28, 12), 4)), ("gathered", 28)]
)
def test_every_schedule_gives_the_same_logits(
    model: LlamaForCausalLM, prompts: list[torch.Tensor], plain: list[list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch, mode: str, first: int,
) -> None:  # fmt: skip
    for seed in range(first, first + 4):
        device = _device(monkeypatch, seed)
        run = Run(model, prompts, device, attention=mode)
        assert run.difference(plain) <= ROUNDING, f"seed {seed}"
        assert not device.violations, f"seed {seed}"
        assert run.num_late > 1000, "nothing ran late: the schedule proves nothing"
        moved = run.stats["bytes_moved"]
        assert all(moved[edge] for edge in ("gpu_to_cpu", "cpu_to_gpu", "nvme_to_gpu")), moved


@pytest.mark.parametrize("host_attention", ["always", "auto"])
def test_the_hosts_own_share_of_attention_is_in_order_too(
    model: LlamaForCausalLM, prompts: list[torch.Tensor], plain: list[list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch, host_attention: str,
) -> None:  # fmt: skip
    for seed in range(4):
        device = _device(monkeypatch, seed)
        run = Run(model, prompts, device, host_attention=host_attention)
        assert run.difference(plain) <= ROUNDING, f"seed {seed}"
        assert not device.violations, f"seed {seed}"
        assert run.stats["tiers"]["cpu"]["slices_read"] > 0


@pytest.mark.parametrize("wait", Wait)
def test_a_wait_that_is_left_out_gives_wrong_logits(
    model: LlamaForCausalLM, prompts: list[torch.Tensor], plain: list[list[torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch, wait: Wait,
) -> None:  # fmt: skip
    """Kernels lag far behind the host, or copies behind the kernels: whichever the wait is there for."""
    hurries = (5.0, 0.02, 0.02) if wait is Wait.COMPUTE_FOR_ARRIVAL else (0.02, 5.0, 5.0)
    for seed in range(3):
        device = _device(monkeypatch, seed, [wait], hurries=hurries)
        difference = Run(model, prompts, device).difference(plain)
        assert not difference <= 0.01, f"seed {seed}: nobody would have noticed, off by {difference}"  # NaN is noticed


def test_the_calls_that_users_make_are_in_order_too(
    model: LlamaForCausalLM, prompts: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is cropped, forked and generated on."""
    ids = torch.cat(prompts)
    wanted = _batch(model, DynamicCache(config=model.config), ids)
    for seed in range(4):
        device = _device(monkeypatch, seed)
        with TieredKV(model, CONFIG | {"tiers": {**CONFIG["tiers"], "gpu": {"budget": "56KiB"}}}) as tiered:
            _poison(tiered)
            with device.kernels():
                found = _batch(model, tiered.new_cache(), ids)
            device.synchronize()
            tiered.check_integrity()
            assert tiered.stats()["nvme_sole_reads"] > 0
        assert float((found - wanted).abs().max()) <= ROUNDING, f"seed {seed}"
        assert not device.violations, f"seed {seed}"


@torch.no_grad()
def _batch(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of both rows: a prompt, then 30 tokens less of it, then other tokens in their place, then one."""
    logits = [model(ids[:, :90], cache=cache).logits]
    cache.crop(-30)
    for piece in ids[:, 60:].flip(1).split((25, 1, ids.shape[1] - 86), 1):
        logits.append(model(piece, cache=cache).logits)
    return torch.cat(logits, 1)
