"""What one cache holds beside its layers, who works with it, and what may change it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtier.batch import Batch
from kvtier.errors import ClosedError, UnsupportedError
from kvtier.hf.attention import current_step
from kvtier.hf.untiered import UntieredLayers
from kvtier.open_step import OpenStep
from kvtier.runtime import Runtime

OUTSIDE = "a TieredCache was used outside of its wrapped model's forward: call tiered.generate or tiered(...)"


@dataclass(eq=False)
class CacheState:
    """What layers and cache share. Refers to neither, so that dropping the cache drops everything at once."""

    runtime: Runtime
    batch: Batch
    untiered: UntieredLayers
    num_rows: int | None = None
    """Rows that the caller asked for; None: whatever the first call has."""
    salt: bytes = b""
    """Whose KV it is: blocks are shared with no other."""
    weights: int = 0
    """Mark of the weights that the tokens held were computed with."""
    structure: bytes | None = None
    """What the model was beside its weights when the first of them was computed; None: nobody asks, or can tell."""
    modules: bytes | None = None
    """What its modules were then, and what was set on them, as far as that is looked at before each call."""
    held_of_prompt: int = 0
    """Columns to drop from the next forward: assisted decoding passes the whole prompt again, held or not."""
    user: int | None = None
    """The thread that a generate or a session works for; None: nobody."""
    may_change: frozenset[str] | None = None
    """While `generate` runs, the operations of a cache that its mode is known to use; None: it does not run."""
    own_positions: bool = False
    """The caller of `generate` gave position_ids, which say nothing about what the cache holds."""
    in_session: bool = False
    """A session's call is under way, of which `generate` is a part."""
    _depth: int = field(default=0, repr=False)
    """How many `enter`s are open: one of a session or a generate, two of a generate in a session."""
    _records_past: dict[int, bool] = field(default_factory=dict, repr=False)

    def has_current_weights(self) -> bool:
        """Whether the tokens held, if any, were computed with the model as it is now."""
        return self.batch.length == 0 or self.weights == self.runtime.weights_mark()

    def check_weights(self, *, closely: bool = True) -> None:
        """Raise UnsupportedError if the model is no longer the one that made this KV.

        `closely`: look closely at that of an empty cache, if KV is shared: before any is attached or gets a label.
        """
        if self.batch.length == 0:
            before = self.weights, self.modules
            self.weights = self.runtime.weights_mark(closely=closely and self.runtime.shares)
            source, labels = self.runtime.source, self.runtime.labels
            self.modules = None if source is None else source.seen()
            recomputes = source is not None and self.runtime.config.on_block_loss == "recompute"
            # It takes milliseconds, and a call that found nothing of its prompt comes by twice.
            if self.structure is None or before != (self.weights, self.modules):
                self.structure = source.structure() if source is not None and recomputes else None
            # Hashed before the first token is computed: a hash made later would say nothing about this KV.
            self.batch.origin = None if labels is None else labels.origin(self.weights, self.modules, self.salt)
        elif not self.has_current_weights():
            raise UnsupportedError(
                f"the model's weights changed since this cache's {self.batch.length} tokens were computed: its KV "
                "is an old model's; use a new cache, or cache.reset()"
            )

    def note_arguments(self, arguments: Mapping[str, Any]) -> None:
        """From a call on whose KV comes from more than ids, positions, padding and the model as it was, no block gets a
        label.

        Called after `check_weights`.
        """
        labels = self.runtime.labels
        if labels is None or self.batch.origin is None:
            return
        if not labels.is_plain(arguments) or not self._has_same_modules():
            self.batch.origin = None

    def may_reuse(self) -> bool:
        """Whether KV that was made of the same tokens may stand for what this model computes now."""
        return self.runtime.shares and self.is_plain()

    def is_as_begun(self) -> bool:
        """Whether the model computes as it did when the first token held was: no hook, no autocast, nothing set on it.

        Called after `check_weights`.
        """
        return self.is_plain() and self._has_same_modules()

    def is_plain(self) -> bool:
        """Whether no hook and no autocast has a part in what the model computes now."""
        return self.runtime.source is None or self.runtime.source.is_plain({})

    def _has_same_modules(self) -> bool:
        return self.runtime.source is None or self.runtime.source.seen() == self.modules

    def obstacle(self) -> str | None:
        """Why the model as it is now would not compute the tokens held again; None where nothing speaks against it."""
        if not self.has_current_weights():
            return "the model's weights have changed since"
        if not self.is_plain():
            return "hooks or autocast have a part in what the model computes now, and nobody can tell whether they had"
        if self.runtime.source is None:
            return None
        now = self.runtime.source.structure()
        if now is None:
            return "a part of the model was replaced, and nobody can tell what it computes"
        return None if now == self.structure else "the model's modules or what is set on them have changed since"

    def check_open(self) -> None:
        """Raise ClosedError once the wrapper is closed."""
        if self.runtime.closed:
            raise ClosedError("this cache's TieredKV was closed: its KV is gone; make a new wrapper and a new cache")

    def open_step(self) -> OpenStep:
        """The step of this cache that is open: layers may be asked for their K and V, and given new ones.

        Raises:
            UnsupportedError: there is none: a call from outside of the wrapped model's forward. ClosedError: as
                `check_open`.
        """
        opened = current_step.get()
        if self.runtime.closed or opened is None or opened.step.batch is not self.batch:
            self.check_open()
            raise UnsupportedError(OUTSIDE)
        return opened

    def check_between_steps(self, operation: str) -> None:
        """Raise UnsupportedError inside a step of this cache, ClosedError after close."""
        self.check_open()
        opened = current_step.get()
        if opened is not None and opened.step.batch is self.batch:
            raise UnsupportedError(f"{operation} inside a step of the same cache: call it between steps")

    def check_change(self, operation: str) -> None:
        """As `check_between_steps`, and raise UnsupportedError while somebody generates with this cache.

        `generate` counts on what it has put there, and looks at its length alone.
        """
        self.check_between_steps(operation)
        if self.user is not None and self.user != threading.get_ident():
            raise UnsupportedError(
                f"{operation} while another thread generates with this cache: wait for it, or fork()"
            )
        if self.may_change is not None and operation not in self.may_change:
            raise UnsupportedError(f"{operation} on a cache that generate is working with: wait for its end, or fork()")

    def check_positions(self, arguments: Mapping[str, Any], num_new: int) -> None:
        """While `generate` runs: raise UnsupportedError unless the new tokens come right behind those held.

        Something else has changed the cache then: a call from a callback. With a mask its length has told so already.
        """
        if self.user is not None and self.user != threading.get_ident():
            raise UnsupportedError("another thread is generating with this cache: give each its own, or fork() it")
        positions, held = arguments.get("position_ids"), self.batch.length
        counts = self.may_change is not None and not self.own_positions
        if not counts or positions is None or arguments.get("attention_mask") is not None:
            return
        expected = torch.arange(held, held + num_new, device=positions.device)
        if positions.shape[-1] != num_new or not bool((positions == expected).all()):
            raise UnsupportedError(
                f"generate goes on at token {int(positions.flatten()[0])}, and the cache holds {held}: it was "
                "changed from inside generate (by a stopping criterion, a logits processor, …): use a fork() there"
            )

    def enter(self, may_change: frozenset[str] | None = None) -> int:
        """This thread works with the cache until `leave`: a session, or `generate` if `may_change` is given.

        Returns what `leave` takes.

        Raises:
            UnsupportedError: another thread does, or this one inside its own generate. Nothing changed.
        """
        me, entered = threading.get_ident(), False
        try:
            with self.runtime.turn:
                if self.user is not None and self.user != me:
                    raise UnsupportedError(
                        "another thread is generating with this cache: give each its own, or fork() it"
                    )
                if self.may_change is not None or (self.user is not None and may_change is None):
                    raise UnsupportedError(
                        "this cache is in use by the very call that this one is made from: fork() it"
                    )
                self.runtime.manager.enter(self.batch)
                self.user, self.may_change = me, may_change
                self.in_session = self.in_session or may_change is None
                if may_change is not None:
                    self._records_past = self.untiered.records_past()
                self._depth += 1
                entered = True
        except BaseException:  # a Ctrl-C that came meanwhile is delivered when the turn ends
            if entered:
                self.leave(self._depth)
            raise
        return self._depth

    def leave(self, depth: int) -> None:
        """Take back an `enter`. Does what a Ctrl-C at its beginning kept it from before it lets that go on."""
        try:
            self._leave(depth)
        except BaseException:  # what it was kept from is done before the Ctrl-C goes on
            self._leave(depth)
            raise

    def _leave(self, depth: int) -> None:
        """Idempotent. If a Ctrl-C comes while it waits for its turn, the next step does the rest."""
        if self._depth < depth:
            return
        if self.may_change is None:
            self.in_session = False
        else:
            self.may_change, self.held_of_prompt, self.own_positions = None, 0, False
            # A draft makes windows keep all their past, and leaves them so: they would grow with every turn.
            self.untiered.record_past(self._records_past)
        self.runtime.manager.left.append(self.batch)
        if not self.in_session:
            self.user = None
        self._depth = depth - 1
        with self.runtime.turn:
            self.runtime.manager.drain_left()

    def take_rows(self, num_rows: int) -> None:
        """Give an empty cache the rows of its first call.

        Raises:
            UnsupportedError: it was made for another number, or holds tokens in another number; nothing changed.
        """
        held = self.batch.num_rows
        if num_rows == held:
            return
        if self.batch.length:
            raise UnsupportedError(
                f"the cache holds {held} rows, the call has {num_rows} (prompts x beams or return sequences): use "
                "cache.batch_repeat_interleave or cache.batch_select_indices first, or a new cache"
            )
        if self.num_rows is not None:
            raise UnsupportedError(
                f"the cache was made with new_cache(batch_size={self.num_rows}), the call has {num_rows} rows (prompts "
                "x beams or return sequences): leave batch_size out, or give that number"
            )
        self.runtime.manager.resize(self.batch, num_rows)

    def length(self, layer: int) -> int:
        """Logical length in columns: committed, plus what this layer appended in the open step."""
        opened = current_step.get()
        if opened is not None and opened.step.batch is self.batch:
            return opened.step.length(layer)
        return self.batch.length
