"""What the nvme store knows of its slots: what lies in each, by what each is found, and whose header lies on disk."""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.stores.slot_format import CODEC_NONE, HEADER, MAX_GENERATION, Headers, Payload, Verdict

_KEY_BYTES, _NAMESPACE_BYTES = 64, 32  # namespace, then identity
_KEY_AT = HEADER.fields["namespace"][1] if HEADER.fields else 0  # mypy: a dtype without fields has none


@dataclass(frozen=True, slots=True)
class FoundSlot:
    """A block that an earlier process wrote whole."""

    namespace: bytes
    identity: bytes
    generation: int
    """Larger is newer."""


class SlotIndex:
    """Slots by key (namespace and identity), and what must be known to read them. Thread-safe.

    The facts of one slot change in one thread at a time, which the store's caller sees to. Of several slots with one
    key the newest is found; the others stay readable.

    Memory: 8 bytes a slice, 12 of an encoded one, and about 400 bytes for each slot that is labelled.
    """

    def __init__(self) -> None:
        self._payloads: dict[int, Payload] = {}  # absent: the slot holds nothing readable
        self._keys: dict[int, tuple[bytes, int]] = {}  # key and generation of each slot that can be found
        self._slots: dict[bytes, int] = {}
        self._namespaces: Counter[bytes] = Counter()  # of all keys
        self._found: set[int] = set()  # by the open, and not written or forgotten since
        self._on_disk: set[int] = set()  # slots whose header may have something in it
        self._unfound: dict[int, bytes] = {}  # keys in headers on disk by which no slot is found: what is left to erase
        self._last_generation = 0
        self._lock = threading.Lock()
        self.num_quarantined = 0
        """Slots that an open did not trust."""

    def load(self, first_slot: int, headers: Headers) -> None:
        """Take in the headers of a segment whose first slot has that number. O(slots)."""
        untrusted = headers.where(Verdict.BAD, Verdict.FUTURE)
        self.num_quarantined += len(untrusted)
        self._on_disk.update((untrusted + first_slot).tolist())
        rows = headers.where(Verdict.GOOD)
        fields, checksums = headers.fields[rows], np.ascontiguousarray(headers.checksums[rows], np.uint64)
        sizes = headers.sizes[rows].astype(np.uint32)  # of encoded slices, which are not longer
        raw = fields.view(np.uint8).reshape(len(rows), fields.dtype.itemsize)
        keys = np.ascontiguousarray(raw[:, _KEY_AT : _KEY_AT + _KEY_BYTES])
        facts = zip((rows + first_slot).tolist(), fields["generation"].tolist(), fields["codec"].tolist(), strict=True)
        for (slot, generation, codec), key, sums, lengths in zip(facts, keys, checksums, sizes, strict=True):
            stored = None if codec == CODEC_NONE else array("I", lengths.tobytes())
            payload = Payload(codec, array("Q", sums.tobytes()), stored)
            self._load_one(slot, key.tobytes(), generation, payload)

    def _load_one(self, slot: int, key: bytes, generation: int, payload: Payload) -> None:
        self._on_disk.add(slot)
        self._last_generation = max(self._last_generation, generation)
        other = self._slots.get(key)
        if other is not None:
            self.num_quarantined += 1
            if self._keys[other][1] >= generation:
                self._unfound[slot] = key
                return
            self._forget(other)
            del self._payloads[other]
        self._payloads[slot] = payload
        self._enter(slot, key, generation)
        self._slots[key] = slot
        self._found.add(slot)

    # --- one slot

    def payload(self, slot: int) -> Payload | None:
        """What lies in the slot; None if it holds nothing readable."""
        return self._payloads.get(slot)

    def is_on_disk(self, slot: int) -> bool:
        """Whether the slot's header on disk must be taken back before its bytes change."""
        return slot in self._on_disk

    def begin(self, slot: int) -> None:
        """The slot is going to be written: from here to `readable` it holds nothing, and is not found."""
        with self._lock:
            self._payloads.pop(slot, None)
            self._forget(slot)

    def readable(self, slot: int, payload: Payload) -> None:
        """The slot's bytes are whole."""
        self._payloads[slot] = payload

    def next_generation(self) -> int:
        """A number that no header has, larger than all."""
        with self._lock:
            if self._last_generation >= MAX_GENERATION:
                raise IntegrityError(
                    "nvme store: there are no generations left"
                )  # at a million a second: 146,000 years
            self._last_generation += 1
            return self._last_generation

    def header_begun(self, slot: int, key: bytes) -> None:
        """From now on something may lie in the slot's header on disk, with that key if anything."""
        with self._lock:
            self._on_disk.add(slot)
            self._unfound[slot] = key

    def header_gone(self, slot: int) -> None:
        """The slot's header on disk is taken back."""
        with self._lock:
            self._on_disk.discard(slot)
            self._unfound.pop(slot, None)

    def label(self, slot: int, key: bytes, generation: int, payload: Payload | None = None) -> None:
        """The slot's header is whole: it can be found, unless a newer one of that key can.

        `payload`: what it is about. Nothing is done where something else lies in the slot now.
        """
        with self._lock:
            if payload is not None and self._payloads.get(slot) is not payload:
                return
            other = self._slots.get(key)
            self._enter(slot, key, generation)
            self._unfound.pop(slot, None)
            if other is None or self._keys[other][1] < generation:
                self._slots[key] = slot

    def forget(self, slot: int) -> None:
        """It is not found any more; its bytes stay readable."""
        with self._lock:
            self._forget(slot)

    def _enter(self, slot: int, key: bytes, generation: int) -> None:
        self._namespaces[key[:_NAMESPACE_BYTES]] += slot not in self._keys
        self._keys[slot] = key, generation

    def _forget(self, slot: int) -> None:
        key, _ = self._keys.pop(slot, (b"", 0))
        if key:
            self._namespaces[key[:_NAMESPACE_BYTES]] -= 1
        if key and slot in self._on_disk:
            self._unfound[slot] = key
        if self._slots.get(key) == slot:
            del self._slots[key]
        self._found.discard(slot)

    # --- looking up

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Slot and generation of a key."""
        with self._lock:
            slot = self._slots.get(key)
            return None if slot is None else (slot, self._keys[slot][1])

    def num_in(self, namespace: bytes) -> int:
        """How many slots of that namespace have a label."""
        return self._namespaces[namespace]

    def slots_of(self, namespace: bytes) -> list[int]:
        """Those slots, the oldest first. O(labelled slots)."""
        with self._lock:
            found = [(number, slot) for slot, (key, number) in self._keys.items() if key.startswith(namespace)]
        return [slot for _, slot in sorted(found)]

    def copies(self, keys: Collection[bytes]) -> list[int]:
        """The slots whose headers on disk may have these keys: older copies too, and what could not be taken back.

        O(slots).
        """
        with self._lock:
            held = [(slot, key) for slot, (key, _) in self._keys.items()] + list(self._unfound.items())
        return sorted(slot for slot, key in held if key in keys)

    def generation(self, slot: int) -> int | None:
        """Of a slot that is labelled."""
        with self._lock:
            return self._keys.get(slot, (b"", None))[1]

    def found(self) -> dict[int, FoundSlot]:
        """What the open found and nobody has overwritten or forgotten since, by slot. O(slots)."""
        with self._lock:
            items = [(slot, *self._keys[slot]) for slot in sorted(self._found)]
        return {slot: FoundSlot(key[:32], key[32:], generation) for slot, key, generation in items}

    @property
    def num_found(self) -> int:
        """How many slots `found` names."""
        return len(self._found)

    def check_integrity(self, backed_slots: int, num_slices: int) -> None:
        """Raise IntegrityError if a slot without backing is readable, or one is found by another's key."""
        for slot, payload in list(self._payloads.items()):
            if not 0 <= slot < backed_slots or len(payload.checksums) != num_slices:
                raise IntegrityError(f"nvme store: slot {slot} has {len(payload.checksums)} checksums and no backing")
        with self._lock:
            for key, slot in self._slots.items():
                if self._keys.get(slot, (b"", 0))[0] != key or slot not in self._on_disk:
                    raise IntegrityError(f"nvme store: slot {slot} is found by a key that is not its own")
            if +self._namespaces != Counter(key[:_NAMESPACE_BYTES] for key, _ in self._keys.values()):
                raise IntegrityError("nvme store: the slots of a namespace are miscounted")
            if not self._found <= self._keys.keys():
                raise IntegrityError("nvme store: a slot was found and has no key")
