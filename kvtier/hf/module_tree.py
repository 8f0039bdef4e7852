"""The modules of a model, and what is set on them: whether anything of it has changed."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers import PreTrainedModel

from kvtier.errors import UnsupportedError
from kvtier.hf.adapters import PER_ROW, check_one_adapter
from kvtier.hf.describe import NAME, UNCOMPILED, is_compiled

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

# A number that is another one after whatever was written into a dict: Python 3.11 keeps it (PEP 509), and torch reads
# it. Later Pythons have given it up.
_num_changes: Callable[[dict[str, Any]], int] | None = (
    getattr(torch._C._dynamo.guards, "dict_version", None) if sys.version_info < (3, 12) else None
)


class ModuleTree:
    """The modules of a model, flattened: walking them anew takes longer than a small model's layer.

    Behind a forward everything has to come from memory again, and each module, dict and value costs 0.1 us for that.
    So where Python tells whether a dict was written, what is in it is looked at only if it was.
    """

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
        self._watched: list[tuple[operator.itemgetter[Any], list[dict[str, Any]]]] = []
        self._num_settings: list[int] = []
        self._dicts = [*self._settings, *self._children]
        self._changes: list[int] | None = None
        self._noted: list[int] | None = None
        self.is_untouched = False
        """Whether nothing was set since `note`, and no child came or went, as of the last `is_current`."""

    def is_current(self) -> bool:
        """Whether every module still has the children that it had."""
        # Before anything is looked at: what is written meanwhile is seen the next time.
        self._changes = None if _num_changes is None else [*map(_num_changes, self._dicts)]
        self.is_untouched = self._changes is not None and self._changes == self._noted
        if any(self._empty):
            return False
        if self.is_untouched:
            return True
        children = [*chain.from_iterable(map(dict.values, self._children))]
        return len(children) == len(self._known) and all(map(operator.is_, children, self._known))

    def note(self) -> None:
        """What there was at the last `is_current` has been looked at, and is as it should be."""
        self._noted = self._changes

    def attributes(self) -> list[Any]:
        """The values that are set on modules and configs, but for what nn.Module keeps and what K and V do not need.

        First an object that is another one when there are other names.
        """
        try:
            if [*map(len, self._settings)] == self._num_settings:
                return self._values()
        except KeyError:  # one was taken away and another one set
            pass
        # By names, which modules of a class have in common: what reads them is fetched once.
        by_names: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for state in self._settings:
            by_names.setdefault(tuple(name for name in state if name not in _NOT_WATCHED), []).append(state)
        self._watched = [
            (operator.itemgetter(*names, names[0]), states)  # two at least: then it is a tuple
            for names, states in by_names.items()
            if names
        ]
        self._num_settings = [*map(len, self._settings)]
        return self._values()

    def _values(self) -> list[Any]:
        values = chain.from_iterable(map(get, states) for get, states in self._watched)
        return [self._watched, *chain.from_iterable(values)]

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
        if not self.is_untouched and self._is_compiled():
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
                if (given := getattr(hook, "keywords", None)) and not given.keys().isdisjoint(PER_ROW):
                    check_one_adapter(given)

    def _is_compiled(self) -> bool:
        found = any(map(operator.contains, self._states, repeat(_COMPILED)))
        return found and any(state.get(_COMPILED) is not None for state in self._states)

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
