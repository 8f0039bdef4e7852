"""Conversations in the nvme folder: what of them is found again, and that what is there is up to date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtier.block_table import TokenSource
from kvtier.errors import StoreError
from kvtier.hf import TieredCache
from kvtier.labels import Sealed
from kvtier.log import logger
from kvtier.prefix import Miss
from kvtier.runtime import Runtime
from kvtier.sequences import Beginning
from kvtier.session_record import SessionRecord
from kvtier.stores.nvme import NvmeStore
from kvtier.types import BlockId, SlotLabel, Tier


class SessionKeeper:
    """Keeps conversations of one runtime in its nvme folder. Nothing is kept where nothing outlives the process.

    A record in a small file names a conversation's tokens; its blocks, the tail too, are found by what they are made
    of. So each may be older or newer than the other, or gone: what is resumed is a beginning of what was.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        store = runtime.stores.get(Tier.NVME)
        keeps = isinstance(store, NvmeStore) and store.persistent and runtime.shares
        self._store = store if keeps and isinstance(store, NvmeStore) else None
        self._records: dict[bytes, SessionRecord] = {}
        if self._store is not None:
            self._records = {record.key(): record for record in self._store.sessions.load()}
            self._protect()

    @property
    def is_on(self) -> bool:
        """Whether conversations outlive the process."""
        return self._store is not None

    def records(self) -> list[SessionRecord]:
        """All that are in the folder."""
        return list(self._records.values())

    def record(self, key: bytes) -> SessionRecord | None:
        """The record of a session."""
        return self._records.get(key)

    def _protect(self) -> None:
        """What belongs to a session is overwritten last, and of a pinned one never."""
        assert self._store is not None
        placement, found = self._runtime.placement, self._store.found()
        slots = {(each.namespace, each.identity): slot for slot, each in found.items()}
        later: dict[int, float] = {}
        for record in self.records():
            for label in record.labels():
                slot = slots.get((label.namespace, label.identity))
                if slot is not None:
                    later[slot] = max(record.used_s if not record.is_pinned else float("inf"), later.get(slot, 0.0))
        order = self._store.held_back()
        sessions = sorted((slot for slot in order if slot in later), key=lambda slot: later[slot])
        placement.pools[Tier.NVME].hold_back([*(slot for slot in order if slot not in later), *sessions])
        for slot in sessions:
            if later[slot] == float("inf"):
                placement.reserve(slot)

    # -- finding again ------------------------------------------------------------------------------------------------

    def resume(self, key: bytes, cache: TieredCache) -> None:
        """Let an empty cache of one row begin with what is found of a conversation. With the turn held."""
        record, state = self._records.get(key), cache.state
        if record is None or self._store is None:
            return
        state.check_weights()
        runtime, batch, origin = self._runtime, state.batch, state.batch.origin
        if origin is None or not state.may_reuse():
            return
        each = runtime.manager.block_tokens
        if record.namespace != origin.fingerprint.namespace or record.block_tokens != each:
            logger.warning(
                "session %r: what is kept of it was computed by another model, or in blocks of another size: it is "
                "computed anew", record.name,
            )  # fmt: skip
            return
        ids, table, finder = record.token_ids.tolist(), batch.tables[0], runtime.prefix_cache
        blocks = list(finder.match(origin, ids, table.sequence).blocks)
        num_tokens = len(blocks) * each
        tail = None
        if len(ids) - num_tokens < each and num_tokens < len(ids):
            label = record.labels()[-1]
            parent = runtime.placement.residency[blocks[-1]].sealed if blocks else None
            before = None if parent is None else parent.label.identity
            tail = finder.match_tail(Sealed(label, before, origin, -1), table.sequence, len(blocks))
        if tail is not None:
            blocks.append(tail)
            num_tokens = len(ids)
        if blocks:
            runtime.manager.attach(batch, [Beginning(0, ids[:num_tokens], blocks)], num_tokens)
            runtime.placement.hold_kept(blocks)
            if record.is_pinned:
                runtime.placement.pinned.update(blocks)
        if tail is not None:
            runtime.placement.release(tail)  # the row holds it
        if num_tokens < len(ids):
            logger.info("session %r: %d of %d tokens are resumed", record.name, num_tokens, len(ids))

    # -- keeping ------------------------------------------------------------------------------------------------------

    def save(self, cache: TieredCache, about: SessionRecord) -> SessionRecord | None:
        """Bring what is kept of a conversation up to date, blocks first; what it is now, or None if it is not kept.

        With the turn held; waits for the writes.

        Args:
            about: name, salt and times; what it says of tokens and model is not used.

        What cannot be written is missing after a restart, with one warning here; the older state stands until then.
        """
        store, runtime, batch = self._store, self._runtime, cache.state.batch
        table, origin, labels = batch.tables[0], batch.origin, runtime.labels
        if store is None or labels is None or origin is None or table.source is not TokenSource.IDS:
            return None
        if not table.num_tokens or not table.is_counted:
            return None
        runtime.manager.seal(batch)
        residency, blocks = runtime.placement.residency, list(table.blocks)
        tails: dict[BlockId, Sealed | None] = {}
        if table.tail is not None:
            parent, content = residency[blocks[-2]].sealed if len(blocks) > 1 else None, table.tail_content()
            assert content is not None  # its ids are known
            tails[table.tail] = labels.seal(origin, parent, content, is_first=len(blocks) == 1)
        num_kept = runtime.manager.upkeep.keeper.keep(blocks, tails)
        record = replace(
            about, namespace=origin.fingerprint.namespace, block_tokens=table.block_tokens, token_ids=table.ids()
        )
        before = self._records.get(record.key())
        try:
            store.sessions.save(record)
        except StoreError as error:
            logger.warning("session %r is not kept: %s", record.name, error)
            return None
        self._records[record.key()] = record
        if num_kept < len(blocks):
            logger.warning(
                "session %r: %d of %d blocks are kept for a restart, the others cannot be written now",
                record.name, num_kept, len(blocks),
            )  # fmt: skip
        if before is not None:
            self._erase_old(before)
        if record.is_pinned:
            runtime.placement.pinned.update(blocks)
        return record

    def num_found(self, record: SessionRecord) -> int:
        """How many of its blocks are in the folder."""
        if self._store is None or record.key() not in self._records:
            return 0
        return sum(slot is not None for slot in self._store.find_all(record.labels()))

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        """These blocks may go."""
        self._runtime.placement.pinned.difference_update(blocks)

    def note(self, record: SessionRecord) -> None:
        """Save what changed beside tokens. Raises StoreError: it did not."""
        if self._store is not None and record.key() in self._records:
            self._store.sessions.save(record)
            self._records[record.key()] = record

    def pin(self, record: SessionRecord, blocks: Sequence[BlockId]) -> None:
        """Have what is kept of a session stay, or no longer, as the record now says. `blocks`: those in memory."""
        placement, store = self._runtime.placement, self._store
        if record.is_pinned:
            placement.pinned.update(blocks)
        else:
            placement.pinned.difference_update(blocks)
        if store is None:
            return
        for label in record.labels() if self._records.get(record.key()) is not None else ():
            slot = store.find(label)
            if slot is not None and record.is_pinned:
                placement.reserve(slot)
            elif slot is not None:
                placement.free_reserved(slot)

    def forget(self, key: bytes) -> None:
        """A conversation goes: its record, then those of its blocks that nothing else has. With the turn held.

        Its cache must have let go of them. Raises StoreError: some of it is still in the folder.
        """
        record = self._records.get(key)
        if record is None or self._store is None:
            return
        self._store.sessions.delete(key)
        del self._records[key]
        self.erase(record.labels())

    def erase(self, labels: Sequence[SlotLabel]) -> None:
        """Take blocks that nobody holds and no session has off all tiers, last first. Raises StoreError."""
        placement = self._runtime.placement
        others = {label.identity for record in self.records() for label in record.labels()}
        for label in reversed(labels):
            if label.identity in others:
                return  # and all before it
            block = placement.prefixes.find(label)
            if block is not None:
                if not placement.is_cached(block) or not placement.prefixes.is_leaf(block):
                    return
                placement.settle(block)
                placement.unindex(block, Miss.UNKNOWN)
            self._erase_slot(label)

    def _erase_slot(self, label: SlotLabel) -> None:
        store, placement = self._store, self._runtime.placement
        slot = None if store is None or not placement.is_readable(Tier.NVME) else store.find(label)
        if store is not None and slot is not None:
            placement.erase(slot, store.erase)

    def _erase_old(self, before: SessionRecord) -> None:
        """The last state's tail is of no more use."""
        labels = before.labels()
        if not labels or len(before.token_ids) % before.block_tokens == 0:
            return
        if any(each.token_ids == before.token_ids and each.namespace == before.namespace for each in self.records()):
            return  # a fork's
        try:
            self._erase_slot(labels[-1])
        except StoreError as error:  # it is overwritten when its slot is
            logger.info("%s", error)
