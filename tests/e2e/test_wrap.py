"""What wrapping does to a model, and what a failed step leaves behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LogitsProcessor, LogitsProcessorList

from kvtier import TieredKV
from kvtier.errors import AlreadyWrappedError, ClosedError, UnsupportedError
from kvtier.hf import cache_keyword
from tests.e2e.families import (
    ATTENTION,
    CHUNK,
    FAMILIES,
    GREEDY,
    MODES,
    assert_same,
    mode_of,
    occupied,
    plain_turns,
    small_config,
    tiny,
    tiny_from,
    tokens,
)

both_modes = pytest.mark.parametrize("mode", MODES)


# -- the model, called directly ----------------------------------------------------------------------------------------


@torch.no_grad()
def direct_calls(model: Any) -> list[torch.Tensor]:
    """Logits and tokens of calls that kvtier has no part in."""
    rows = torch.cat([tokens(40, seed) for seed in (1, 2)])
    padded = torch.ones_like(rows)
    padded[0, :7] = 0
    cache = DynamicCache(config=model.config)
    quiet = {"max_new_tokens": 6, "do_sample": False}
    torch.manual_seed(5)
    return [
        model(rows).logits,
        model(rows, attention_mask=padded).logits,
        model(rows[:1], cache=cache).logits,
        model(rows[:1, :3], cache=cache).logits,
        model(rows, use_cache=False, return_dict=False)[0],
        model.generate(rows, **quiet),
        model.generate(rows, attention_mask=padded, **quiet),
        model.generate(rows, attention_mask=padded, num_beams=3, **quiet),
        model.generate(rows[:1], prefill_chunk_size=16, **quiet),
        model.generate(rows[:1], do_sample=True, max_new_tokens=6, num_return_sequences=2),
    ]


def footprint(model: Any) -> dict[str, Any]:
    """What wrapping could leave on a model."""
    return {
        "attributes": sorted(vars(model)),
        "attention": [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
        "config": model.config.to_dict(),
        "config attributes": sorted(vars(model.config)),
        "generation": model.generation_config.to_dict(),
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "instance forwards": [name for name, m in model.named_modules() if "forward" in vars(m)],
    }


@pytest.mark.sampled
@both_modes
@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, kind) for family in FAMILIES for kind in ("sdpa", "eager") if ATTENTION.get(family, kind) == kind],
)
def test_direct_calls_are_as_before_while_wrapped_and_after(
    family: str, attention: str, mode: str, tmp_path: Path
) -> None:
    model = tiny(family, attention=attention)
    before, expected = footprint(model), direct_calls(model)
    with TieredKV(model, small_config(model, tmp_path, mode)) as tiered:
        tiered.generate(tokens(50), **GREEDY)
        assert all(map(torch.equal, direct_calls(model), expected))
        assert tiered.generate(tokens(50), max_new_tokens=3).shape == (1, 53)
    assert footprint(model) == before
    assert model.forward.__func__ is type(model).forward
    assert all(map(torch.equal, direct_calls(model), expected))


def test_an_instance_forward_comes_back(tmp_path: Path) -> None:
    """Device hooks put one there."""
    model = tiny_from(LlamaConfig, **FAMILIES["llama"][1])
    calls: list[int] = []
    own = model.forward

    @functools.wraps(own)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    model.forward = hooked
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        tiered.generate(input_ids=tokens(5), max_new_tokens=2)
        assert calls
    assert model.forward is hooked


def test_wrapping_twice_and_again(tmp_path: Path) -> None:
    model, turns = tiny(), plain_turns(tiny(), turns=1, prompt=100)
    config = small_config(model, tmp_path)
    with TieredKV(model, config) as first:
        for target in (model, model.model):
            with pytest.raises(AlreadyWrappedError, match="close"):
                TieredKV(target, small_config(model, tmp_path / "other") if target is model else config)
        assert_same(first.generate(turns[0][0], **GREEDY), turns[0][1], "blockwise")
    first.close()
    with TieredKV(model, config) as second:
        assert_same(second.generate(turns[0][0], **GREEDY), turns[0][1], "blockwise")


def test_a_closed_wrapper_and_its_caches_say_so(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(40)
    tiered = TieredKV(model, small_config(model, tmp_path))
    cache = tiered.new_cache()
    tiered.generate(ids, cache=cache, max_new_tokens=2)
    tiered.close()
    longer = torch.cat([ids, tokens(20)], dim=1)
    with TieredKV(model, small_config(model, tmp_path)) as later:
        calls: list[Callable[[], object]] = [
            lambda: tiered.generate(ids),
            lambda: tiered(ids),
            tiered.new_cache,
            tiered.stats,
            tiered.check_integrity,
            lambda: cache.crop(-1),
            cache.fork,
            cache.reset,
            lambda: model(tokens(1), cache=cache),
            lambda: model.generate(longer, cache=cache),
            lambda: later.generate(longer, cache=cache),
            lambda: later(tokens(1), cache=cache),
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="closed"):
                call()
    with pytest.raises(ClosedError):  # by the model's own name for it: an unwrapped model swallows any other
        model(tokens(1), **{cache_keyword(model.forward): cache})


# -- other weights -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def through_data(model: Any) -> None:
    """As target networks and trainers send weights over: no counter of torch's sees it."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 1.01)


@torch.no_grad()
def in_place(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.weight.mul_(1.01)


def loaded(model: Any) -> None:
    model.load_state_dict({name: value * 1.01 for name, value in model.state_dict().items()})


def assigned(model: Any) -> None:
    model.load_state_dict({name: value * 1.01 for name, value in model.state_dict().items()}, assign=True)


def swapped_layer(model: Any) -> None:
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def exchanged(model: Any) -> None:
    """Two tensors change places; torch refuses it for tensors that something refers to weakly."""
    weight = model.model.layers[0].mlp.up_proj.weight
    torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach() * 1.01))


def cast(model: Any) -> None:
    model.half().float()


@both_modes
@pytest.mark.parametrize("change", [through_data, in_place, loaded, assigned, swapped_layer, exchanged, cast])
def test_kv_of_other_weights_is_never_served(change: Callable[[Any], None], mode: str, tmp_path: Path) -> None:
    model = tiny_from(LlamaConfig, **FAMILIES["llama"][1])
    with TieredKV(model, small_config(model, tmp_path, mode)) as tiered:
        cache, session = tiered.new_cache(), tiered.session("alice")
        tiered.generate(tokens(100), cache=cache, **GREEDY)
        ids = torch.cat([session.generate(tokens(100), **GREEDY).sequences, tokens(30, 1)], dim=1)
        change(model)
        if change is swapped_layer:  # transformers' layers know their number
            for number, layer in enumerate(model.model.layers):
                layer.self_attn.layer_idx = number
        with pytest.raises(UnsupportedError, match=r"weights changed.*119 tokens.*new cache, or cache\.reset"):
            tiered.generate(ids, cache=cache, **GREEDY)
        with pytest.raises(UnsupportedError, match="weights changed"):
            tiered(tokens(1), cache=cache)
        expected = model.generate(ids, prefill_chunk_size=CHUNK, **GREEDY)
        assert_same(session.generate(ids, **GREEDY), expected, mode)
        cache.reset()
        assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, mode)
        tiered.check_integrity()


# -- failures inside a step --------------------------------------------------------------------------------------------


class Breaks(LogitsProcessor):  # type: ignore[no-untyped-call]
    """Raises at its third token."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("a processor failed")
        return scores


def raise_at_call(number: int, error: BaseException) -> Callable[..., None]:
    calls = [0]

    def hook(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == number:
            raise error

    return hook


@pytest.mark.sampled
@pytest.mark.parametrize("error", [RuntimeError("a hook failed"), KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("held", [0, 1], ids=["a new cache", "second turn"])
def test_an_exception_in_the_third_chunk_leaves_the_cache_as_it_was(
    tiered: TieredKV, held: int, error: BaseException
) -> None:
    turns = plain_turns(tiered.model, turns=2)
    cache = tiered.new_cache()
    if held:
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode_of(tiered))
    ids, expected = turns[held]
    before = (cache.get_seq_length(), cache.token_ids, occupied(tiered))
    hook = tiered.model.model.layers[1].register_forward_hook(raise_at_call(3, error))
    try:
        with pytest.raises(type(error)):
            tiered.generate(torch.cat([ids, tokens(3 * CHUNK)], dim=1), cache=cache, **GREEDY)
    finally:
        hook.remove()
    assert (cache.get_seq_length(), cache.token_ids, occupied(tiered)) == before
    assert tiered.stats()["steps_aborted"] == 1
    assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, mode_of(tiered))


def test_a_failed_call_with_embeddings_keeps_the_token_ids(tiered: TieredKV) -> None:
    ids, cache = tokens(40), tiered.new_cache()
    with torch.no_grad():
        tiered(ids, cache=cache)
        hook = tiered.model.model.layers[1].register_forward_hook(raise_at_call(3, RuntimeError("a hook failed")))
        with pytest.raises(RuntimeError):
            tiered(inputs_embeds=tiered.model.get_input_embeddings()(tokens(4 * CHUNK)), cache=cache)
        hook.remove()
    assert cache.get_seq_length() == 40
    assert cache.token_ids == ids[0].tolist()


def test_an_exception_in_a_logits_processor(tiered: TieredKV) -> None:
    turns = plain_turns(tiered.model, turns=2)
    cache = tiered.new_cache()
    tiered.generate(turns[0][0], cache=cache, **GREEDY)
    with pytest.raises(RuntimeError, match="a processor failed"):
        tiered.generate(turns[1][0], cache=cache, logits_processor=LogitsProcessorList([Breaks()]), **GREEDY)
    # Whole steps stay: the prompt and the two tokens that were fed back.
    assert cache.get_seq_length() == turns[1][0].shape[1] + 2
    occupied(tiered)
    cache.crop(-2)
    cache.crop(turns[0][1].sequences.shape[1] - 1 - cache.get_seq_length())
    assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], mode_of(tiered))


def test_generating_writes_nothing_to_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path, "blockwise")) as tiered:
        tiered.generate(tokens(200), max_new_tokens=4, do_sample=False)
        tiered.stats()
    assert capfd.readouterr() == ("", "")
