"""Conversations in the nvme folder: what of them is found again, and that what is there is up to date."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from kvtier.block_table import BlockTable, TokenSource
from kvtier.errors import StoreError
from kvtier.hf import TieredCache
from kvtier.log import logger
from kvtier.origin import Sealed
from kvtier.residency import BlockState
from kvtier.runtime import Runtime
from kvtier.sequences import Beginning
from kvtier.session_erasing import SessionErasing
from kvtier.session_record import SessionRecord
from kvtier.stores.nvme import NvmeStore
from kvtier.timed_files import TimedFiles
from kvtier.types import BlockId, SequenceId, SlotLabel, Tier


class SessionKeeper:
    """Keeps conversations of one runtime in its nvme folder. Nothing is kept where nothing outlives the process.

    A record in a small file names a conversation's tokens; its blocks, the tail too, are found by what they are made
    of. So each may be older or newer than the other, or gone: what is resumed is a beginning of what was.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        store = runtime.stores.get(Tier.NVME)
        keeps = isinstance(store, NvmeStore) and store.persistent and runtime.can_keep and runtime.files is not None
        self._store = store if keeps and isinstance(store, NvmeStore) else None
        self._records: dict[bytes, SessionRecord] = {}
        self._behind: set[bytes] = set()
        self._erasing = SessionErasing(runtime.placement, runtime.files if keeps else None)
        if self._store is not None:
            self._records = {record.key(): record for record in self._store.sessions.load()}
            self._protect()

    @property
    def _files(self) -> TimedFiles:
        assert self._runtime.files is not None  # or nothing is kept
        return self._runtime.files

    @property
    def is_on(self) -> bool:
        """Whether conversations outlive the process."""
        return self._store is not None

    @property
    def behind(self) -> list[bytes]:
        """The sessions of which not all blocks could be kept at the last `save`, by key."""
        return list(self._behind)

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

    def resume(self, key: bytes, cache: TieredCache) -> list[int]:
        """Let an empty cache of one row begin with what is found of a conversation. With the turn held.

        The ids of all of its tokens, held or not; none of another model's conversation, whose ids may mean other text.
        """
        record, state = self._records.get(key), cache.state
        if record is None or self._store is None:
            return []
        state.check_weights()
        runtime, batch, origin = self._runtime, state.batch, state.batch.origin
        if origin is None or not state.is_plain():
            return []
        each = runtime.manager.block_tokens
        if record.namespace != origin.fingerprint.namespace or record.block_tokens != each:
            logger.warning(
                "session %r: what is kept of it was computed by another model, or in blocks of another size: it is "
                "computed anew", record.name,
            )  # fmt: skip
            return []
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
        if tail is not None:
            runtime.placement.release(tail)  # the row holds it
        if num_tokens < len(ids):
            logger.info("session %r: %d of %d tokens are resumed", record.name, num_tokens, len(ids))
        return ids

    # -- keeping ------------------------------------------------------------------------------------------------------

    def seal(self, cache: TieredCache) -> Sealed | None:
        """What a conversation's tail is labelled with, as it is now; None where it has none, or may have no label."""
        runtime, batch = self._runtime, cache.state.batch
        table, origin, labels = batch.tables[0], batch.origin, runtime.labels
        if not self._keeps(cache) or labels is None or origin is None:
            return None
        runtime.manager.seal(batch)
        content = table.tail_content()
        if table.tail is None or content is None:
            return None
        parent = runtime.placement.residency[table.blocks[-2]].sealed if len(table.blocks) > 1 else None
        return labels.seal(origin, parent, content, is_first=len(table.blocks) == 1)

    def _keeps(self, cache: TieredCache) -> bool:
        """Whether what it holds can be found again by its tokens."""
        table = cache.state.batch.tables[0]
        is_known = table.source is TokenSource.IDS and bool(table.num_tokens) and table.is_counted
        return self._store is not None and cache.state.batch.origin is not None and is_known

    def save(self, cache: TieredCache, about: SessionRecord, tail: Sealed | None = None) -> SessionRecord | None:
        """Bring what is kept of a conversation up to date, blocks first; what it is now, or None if it is not kept.

        With the turn held; waits for the writes.

        Args:
            about: name, salt and times; what it says of tokens and model is not used.
            tail: as `seal` gave it, if nothing was computed since.

        What cannot be written is missing after a restart, with one warning here; the older state stands until then.
        """
        store, runtime, batch = self._store, self._runtime, cache.state.batch
        table, origin = batch.tables[0], batch.origin
        if not self._keeps(cache) or store is None or origin is None:
            return None
        runtime.manager.seal(batch)
        tail = self.seal(cache) if tail is None else tail
        residency, blocks = runtime.placement.residency, list(table.blocks)
        tails: dict[BlockId, Sealed | None] = {} if table.tail is None else {table.tail: tail}
        older = None if tail is None else self._files.find(tail.label)
        self._zero_behind(table)
        num_kept = runtime.manager.upkeep.keeper.keep(blocks, tails)
        if older is not None:  # unless it is the tail's own, which is in use
            self._erasing.erase_tail(older)
        record = replace(
            about, namespace=origin.fingerprint.namespace, block_tokens=table.block_tokens, token_ids=table.ids()
        )
        before = self._records.get(record.key())
        try:
            self._files.save(record)
        except StoreError as error:
            logger.warning("session %r is not kept: %s", record.name, error)
            self._behind.add(record.key())
            return None
        self._records[record.key()] = record
        self._behind.discard(record.key())
        if num_kept < len(blocks):
            self._behind.add(record.key())
            block, placement = blocks[num_kept], runtime.placement
            if placement.label_of(tails.get(block, residency[block].sealed)) is not None:
                logger.warning(
                    "session %r: %d of %d blocks are kept for a restart; the rest cannot be written now, and is tried "
                    "again at its next turn and at close(): %s", record.name, num_kept, len(blocks), self._why_short(),
                )  # fmt: skip
        if before is not None:
            self._erase_old(before)
            if before.is_pinned:  # what it has no more, another model's too
                now = {label.identity for label in record.labels()}
                self.free([label for label in before.labels() if label.identity not in now])
        return record

    def lacks_room(self, key: bytes, cache: TieredCache) -> bool:
        """Whether the rest of a conversation could be written if others had less of the nvme tier."""
        placement = self._runtime.placement
        blocks = [placement.indexed(block) for block in cache.state.batch.tables[0].blocks]
        missing = [placement.residency[block].sealed for block in blocks if not placement.is_labelled(block)]
        is_full = placement.takes(Tier.NVME) and not placement.pools[Tier.NVME].num_free
        # A full block whose label is not to be had (a quota, a model not proven) would not be written with room either.
        return key in self._behind and is_full and all(s is None or placement.label_of(s) for s in missing)

    def _why_short(self) -> str:
        placement = self._runtime.placement
        if not placement.takes(Tier.NVME):
            return "the nvme tier takes none for now (see stats()['tiers']['nvme']['state'])"
        if not placement.pools[Tier.NVME].num_free:
            return "other conversations fill the nvme tier: raise tiers.nvme.budget, or delete sessions"
        return "salt_quota is used up, or a write failed"

    def _zero_behind(self, table: BlockTable) -> None:
        """What lies behind a tail's tokens is another conversation's, which may since have been deleted."""
        runtime = self._runtime
        if table.tail is None:
            return
        runtime.placement.settle(table.tail)
        record = runtime.placement.residency[table.tail]
        if record.holders > 1 or record.state is BlockState.SEALED:  # others may have more tokens of it
            return
        for tier, slot in record.copies.items():
            if (slab := runtime.executor.memory.slabs.get(tier)) is not None:
                for layer in (*slab.keys, *slab.values):
                    layer[slot, :, table.tail_tokens :] = 0

    def num_found(self, record: SessionRecord) -> int:
        """How many of its blocks are in the folder."""
        if self._store is None or record.key() not in self._records:
            return 0
        return sum(slot is not None for slot in self._files.find_all(record.labels()))

    def note(self, record: SessionRecord) -> None:
        """Save what changed beside tokens. Raises StoreError: it did not."""
        if self._store is not None and record.key() in self._records:
            self._files.save(record)
            self._records[record.key()] = record

    def reserve(self, record: SessionRecord) -> None:
        """Have what is kept of a session stay, whether it is in use or not."""
        placement = self._runtime.placement
        for label in record.labels() if self._store is not None and record.key() in self._records else ():
            block, slot = placement.prefixes.find(label), self._files.find(label)
            if block is not None:
                placement.pinned.add(block)
            if slot is not None:
                placement.reserve(slot)

    def free(self, labels: Sequence[SlotLabel]) -> None:
        """Take `reserve` back for these blocks, but for those that a pinned session in files has."""
        placement, store = self._runtime.placement, self._store
        for label in self._unless_pinned(labels) if store is not None else ():
            block = placement.prefixes.find(label)
            if block is not None:
                placement.pinned.discard(block)
            slot = self._files.find(label)
            if slot is not None:
                placement.free_reserved(slot)

    def unpin(self, blocks: Iterable[BlockId]) -> None:
        """These blocks may go, but for those that a pinned session in files has."""
        placement = self._runtime.placement
        records = {block: record for block in blocks if (record := placement.residency.get(block)) is not None}
        labels = [record.sealed.label for record in records.values() if record.sealed is not None]
        free = {label.identity for label in self._unless_pinned(labels)}
        for block, record in records.items():
            if record.sealed is None or record.sealed.label.identity in free:
                placement.pinned.discard(block)

    def _unless_pinned(self, labels: Sequence[SlotLabel]) -> list[SlotLabel]:
        if not labels:
            return []
        others = {label.identity for record in self.records() if record.is_pinned for label in record.labels()}
        return [label for label in labels if label.identity not in others]

    def forget(self, key: bytes, labels: Sequence[SlotLabel], sequences: Container[SequenceId]) -> None:
        """A conversation goes: those of its blocks that nothing else has, then its record. With the turn held.

        Its cache must have let go of them. Raises StoreError: some of it is still in the folder; to be tried again.

        Args:
            labels: of blocks that the record may not name.
            sequences: the rows that it was in this process: what of an earlier wording they left goes too.
        """
        record = self._records.get(key)
        of_record = [] if record is None else record.labels()
        others = {label.identity for each in self.records() if each.key() != key for label in each.labels()}
        gone = self._erasing.let_go(self._erasing.left_by(sequences), others, is_chain=False)
        gone += self._erasing.let_go(labels, others) + self._erasing.let_go(of_record, others)
        bare = self._runtime.placement.bare_slots(gone)
        self._erasing.erase([] if self._store is None else [*self._store.copies(gone), *bare])
        if record is not None and self._store is not None:
            self._files.delete(key)
            del self._records[key]
            self._behind.discard(key)
            if record.is_pinned:
                self.free(of_record)

    def _erase_old(self, before: SessionRecord) -> None:
        """The last state's tail is of no more use."""
        labels = before.labels()
        if not labels or len(before.token_ids) % before.block_tokens == 0:
            return
        if any(each.token_ids == before.token_ids and each.namespace == before.namespace for each in self.records()):
            return  # a fork's
        slot = self._files.find(labels[-1])
        if slot is not None:
            self._erasing.erase_tail(slot)
