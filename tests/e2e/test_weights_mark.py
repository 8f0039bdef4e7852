"""The look at the model before each call: each single change is noticed, counted by Python or walked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from kvtier import TieredKV
from kvtier.errors import UnsupportedError
from kvtier.hf import WeightsMark, module_tree
from kvtier.hf.tensor_state import TensorState
from tests.e2e.families import FAMILIES, GREEDY, small_config, tiny_from, tokens


@pytest.fixture(params=["counted", "walked"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How it is found out that nothing was set: later Pythons do not count."""
    if request.param == "walked":
        monkeypatch.setattr(module_tree, "_num_changes", None)
    return str(request.param)


@pytest.fixture
def model() -> Any:
    return tiny_from(LlamaConfig, **FAMILIES["llama"][1])


@pytest.fixture
def mark(model: Any, tmp_path: Path) -> Iterator[WeightsMark]:
    """Of a wrapped model that has been at work, and was looked at since."""
    with TieredKV(model, small_config(model, tmp_path)) as tiered, torch.no_grad():
        mark = tiered._runtime.weights_mark
        assert isinstance(mark, WeightsMark)
        tiered.generate(tokens(40), **GREEDY)
        for _ in range(2):
            mark()
        yield mark


def attention(model: Any) -> Any:
    return model.model.layers[1].self_attn


def renamed(model: Any) -> None:
    """The same value under another name."""
    value = attention(model).scaling
    del attention(model).scaling
    attention(model).other = value


def one_for_another(model: Any) -> None:
    del attention(model).scaling
    attention(model).other = 3


SET: dict[str, Callable[[Any], object]] = {
    "set": lambda model: setattr(attention(model), "scaling", 1.5),
    "set as an object's": lambda model: object.__setattr__(attention(model), "scaling", 1.5),
    "written into its dict": lambda model: vars(attention(model)).update(scaling=1.5),
    "another sign": lambda model: setattr(attention(model), "scaling", -attention(model).scaling),
    "another type": lambda model: setattr(attention(model), "layer_idx", True),
    "added": lambda model: setattr(attention(model), "window", 3),
    "added to a leaf": lambda model: setattr(attention(model).k_proj, "window", 3),
    "taken away": lambda model: delattr(attention(model), "scaling"),
    "one for another": one_for_another,
    "renamed": renamed,
    "of a norm": lambda model: setattr(model.model.norm, "variance_epsilon", 1e-2),
    "of the config": lambda model: setattr(model.config, "rms_norm_eps", 1e-2),
    "in the config's dict": lambda model: vars(model.config).update(rms_norm_eps=1e-2),
    "added to the config": lambda model: setattr(model.config, "window", 3),
    "a method in place of a module's": lambda model: setattr(attention(model), "forward", print),
}


@pytest.mark.parametrize("name", SET)
def test_what_is_set_is_seen(name: str, model: Any, mark: WeightsMark) -> None:
    before, number = mark.modules, mark()
    SET[name](model)
    assert mark() == number and mark.modules != before
    after = mark.modules
    mark()
    assert mark.modules == after


def exchanged_children(model: Any) -> None:
    modules = attention(model)._modules
    modules["k_proj"], modules["v_proj"] = modules["v_proj"], modules["k_proj"]


def moved(model: Any) -> None:
    weight = attention(model).k_proj.weight
    weight.data = weight.data.clone()


def through_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 1.01)


CHANGED: dict[str, Callable[[Any], object]] = {
    "a child of a leaf": lambda model: attention(model).k_proj.add_module("inner", nn.Identity()),
    "a child of a leaf, past torch": lambda model: attention(model).k_proj._modules.update(inner=nn.Identity()),
    "children exchanged": exchanged_children,
    "a child replaced": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.ReLU()),
    "a child taken out": lambda model: model.model.layers.pop(1),
    "a child put to None": lambda model: setattr(attention(model), "k_proj", None),
    "a parameter replaced": lambda model: setattr(
        attention(model).k_proj, "weight", nn.Parameter(attention(model).k_proj.weight.clone())
    ),
    "a parameter replaced, past torch": lambda model: attention(model).k_proj._parameters.update(
        weight=nn.Parameter(attention(model).k_proj.weight.clone())
    ),
    "a parameter that was None": lambda model: setattr(attention(model).k_proj, "bias", nn.Parameter(torch.zeros(1))),
    "a parameter of a module without": lambda model: attention(model).register_parameter(
        "sinks", nn.Parameter(torch.zeros(3))
    ),
    "a buffer of a module without": lambda model: attention(model).register_buffer("sinks", torch.zeros(3)),
    "a buffer replaced": lambda model: setattr(
        model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq.clone()
    ),
    "a buffer written": lambda model: model.model.rotary_emb.inv_freq.mul_(1.1),
    "a parameter written": lambda model: attention(model).k_proj.weight.mul_(1.1),
    "a parameter moved": moved,
    "all parameters written through .data": through_data,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_replaced_moved_or_written_is_seen(name: str, model: Any, mark: WeightsMark) -> None:
    before = mark()
    CHANGED[name](model)
    after = mark()
    assert after != before
    assert mark() == after


def test_a_part_that_was_compiled_is_refused_until_it_is_not(model: Any, mark: WeightsMark) -> None:
    number = mark()
    for part in (model.model.layers[0], attention(model).k_proj):
        part.compile()
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="was compiled"):
                mark()
        del part._compiled_call_impl
        assert mark() == number


def test_a_hook_is_seen(model: Any, mark: WeightsMark) -> None:
    for register in (attention(model).k_proj.register_forward_hook, model.model.norm.register_forward_pre_hook):
        handle = register(lambda *_: None)
        mark()
        assert mark.is_hooked()
        handle.remove()
        mark()
        assert not mark.is_hooked()


def test_calls_themselves_touch_nothing(model: Any, way: str, tmp_path: Path) -> None:
    """If transformers wrote into its modules, every call would walk over all that is set on them."""
    described = 0
    with TieredKV(model, small_config(model, tmp_path)) as tiered, torch.no_grad():
        mark = tiered._runtime.weights_mark
        assert isinstance(mark, WeightsMark)
        describe = mark.describe

        def counting() -> bytes | None:
            nonlocal described
            described += 1
            return describe()

        mark.describe = counting
        cache = tiered.new_cache()
        for seed in range(3):
            tiered(tokens(40, seed), cache=cache)
        for _ in range(3):
            tiered(tokens(1), cache=cache)
            assert mark._tree is not None
            assert mark._tree.is_untouched == (way == "counted" and module_tree._num_changes is not None)
    assert described == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("lies", ["in rows", "in columns", "as inference tensors"])
def test_weights_of_every_kind_written_through_data_are_seen(dtype: torch.dtype, lies: str, tmp_path: Path) -> None:
    model = tiny_from(LlamaConfig, dtype, **FAMILIES["llama"][1])
    for module in model.modules():
        if isinstance(module, nn.Linear) and lies == "in columns":
            module.weight.data = module.weight.data.t().contiguous().t()
    if lies == "as inference tensors":
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
    with TieredKV(model, small_config(model, tmp_path)) as tiered, torch.no_grad():
        before = tiered._runtime.weights_mark()
        assert tiered._runtime.weights_mark() == before
        through_data(model)
        assert tiered._runtime.weights_mark() != before


def test_weights_that_are_nan_stay_what_they_are(model: Any, mark: WeightsMark) -> None:
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    before = mark()
    assert mark() == before


def test_looking_leaves_the_memory_of_weights_resizable(model: Any) -> None:
    """Sharded training frees and takes it so; numpy forbids that for what it was given."""
    tensors = [*model.parameters()]
    TensorState(tensors).watch(tensors, [])
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)


def test_a_tensor_with_its_sign_turned_is_read_as_well(model: Any) -> None:
    """numpy takes none whose negative bit is set."""
    whole = torch.ones(3, 3, dtype=torch.complex64)
    values = whole.conj().imag
    assert values.is_neg()
    before = TensorState([values])
    before.watch([values], [])
    assert before.is_same(TensorState([values]))
    whole.data.add_(1j)
    assert not before.is_same(TensorState([values]))
