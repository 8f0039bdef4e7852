"""The namespace: any single change of what makes KV changes it, nothing else does, and no KV gets the wrong one."""

from __future__ import annotations

import contextlib
import copy
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from kvtier import TieredKV
from kvtier.errors import UnsupportedModelError
from kvtier.hf import describe, transformers_model
from kvtier.hf.fingerprint import fingerprint
from kvtier.labels import Labels
from kvtier.origin import Fingerprint
from kvtier.stores.nvme import NvmeStore
from kvtier.types import SlotLabel, Tier
from tests.e2e.families import ATTENTION, BLOCK, FAMILIES, GREEDY, assert_same, small_config, tiny, tiny_from, tokens
from tests.sample import rounds

LLAMA = FAMILIES["llama"][1]


def llama(**values: Any) -> Any:
    return tiny_from(LlamaConfig, **{**LLAMA, **values})


def namespace(model: Any, block_tokens: int = BLOCK, salt: bytes = b"") -> bytes:
    return fingerprint(model, describe(model, block_tokens), salt).namespace


# -- equal models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_saved_and_loaded_again_is_the_same(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    before = namespace(model)
    with torch.no_grad():
        model(tokens(40))
    assert namespace(model) == before, "running it changes nothing"
    model.save_pretrained(tmp_path)
    attention = ATTENTION.get(family, "sdpa")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation=attention).eval()
    assert namespace(again) == before
    assert namespace(copy.deepcopy(model)) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_one_weight_and_one_buffer_of_every_family_count(family: str) -> None:
    model = tiny(family)
    before = namespace(model)
    with torch.no_grad():
        for tensor in (list(model.parameters())[-1], *list(model.buffers())[:1]):
            if not tensor.is_floating_point():
                continue
            element = tensor.view(-1)[-1:]
            old = element.clone()
            element.copy_(torch.nextafter(element, element + 1))
            assert namespace(model) != before
            element.copy_(old)
            assert namespace(model) == before


PROGRAM = """
from kvtier.hf import describe
from kvtier.hf.fingerprint import fingerprint
from tests.e2e.test_fingerprint import adapted, llama
for model in (llama(), adapted().get_base_model()):
    print(fingerprint(model, describe(model, 16)).namespace.hex())
"""


def test_the_same_in_processes_of_other_hash_seeds() -> None:
    here = [namespace(llama()).hex(), namespace(adapted().get_base_model()).hex()]
    for seed in ("12345", "0")[: rounds(2, 1)]:
        environment = {"PYTHONHASHSEED": seed, "PATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, cwd=Path(__file__).parents[2], capture_output=True,
            check=True, text=True,
        )  # fmt: skip
        assert done.stdout.split() == here


def test_wrapped_or_not_in_either_mode_it_is_the_same(tmp_path: Path) -> None:
    model = llama()
    before = namespace(model)
    group = describe(model, BLOCK)
    for mode in ("blockwise", "gathered"):
        with TieredKV(model, small_config(model, tmp_path, mode)):
            assert fingerprint(model, group).namespace == before
    assert namespace(llama(attention="eager")) == before, "attention implementations differ in rounding alone"


def test_the_order_in_which_modules_and_tensors_were_registered_does_not_count() -> None:
    model = llama()
    before = namespace(model)
    for module in model.modules():
        for entries in (module._parameters, module._buffers, module._modules):
            if not isinstance(module, nn.ModuleList):  # whose order is that of the layers
                turn_round(entries)
    assert [*model.model._modules] == ["rotary_emb", "norm", "layers", "embed_tokens"]
    assert namespace(model) == before
    turn_round(model.model.layers._modules)
    assert namespace(model) != before
    turn_round(model.model.layers._modules)
    attention = model.model.layers[0].self_attn
    attention._modules["k_proj"], attention._modules["v_proj"] = attention.v_proj, attention.k_proj
    assert namespace(model) != before, "but names do"


def turn_round(entries: dict[str, Any]) -> None:
    for name in list(entries)[::-1]:
        entries[name] = entries.pop(name)


# -- single changes ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def one_ulp(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(torch.inf))


def through_data(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data[0, 0] += 1e-7


def minus_zero(model: Any) -> None:
    bias = model.model.layers[0].self_attn.q_proj.weight.data[0]
    bias[:2] = torch.tensor([0.0, -0.0])


def buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq[2] *= 1.0001


def plain_attribute(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def config_in_place(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 20000.0


def activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def tensor_attribute(model: Any) -> None:
    model.model.layers[0].self_attn.temperature = torch.ones(2)


CHANGES: dict[str, Callable[[Any], None]] = {
    "one weight by one ulp": one_ulp,
    "one weight through .data": through_data,
    "a sign of zero": minus_zero,
    "a buffer that is not saved": buffer,
    "an attribute of a module": plain_attribute,
    "the config, in place": config_in_place,
    "an activation without weights": activation,
    "a tensor that is no parameter": tensor_attribute,
    "float64": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "a norm's epsilon": lambda model: setattr(model.model.norm, "variance_epsilon", 1e-5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_single_change_makes_another_namespace(change: str) -> None:
    model = llama()
    before = namespace(model)
    CHANGES[change](model)
    assert namespace(model) != before


def yarn(factor: float) -> dict[str, Any]:
    return {"rope_type": "yarn", "rope_theta": 10000.0, "factor": factor, "original_max_position_embeddings": 1024}


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "rope_theta": lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 10001.0}),
    "rope scaling": lambda: llama(rope_parameters=yarn(2.0)),
    "another rope scaling": lambda: llama(rope_parameters=yarn(2.5)),
    "linear rope": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    "kv heads": lambda: llama(num_key_value_heads=3),
    "heads": lambda: llama(num_attention_heads=3, num_key_value_heads=1, head_dim=32),
    "layers": lambda: llama(num_hidden_layers=2),
    "activation": lambda: llama(hidden_act="gelu"),
    "epsilon": lambda: llama(rms_norm_eps=1e-5),
    "window": lambda: tiny("gemma3"),
    "another window": lambda: tiny_from(FAMILIES["gemma3"][0], **{**FAMILIES["gemma3"][1], "sliding_window": 25}),
    "layer types": lambda: tiny_from(
        FAMILIES["gemma3"][0],
        **{**FAMILIES["gemma3"][1], "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "family": lambda: tiny("mistral"),
}


def test_every_config_has_its_own_namespace() -> None:
    """Weights are the same wherever shapes are: seeded."""
    found = {name: namespace(make()) for name, make in CONFIGS.items()}
    assert len(set(found.values())) == len(found)


def test_what_no_kv_depends_on_does_not_count() -> None:
    model = llama()
    before = namespace(model)
    model.config.pad_token_id = model.config.eos_token_id = 3
    model.config._name_or_path = model.name_or_path = "/elsewhere"
    model.config.output_hidden_states = True
    model.generation_config.temperature = 0.3
    model.train()
    model.requires_grad_(False)
    assert namespace(model) == before


def test_block_tokens_shape_dtype_layers_salt_and_versions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    group = describe(model, BLOCK)
    groups = [
        group,
        describe(model, 2 * BLOCK),
        replace(group, layers=(0, 2, 1)),
        replace(group, dtype="float16"),
        replace(group, heads=12),
        replace(group, shape=replace(group.shape, kv_heads=4)),
        replace(group, shape=replace(group.shape, value_dim=8)),
    ]
    found = [fingerprint(model, each).namespace for each in groups]
    found += [fingerprint(model, group, salt).namespace for salt in (b"alice", b"alice2", b"\0", b"\0\0")]
    monkeypatch.setattr("transformers.__version__", "99.0.0")
    found.append(namespace(model))
    monkeypatch.setattr("kvtier.hf.fingerprint.FORMATS", {"layout": 2})
    found.append(namespace(model))
    assert len(set(found)) == len(found) == 13
    assert fingerprint(model, replace(group, device="cuda:1"), b"").namespace == found[-1], "devices differ in rounding"


def test_another_salt_is_the_same_model() -> None:
    model = llama()
    group = describe(model, BLOCK)
    assert fingerprint(model, group, b"a").weights == fingerprint(model, group, b"b").weights


# -- adapters ---------------------------------------------------------------------------------------------------------


def lora(seed: int = 1) -> peft.LoraConfig:
    torch.manual_seed(seed)
    return peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def adapted() -> Any:
    model = peft.get_peft_model(llama(), lora()).eval()
    model.add_adapter("other", lora(2))
    return model


def test_adapters_make_namespaces_of_their_own() -> None:
    model = adapted()
    base = model.get_base_model()
    layer = base.model.layers[0].self_attn.k_proj
    found = {"bare": namespace(llama()), "default": namespace(base)}
    model.set_adapter("other")
    found["other"] = namespace(base)
    with model.disable_adapter():
        found["disabled"] = namespace(base)
        model.set_adapter("default")
        model.base_model.disable_adapter_layers()
        assert namespace(base) == found["disabled"], "whichever it is that is disabled"
    assert namespace(base) == found["default"]
    layer.set_scale("default", 0.5)
    found["scaled"] = namespace(base)
    layer.set_scale("default", 1.0)
    assert namespace(base) == found["default"]
    layer.lora_B["default"].weight.data[0, 0] += 1e-7
    found["trained"] = namespace(base)
    model.merge_adapter()
    found["merged"] = namespace(base)
    model.unmerge_adapter()
    found["merged into the weights"] = namespace(model.merge_and_unload())
    assert len(set(found.values())) == len(found) == 8


def test_switching_adapters_leaves_what_is_hashed_of_the_weights() -> None:
    model = adapted()
    base = model.get_base_model()
    group = describe(base, BLOCK)
    before = fingerprint(base, group)
    model.set_adapter("other")
    model.base_model.model.model.layers[0].self_attn.k_proj.set_scale("other", 0.5)
    after = fingerprint(base, group)
    assert after.weights == before.weights and after.namespace != before.namespace


def test_scales_whose_hashes_are_equal_have_marks_and_namespaces_of_their_own(tmp_path: Path) -> None:
    base = adapted().get_base_model()
    group, found = describe(base, BLOCK), []
    with TieredKV(base, small_config(base, tmp_path)) as tiered:
        for scale in (-1.0, -2.0):
            base.model.layers[0].self_attn.k_proj.set_scale("default", scale)
            found.append((tiered._runtime.weights_mark(), fingerprint(base, group).namespace))
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]


# -- tensors ----------------------------------------------------------------------------------------------------------


def with_buffer(tensor: torch.Tensor) -> bytes:
    model = tiny("qwen2")
    model.register_buffer("extra", tensor, persistent=False)
    try:
        return fingerprint(model, describe(model, BLOCK)).namespace
    finally:
        del model.extra


DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64,
]  # fmt: skip


def test_every_dtype_is_hashed_and_none_taken_for_another() -> None:
    values = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    found = {dtype: with_buffer(values.to(dtype)) for dtype in DTYPES}
    assert len(set(found.values())) == len(found)
    changed = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert all(with_buffer(changed.to(dtype)) != found[dtype] for dtype in DTYPES)


@pytest.mark.parametrize("piece_bytes", [1, 64, 1 << 20])
def test_tensors_are_hashed_by_their_logical_content(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.hf.fingerprint.PIECE_BYTES", piece_bytes)
    plain = torch.arange(120, dtype=torch.float32).reshape(4, 5, 6)
    expected = with_buffer(plain)
    wide = torch.zeros(4, 5, 9)
    wide[:, :, 2:8] = plain
    views = [plain.permute(2, 0, 1).contiguous().permute(1, 2, 0), wide[:, :, 2:8], plain.clone()]
    assert [view.is_contiguous() for view in views] == [False, False, True]
    assert all(with_buffer(view) == expected for view in views)
    row = torch.arange(6, dtype=torch.float32)
    assert with_buffer(row.expand(4, 5, 6)) == with_buffer(row.expand(4, 5, 6).contiguous())
    assert with_buffer(plain.reshape(5, 4, 6)) != expected, "the shape counts"
    assert with_buffer(plain.transpose(0, 1)) != expected
    conj = torch.tensor([1 + 2j, 3 - 4j, 5j])
    assert with_buffer(conj.conj()) == with_buffer(conj.conj().resolve_conj()) != with_buffer(conj)
    assert with_buffer(conj.conj().imag) == with_buffer(conj.conj().imag.resolve_neg())
    assert with_buffer(torch.tensor(3.0)) != with_buffer(torch.tensor([3.0]))
    assert with_buffer(torch.empty(0, 3)) != with_buffer(torch.empty(3, 0))


def test_a_quantized_tensor_counts_with_its_scale_and_zero_point() -> None:
    values = torch.linspace(-1, 1, 12).reshape(3, 4)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    found = [
        with_buffer(torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)),
        with_buffer(torch.quantize_per_tensor(values, 0.1, 1, torch.qint8)),
        with_buffer(torch.quantize_per_tensor(values, 0.1, 1, torch.quint8)),
        with_buffer(torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)),
        with_buffer(torch.quantize_per_channel(values, scales * 2, zeros, 0, torch.qint8)),
    ]
    assert len(set(found)) == 5
    assert with_buffer(torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)) == found[0]


def test_tied_weights_are_hashed_as_what_they_hold() -> None:
    tied = llama(tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    before = namespace(tied)
    tied.lm_head.weight = nn.Parameter(tied.lm_head.weight.detach().clone())
    assert namespace(tied) == before
    with torch.no_grad():
        tied.lm_head.weight[0, 0] += 1
    assert namespace(tied) != before


def test_what_has_no_content_or_cannot_be_read_is_refused_by_name() -> None:
    model = llama()
    group = describe(model, BLOCK)
    model.model.register_buffer("extra", torch.empty(3, device="meta"))
    with pytest.raises(UnsupportedModelError, match=r"^model.extra: it has no content \(device meta\)"):
        fingerprint(model, group)
    model.model.register_buffer("extra", torch.eye(3).to_sparse())
    with pytest.raises(UnsupportedModelError, match=r"^model.extra: a torch.Tensor of layout torch.sparse_coo"):
        fingerprint(model, group)
    del model.model.extra
    model.model.layers[0].forward = lambda *args, **kwargs: args[0]
    with pytest.raises(UnsupportedModelError, match=r"model.layers.0.forward was replaced on the object"):
        fingerprint(model, group)
    del model.model.layers[0].forward
    model.forward = lambda *args, **kwargs: None
    with pytest.raises(UnsupportedModelError, match=r"the model\.forward was replaced on the object"):
        fingerprint(model, group)


def test_hashing_copies_at_most_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.hf.fingerprint.PIECE_BYTES", 1 << 10)
    model = llama()
    model.register_buffer("extra", torch.zeros(300, 200).t(), persistent=False)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc,name-defined]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    gc.collect()
    with Watch():
        namespace(model)
    assert 0 < largest <= 1 << 10


# -- labels of what goes to disk --------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched(
    model: Any, folder: Path, survives: str = "kill", **values: Any
) -> Iterator[tuple[TieredKV, list[SlotLabel | None]]]:
    """A wrapper with a persistent folder, and the label of each block that its nvme store was given, in order.

    With `survives: kill` blocks may be given theirs where they lie already.
    """
    written: list[SlotLabel | None] = []
    config = small_config(transformers_model(model), folder, **values)
    config["tiers"]["nvme"]["survives"] = survives
    with TieredKV(model, config) as tiered:
        store = tiered._runtime.stores[Tier.NVME]
        assert isinstance(store, NvmeStore)
        write, put_label = store.write, store.put_label

        def noting(slot: Any, block: torch.Tensor, label: SlotLabel | None = None) -> None:
            write(slot, block, label)
            written.append(label)

        def noting_late(slot: Any, label: SlotLabel) -> None:
            put_label(slot, label)
            written.append(label)

        store.write, store.put_label = noting, noting_late  # type: ignore[method-assign]
        yield tiered, written
        tiered.check_integrity()


def demote_all(tiered: TieredKV) -> None:
    """Every block of idle caches goes to disk, and has its label there if it is to have one."""
    runtime = tiered._runtime
    with runtime.turn:
        runtime.manager.make_last(runtime.manager.new_batch())  # whoever stepped last is idle now
        placement = runtime.placement
        upper = [tier for tier in (Tier.CPU, Tier.GPU) if tier in placement.pools]
        while any(placement.pools[tier].num_used for tier in upper):
            for tier in upper:
                placement.give_up(tier, 1000)
            while placement.moves:
                placement.wait()
        if runtime.labels is not None and placement.unlabelled:
            runtime.labels.prove()
            while placement.unlabelled:
                runtime.manager.upkeep.keeper.label_late(8)


def by_identity(labels: list[SlotLabel | None]) -> dict[bytes, SlotLabel]:
    return {label.identity: label for label in labels if label is not None}


def test_blocks_that_go_to_disk_say_whose_kv_they_are(tmp_path: Path) -> None:
    model = llama()
    runs = []
    for mode in ("blockwise", "gathered"):
        with watched(model, tmp_path / mode, mode=mode) as (tiered, written):
            tiered.generate(tokens(300), **GREEDY)
            demote_all(tiered)
            assert {label.namespace for label in written if label is not None} == {namespace_of(tiered)}
            runs.append(by_identity(written))
    assert runs[0] == runs[1] and len(runs[0]) >= 10


def namespace_of(tiered: TieredKV, model: Any = None) -> bytes:
    model = tiered.model if model is None else model
    return fingerprint(model, tiered._runtime.group).namespace


LABELS_PROGRAM = """
import sys, pathlib, torch
from tests.e2e.test_fingerprint import llama, labels_of
for line in labels_of(llama(), pathlib.Path(sys.argv[1])):
    print(line)
"""


def labels_of(model: Any, folder: Path) -> list[str]:
    """Labels of one conversation, sorted."""
    with watched(model, folder) as (tiered, written), torch.no_grad():
        cache = tiered.new_cache()
        tiered(tokens(200), cache=cache)
        demote_all(tiered)
    return sorted(
        f"{label.namespace.hex()} {label.identity.hex()} {label.content.hex()}"
        for label in by_identity(written).values()
    )


def test_the_same_conversation_has_the_same_labels_in_another_process(tmp_path: Path) -> None:
    here = labels_of(llama(), tmp_path / "here")
    assert len(here) == 200 // BLOCK
    environment = {"PYTHONHASHSEED": "99", "PATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LABELS_PROGRAM, str(tmp_path / "there")],
        env=environment, capture_output=True, check=True, cwd=Path(__file__).parents[2], text=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[:-1] == here


def test_nothing_is_hashed_for_a_temporary_folder_nor_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashed(*_: Any) -> Fingerprint:
        raise AssertionError("hashed")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kvtier.hf.fingerprint.fingerprint", hashed)
    model = llama()
    config = small_config(model, tmp_path)
    for tiers in ({"nvme": {"budget": 4 << 20}}, {}):
        config["tiers"] = {"gpu": config["tiers"]["gpu"], "cpu": {"budget": 1 << 20}} | tiers
        with TieredKV(model, config) as tiered:
            assert tiered._runtime.labels is None
            cache = tiered.new_cache()
            tiered.generate(tokens(300), **GREEDY, cache=cache)
            if tiers:
                demote_all(tiered)
                assert tiered.stats()["tiers"]["nvme"]["used_slots"] > 0


def test_the_model_is_hashed_at_the_first_token_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []

    def counting(*args: Any) -> Fingerprint:
        made = fingerprint(*args)
        calls.append(made.namespace)
        return made

    monkeypatch.setattr("kvtier.hf.fingerprint.fingerprint", counting)
    model = llama()
    with watched(model, tmp_path) as (tiered, _), torch.no_grad():
        caches = [tiered.new_cache() for _ in range(3)]
        assert not calls
        for cache in caches:
            tiered(tokens(8), cache=cache)
        assert len(calls) == 1


@torch.no_grad()
def visibly(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def unseen(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data[1, 1] += 0.5


@pytest.mark.parametrize("survives", ["kill", "power_loss"])
@pytest.mark.parametrize("change", [visibly, unseen])
def test_weights_changed_between_prefill_and_demotion_never_label_old_kv_as_new(
    change: Callable[[Any], None], survives: str, tmp_path: Path
) -> None:
    model = llama()
    with watched(model, tmp_path, survives, gpu_slots=30, cpu_blocks=0) as (tiered, written), torch.no_grad():
        old = tiered.new_cache()
        before = namespace_of(tiered)
        tiered(tokens(100), cache=old)
        change(model)
        demote_all(tiered)
        assert len(written) >= 6 and set(written) == {None}
        written.clear()
        new = tiered.new_cache()
        tiered(tokens(100), cache=new)
        demote_all(tiered)
        after = namespace_of(tiered)
        assert after != before
        assert {label.namespace for label in by_identity(written).values()} == {after}
        assert len(by_identity(written)) == 100 // BLOCK


@pytest.mark.parametrize("survives", ["kill", "power_loss"])
def test_kv_of_a_turn_after_an_unseen_change_is_not_the_old_models(survives: str, tmp_path: Path) -> None:
    model = llama()
    with watched(model, tmp_path, survives, gpu_slots=30, cpu_blocks=0) as (tiered, written), torch.no_grad():
        cache = tiered.new_cache()
        tiered(tokens(100), cache=cache)
        demote_all(tiered)
        assert len(by_identity(written)) == 100 // BLOCK
        written.clear()
        unseen(model)
        twin = cache.fork()
        for each in (cache, twin):
            tiered(tokens(100, 5), cache=each)
        demote_all(tiered)
        assert written and set(written) == {None}


def test_adapters_changed_between_turns_label_no_kv_of_the_one_as_the_others(tmp_path: Path) -> None:
    model = adapted()
    base = model.get_base_model()
    with watched(model, tmp_path, gpu_slots=60, cpu_blocks=0) as (tiered, written), torch.no_grad():
        namespaces = {}
        for name in ("default", "other"):
            model.set_adapter(name)
            namespaces[name] = namespace_of(tiered, base)
            with tiered.session(name) as session:
                session.generate(tokens(100), max_new_tokens=4, do_sample=False)
        demote_all(tiered)  # while `other` is active
        labels = list(by_identity(written).values())
        assert len(labels) == 2 * -(-103 // BLOCK), "a session's tail has one too"
        for label in labels:
            twins = [each for each in labels if each.content == label.content]
            assert {each.namespace for each in twins} <= set(namespaces.values())
        assert {label.namespace for label in labels} == set(namespaces.values())
        written.clear()
        session = tiered.session("default")  # held by the other adapter: computed anew
        session.generate(tokens(100), max_new_tokens=4, do_sample=False)
        demote_all(tiered)
        assert {label.namespace for label in by_identity(written).values()} == {namespaces["other"]}


def test_beams_and_padded_rows_are_labelled_by_what_they_hold(tmp_path: Path) -> None:
    model = llama()
    ids = torch.cat([tokens(60, 1), tokens(60, 2)])
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    runs = []
    for padded in (mask, torch.ones_like(ids)):
        with watched(model, tmp_path / str(len(runs)), rows=2, gpu_slots=20) as (tiered, written), torch.no_grad():
            cache = tiered.new_cache(2)
            tiered(ids, attention_mask=padded, cache=cache)
            demote_all(tiered)
            runs.append(by_identity(written))
    assert len(runs[0]) == 60 // BLOCK + 53 // BLOCK and len(runs[1]) == 2 * (60 // BLOCK)
    assert len(runs[0].keys() & runs[1].keys()) == 60 // BLOCK, "the row without padding is the same in both"


@contextlib.contextmanager
def steered(module: nn.Module) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _, __, out: out * 1.01)
    yield
    handle.remove()


def test_kv_that_depends_on_more_than_tokens_gets_no_label(tmp_path: Path) -> None:
    model = tiny_from(LlamaConfig, torch.bfloat16, **LLAMA)
    ids = tokens(96)
    embeds = model.get_input_embeddings()(ids).detach()

    def hooked(tiered: TieredKV, cache: Any) -> Any:
        with steered(model.model.layers[0].mlp):
            return tiered(ids, cache=cache)

    def autocast(tiered: TieredKV, cache: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return tiered(ids[:, :32], cache=cache)

    calls: dict[str, Callable[[TieredKV, Any], Any]] = {
        "embeddings": lambda tiered, cache: tiered(inputs_embeds=embeds, cache=cache),
        "a hook": hooked,
        "autocast": autocast,
    }
    for number, (name, call) in enumerate(calls.items()):
        with watched(model, tmp_path / str(number), gpu_slots=20, cpu_blocks=0) as (tiered, written), torch.no_grad():
            cache = tiered.new_cache()
            call(tiered, cache)
            tiered(tokens(48, 9), cache=cache)  # what follows has it as its past
            demote_all(tiered)
            assert written and set(written) == {None}, name
            written.clear()
            cache.reset()
            tiered(ids, cache=cache)
            demote_all(tiered)
            assert len(by_identity(written)) == 96 // BLOCK, f"after {name}, in a cache that was reset"


def test_what_is_set_on_a_module_and_put_back_before_blocks_go_to_disk_ends_the_labels(tmp_path: Path) -> None:
    """Both hashes were the same, and a later process would have found other KV under the tokens of those in between."""
    model = tiny_from(LlamaConfig, **LLAMA)
    attention = model.model.layers[0].self_attn
    with watched(model, tmp_path / "plain", gpu_slots=20, cpu_blocks=0) as (tiered, written), torch.no_grad():
        caches = [tiered.new_cache(), tiered.new_cache()]
        for cache, ids in zip(caches, (tokens(48), tokens(32, 3)), strict=True):
            tiered(ids, cache=cache)
            tiered(tokens(1), cache=cache)  # a block is sealed when the next step begins
        demote_all(tiered)
        allowed = set(by_identity(written))
    assert len(allowed) == (48 + 32) // BLOCK
    with watched(model, tmp_path, gpu_slots=20, cpu_blocks=0) as (tiered, written), torch.no_grad():
        cache, other = tiered.new_cache(), tiered.new_cache()
        tiered(tokens(48), cache=cache)
        before, attention.scaling = attention.scaling, attention.scaling * 3
        tiered(tokens(48, 1), cache=cache)
        attention.scaling = before
        tiered(tokens(32, 2), cache=cache)
        tiered(tokens(32, 3), cache=other)
        demote_all(tiered)
        assert len(by_identity(written)) >= 3 and set(by_identity(written)) <= allowed and None in written


def test_setting_the_same_again_ends_nothing(tmp_path: Path) -> None:
    model = tiny_from(LlamaConfig, **LLAMA)
    with watched(model, tmp_path, gpu_slots=20, cpu_blocks=0) as (tiered, written), torch.no_grad():
        cache = tiered.new_cache()
        for seed in range(3):
            tiered(tokens(32, seed), cache=cache)
            model.model.layers[0].self_attn.scaling = float(repr(model.model.layers[0].self_attn.scaling))
            model.note = seed  # nobody computes with it, but nobody can know that
            del model.note
        demote_all(tiered)
        assert len(by_identity(written)) == 96 // BLOCK


def test_an_argument_that_nobody_knows_is_not_plain(tmp_path: Path) -> None:
    model = llama()
    with watched(model, tmp_path) as (tiered, _):
        labels = tiered._runtime.labels
        assert labels is not None
        assert labels.is_plain({"input_ids": tokens(3), "cache": None, "strange": None})
        assert not labels.is_plain({"input_ids": tokens(3), "strange": torch.ones(1)})


def test_hidden_states_asked_for_are_no_reason_to_leave_labels_out(tmp_path: Path) -> None:
    model = llama()
    with watched(model, tmp_path, gpu_slots=20, cpu_blocks=0) as (tiered, written), torch.no_grad():
        tiered(tokens(96), cache=(cache := tiered.new_cache()), output_hidden_states=True, logits_to_keep=1)
        tiered(tokens(96, 2), cache=(other := tiered.new_cache()))
        demote_all(tiered)
        assert len(by_identity(written)) == 2 * (96 // BLOCK)
    del cache, other


def test_every_way_to_generate_is_labelled(tmp_path: Path) -> None:
    """No mode passes an argument that would be taken for one that K and V depend on."""
    model = llama()
    modes: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True},
                                   {"prompt_lookup_num_tokens": 3}]  # fmt: skip
    for number, mode in enumerate(modes):
        with watched(model, tmp_path / str(number), rows=2) as (tiered, written):
            assert isinstance(tiered._runtime.labels, Labels)
            cache = tiered.new_cache()
            tiered.generate(tokens(80), **{**GREEDY, **mode}, cache=cache)
            demote_all(tiered)
            assert len(by_identity(written)) >= 96 // BLOCK - 1, mode


@pytest.mark.parametrize("has_path", [True, False])
def test_prompts_are_found_of_the_adapter_in_force_alone(tmp_path: Path, has_path: bool) -> None:
    """Switched, disabled, merged, written: none is answered with another's KV, and one that is back finds its own."""
    model, ids = adapted(), tokens(150)
    config = small_config(model.get_base_model(), tmp_path, prefix_cache=True)
    if not has_path:
        del config["tiers"]["nvme"]["path"]

    def reused(tiered: TieredKV) -> int:
        before = sum(tiered.stats()["prefix_cache"]["reused_tokens"].values())
        out = tiered.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        assert_same(out, model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY), "blockwise")
        tiered.check_integrity()
        return sum(tiered.stats()["prefix_cache"]["reused_tokens"].values()) - before

    whole = 150 // BLOCK * BLOCK
    with TieredKV(model, config) as tiered, torch.no_grad():
        assert [reused(tiered), reused(tiered)] == [0, whole]
        model.set_adapter("other")
        assert [reused(tiered), reused(tiered)] == [0, whole]
        model.set_adapter("default")
        assert reused(tiered) == whole
        with model.disable_adapter():
            assert reused(tiered) == 0
        model.merge_adapter()
        assert reused(tiered) == 0
        model.unmerge_adapter()
        reused(tiered)  # the same weights up to rounding: found or not, the tokens are this model's
        next(each for name, each in model.named_parameters() if "lora_B" in name).add_(0.3)
        assert reused(tiered) == 0
    with TieredKV(model, config) as tiered:
        reused(tiered)
        assert reused(tiered) == whole
