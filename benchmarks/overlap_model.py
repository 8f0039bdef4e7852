"""A small random Llama whose layers and head take as long as they are told to: its tokens are real, its time is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.benchmarks.overlap_link import Device

VOCABULARY = 64
BLOCK_TOKENS = 32
"""Tokens of a block here. Each stands for one of `overlap_shapes.BLOCK_TOKENS`."""


class Begin(nn.Module):
    """The module that a step begins with."""

    def __init__(self, inner: nn.Module, device: Device) -> None:
        super().__init__()
        self.inner, self.device = inner, device

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.device.begin()
        found: torch.Tensor = self.inner(ids)
        return found


class Timed(nn.Module):
    """The last module of part `number` of a step, with which the device has computed it, in `seconds`."""

    def __init__(self, inner: nn.Module, device: Device, number: int) -> None:
        super().__init__()
        self.inner, self.device, self.number, self.seconds = inner, device, number, 0.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.device.compute(self.number, lambda: self.inner(hidden), self.seconds)


def build(num_layers: int, device: Device, seed: int = 0) -> Any:
    """The model, in fp32 with sdpa attention."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=8192,
        initializer_range=0.2,  # wide enough that logits differ
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    model.model.embed_tokens = Begin(model.model.embed_tokens, device)
    for number, layer in enumerate(model.model.layers):
        layer.mlp = Timed(layer.mlp, device, number)
    model.lm_head = Timed(model.lm_head, device, num_layers)
    return model


def set_times(model: Any, layer_s: float, head_s: float) -> None:
    """How long each layer and the head take."""
    for layer in model.model.layers:
        layer.mlp.seconds = layer_s
    model.lm_head.seconds = head_s
