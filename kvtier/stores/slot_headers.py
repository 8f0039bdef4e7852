"""Headers on disk: written behind their block, taken back before the block changes, read again before it is found."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.namespaces import Namespaces
from kvtier.stores.segment import Segment
from kvtier.stores.slot_format import Geometry, Payload, Verdict
from kvtier.stores.slot_index import SlotIndex
from kvtier.types import SlotLabel

_NO_HEADER: npt.NDArray[np.uint8] = np.zeros(PAGE_BYTES, np.uint8)


class SlotHeaders:
    """The order of writes that makes a slot whose header verifies a whole one, and the index that follows it.

    `start` is where the slot begins in its segment. With `syncs` each step waits for the medium.
    """

    def __init__(self, geometry: Geometry, index: SlotIndex, namespaces: Namespaces, syncs: bool) -> None:
        self._geometry, self._index, self._namespaces, self._syncs = geometry, index, namespaces, syncs

    def take_back(self, slot: int, segment: Segment, start: int, *, at_once: bool = False) -> None:
        """Before the slot's bytes change: its old header must not speak for new ones. Raises OSError.

        `at_once`: nothing follows that would wait for the medium.
        """
        if self._index.is_on_disk(slot):
            segment.write(start, _NO_HEADER)
            if self._syncs and at_once:
                segment.sync()
            self._index.header_gone(slot)

    def write(
        self, slot: int, label: SlotLabel, payload: Payload, segment: Segment, start: int, *, is_there: bool = False
    ) -> None:
        """Behind the block, never before it. Raises OSError; the slot is then not found here, nor after a restart.

        `is_there`: the block has been readable for some time; it is not found if another one is by then.
        """
        self._namespaces.touch(label.namespace)
        generation = self._index.next_generation()
        header = self._geometry.header(label, generation, time.time_ns(), payload)
        if self._syncs:
            segment.sync()
        self._index.header_begun(slot, label.namespace + label.identity)
        segment.write(start, header)
        if self._syncs:
            segment.sync()
        self._index.label(slot, label.namespace + label.identity, generation, payload if is_there else None)

    def read(self, generation: int, segment: Segment, start: int) -> SlotLabel | None:
        """The label of the slot, if its header is that of this generation and verifies."""
        raw = np.empty(self._geometry.header_bytes, np.uint8)
        try:
            segment.read(start, raw)
        except OSError:  # a store's errors are OSErrors too; whatever it is, the slot is not found
            return None
        header = self._geometry.parse(raw[None])
        fields = header.fields[0]
        if header.verdicts[0] != Verdict.GOOD.value or fields["generation"] != generation:
            return None
        return SlotLabel(fields["namespace"].tobytes(), fields["identity"].tobytes(), self._geometry.content(raw))
