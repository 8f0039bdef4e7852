"""The fingerprint of a model: one hash of everything that makes the KV of given tokens what it is.

docs/namespaces.md says what it contains and what it leaves out, ADR 0013 why.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
import xxhash
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvtier.errors import UnsupportedModelError
from kvtier.hf.cache import CACHE_NAMES
from kvtier.hf.module_tree import NOT_OF_CONFIG, NOT_OF_MODULE
from kvtier.hf.weights import WeightsMark
from kvtier.hf.wrapped import WrappedMethod
from kvtier.identity import FORMATS, canonical, digest
from kvtier.origin import Fingerprint, namespace_of
from kvtier.types import LayerGroup

PIECE_BYTES = 16 << 20
"""What is copied at a time of a tensor that cannot be hashed where it lies."""

# Arguments of a call that K and V depend on by ids, positions and padding alone, or not at all.
PLAIN_ARGUMENTS = frozenset({
    *CACHE_NAMES, "input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", "use_cache",
    "logits_to_keep", "return_dict", "output_hidden_states", "output_attentions", "output_router_logits", "labels",
})  # fmt: skip


class Fingerprints:
    """Fingerprints of one wrapped model, made when asked and never remembered here."""

    def __init__(self, model: PreTrainedModel, group: LayerGroup, mark: WeightsMark, salt: bytes = b"") -> None:
        """`mark` is the model's, and is called before each forward."""
        self._model, self._group, self._mark, self._salt = model, group, mark, salt
        self._device_type = torch.device(group.device).type

    def fingerprint(self) -> Fingerprint:
        """As the function `fingerprint`."""
        return fingerprint(self._model, self._group, self._salt)

    def begin_fingerprint(self) -> Callable[[], Fingerprint]:
        """As the function `begin_fingerprint`."""
        return begin_fingerprint(self._model, self._group, self._salt)

    def modules(self) -> bytes | None:
        """Of what the modules are and what is set on them; None if a part of the model cannot be told. Milliseconds."""
        try:
            return digest("modules", [("modules", canonical(_modules(self._model)))])
        except UnsupportedModelError:
            return None

    def structure(self) -> bytes | None:
        """Of all but parameters and buffers, which the mark watches; None if a part of the model cannot be told.

        Cost: O(modules), milliseconds.
        """
        try:
            return digest("structure", [
                ("modules", canonical(_modules(self._model))), ("adapters", canonical(_adapters(self._model))),
            ])  # fmt: skip
        except UnsupportedModelError:
            return None

    def seen(self) -> bytes | None:
        """As `modules` was when the mark was last called; costs nothing."""
        return self._mark.modules

    def is_plain(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call's KV follows from ids, positions, padding and the fingerprint: no hooks, no autocast."""
        given = {name for name, value in arguments.items() if value is not None}
        if not given <= PLAIN_ARGUMENTS:
            return False
        return not self._mark.is_hooked() and not torch.is_autocast_enabled(self._device_type)


@torch.no_grad()
def fingerprint(model: PreTrainedModel, group: LayerGroup, salt: bytes = b"") -> Fingerprint:
    """Hash a model as it is now: equal for equal models in every process, wrapped or not, on every device.

    Each tensor's raw bits in logical order go through xxh3_128, and its digest with its name, shape and dtype into
    blake2b: accidents are to be seen, not crafted weights, and blake2b over all bytes would take three times as long
    as reading them does (benchmarks/LOG.md).

    Args:
        salt: whose KV it is to be: namespaces of different salts have nothing in common.

    Raises:
        UnsupportedModelError: a part of the model has no content (meta) or none that can be read.

    Cost: about 0.15 s a GB on one core, 1.3 for tensors that are not contiguous; memory: 16 MiB for those and for
    tensors that are not on the host. On CUDA devices tensors are copied to the host in such pieces (not verified: no
    such device at hand).
    """
    return begin_fingerprint(model, group, salt)()


def begin_fingerprint(model: PreTrainedModel, group: LayerGroup, salt: bytes = b"") -> Callable[[], Fingerprint]:
    """As `fingerprint`, in two parts: all but the tensors' bytes is read now (milliseconds), and those when the result
    is called, on any thread. Tensors that are replaced meanwhile are hashed as they were."""
    modules, adapters = canonical(_modules(model)), canonical(_adapters(model))
    packages, tensors = canonical(_packages(model)), _named_tensors(model)

    @torch.no_grad()
    def finish() -> Fingerprint:
        weights = digest("weights", [
            ("formats", canonical(FORMATS)),
            ("packages", packages),
            ("layers", canonical(list(group.layers))),
            ("shape", canonical(asdict(group.shape))),
            ("dtype", group.dtype.encode()),
            ("heads", canonical(group.heads)),
            ("modules", modules),
            ("tensors", canonical(_digests(tensors))),
        ])  # fmt: skip
        return Fingerprint(weights, namespace_of(weights, adapters, salt), adapters)

    return finish


def _packages(model: nn.Module) -> dict[str, str]:
    """Whose code computes, in which version, but for its build: code may change and weights not."""
    names = {type(module).__module__.partition(".")[0] for module in model.modules()} | {"torch", "transformers"}
    versions = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in names}
    return {name: version.partition("+")[0] for name, version in versions.items()}


def _modules(model: PreTrainedModel) -> dict[str, Any]:
    """By name, each module's class and plain attributes: windows, scales, epsilons, RoPE kinds, as they are now."""
    found: dict[str, Any] = {}
    configs: dict[int, bytes] = {}  # by address: nearly all modules share one, and all live as long as the model
    for name, module in model.named_modules():
        own = vars(module)
        if "forward" in own and not (module is model and _is_own_forward(model)):
            replaced = f"{name or 'the model'}.forward was replaced on the object"
            raise UnsupportedModelError(f"{replaced}: what it computes cannot be hashed")
        values = {
            attribute: _plain(value)
            for attribute, value in own.items()
            if not attribute.startswith("_") and not _is_left_out(module, attribute)
        }
        config = own.get("config")
        if isinstance(config, PreTrainedConfig):
            if id(config) not in configs:
                configs[id(config)] = digest("config", [("", canonical(_plain(_without(config.to_dict()))))])
            values["config"] = configs[id(config)]
        if isinstance(module, nn.Sequential | nn.ModuleList):  # they run in the order of registration
            values["order"] = list(module._modules)
        found[name] = [_name(type(module)), values]
    return found


def _is_own_forward(model: PreTrainedModel) -> bool:
    """Whether what stands in front of its class's forward is a TieredKV and no one else."""
    wrapper = vars(model)["forward"]
    original = getattr(wrapper, "__wrapped__", None) if isinstance(wrapper, WrappedMethod) else None
    return getattr(original, "__func__", None) is type(model).forward


def _is_left_out(module: nn.Module, attribute: str) -> bool:
    return attribute in NOT_OF_MODULE or (attribute == "scaling" and _is_adapter(module))


def _without(values: dict[Any, Any]) -> dict[Any, Any]:
    """A config less what cannot matter, in nested ones too."""
    return {
        key: _without(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key not in NOT_OF_CONFIG
    }


def _plain(value: Any) -> Any:
    """A value as `canonical` takes it: functions and classes by name, objects by their class alone."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case list() | tuple():
            return [_plain(each) for each in value]
        case set() | frozenset():
            return sorted(canonical(_plain(each)) for each in value)
        case dict():
            return {key if isinstance(key, str | int) else str(key): _plain(each) for key, each in value.items()}
        case functools.partial():
            return ["partial", _plain(value.func), _plain(value.args), _plain(value.keywords)]
        case torch.dtype():
            return str(value)
        case torch.Tensor():
            return _tensor(value)
        case type() | types.FunctionType() | types.MethodType() | types.BuiltinFunctionType():
            return _name(value)
        case enum.Enum():
            return [_name(type(value)), value.name]
    return ["object", _name(type(value))]


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _is_adapter(module: nn.Module) -> bool:
    return hasattr(module, "_disable_adapters")


def _adapters(model: nn.Module) -> dict[str, Any]:
    """By module, what each adapted layer adds to its weights. PEFT's names for it."""
    return {
        name: None
        if module._disable_adapters and not getattr(module, "merged_adapters", ())
        else [
            module._disable_adapters,
            _plain(module._active_adapter),
            _plain(getattr(module, "scaling", None)),
            _plain(getattr(module, "merged_adapters", ())),
        ]
        for name, module in model.named_modules()
        if _is_adapter(module)
    }


# -- tensors ----------------------------------------------------------------------------------------------------------


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, persistent or not; those tied to others under each of their names."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _digests(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """By name; one that has several is read once."""
    found: dict[str, Any] = {}
    known: dict[int, Any] = {}
    for name, tensor in tensors:
        if id(tensor) not in known:
            try:
                known[id(tensor)] = _tensor(tensor)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{name}: {error}") from error
        found[name] = known[id(tensor)]
    return found


def _tensor(tensor: torch.Tensor) -> list[Any]:
    """What it is, not how it lies in memory: dtype, shape, and a digest of its elements in order."""
    if tensor.is_meta:
        raise UnsupportedModelError("it has no content (device meta)")
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise UnsupportedModelError(f"a {_name(type(tensor))} of layout {tensor.layout} cannot be hashed")
    extra: list[Any] = []
    if tensor.is_quantized:
        extra, tensor = _quantizer(tensor), tensor.int_repr()
    state = xxhash.xxh3_128()
    for piece in _pieces(tensor.detach().resolve_conj().resolve_neg()):
        state.update(piece.reshape(-1).view(torch.uint8).numpy().data)
    return [str(tensor.dtype), list(tensor.shape), state.digest(), *extra]


def _quantizer(tensor: torch.Tensor) -> list[Any]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [str(tensor.dtype), tensor.q_scale(), tensor.q_zero_point()]
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return [str(tensor.dtype), _tensor(scales), _tensor(zeros), tensor.q_per_channel_axis()]


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in logical order as contiguous pieces on the host: itself, or copies of at most PIECE_BYTES."""
    if not tensor.numel():
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield tensor
    elif tensor.nbytes <= PIECE_BYTES or tensor.ndim == 0:
        yield tensor.cpu().contiguous()
    else:
        rows = max(1, PIECE_BYTES * tensor.shape[0] // tensor.nbytes)
        for part in torch.split(tensor, rows):
            # One row may still be too much: then it is split along its next dimension.
            yield from _pieces(part[0] if rows == 1 else part)
