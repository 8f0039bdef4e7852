"""The conversations of one wrapper by name: which there are, how long they stay, and what is kept of each."""

from __future__ import annotations

import math
import time
import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from kvtier.errors import ClosedError, SessionExistsError, StoreError, UnsupportedError
from kvtier.hf import TieredCache, check_process
from kvtier.inputs import check_vocabulary
from kvtier.log import logger
from kvtier.origin import Sealed
from kvtier.runtime import Runtime
from kvtier.session_info import SessionInfo, info_of_cache, info_of_record
from kvtier.session_keeper import SessionKeeper
from kvtier.session_record import KvLayout, SessionRecord, salt_digest, session_key
from kvtier.session_turn import take_turn
from kvtier.types import BlockId, SequenceId, SlotLabel


@dataclass(eq=False, slots=True)
class _Entry:
    """A conversation that the wrapper knows."""

    about: SessionRecord
    salt: bytes
    cache: TieredCache | None = None
    """None: not used yet in this process."""
    pins: set[BlockId] = field(default_factory=set)
    """The blocks that it has pinned."""
    sequences: set[SequenceId] = field(default_factory=set)
    """The rows that it was."""
    transcript: list[int] = field(default_factory=list)
    """All that an earlier process kept the ids of, until a turn of this one; the cache may hold less."""
    left: list[SlotLabel] = field(default_factory=list)
    """What a `delete` that failed has let go of."""


_Entries = list[_Entry]  # in `Sessions`, `list` is a method


class Sessions:
    """The conversations of one wrapper, by name and salt."""

    def __init__(self, model: Any, runtime: Runtime, new_cache: Callable[[bytes], TieredCache]) -> None:
        self._model, self.runtime, self.new_cache = model, runtime, new_cache
        self.keeper = SessionKeeper(runtime)
        self._entries: dict[bytes, _Entry] = {}
        runtime.save_sessions = weakref.WeakMethod(self._save_rest)

    # -- by name ------------------------------------------------------------------------------------------------------

    def open(self, name: str, salt: bytes, ttl_s: float | None) -> bytes:
        """The key of the session of that name: of this process, else one that an earlier one kept, else a new one."""
        check_process(self.runtime.pid)
        key = self.key(name, salt)
        with self.runtime.turn:
            self.expire()
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(self.keeper.record(key) or self._new(name, salt), salt)
            if ttl_s is not None and entry.about.ttl_s != ttl_s:
                self._change(entry, replace(entry.about, ttl_s=ttl_s))
        return key

    def _new(self, name: str, salt: bytes) -> SessionRecord:
        now_s, each = time.time(), self.runtime.manager.block_tokens
        nothing = array("i")
        return SessionRecord(name, salt_digest(salt), bytes(32), each, nothing, now_s, now_s, math.inf, False)

    @property
    def layout(self) -> KvLayout:
        """How the KV of one layer lies in a block."""
        group = self.runtime.group
        shape = group.shape
        model = f"{type(self._model).__name__}: {len(group.layers)} layers of {shape.kv_heads} x {shape.key_dim}"
        return KvLayout(shape.kv_heads, shape.key_dim, shape.value_dim, group.dtype, model)

    @staticmethod
    def key(name: str, salt: bytes) -> bytes:
        """What tells a session from all others. Raises UnsupportedError: no session can have that name."""
        _check_name(name)
        return session_key(salt_digest(salt), name)

    def exists(self, key: bytes) -> bool:
        """Whether there is such a session, in this process or in files."""
        return key in self._entries or self.keeper.record(key) is not None

    def about(self, key: bytes, name: str) -> SessionRecord:
        """Its name, times and so on; what it says of tokens may be older. Raises ClosedError when it was deleted."""
        return self._entry(key, name).about

    def take(self, key: bytes, name: str, cache: TieredCache, ttl_s: float) -> None:
        """A session that was made otherwise, in the place of one of that name. With the turn held."""
        if self.exists(key):
            self.delete(key)
        entry = _Entry(replace(self._new(name, cache.state.salt), ttl_s=ttl_s), cache.state.salt, cache)
        self._entries[key] = entry
        self._save(entry)

    def _entry(self, key: bytes, name: str) -> _Entry:
        check_process(self.runtime.pid)  # a forked child has the folder of its parent
        found = self._entries.get(key)
        if found is None:
            raise ClosedError(f"session {name!r} was deleted: tiered.session({name!r}) makes a new one")
        return found

    def cache(self, key: bytes, name: str) -> TieredCache:
        """Its cache, with what is found of it. Raises ClosedError when it was deleted."""
        entry = self._entry(key, name)
        with self.runtime.turn:
            if entry.cache is None:
                cache = self.new_cache(entry.salt)
                entry.transcript = self.keeper.resume(key, cache)
                entry.cache = cache
                self._repin(entry)
        return entry.cache

    def token_ids(self, key: bytes, name: str) -> list[int]:
        """The ids of all tokens: those that the cache holds, or those it began with where not all of that was found."""
        held, transcript = self.cache(key, name).token_ids, self._entry(key, name).transcript
        return transcript if transcript[: len(held)] == held and len(transcript) > len(held) else held

    def list(self, salt: bytes) -> list[SessionInfo]:
        """What there is under a salt, last used first."""
        check_process(self.runtime.pid)
        digest = salt_digest(salt)
        with self.runtime.turn:
            self.expire()
            known = {key: entry.about for key, entry in self._entries.items()}
            abouts = {record.key(): record for record in self.keeper.records()} | known
            infos = [self._info(key, about) for key, about in abouts.items() if about.salt == digest]
        return sorted(infos, key=lambda info: -info.used_s)

    def info(self, key: bytes, name: str) -> SessionInfo:
        """What `list` says of it."""
        with self.runtime.turn:
            return self._info(key, self._entry(key, name).about)

    def _info(self, key: bytes, about: SessionRecord) -> SessionInfo:
        entry = self._entries.get(key)
        if entry is not None and entry.cache is not None:
            return info_of_cache(about, entry.cache)
        return info_of_record(about, self.keeper.num_found(about), self.runtime.group.shape.block_bytes)

    def fork(self, key: bytes, name: str, new_name: str) -> bytes:
        """The key of a new session that shares every block by count. Raises SessionExistsError; nothing changed."""
        _check_name(new_name)
        entry = self._entry(key, name)
        twin_key = session_key(entry.about.salt, new_name)
        with self.runtime.turn:
            if self.exists(twin_key):
                raise SessionExistsError(
                    f"fork: there is a session {new_name!r} already: delete() it first, or use another name"
                )
            now_s = time.time()
            about = replace(entry.about, name=new_name, created_s=now_s, used_s=now_s)
            twin = _Entry(about, entry.salt, self.cache(key, name).fork())
            self._entries[twin_key] = twin
            self._save(twin)
        return twin_key

    def delete(self, key: bytes) -> None:
        """Free its blocks, on every tier and in files. Idempotent. Raises UnsupportedError inside a step of it.

        Raises StoreError: some of it is still in the folder, and the next `delete` tries again.
        """
        check_process(self.runtime.pid)
        with self.runtime.turn:
            entry = self._entries.get(key)
            if entry is None and self.keeper.record(key) is None:
                return
            if entry is not None and entry.cache is not None:
                entry.cache.state.check_change("delete")
                residency, table = self.runtime.placement.residency, entry.cache.state.batch.tables[0]
                found = [residency[block].sealed for block in table.blocks]
                entry.left = [sealed.label for sealed in found if sealed is not None] or entry.left
                entry.sequences.add(table.sequence)
                entry.cache.reset()
                entry.about = replace(entry.about, is_pinned=False)
                self._repin(entry)
            labels, sequences = ([], set()) if entry is None else (entry.left, entry.sequences)
            self.keeper.forget(key, labels, sequences)
            self._entries.pop(key, None)

    def expire(self) -> None:
        """Delete what nobody used for longer than its time to live. With the turn held."""
        now_s = time.time()
        abouts = {record.key(): record for record in self.keeper.records()}
        abouts |= {key: entry.about for key, entry in self._entries.items()}
        for key, about in abouts.items():
            entry = self._entries.get(key)
            is_used = entry is not None and entry.cache is not None and entry.cache.state.user is not None
            if about.is_expired(now_s) and not is_used:
                try:
                    self.delete(key)
                except StoreError as error:  # whoever asks for another session is not to be told no
                    logger.warning("session %r has expired, and is not all deleted: %s", about.name, error)

    def change(self, key: bytes, name: str, *, ttl_s: float | None = None, pinned: bool | None = None) -> None:
        """Set how long it is kept."""
        entry = self._entry(key, name)
        with self.runtime.turn:
            about = entry.about if ttl_s is None else replace(entry.about, ttl_s=ttl_s)
            self._change(entry, about if pinned is None else replace(about, is_pinned=pinned))

    def _change(self, entry: _Entry, about: SessionRecord) -> None:
        self.keeper.note(about)
        before, entry.about = entry.about, about
        if about.is_pinned and not before.is_pinned:
            self.keeper.reserve(about)
        elif before.is_pinned and not about.is_pinned:
            self.keeper.free(before.labels())
        self._repin(entry)

    def _save(self, entry: _Entry, tail: Sealed | None = None) -> bool:
        """With the turn held. What is kept of the conversation is what it is now; whether its record is."""
        assert entry.cache is not None  # it was just used
        kv = None if self.runtime.group.num_untiered else self.layout
        saved = self.keeper.save(entry.cache, replace(entry.about, kv=kv), tail)
        if saved is not None:
            entry.about = saved
        entry.sequences.add(entry.cache.state.batch.tables[0].sequence)
        self._repin(entry)
        return saved is not None

    def _save_rest(self) -> None:
        """What could not be proven in time, or written, is kept now if it can be. With the turn held, at the end.

        The latest used first: those used before it let go of theirs where there is no room.
        """
        latest = sorted(self._entries, key=lambda key: self._entries[key].about.used_s, reverse=True)
        behind = [key for key in latest if key in self.keeper.behind and self._entries[key].cache is not None]
        tails = {key: self.keeper.seal(cache) for key in behind if (cache := self._entries[key].cache) is not None}
        if self.runtime.labels is not None and behind:
            self.runtime.labels.prove()  # once for all of them
        for key in behind:
            older = [self._entries[each] for each in latest[latest.index(key) + 1 :]]
            entry = self._entries[key]
            is_saved = self._save(entry, tails[key])
            while is_saved and self._lacks_room(key, entry) and self._let_go(older):
                is_saved = self._save(entry, tails[key])

    def _lacks_room(self, key: bytes, entry: _Entry) -> bool:
        return entry.cache is not None and self.keeper.lacks_room(key, entry.cache)

    def _let_go(self, older: _Entries) -> bool:
        """The last of these conversations with blocks that may go lets go of them; whether there was one."""
        while older:
            entry = older.pop()
            if entry.cache is not None and entry.cache.state.batch.length and not entry.about.is_pinned:
                self.runtime.manager.truncate(entry.cache.state.batch, 0)
                return True
        return False

    def _repin(self, entry: _Entry) -> None:
        """What stays of a pinned conversation is what it is now; other pinned ones may have the rest."""
        table = None
        if entry.cache is not None and entry.about.is_pinned:
            table = entry.cache.state.batch.tables[0]
        placement = self.runtime.placement  # what was computed twice is in files once, as another block
        blocks = () if table is None else table.blocks
        before, entry.pins = entry.pins, {*blocks, *(placement.indexed(block) for block in blocks)}
        gone = before - entry.pins
        if gone:
            others = [other.pins for other in self._entries.values() if other.pins]
            self.keeper.unpin(block for block in gone if not any(block in pins for pins in others))
        placement.pinned.update(entry.pins)

    def generate(self, key: bytes, name: str, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """See `Session.generate`."""
        cache = self.cache(key, name)
        check_vocabulary(input_ids, "session.generate", self._model)  # before the session goes back to what is common
        self._entry(key, name).transcript = []
        return take_turn(name, self._model, cache, input_ids, kwargs, partial(self._keep_turn, key, cache))

    def _keep_turn(self, key: bytes, cache: TieredCache) -> None:
        with self.runtime.turn:  # before the cache is free for others: its blocks are the last to be moved
            entry = self._entries.get(key)
            if entry is not None and entry.cache is cache:  # nobody has deleted it meanwhile, nor begun another
                entry.about = replace(entry.about, used_s=time.time())
                self._save(entry)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UnsupportedError(f"a session's name is any printable text, not {name!r:.60}")
