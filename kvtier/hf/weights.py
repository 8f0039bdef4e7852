"""Whether a wrapped model is still the one that made the KV held: the mark of its weights and adapters."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

from kvtier.hf.describe import check_modules
from kvtier.hf.module_tree import ModuleTree
from kvtier.hf.tensor_state import TensorState, some_values


class WeightsMark:
    """Called once a forward: a number that changes with whatever a model computes its KV from.

    It sees parameters and buffers that are replaced, moved or written in place, modules that come and go, and adapters
    that are switched, disabled, scaled, merged or swapped, and steps of optimizers. Adapters that are switched or
    scaled back, or enabled again, give the number they gave before; everything else never does. What may go by
    unnoticed: tensors written through `.data` into the same memory, one alone until the next close look, a part of one
    for good; and an adapter that is merged and unmerged between two calls (which restores the weights up to rounding).
    What is set on modules and configs is not in the number, but in `modules`.

    Cost: O(modules + parameters). For 30 layers 0.1 ms, but 0.6 behind a forward, when all that it looks at comes from
    memory (0.9 from Python 3.12 on); 1 ms more for a close look, and that of `describe` when something was set. A
    module that was taken out, and the memory of a few parameters that were replaced, live until the next call.

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
        self._tree: ModuleTree | None = None
        self._last: TensorState | None = None
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
                self._tree, self._last = ModuleTree(self._model), None
            self._tree.check()
            tensors, merged = self._tree.tensors(), self._tree.merged()
            now = TensorState(tensors)
            num_steps, values = self._num_steps, some_values(tensors) if closely else None
            is_same = self._last is not None and self._last.is_same(now) and num_steps == self._num_steps_seen
            if not is_same or merged != self._merged or (values is not None and self._has_other(values)):
                check_modules(self._model)
                self._epoch += 1
                now.watch(tensors, self._tree.adapter_tensors())
                self._last, self._merged, self._num_steps_seen = now, merged, num_steps
                self._values = some_values(tensors)
            if not self._tree.is_untouched:
                self._look_at_attributes(self._tree)
                self._tree.note()
            return hash((self._epoch, self._tree.adapters()))

    def _has_other(self, values: torch.Tensor) -> bool:
        return self._values is None or not torch.equal(self._values, values)

    def _look_at_attributes(self, tree: ModuleTree) -> None:
        """Describe the modules anew if anything was set on them. It may be the same: then nothing has changed."""
        now = tree.attributes()
        if len(now) != len(self._attributes) or not all(map(operator.is_, now, self._attributes)):
            self.modules = self.describe()
            self._attributes = now

    def is_hooked(self) -> bool:
        """Whether a hook stands in the model, as of the last call: what it makes of the KV nobody can tell."""
        return self._tree is not None and self._tree.is_hooked()
