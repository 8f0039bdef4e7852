"""What else people do to a model: devices, quantisation, compilers, pipelines, training. Each works or is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from kvtier import TieredKV
from kvtier.errors import UnsupportedError, UnsupportedModelError
from tests.e2e.families import FAMILIES, GREEDY, MODES, assert_same, plain_turns, small_config, tiny, tiny_from, tokens

LLAMA = FAMILIES["llama"][1]
both_modes = pytest.mark.parametrize("mode", MODES)


def llama(**values: Any) -> Any:
    return tiny_from(hf.LlamaConfig, **{**LLAMA, **values})


def assert_three_turns(tiered: TieredKV, turns: list[Any]) -> None:
    """Three calls on one cache give what the plain model gave."""
    cache = tiered.new_cache()
    for ids, expected in turns:
        assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, tiered.config.attention.value)
    tiered.check_integrity()


def refused(model: Any, message: str, tmp_path: Path) -> None:
    """At wrapping, with nothing changed."""
    before = sorted(vars(model))
    with pytest.raises(UnsupportedModelError, match=message):
        TieredKV(model, small_config(tiny(), tmp_path))
    assert sorted(vars(model)) == before and not list(tmp_path.glob("nvme/*"))


# -- devices -----------------------------------------------------------------------------------------------------------


@both_modes
def test_a_device_map_of_one_device(mode: str, tmp_path: Path) -> None:
    model = llama()
    turns = plain_turns(model, prompt=100)
    model = dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    hooked = model.forward
    assert "forward" in vars(model)
    with TieredKV(model, small_config(model, tmp_path, mode)) as tiered:
        assert_three_turns(tiered, turns)
    assert model.forward is hooked
    assert_same(model.generate(turns[0][0], prefill_chunk_size=32, **GREEDY), turns[0][1], "gathered")


def test_offloaded_and_spread_models(tmp_path: Path) -> None:
    message = r"lies on \['cpu', 'meta'\].*offloaded.*one device.*without device_map"
    spread = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    spread |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    refused(dispatch_model(llama(), spread, main_device="cpu", offload_dir=str(tmp_path / "disk")), message, tmp_path)
    refused(disk_offload(llama(), str(tmp_path / "disk2"), execution_device="cpu"), r"lies on \['meta'\]", tmp_path)
    refused(cpu_offload(llama(), execution_device="cpu"), r"lies on \['meta'\]", tmp_path)
    half = llama()
    half.lm_head.to("meta")
    refused(half, r"lies on \['cpu', 'meta'\]", tmp_path)


def test_hooks_that_come_and_go_while_wrapped(tmp_path: Path) -> None:
    """accelerate replaces `forward` on the instance: past ours, no call may take the cache for a plain one."""
    model = llama()
    turns = plain_turns(model, prompt=100)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        cache = tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], "blockwise")
        add_hook_to_module(model, AlignDevicesHook("cpu"))
        assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], "blockwise")
        remove_hook_from_module(model)
        assert_same(tiered.generate(turns[2][0], cache=cache, **GREEDY), turns[2][1], "blockwise")
    assert "forward" not in vars(model)


# -- quantised weights -------------------------------------------------------------------------------------------------


class Int8Linear(nn.Linear):
    """As quantisation libraries have one."""

    __module__ = "somewhere.quantized"


class OddTensor(torch.Tensor):
    """As torchao and quanto store weights."""


def stored_as_bytes(model: Any) -> Any:
    weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    model.model.layers[0].mlp.up_proj.weight = weight
    return model


def odd_tensor(model: Any) -> Any:
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(OddTensor))
    return model


def foreign_linear(model: Any) -> Any:
    model.model.layers[1].mlp.down_proj = Int8Linear(128, 96, bias=False)
    return model


QUANTIZED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dynamic": (
        lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8),
        r"layers.0.self_attn.q_proj is a torch.ao.nn.quantized.dynamic.*Linear, quantized.*load the model in float32",
    ),
    "bytes": (stored_as_bytes, r"layers.0.mlp.up_proj.weight is stored as torch.uint8.*load the model in float32"),
    "a tensor class": (odd_tensor, "layers.0.mlp.up_proj.weight is stored as .*OddTensor.*load the model in float32"),
    "a layer class": (foreign_linear, r"layers.1.mlp.down_proj is a somewhere.quantized.Int8Linear, quantized"),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights(kind: str, tmp_path: Path) -> None:
    change, message = QUANTIZED[kind]
    refused(change(llama()), message, tmp_path)


@pytest.mark.parametrize("kind", ["a tensor class", "a layer class"])
def test_weights_quantized_while_wrapped(kind: str, tmp_path: Path) -> None:
    model, (change, message) = llama(), QUANTIZED[kind]
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        tiered.generate(tokens(30), max_new_tokens=2)
        change(model)
        with pytest.raises(UnsupportedError, match=message):
            tiered.generate(tokens(30), max_new_tokens=2)


# -- torch.compile -----------------------------------------------------------------------------------------------------


def compile_model(model: Any) -> None:
    model.compile(backend="eager")


def compile_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def compile_layer(model: Any) -> None:
    model.model.layers[0].compile(backend="eager")


COMPILED = {
    compile_model: "the model was compiled.*as it was before compiling",
    compile_forward: "forward was compiled.*as it was before compiling",
    compile_layer: r"model\.layers\.0 was compiled.*as it was before compiling",
}


@pytest.mark.parametrize("compiles", COMPILED)
def test_compiled_before_wrapping(compiles: Callable[[Any], None], tmp_path: Path) -> None:
    model = llama()
    compiles(model)
    refused(model, COMPILED[compiles], tmp_path)


@pytest.mark.parametrize("compiles", COMPILED)
def test_compiled_after_wrapping(compiles: Callable[[Any], None], tmp_path: Path) -> None:
    model = llama()
    turns = plain_turns(model, prompt=100)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        cache = tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], "blockwise")
        compiles(model)
        for call in (tiered.generate, model.generate, tiered):
            with pytest.raises(UnsupportedError, match=r"compiled.*as it was before compiling"), torch.no_grad():
                call(turns[1][0], cache=tiered.new_cache(), **(GREEDY if call is not tiered else {}))
        with pytest.raises(UnsupportedError, match=r"compiled.*as it was before compiling"):
            tiered.generate(turns[1][0], cache=cache, **GREEDY)
        tiered.check_integrity()


def test_a_compiled_wrapper_object(tmp_path: Path) -> None:
    """torch.compile(model) makes an object beside the model: that one cannot be served, the model still can."""
    model = llama()
    turns = plain_turns(model, prompt=100)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        torch.compile(model, backend="eager")
        assert_three_turns(tiered, turns)


def test_a_compile_config(tmp_path: Path) -> None:
    """transformers compiles for static caches alone."""
    model = llama()
    turns = plain_turns(model, prompt=100)
    model.generation_config.compile_config = hf.CompileConfig(backend="eager")
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        assert_three_turns(tiered, turns)
        assert not hasattr(model, "_compiled_call")


# -- generation configs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shipped", ["hybrid", "static", "dynamic", "offloaded"])
def test_a_cache_that_a_checkpoint_asks_for(shipped: str, tmp_path: Path) -> None:
    model = llama()
    turns = plain_turns(model, prompt=100)
    model.generation_config.cache_implementation = shipped
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        assert_three_turns(tiered, turns)
        session, own = tiered.session("alice"), copy.deepcopy(model.generation_config)
        own.update(**GREEDY)
        for ids, expected in turns:
            assert_same(session.generate(ids, **GREEDY), expected, "blockwise")
        assert_same(tiered.generate(turns[0][0], generation_config=own), turns[0][1], "blockwise")
        assert model.generation_config.cache_implementation == shipped
        for asked in (
            {"cache_implementation": "static" if shipped != "static" else "dynamic"},
            {"cache_implementation": shipped},
            {"generation_config": hf.GenerationConfig(cache_implementation="quantized", max_new_tokens=2)},
        ):
            with pytest.raises(UnsupportedError, match=r"cache_implementation=.*the cache is the TieredCache"):
                tiered.generate(turns[0][0], **asked)


# -- RoPE --------------------------------------------------------------------------------------------------------------

_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
_LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def gemma(parameters: dict[str, Any]) -> Any:
    small = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, head_dim=16)
    plain = {"rope_type": "default", "rope_theta": 1e4}
    return tiny_from(
        hf.Gemma3TextConfig, **small, layer_types=["sliding_attention", "full_attention"], sliding_window=16,
        rope_parameters={"sliding_attention": plain, "full_attention": parameters},
    )  # fmt: skip


@pytest.mark.parametrize("parameters", [_DYNAMIC, _LONG], ids=["dynamic", "longrope"])
def test_rope_that_changes_keys_already_cached(parameters: dict[str, Any], tmp_path: Path) -> None:
    message = f"RoPE.*{parameters['rope_type']}.*changes keys that are cached already"
    refused(llama(rope_parameters=parameters), message, tmp_path)
    refused(gemma(parameters), message, tmp_path)
    hidden = llama(rope_parameters=parameters)
    hidden.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    refused(hidden, message, tmp_path)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_rope_that_does_not(kind: str, tmp_path: Path) -> None:
    parameters: dict[str, Any] = {
        "rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64
    }  # fmt: skip
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = llama(rope_parameters=parameters)
    turns = plain_turns(model, prompt=100)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        assert_three_turns(tiered, turns)


def test_a_config_edited_after_wrapping_changes_nothing(tmp_path: Path) -> None:
    """The model has read it when it was built."""
    model = llama()
    turns = plain_turns(model, prompt=100)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        cache = tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], "blockwise")
        model.config.rope_parameters = _DYNAMIC
        for ids, expected in turns[1:]:
            assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, "blockwise")


def test_frequencies_changed_after_wrapping_are_noticed(tmp_path: Path) -> None:
    model = llama()
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        cache = tiered.new_cache()
        ids = torch.cat([tiered.generate(tokens(100), cache=cache, **GREEDY).sequences, tokens(9)], dim=1)
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / 2
        with pytest.raises(UnsupportedError, match="weights changed"):
            tiered.generate(ids, cache=cache, **GREEDY)
        expected = model.generate(ids, prefill_chunk_size=32, **GREEDY)
        assert_same(tiered.generate(ids, **GREEDY), expected, "blockwise")


def cache_ids(cache: Any) -> torch.Tensor:
    """What a cache holds, and one token more."""
    return torch.tensor([[*cache.token_ids, 5]])


def test_another_attention_set_after_wrapping(tmp_path: Path) -> None:
    """It would see the new tokens alone."""
    model = llama()
    turns = plain_turns(model, prompt=100)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        cache = tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], "blockwise")
        for other in ("sdpa", "eager"):
            model.set_attn_implementation(other)
            for ids in (turns[1][0], cache_ids(cache)):  # many tokens, and one, for which sdpa makes no mask
                with pytest.raises(UnsupportedError, match=f"attention was set to '{other}'.*wrap the model again"):
                    tiered.generate(ids, cache=cache, **GREEDY)
            tiered.check_integrity()
        model.set_attn_implementation("kvtier")
        for ids, expected in turns[1:]:
            assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, "blockwise")


# -- training ----------------------------------------------------------------------------------------------------------


def test_training_mode_without_dropout(tmp_path: Path) -> None:
    model = llama()
    turns = plain_turns(model, prompt=100)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        model.train()
        assert_three_turns(tiered, turns)
        model.gradient_checkpointing_enable()
        assert_three_turns(tiered, turns)  # generate runs without gradients, and so does not checkpoint


@pytest.mark.parametrize(
    ("config", "values", "where"),
    [
        (hf.GPT2Config, dict(n_embd=32, n_layer=2, n_head=2, n_inner=64, attn_pdrop=0.0, embd_pdrop=0.0,
                         resid_pdrop=0.25), "0.25"),
        (
            hf.OPTConfig,
            dict(hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_attention_heads=2, num_hidden_layers=2,
                 dropout=0.3, attention_dropout=0.0),
            "0.3",
        ),
        (hf.LlamaConfig, {**LLAMA, "attention_dropout": 0.2}, "0.2"),
    ],
    ids=["gpt2", "opt", "llama"],
)  # fmt: skip
def test_dropout_in_training_mode(config: Any, values: dict[str, Any], where: str, tmp_path: Path) -> None:
    """Also where a model drops outside of its attention."""
    model = tiny_from(config, **values)
    turns = plain_turns(model, prompt=50)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        model.train()
        with pytest.raises(UnsupportedError, match=rf"dropout {where} of .*call model\.eval\(\)"):
            tiered.generate(tokens(30), max_new_tokens=2)
        model.eval()
        assert_three_turns(tiered, turns)


def test_gradient_checkpointing(tmp_path: Path) -> None:
    model = llama()
    model.requires_grad_(False)
    turns = plain_turns(model, prompt=100)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        model.gradient_checkpointing_enable()
        model.train()
        with torch.enable_grad(), pytest.raises(UnsupportedError, match=r"gradient checkpointing.*_disable"):
            tiered(tokens(30))
        model.eval()
        assert_three_turns(tiered, turns)


# -- multimodal --------------------------------------------------------------------------------------------------------


def test_multimodal_models(tmp_path: Path) -> None:
    text = hf.LlamaConfig(**{**LLAMA, "vocab_size": 64, "intermediate_size": 32})
    vision = hf.CLIPVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                                 image_size=28, patch_size=14)  # fmt: skip
    llava = hf.LlavaForConditionalGeneration(hf.LlavaConfig(vision_config=vision, text_config=text)).eval()
    refused(llava, r"multimodal model \(llava\): only its text model alone", tmp_path)


# -- pipelines ---------------------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    """A character a token, of the tests' vocabulary."""
    own = Tokenizer(models.WordLevel({chr(_FIRST + number): number for number in range(256)}, unk_token=chr(_FIRST)))
    own.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    own.decoder = decoders.Fuse()
    return hf.PreTrainedTokenizerFast(tokenizer_object=own, pad_token=chr(_FIRST), padding_side="left")


_FIRST = 0x4E00


def text_of(count: int, seed: int = 0) -> str:
    return "".join(chr(_FIRST + number) for number in tokens(count, seed)[0].tolist())


QUIET: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


def test_a_pipeline(tmp_path: Path) -> None:
    model = llama()
    generator = hf.pipeline("text-generation", model=model, tokenizer=tokenizer())
    text, plain = text_of(60), []
    for turn in range(3):
        plain.append(generator(text, **QUIET)[0]["generated_text"])
        text = plain[-1] + text_of(20, turn + 1)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        cache, text = tiered.new_cache(), text_of(60)
        for turn in range(3):
            assert generator(text, cache=cache, **QUIET)[0]["generated_text"] == plain[turn]
            assert cache.get_seq_length() == 60 + 12 * (turn + 1) + 20 * turn - 1
            text = plain[turn] + text_of(20, turn + 1)
        with pytest.raises(Exception, match="departs from the cache"):
            generator(text_of(100, 50), cache=cache, **QUIET)
        assert generator(text_of(60), **QUIET)[0]["generated_text"] == plain[0]
        tiered.check_integrity()


def test_a_pipeline_of_several_prompts(tmp_path: Path) -> None:
    model = llama()
    generator = hf.pipeline("text-generation", model=model, tokenizer=tokenizer())
    texts = [text_of(60), text_of(35, 1), text_of(48, 2)]
    plain = [out[0]["generated_text"] for out in generator(texts, batch_size=3, **QUIET)]
    with TieredKV(model, small_config(model, tmp_path, cpu_blocks=20)) as tiered:
        cache = tiered.new_cache()
        assert [o[0]["generated_text"] for o in generator(texts, batch_size=3, cache=cache, **QUIET)] == plain
        assert cache.batch_size == 3
        # Without batch_size a pipeline makes a call for each prompt, and the second one is another conversation.
        with pytest.raises(Exception, match="departs from the cache"):
            generator(texts, cache=tiered.new_cache(), **QUIET)
        tiered.check_integrity()


def test_a_pipeline_of_the_wrapper(tmp_path: Path) -> None:
    model = llama()
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        with pytest.raises(Exception, match=r"model=tiered.model"):
            hf.pipeline("text-generation", model=tiered, tokenizer=tokenizer())
