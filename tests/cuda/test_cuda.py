"""What needs a CUDA device: `make test-cuda`. Nobody has run it yet (README, Verified on)."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvtier import TieredKV

# The one thing this folder tests cannot be had on a machine without the device.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TINY = {
    "block_tokens": 16,
    "prefill_chunk": 48,
    "tiers": {"gpu": {"budget": "512KiB"}, "cpu": {"budget": "128KiB"}, "nvme": {"budget": "16MiB"}},
}


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
    with TieredKV(model, {**TINY, "attention": mode}) as tiered:
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
