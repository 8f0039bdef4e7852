"""The files that an open found: segments to go on with, and those that only take room until it is needed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvtier.stores.folder import OwnedFolder
from kvtier.stores.namespaces import Age
from kvtier.stores.segment import Segment, io_error

_log = logging.getLogger("kvtier")


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A segment file that is not read: of another model or block size, of a later version, or damaged."""

    name: str
    num_bytes: int
    age: Age


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """What is in a folder when it is opened."""

    segments: list[tuple[Segment, int]]
    """Those taken over, with their slots."""
    others: list[OtherFile]


class OtherFiles:
    """Files that take room and are not read, in the order in which they are given up. Only its owner changes it."""

    def __init__(self, folder: OwnedFolder, files: Iterable[OtherFile]) -> None:
        self._folder = folder
        self._files = sorted(files, key=lambda other: other.age)

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[OtherFile]:
        return iter(list(self._files))  # one may be given up meanwhile, by a thread that writes

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return sum(other.num_bytes for other in self)

    def give_up_first(self) -> None:
        """Take the one that goes first off the disk; it is forgotten also where that fails. Raises StoreError."""
        other = self._files.pop(0)
        _log.info("nvme folder %s: %s is given up, which nothing here can read", self._folder.path, other.name)
        try:
            self._folder.unlink(other.name)
        except OSError as error:
            raise io_error(error, "giving up a file", self._folder.path / other.name) from error
