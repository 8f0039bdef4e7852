"""Whether a wrapped model is still the one that made the KV held: the mark of its weights and adapters."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

from kvtier.errors import UnsupportedError
from kvtier.hf.describe import NAME, UNCOMPILED, check_modules, is_compiled


class WeightsMark:
    """Called once a forward: a number that changes with whatever a model computes its KV from.

    It sees parameters and buffers that are replaced, moved or written in place, modules that come and go, and adapters
    that are switched, disabled, scaled, merged or swapped, and steps of optimizers. Adapters that are switched or
    scaled back, or enabled again, give the number they gave before; everything else never does. What may go by
    unnoticed: tensors written through `.data` into the same memory, one alone until the next close look, a part of one
    for good; and an adapter that is merged and unmerged between two calls (which restores the weights up to rounding).
    What is set on modules and configs is not in the number, but in `modules`.

    Cost: O(modules + parameters), about 0.3 ms for 30 layers, 1 ms more for a close look, and that of `describe` when
    something was set. A module that was taken out, and the memory of a few parameters that were replaced, live until
    the next call.

    Attributes:
        modules: as of the last call, what the modules are and what is set on them, as `describe` has it. A list or dict
            that was written in place goes by unnoticed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.describe: Callable[[], bytes | None] = lambda: None
        """What the modules are and what is set on them, as a digest; None: nobody can tell."""
        self._lock = threading.Lock()
        self._epoch = 0  # how often the weights were seen to differ from the call before
        self._tree: _Tree | None = None
        self._last: _Tensors | None = None
        self._merged: list[tuple[str, ...]] = []
        self._attributes: list[Any] = []
        self.modules: bytes | None = None
        self._values: torch.Tensor | None = None
        self._num_steps = self._num_steps_seen = 0
        me = weakref.ref(self)

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (mark := me()) is not None:
                mark._note_step(optimizer)

        # Fused ones count no version of what they write, and those of others may write through `.data`.
        weakref.finalize(self, register_optimizer_step_post_hook(note).remove).atexit = False

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        known = self._last
        if known is not None and known.any_of(each for group in optimizer.param_groups for each in group["params"]):
            self._num_steps += 1

    def __call__(self, *, closely: bool = False) -> int:
        """The number.

        Args:
            closely: look at a few values of each tensor: before KV of earlier calls is served to a new one.

        Raises:
            UnsupportedError: the model has become one that cannot be served exactly; the message names why.
        """
        with self._lock:
            if self._tree is None or not self._tree.is_current():
                self._tree, self._last = _Tree(self._model), None
            self._tree.check()
            tensors, merged = self._tree.tensors(), self._tree.merged()
            now = _Tensors(tensors)
            num_steps, values = self._num_steps, _values(tensors) if closely else None
            is_same = self._last is not None and self._last.is_same(now) and num_steps == self._num_steps_seen
            if not is_same or merged != self._merged or (values is not None and self._has_other(values)):
                check_modules(self._model)
                self._epoch += 1
                now.watch(tensors, self._tree.adapter_tensors())
                self._last, self._merged, self._num_steps_seen = now, merged, num_steps
                self._values = _values(tensors)
            self._look_at_attributes(self._tree)
            return hash((self._epoch, self._tree.adapters()))

    def _has_other(self, values: torch.Tensor) -> bool:
        return self._values is None or not torch.equal(self._values, values)

    def _look_at_attributes(self, tree: _Tree) -> None:
        """Describe the modules anew if anything was set on them. It may be the same: then nothing has changed."""
        now = tree.attributes()
        if len(now) != len(self._attributes) or not all(map(operator.is_, now, self._attributes)):
            self.modules = self.describe()
            self._attributes = now

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
        configs = {id(config): vars(config) for module in modules if (config := vars(module).get("config")) is not None}
        self._settings = [*self._states, *configs.values()]
        self._watched: list[tuple[operator.itemgetter[Any], dict[str, Any]]] = []
        self._num_settings: list[int] = []

    def is_current(self) -> bool:
        """Whether every module still has the children that it had."""
        children = [*chain.from_iterable(map(dict.values, self._children))]
        return (
            not any(self._empty) and len(children) == len(self._known) and all(map(operator.is_, children, self._known))
        )

    def attributes(self) -> list[Any]:
        """The values that are set on modules and configs, but for what nn.Module keeps and what K and V do not need."""
        try:
            if [*map(len, self._settings)] == self._num_settings:
                return [*chain.from_iterable([get(state) for get, state in self._watched])]
        except KeyError:  # one was taken away and another one set
            pass
        self._watched = []
        for state in self._settings:
            names = [name for name in state if name not in _NOT_WATCHED]
            if names:
                self._watched.append((operator.itemgetter(*names, names[0]), state))  # two at least: then it is a tuple
        self._num_settings = [*map(len, self._settings)]
        return [*chain.from_iterable([get(state) for get, state in self._watched])]

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
        if any(map(operator.contains, self._states, repeat(_COMPILED))) and any(
            state.get(_COMPILED) is not None for state in self._states
        ):
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
        self._samples = [_few(tensor.detach()) for tensor in chosen]
        if self._samples:
            self._bits = torch.cat(self._samples).view(torch.uint8)  # as bits: a NaN is equal to itself

    def any_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of these lies where one of the model's does."""
        return not {*self._addresses}.isdisjoint(map(torch.Tensor.data_ptr, tensors))

    def is_same(self, now: _Tensors) -> bool:
        """Whether nothing was replaced, moved or written since."""
        return (
            self._addresses == now._addresses
            and self._versions == now._versions
            and not any(map(_expired, self._watched))
            and (self._bits is None or torch.equal(self._bits, torch.cat(self._samples).view(torch.uint8)))
        )


_NUM_SAMPLES = 16
_FIRST_FEW = (slice(None, 4),)

_COMPILED = "_compiled_call_impl"
_COLLECTING = "transformers.utils.output_capturing"

# Of a config: who made it, what the caller gets beside logits, and what only training or `generate` reads.
NOT_OF_CONFIG = frozenset({
    "_name_or_path", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache",
    "output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id", "problem_type",
    "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id",
    "_attn_implementation", "_attn_implementation_internal", "_experts_implementation_internal",
})  # fmt: skip

# Of a module: the same, and adapters' states, which are looked at apart.
NOT_OF_MODULE = frozenset({
    "training", "gradient_checkpointing", "name_or_path", "kernel_config", "config", "generation_config", "loss_type",
    "all_tied_weights_keys", "warnings_issued", "forward", "generate", "merged_adapters",
})  # fmt: skip

_NOT_WATCHED = frozenset(vars(torch.nn.Module())) | NOT_OF_CONFIG | (NOT_OF_MODULE - {"config", "forward"})

_PER_ROW = frozenset({"adapter_names", "alora_offsets"})

# Methods of C themselves: a Python frame for each parameter would double the cost.
_expired = torch.UntypedStorage._expired
_version: Callable[[torch.Tensor], int] = vars(torch._C.TensorBase)["_version"].__get__


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has no types here


def _spread(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Some that have values to look at, from all over."""
    usable = _usable(tensors)
    # An odd stride: an adapter's tensors come in pairs, of which one may be frozen.
    return usable[:: len(usable) // _NUM_SAMPLES | 1]


def _usable(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    usable = [t for t in tensors if t.is_floating_point() and t.ndim and t.numel() and not t.is_meta]
    return [tensor for tensor in usable if tensor.device == usable[0].device]


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Some of its values, as a view."""
    return tensor[(-1,) * (tensor.ndim - 1) + _FIRST_FEW]


@torch.no_grad()
def _values(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A few of each, as bits. Copies: a view would keep the memory of what is replaced."""
    chosen = [_few(tensor) for tensor in _usable(tensors)]
    return torch.cat(chosen).view(torch.uint8) if chosen else torch.empty(0, dtype=torch.uint8)


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
