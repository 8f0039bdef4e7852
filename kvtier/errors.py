"""Every error that kvtier raises on purpose.

    KVTierError
    |-- ConfigError            a config, preset, size or path that cannot be used   (also a ValueError)
    |   `-- BudgetError        a budget below its minimum; prints the sum
    |-- UnsupportedError       what cannot be honoured, refused by name             (also a ValueError)
    |   `-- UnsupportedModelError
    |-- ClosedError            a call on a closed wrapper, cache or store           (also a RuntimeError)
    |-- AlreadyWrappedError    wrapping a model twice                               (also a RuntimeError)
    |-- PromptMismatchError    a prompt that does not start with what its cache holds (also a ValueError)
    |-- SessionExistsError     a session of that name is there already              (also a ValueError)
    |-- FolderInUseError       the nvme folder belongs to another live process
    |-- CapacityError          no tier has room; the state is as before the step
    |-- BlockLostError         a block cannot be read, nor recomputed; nothing was served from it
    |-- StoreError             one read or write of one slot failed                 (also an OSError)
    |   |-- ChecksumError      bytes read back differ from bytes written
    |   |-- ShortReadError     fewer bytes came back than were asked for
    |   `-- NoSpaceError       the tier's medium is full; carries `available_slots`
    |-- ArchiveError           an exported session cannot be written, or is not one       (also an OSError)
    |-- TransferTimeoutError   a copy within memory passed its deadline             (also a TimeoutError)
    `-- IntegrityError         an internal invariant does not hold: a bug in kvtier

Each message names the thing, the value and the mend.
"""

from __future__ import annotations


class KVTierError(Exception):
    """Base of all of kvtier's errors."""


class ConfigError(KVTierError, ValueError):
    """A config that cannot be used. Nothing was opened or allocated. Its text has a line for each mistake.

    Attributes:
        mistakes: these lines. Not the text split at line breaks: a name in it may hold some.
    """

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes

    def name_source(self, source: str) -> None:
        """Put the name of the file or preset that the config came from before each mistake."""
        self.mistakes = tuple(f"{source}: {mistake}" for mistake in self.mistakes)
        self.args = ("\n".join(self.mistakes),)


class BudgetError(ConfigError):
    """A budget is below the minimum that the config and model need. The message prints the sum and the mend."""


class UnsupportedError(KVTierError, ValueError):
    """Something that kvtier cannot honour exactly, refused by name. Nothing was computed."""


class UnsupportedModelError(UnsupportedError):
    """A model that kvtier cannot serve exactly. The model is unchanged."""


class ClosedError(KVTierError, RuntimeError):
    """A call on something that was closed."""


class AlreadyWrappedError(KVTierError, RuntimeError):
    """The model is wrapped by a live TieredKV already. Both are unchanged."""


class PromptMismatchError(KVTierError, ValueError):
    """The prompt does not begin with the tokens that its cache holds. The cache is unchanged."""


class SessionExistsError(KVTierError, ValueError):
    """There is a session of that name already. Both are unchanged."""


class FolderInUseError(KVTierError):
    """Another live process, or another wrapper in this one, owns the nvme folder. Nothing in it was touched.

    Attributes:
        fact: the message without its mend, which depends on who asked for the folder.
    """

    def __init__(self, fact: str, mend: str = "") -> None:
        super().__init__(f"{fact}: {mend}" if mend else fact)
        self.fact = fact


class CapacityError(KVTierError):
    """No tier has room for a step's blocks, or the process no thread to read them. Every cache is as it was before."""


class BlockLostError(KVTierError):
    """A block has no readable copy. The step was aborted; no token was made from it."""

    def __init__(self, message: str, blocks: tuple[int, ...] = ()) -> None:
        """`blocks`: the ids of those that could not be read."""
        super().__init__(message)
        self.blocks = blocks


class StoreError(KVTierError, OSError):
    """One read or write of one slot failed. The slot's previous owner must treat it as lost."""


class ChecksumError(StoreError):
    """Bytes read back differ from the bytes written."""


class ShortReadError(StoreError):
    """Fewer bytes came back than were asked for."""


class NoSpaceError(StoreError):
    """The tier's medium is full. `available_slots` slots have backing.

    `retires_slot`: not the one that was written, though it is below that. It holds nothing, and what it took serves the
    others from now on.
    """

    def __init__(self, message: str, available_slots: int, retires_slot: bool = False) -> None:
        super().__init__(message)
        self.available_slots = available_slots
        self.retires_slot = retires_slot


class ArchiveError(KVTierError, OSError):
    """An exported session cannot be written or read, or is damaged, cut off, or no exported session at all.

    Of writing: nothing was written, and a file that was there still is. Of reading: what was yielded before is right.
    `errno` is the system's where it was the system that failed, else None.
    """


class TransferTimeoutError(KVTierError, TimeoutError):
    """A transfer passed its deadline, and there is no way around it: a copy within memory, or a ring that is all taken.

    Reads and writes of the nvme tier that are late are losses or are left out instead. What the transfer uses stays its
    own until it ends.
    """


class IntegrityError(KVTierError):
    """An internal invariant does not hold. This is a bug in kvtier: please report it with the message."""
