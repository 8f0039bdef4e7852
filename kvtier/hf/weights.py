"""Whether a wrapped model is still the one that made the KV held: the mark of its weights and adapters."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import PreTrainedModel

from kvtier.errors import UnsupportedError
from kvtier.hf.describe import NAME, UNCOMPILED, check_modules, is_compiled


class WeightsMark:
    """Called once a forward: a number that changes with whatever a model computes its KV from.

    It sees parameters and buffers that are replaced, moved or written in place, modules that come and go, and adapters
    that are switched, disabled, scaled, merged or swapped. Adapters that are switched or scaled back, or enabled again,
    give the number they gave before; everything else never does. What may go by unnoticed: single tensors written
    through `.data` into the same memory, and an adapter that is merged and unmerged between two calls (which restores
    the weights up to rounding).

    Cost: O(modules + parameters), about 0.2 ms for 30 layers. A module that was taken out, and the memory of a few
    parameters that were replaced, live until the next call.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._epoch = 0  # how often the weights were seen to differ from the call before
        self._tree: _Tree | None = None
        self._last: _Tensors | None = None
        self._merged: list[tuple[str, ...]] = []

    def __call__(self) -> int:
        """The number.

        Raises:
            UnsupportedError: the model has become one that cannot be served exactly; the message names why.
        """
        with self._lock:
            if self._tree is None or not self._tree.is_current():
                self._tree, self._last = _Tree(self._model), None
            self._tree.check()
            tensors, merged = self._tree.tensors(), self._tree.merged()
            now = _Tensors(tensors)
            if self._last is None or not self._last.is_same(now) or merged != self._merged:
                check_modules(self._model)
                self._epoch += 1
                now.watch(tensors, self._tree.adapter_tensors())
                self._last, self._merged = now, merged
            return hash((self._epoch, self._tree.adapters()))

    def is_hooked(self) -> bool:
        """Whether a hook stands in the model, as of the last call: what it makes of the KV nobody can tell."""
        return self._tree is not None and self._tree.is_hooked()


class _Tree:
    """The modules of a model, flattened: walking them anew takes longer than a small model's layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        named = dict(model.named_modules())
        modules = named.values()
        self._states = [vars(module) for module in modules]
        everything = [
            entries for module in modules for entries in (module._modules, module._parameters, module._buffers)
        ]
        self._empty = [entries for entries in everything if not entries]
        self._children = [module._modules for module in modules if module._modules]
        self._known = [*chain.from_iterable(map(dict.values, self._children))]
        self._tensors = [entries for module in modules for entries in (module._parameters, module._buffers) if entries]
        self._hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._dropouts = {name: module for name, module in named.items() if _dropout(module)}
        self._checkpointed = [module for module in modules if hasattr(module, "gradient_checkpointing")]
        self._adapters = {name: module for name, module in named.items() if hasattr(module, "_disable_adapters")}

    def is_current(self) -> bool:
        """Whether every module still has the children that it had."""
        children = [*chain.from_iterable(map(dict.values, self._children))]
        return (
            not any(self._empty) and len(children) == len(self._known) and all(map(operator.is_, children, self._known))
        )

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers as they are now."""
        found = chain.from_iterable(map(dict.values, self._tensors))
        return [tensor for tensor in found if tensor is not None]

    def check(self) -> None:
        """Raise UnsupportedError, by name, for a state in which forward is not what it was at wrapping."""
        attention = self._model.config._attn_implementation
        if attention != NAME:
            raise UnsupportedError(
                f"the model's attention was set to {attention!r} while it was wrapped, and sees the new tokens alone: "
                f"model.set_attn_implementation({NAME!r}), or close() and wrap the model again"
            )
        if is_compiled(vars(self._model).get("forward")):
            raise UnsupportedError(f"the model's forward was compiled (torch.compile): {UNCOMPILED}")
        if any("_compiled_call_impl" in state and state["_compiled_call_impl"] is not None for state in self._states):
            raise UnsupportedError(f"the wrapped model, or a part of it, was compiled: {UNCOMPILED}")
        for name, module in self._dropouts.items():
            if module.training and _dropout(module):
                raise UnsupportedError(f"dropout {_dropout(module)} of {name} makes KV random: call model.eval()")
        if torch.is_grad_enabled() and any(m.training and m.gradient_checkpointing for m in self._checkpointed):
            raise UnsupportedError(
                "gradient checkpointing switches the cache off in training mode: call model.eval(), or "
                "model.gradient_checkpointing_disable()"
            )
        for module in self._adapters.values():
            for hook in module._forward_pre_hooks.values():
                if (given := getattr(hook, "keywords", None)) and not given.keys().isdisjoint(_PER_ROW):
                    check_one_adapter(given)

    def is_hooked(self) -> bool:
        """Whether any module has a hook, but for those with which transformers collects hidden states."""
        if not (any(self._hooks) or _global_forward_hooks or _global_forward_pre_hooks):
            return False
        hooks = chain.from_iterable(map(dict.values, (*self._hooks, _global_forward_hooks, _global_forward_pre_hooks)))
        return any(getattr(hook, "__module__", None) != _COLLECTING for hook in hooks)

    def merged(self) -> list[tuple[str, ...]]:
        """The adapters merged into each layer's weights, which torch's version counters do not see."""
        return [tuple(getattr(module, "merged_adapters", ())) for module in self._adapters.values()]

    def adapters(self) -> tuple[Any, ...]:
        """What each layer adds to its weights."""
        return tuple(
            None
            if module._disable_adapters
            else (_flat(module._active_adapter), _flat(getattr(module, "scaling", None)))
            for module in self._adapters.values()
        )

    def adapter_tensors(self) -> list[torch.Tensor]:
        """The tensors of the adapters alone."""
        inner = (
            part
            for module in self._adapters.values()
            for name, part in module.named_modules()
            if not name.startswith(("base_layer", "original_module"))
        )
        return [
            tensor
            for part in inner
            for tensor in (*part._parameters.values(), *part._buffers.values())
            if tensor is not None
        ]


class _Tensors:
    """What memory a model's tensors had at one time, and how often each had been written."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        # Addresses, not weak references to the tensors: with one, torch.utils.swap_tensors refuses a tensor.
        self._addresses = [*map(torch.Tensor.data_ptr, tensors)]
        try:
            self._versions = [*map(_version, tensors)]
        except RuntimeError:  # inference tensors count nothing
            self._versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        self._storages: list[StorageWeakRef] = []
        self._watched: list[int] = []
        self._samples: list[torch.Tensor] = []
        self._bits: torch.Tensor | None = None

    def watch(self, tensors: list[torch.Tensor], adapters: list[torch.Tensor]) -> None:
        """Notice, too, what leaves addresses and counters as they are.

        That is memory that was freed and given out again, and a whole model or adapter written through `.data`, as in
        `p.data.copy_(q)` over all parameters, or in PEFT's hotswap: a few values of tensors from all over it tell.
        """
        self._storages = [_storage(tensor) for tensor in tensors]
        self._watched = [storage.cdata for storage in self._storages]
        chosen = _spread(tensors) + _spread(adapters)
        self._samples = [tensor[(-1,) * (tensor.ndim - 1)][:4] for tensor in chosen]
        if self._samples:
            self._bits = torch.cat(self._samples).view(torch.uint8)  # as bits: a NaN is equal to itself

    def is_same(self, now: _Tensors) -> bool:
        """Whether nothing was replaced, moved or written since."""
        return (
            self._addresses == now._addresses
            and self._versions == now._versions
            and not any(map(_expired, self._watched))
            and (self._bits is None or torch.equal(self._bits, torch.cat(self._samples).view(torch.uint8)))
        )


_NUM_SAMPLES = 16

_COLLECTING = "transformers.utils.output_capturing"

_PER_ROW = frozenset({"adapter_names", "alora_offsets"})

# Methods of C themselves: a Python frame for each parameter would double the cost.
_expired = torch.UntypedStorage._expired
_version: Callable[[torch.Tensor], int] = vars(torch._C.TensorBase)["_version"].__get__


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has no types here


def _spread(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Some that have values to look at, from all over."""
    usable = [t.detach() for t in tensors if t.is_floating_point() and t.ndim and t.numel() and not t.is_meta]
    usable = [tensor for tensor in usable if tensor.device == usable[0].device]
    # An odd stride: an adapter's tensors come in pairs, of which one may be frozen.
    return usable[:: len(usable) // _NUM_SAMPLES | 1]


def _dropout(module: torch.nn.Module) -> float:
    """The probability with which a module drops values in training mode."""
    if isinstance(module, _DropoutNd):
        return float(module.p)
    return max(
        (value for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)), default=0
    )


def _flat(value: Any) -> Any:
    """A name, several names, or a number for each name, as something that can be hashed."""
    if isinstance(value, dict):
        return tuple((name, repr(number)) for name, number in value.items())  # hash(-1.0) is hash(-2.0)
    return tuple(value) if isinstance(value, list) else value


def check_one_adapter(arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for PEFT's arguments that change adapters inside one call."""
    for name in sorted(_PER_ROW.intersection(arguments)):
        if arguments[name] is not None:
            raise UnsupportedError(
                f"{name} changes the adapter from row to row or token to token, and a cache cannot tell: make a call "
                "for each adapter, with set_adapter before it"
            )


def check_own_inputs(model: PreTrainedModel) -> None:
    """Raise UnsupportedError while another object prepares the model's inputs, as PEFT's prompt learning does."""
    prepares = vars(model).get("prepare_inputs_for_generation")
    owner = getattr(prepares, "__self__", model)
    if owner is not model:
        raise UnsupportedError(
            f"a {type(owner).__name__} adds virtual tokens to the prompt (PEFT's prompt learning), which no cache can "
            "compare with it: generate without a TieredCache"
        )
