"""PEFT adapters: the tokens of the adapted model, and no KV of another adapter, however it was changed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils.hotswap import hotswap_adapter
from torch import nn
from transformers import LlamaConfig

from kvtier import TieredKV
from kvtier.errors import AlreadyWrappedError, UnsupportedError, UnsupportedModelError
from tests.e2e.families import FAMILIES, GREEDY, MODES, assert_same, plain_turns, small_config, tiny_from, tokens

both_modes = pytest.mark.parametrize("mode", MODES)

_TARGETS = ["q_proj", "k_proj", "v_proj", "down_proj"]


def bare() -> Any:
    return tiny_from(LlamaConfig, **FAMILIES["llama"][1])


def lora(**values: Any) -> peft.LoraConfig:
    """LoRA that changes keys and values from the start: by default it begins as the identity."""
    return peft.LoraConfig(**{"r": 4, "target_modules": _TARGETS, "init_lora_weights": False, **values})


@torch.no_grad()
def shaken(model: Any) -> Any:
    """Adapter weights that are not the identity, whatever the kind begins with."""
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or "lora" in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def adapted(config: peft.PeftConfig | None = None, task: str | None = "CAUSAL_LM") -> Any:
    config = lora() if config is None else config
    config.task_type = task
    return shaken(peft.get_peft_model(bare(), config))


KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lora,
    "DoRA": lambda: lora(use_dora=True),
    "rank-stabilised LoRA": lambda: lora(use_rslora=True, lora_bias=True),
    "LoRA with whole modules": lambda: lora(modules_to_save=["lm_head"]),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=_TARGETS),
    "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=_TARGETS),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], save_projection=True),
    "OFT": lambda: peft.OFTConfig(oft_block_size=8, r=0, target_modules=_TARGETS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapted_model_gives_its_own_tokens(kind: str, tmp_path: Path) -> None:
    model, mode = adapted(KINDS[kind]()), MODES[len(kind) % 2]
    turns, others = plain_turns(model, prompt=100), plain_turns(bare(), turns=1, prompt=100)
    assert not torch.equal(turns[0][1].logits[0], others[0][1].logits[0])
    with TieredKV(model, small_config(model.get_base_model(), tmp_path, mode)) as tiered:
        cache, session = tiered.new_cache(), tiered.session("alice")
        for ids, expected in turns:
            assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, mode)
            assert_same(session.generate(ids, **GREEDY), expected, mode)
        assert_same(model.generate(turns[0][0], cache=tiered.new_cache(), **GREEDY), turns[0][1], mode)
        assert_same(model.generate(turns[0][0], prefill_chunk_size=32, **GREEDY), turns[0][1], "gathered")
        tiered.check_integrity()
    assert_same(model.generate(turns[0][0], prefill_chunk_size=32, **GREEDY), turns[0][1], "gathered")


def through_peft(model: Any) -> Any:
    peft.get_peft_model(model, lora(task_type="CAUSAL_LM"))
    return model


def through_transformers(model: Any) -> Any:
    # transformers 5.24 asks for a peft that is not out yet (0.22).
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
        model.add_adapter(lora(), "first")
    return model


def without_a_task(model: Any) -> Any:
    return peft.get_peft_model(model, lora())


@pytest.mark.sampled
@both_modes
@pytest.mark.parametrize("way", [through_peft, through_transformers, without_a_task])
def test_every_way_to_add_an_adapter(way: Callable[[Any], Any], mode: str, tmp_path: Path) -> None:
    model = shaken(way(bare()))
    turns = plain_turns(model, prompt=100)
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    before = sorted(vars(base))
    with TieredKV(model, small_config(base, tmp_path, mode)) as tiered:
        cache = tiered.new_cache()
        for ids, expected in turns:
            assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, mode)
        for again in (model, base):
            with pytest.raises(AlreadyWrappedError, match="close"):
                TieredKV(again)
        with torch.no_grad():
            plain, ours = model(turns[0][0]).logits, tiered(turns[0][0]).logits
            assert (plain - ours).abs().max() < 1e-4
    assert sorted(vars(base)) == before


# -- changes under a cache ---------------------------------------------------------------------------------------------


def two_adapters() -> Any:
    model = peft.get_peft_model(bare(), lora(task_type="CAUSAL_LM"), "first")
    model.add_adapter("second", lora())
    return shaken(model)


@contextlib.contextmanager
def switched(model: Any) -> Any:
    model.set_adapter("second")
    yield
    model.set_adapter("first")


@contextlib.contextmanager
def both_at_once(model: Any) -> Any:
    model.base_model.set_adapter(["first", "second"])
    yield
    model.base_model.set_adapter("first")


@contextlib.contextmanager
def scaled(model: Any) -> Any:
    layer = model.get_base_model().model.layers[0].self_attn.k_proj
    layer.set_scale("first", 3.0)
    yield
    layer.set_scale("first", 1.0)


CHANGES_AND_BACK: dict[str, Callable[[Any], Any]] = {
    "switched": switched,
    "disabled": lambda model: model.disable_adapter(),
    "both": both_at_once,
    "scaled": scaled,
}


@pytest.mark.sampled
@both_modes
@pytest.mark.parametrize("name", CHANGES_AND_BACK)
def test_a_change_is_noticed_and_one_back_makes_the_cache_good_again(name: str, mode: str, tmp_path: Path) -> None:
    model = two_adapters()
    turns = plain_turns(model, prompt=100)
    with CHANGES_AND_BACK[name](model):
        others = plain_turns(model, prompt=100)
    assert not torch.equal(turns[0][1].logits[0], others[0][1].logits[0])
    with TieredKV(model, small_config(model.get_base_model(), tmp_path, mode, cpu_blocks=12)) as tiered:
        cache, session = tiered.new_cache(), tiered.session("alice")
        other = tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        assert_same(session.generate(turns[0][0], **GREEDY), turns[0][1], mode)
        with CHANGES_AND_BACK[name](model):
            for call in (tiered.generate, model.generate):
                with pytest.raises(UnsupportedError, match=r"weights changed.*119 tokens.*new cache, or cache.reset"):
                    call(turns[1][0], cache=cache, **GREEDY)
            for turn in range(2):
                assert_same(tiered.generate(others[turn][0], cache=other, **GREEDY), others[turn][1], mode)
            # A session begins again, so that its chunks are others than the plain run's.
            assert_same(session.generate(others[1][0], **GREEDY), others[1][1], "blockwise")
        for turn in (1, 2):
            assert_same(tiered.generate(turns[turn][0], cache=cache, **GREEDY), turns[turn][1], mode)
            assert_same(session.generate(turns[turn][0], **GREEDY), turns[turn][1], "blockwise")
        with pytest.raises(UnsupportedError, match="weights changed"):
            tiered.generate(others[2][0], cache=other, **GREEDY)
        tiered.check_integrity()


@torch.no_grad()
def trained(model: Any) -> None:
    model.get_base_model().model.layers[1].self_attn.v_proj.lora_B["first"].weight.mul_(1.5)


def swapped_hot(model: Any) -> None:
    """Another user's adapter under the same name, in memory that the allocator may have handed out before."""
    with tempfile.TemporaryDirectory() as folder:
        other = shaken(peft.get_peft_model(bare(), lora(task_type="CAUSAL_LM")))
        other.save_pretrained(folder)
        hotswap_adapter(model, folder, "first")


CHANGES: dict[str, Callable[[Any], object]] = {
    "merged": lambda model: model.merge_adapter(),
    "merged safely": lambda model: model.merge_adapter(safe_merge=True),
    "merged and unloaded": lambda model: model.merge_and_unload(),
    "unloaded": lambda model: model.unload(),
    "added": lambda model: model.add_adapter("third", lora()),
    "deleted": lambda model: model.delete_adapter("first"),
    "trained": trained,
    "swapped": swapped_hot,
    "a frozen weight replaced": lambda model: setattr(
        model.get_base_model().model.norm, "weight", nn.Parameter(model.get_base_model().model.norm.weight * 1.1)
    ),
    "a buffer": lambda model: model.get_base_model().model.rotary_emb.inv_freq.mul_(1.1),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_for_good_is_noticed(name: str, tmp_path: Path) -> None:
    model = two_adapters()
    base = model.get_base_model()
    with TieredKV(model, small_config(base, tmp_path)) as tiered:
        cache, session = tiered.new_cache(), tiered.session("alice")
        ids = tokens(100)
        tiered.generate(ids, cache=cache, **GREEDY)
        longer = torch.cat([session.generate(ids, **GREEDY).sequences, tokens(30, 1)], dim=1)
        CHANGES[name](model)
        with pytest.raises(UnsupportedError, match=r"weights changed.*119 tokens.*new cache, or cache.reset"):
            tiered.model.generate(longer, cache=cache, **GREEDY) if "unload" not in name else base.generate(
                longer, cache=cache, **GREEDY
            )
        expected = base.generate(longer, prefill_chunk_size=32, **GREEDY)
        assert_same(session.generate(longer, **GREEDY), expected, "blockwise")
        cache.reset()
        assert_same(base.generate(longer, cache=cache, **GREEDY), expected, "blockwise")


def test_merged_and_unmerged_weights_are_not_taken_for_the_old_ones(tmp_path: Path) -> None:
    """Unmerging rounds."""
    model = two_adapters()
    with TieredKV(model, small_config(model.get_base_model(), tmp_path)) as tiered:
        cache, ids = tiered.new_cache(), tokens(100)
        longer = torch.cat([tiered.generate(ids, cache=cache, **GREEDY).sequences, tokens(30, 1)], dim=1)
        model.merge_adapter()
        tiered.generate(ids, **GREEDY)
        model.unmerge_adapter()
        with pytest.raises(UnsupportedError, match="weights changed"):
            tiered.generate(longer, cache=cache, **GREEDY)


def test_memory_given_out_again_is_not_taken_for_the_old_weights(tmp_path: Path) -> None:
    """Two swaps through `.data`: no version counter moves, and the second may lie where the first one's weights lay."""
    model = two_adapters()
    weight = model.get_base_model().model.layers[0].self_attn.k_proj.lora_A["first"].weight
    with TieredKV(model, small_config(model.get_base_model(), tmp_path)) as tiered:
        cache = tiered.new_cache()
        ids = tiered.generate(tokens(100), cache=cache, **GREEDY).sequences
        address = weight.data_ptr()
        for _ in range(50):
            weight.data = weight.data * 1.1
            if weight.data_ptr() == address:
                break
        with pytest.raises(UnsupportedError, match="weights changed"):
            tiered.generate(torch.cat([ids, tokens(30, 1)], dim=1), cache=cache, **GREEDY)


def test_an_adapter_added_while_wrapped(tmp_path: Path) -> None:
    plain, model = adapted(), bare()
    turns = plain_turns(plain, prompt=100)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        old = tiered.new_cache()
        before = tiered.generate(turns[0][0], cache=old, **GREEDY).sequences
        later = shaken(peft.get_peft_model(model, lora(task_type="CAUSAL_LM")))
        later.load_state_dict(plain.state_dict())
        with pytest.raises(UnsupportedError, match="weights changed"):
            tiered.generate(torch.cat([before, tokens(9)], dim=1), cache=old, **GREEDY)
        cache = tiered.new_cache()
        for ids, expected in turns:
            assert_same(later.generate(ids, cache=cache, **GREEDY), expected, "blockwise")
    assert_same(later.generate(turns[0][0], prefill_chunk_size=32, **GREEDY), turns[0][1], "gathered")


# -- what is refused ---------------------------------------------------------------------------------------------------

_VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}

REFUSED: dict[str, tuple[Callable[[], peft.PeftConfig], str]] = {
    "prefix": (lambda: peft.PrefixTuningConfig(**_VIRTUAL), "PREFIX_TUNING.*virtual tokens.*verified: LORA"),
    "prompt": (lambda: peft.PromptTuningConfig(**_VIRTUAL), "PROMPT_TUNING.*virtual tokens.*verified: LORA"),
    "p": (lambda: peft.PromptEncoderConfig(**_VIRTUAL), "P_TUNING.*virtual tokens.*verified: LORA"),
    "layer norms": (
        lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm"]),
        "adapter 'default' is LN_TUNING.*not verified.*verified: LORA",
    ),
    "activated": (
        lambda: lora(task_type="CAUSAL_LM", alora_invocation_tokens=[3]),
        "activated LoRA.*cannot tell",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_cannot_be_served(name: str, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    base = bare()
    small = small_config(base, tmp_path)
    model = peft.get_peft_model(base, config()).eval()
    with pytest.raises(UnsupportedModelError, match=message):
        TieredKV(model, small)
    assert "forward" not in vars(base) and not list(tmp_path.glob("nvme/*"))


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_cannot_be_served_added_while_wrapped(name: str, tmp_path: Path) -> None:
    base = bare()
    with TieredKV(base, small_config(base, tmp_path)) as tiered:
        tiered.generate(tokens(50), **GREEDY)
        model = peft.get_peft_model(base, REFUSED[name][0]()).eval()
        with pytest.raises(UnsupportedError, match=r"virtual tokens|not verified|cannot tell"):
            model.generate(tokens(50), cache=tiered.new_cache(), **GREEDY)


def test_adapters_by_row_are_refused(tmp_path: Path) -> None:
    model = two_adapters()
    with TieredKV(model, small_config(model.get_base_model(), tmp_path)) as tiered:
        for call in (tiered.generate, tiered, model.generate):
            with pytest.raises(UnsupportedError, match=r"adapter_names changes the adapter.*set_adapter"):
                call(tokens(30).repeat(2, 1), cache=tiered.new_cache(), adapter_names=["first", "second"], **GREEDY)


def test_adapter_dropout_is_refused(tmp_path: Path) -> None:
    model = adapted(lora(lora_dropout=0.4))
    with TieredKV(model, small_config(model.get_base_model(), tmp_path)) as tiered:
        model.train()
        with pytest.raises(UnsupportedError, match=r"dropout 0\.4 of model.layers.*model\.eval\(\)"):
            tiered.generate(tokens(30), max_new_tokens=2)
        model.eval()
        assert tiered.generate(tokens(30), max_new_tokens=2).shape == (1, 32)
