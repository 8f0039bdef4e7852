"""What a plan knows of a model: the formula for its KV, presets, what a config.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.planner.card import ModelCard
from kvtier.planner.model_config import read_card
from kvtier.planner.models import find_card, presets
from kvtier.planner.report import parse_tokens
from kvtier.stores.slab import slot_bytes
from tests.planning import card

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100, "dtype": "bfloat16",
}  # fmt: skip


# -- the formula -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_heads", "gigabytes"), [(64, 21.5), (8, 2.7)])
def test_llama_2_70b_with_8k_tokens_in_fp16(kv_heads: int, gigabytes: float) -> None:
    like = card("Llama-2-70B", kv_heads=kv_heads)
    assert (like.num_full, like.dtype, like.element_bytes) == (80, "float16", 2)
    assert like.kv_bytes(8192) == 80 * 8192 * kv_heads * 256 * 2
    assert round(like.kv_bytes(8192) / 1e9, 1) == gigabytes
    (line,) = like.formulas(8192)
    assert f"80 full-attention layers x 8,192 tokens x {kv_heads} KV heads x (128 + 128) x 2 bytes" in line
    assert f"({gigabytes} GB)" in line


CARDS = st.builds(
    ModelCard,
    name=st.just("a model"), family=st.just("llama"), num_full=st.integers(1, 96), num_window=st.integers(0, 64),
    window_tokens=st.integers(1, 8192), num_linear=st.just(0), heads=st.sampled_from([8, 32]),
    kv_heads=st.sampled_from([1, 2, 8]), head_dim=st.sampled_from([64, 96, 128, 256]), dtype=st.just("bfloat16"),
    element_bytes=st.just(2), max_tokens=st.none(), num_parameters=st.integers(10**8, 10**11),
    table_parameters=st.integers(0, 10**7), is_tied=st.booleans(),
)  # fmt: skip


@given(CARDS, st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_tiered_kv_grows_with_every_token_and_windows_stop(model: ModelCard, tokens: int, more: int) -> None:
    assert model.tiered_bytes(tokens + more) == model.tiered_bytes(tokens) + model.tiered_bytes(more)
    full = model.num_window * model.window_tokens * model.layer_token_bytes
    assert model.window_bytes(tokens) <= full == model.window_bytes(model.window_tokens + more)
    assert model.kv_bytes(tokens) == model.tiered_bytes(tokens) + model.window_bytes(tokens)
    assert model.tiered_bytes(tokens) == tokens * model.group(256, "cuda").shape.token_bytes


@given(CARDS, st.sampled_from([16, 48, 64, 256]))
def test_a_slot_in_memory_is_a_block(model: ModelCard, block_tokens: int) -> None:
    shape = model.group(block_tokens, "cuda").shape
    assert slot_bytes(shape) == shape.block_bytes  # the plan does without torch, which the slab needs


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.1-8B", 8.03), ("Llama-3.1-70B", 70.55), ("Llama-2-70B", 68.98), ("Qwen3-8B", 8.19),
        ("Qwen3-32B", 32.76), ("Mistral-7B", 7.25), ("Gemma-3-27B", 27.01), ("SmolLM2-135M", 0.13),
    ],
)  # fmt: skip
def test_presets_have_the_parameters_that_their_makers_name(name: str, billions: float) -> None:
    assert round(card(name).num_parameters / 1e9, 2) == billions


def test_every_preset_says_where_its_numbers_are_from_and_can_be_planned() -> None:
    for name, preset in presets().items():
        found, source = find_card(name.lower())
        assert source == preset["source"] and "config.json of " in source
        assert found.name == name and found.num_full + found.num_window == preset["config"]["num_hidden_layers"]


def test_gemma_has_a_full_layer_in_six() -> None:
    gemma = card("Gemma-3-27B")
    assert (gemma.num_full, gemma.num_window, gemma.window_tokens) == (10, 52, 1024)
    assert gemma.window_bytes(1 << 20) == gemma.window_bytes(1024)


def test_a_multimodal_config_is_read_for_its_text_model() -> None:
    text = {key: value for key, value in LLAMA.items() if key != "dtype"}
    found = read_card({"model_type": "llava", "text_config": text, "torch_dtype": "float16"}, "a model")
    assert (found.family, found.dtype, found.head_dim) == ("llama", "float16", 8)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 32}, (2, 2, 32)),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, (3, 0, 0)),
        ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3}, (3, 1, 32)),
        ({"sliding_window": 32, "use_sliding_window": False}, (4, 0, 0)),
        ({"model_type": "gemma2", "sliding_window": 32}, (2, 2, 32)),
    ],
)  # fmt: skip
def test_kinds_of_layers(changes: dict[str, Any], kinds: tuple[int, int, int]) -> None:
    found = read_card(LLAMA | changes, "a model")
    assert (found.num_full, found.num_window, found.window_tokens) == kinds


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers: is missing"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers: must be a whole number of at least 1, got '4'"),
        ({"num_attention_heads": 0}, "num_attention_heads: must be a whole number of at least 1, got 0"),
        ({"num_attention_heads": True}, "num_attention_heads: must be a whole number of at least 1, got True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide the 8 query heads"),
        ({"hidden_size": 65}, "hidden_size: 65 is not a multiple of the 8 query heads"),
        ({"model_type": 7}, "model_type: must be a name, got 7"),
        ({"model_type": "mixtral"}, "model_type is 'mixtral'.*--weights"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512: its cache is latent"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is true"),
        ({"sliding_window": 32}, "no layer has full attention.*sliding_attention.*nothing to tier"),
        ({"layer_types": ["full_attention"]}, "layer_types: must name 4 kinds"),
        ({"layer_types": ["full_attention"] * 3 + ["odd"]}, "layer_types: odd: no formula"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "sliding_window: is missing"),
        ({"dtype": None}, "dtype: is missing.*--dtype"),
        ({"dtype": "int4"}, "dtype: is not served, got 'int4'.*float32, bfloat16, float16"),
        ({"text_config": []}, r"text_config: must be a mapping, got \[\]"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_used_is_named_with_its_value_and_the_mend(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"a model: {words}"):
        read_card(LLAMA | changes, "a model")


def test_weights_that_were_given_stand_in_for_the_formula() -> None:
    found = read_card(LLAMA | {"model_type": "mixtral"}, "a model", weights_bytes=2_000_000)
    assert (found.weights_bytes, found.read_parameters, found.layer_parameters) == (2_000_000, 1_000_000, 1_000_000)


def test_a_folder_and_its_file_are_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    by_folder, by_file = (find_card(str(path))[0] for path in (tmp_path, tmp_path / "config.json"))
    assert by_folder == by_file and by_folder.num_full == 4


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("32k", 32768), ("1.5K", 1536), ("1m", 1 << 20)])
def test_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text, "--context") == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "k", "32 GB", "1e5", "９", "9" * 40])
def test_no_tokens(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--context .*is not a number of tokens.*32k"):
        parse_tokens(text, "--context")
