"""The file in an nvme folder that keeps what was written there, for `tiers.nvme.max_writes` of the next process."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence

from kvtier.stores.folder import OwnedFolder
from kvtier.stores.folder_entries import WRITES_NAME
from kvtier.wear import Written

MAX_BYTES = 4096  # one block on disk; two dozen entries take a quarter of it
_VERSION = 1


def parse_ledger(data: bytes, now_s: float) -> list[Written]:
    """What a ledger says was written, and what was promised as if it were now.

    Args:
        now_s: seconds since the epoch. A clock that went back makes nothing older.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    if len(data) > MAX_BYTES:
        raise ValueError("is damaged")
    try:
        kept = json.loads(data)
        version, saved_s, promised = kept["version"], kept["saved_s"], kept["promised_bytes"]
        written = [Written(float(age_s), num_bytes) for age_s, num_bytes in kept["written"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise ValueError("is damaged") from None
    if version != _VERSION:
        raise ValueError("is of another version")
    numbers = [promised, *(each.num_bytes for each in written)]
    if any(not isinstance(number, int) or not 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("is damaged")
    if not all(math.isfinite(each.age_s) and each.age_s >= 0 for each in written):
        raise ValueError("is damaged")
    if not isinstance(saved_s, int | float) or not math.isfinite(saved_s):
        raise ValueError("is damaged")
    passed_s = max(0.0, now_s - saved_s)
    return [Written(0.0, promised), *(Written(each.age_s + passed_s, each.num_bytes) for each in written)]


class FolderLedger:
    """A `kvtier.wear.Ledger` in an owned folder. Replaced as a whole, and on the medium before that is relied on."""

    def __init__(self, folder: OwnedFolder, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock

    def load(self) -> list[Written]:
        """As the protocol says; nothing where there is no file."""
        try:
            data = self._folder.read_file(WRITES_NAME, MAX_BYTES + 1)
        except FileNotFoundError:
            return []
        try:
            return parse_ledger(data, self._clock())
        except ValueError as error:
            raise ValueError(f"{self._folder.path / WRITES_NAME}, the count of bytes written, {error}") from None

    def save(self, written: Sequence[Written], promised_bytes: int) -> None:
        """As the protocol says. Waits for the medium twice."""
        kept = {
            "version": _VERSION,
            "saved_s": self._clock(),
            "promised_bytes": promised_bytes,
            "written": [[round(each.age_s, 3), each.num_bytes] for each in written],
        }
        self._folder.replace_file(WRITES_NAME, json.dumps(kept).encode())
