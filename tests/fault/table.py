"""The table of faults: which there are, what a test reports of one, and when a run of all of them does not pass."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pytest

PROPERTY = "fault"
"""The name under which a test's report carries what it met; pytest-xdist brings it from the workers."""
UNJUDGED = "faults that cannot be made here"
"""The name under which a test says why it cannot fill its row on this machine; the table is then not judged."""
LEAST_REACHED = 10


class Mends(enum.Enum):
    """Whether a model computes again what the fault took."""

    MODEL = "recomputed"
    MAYBE = "recomputed where it can be"
    NOBODY = "n/a"
    """The fault lies below the model, or takes nothing from it."""


class Control(enum.Enum):
    """Whether the same fault was made with verification switched off."""

    WRONG_BYTES = "must be served wrong"
    NONE = "n/a"
    """No verification stands between this fault and the user that a test could switch off."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A row: a kind of fault, how it is made, and what may become of it."""

    name: str
    how: str
    mends: Mends = Mends.NOBODY
    control: Control = Control.NONE


class Row(enum.Enum):
    """Every kind of fault, in the order of the table."""

    PAYLOAD_FLIP_AT_REST = Kind("bit flip in a block, at rest", "a bit of the closed file", control=Control.WRONG_BYTES)
    PAYLOAD_FLIP_LIVE = Kind(
        "bit flip in a block, live", "a bit of the open file, through another descriptor", control=Control.WRONG_BYTES
    )
    HEADER_FLIP_AT_REST = Kind("bit flip in a header, at rest", "a bit of the closed file")
    HEADER_FLIP_LIVE = Kind("bit flip in a header, live", "a bit of the open file, before a look-up")
    FREE_FLIP = Kind(
        "bit flip in free space, at rest and live", "a bit behind a header, in a free slot, behind a superblock"
    )
    TORN_HEADER = Kind(
        "two headers torn into one", "another block's identity and content in a header", control=Control.WRONG_BYTES
    )
    SWAPPED_AT_REST = Kind(
        "blocks swapped behind their headers, at rest", "written into the closed file", control=Control.WRONG_BYTES
    )
    SWAPPED_LIVE = Kind(
        "segment files swapped in content, live", "written into the open files", control=Control.WRONG_BYTES
    )
    RENAMED = Kind("segment files swapped by name, at rest and live", "rename(2)")
    OLD_GENERATION = Kind(
        "an older block in the place of a newer, live", "written into the open file", control=Control.WRONG_BYTES
    )
    TRUNCATED_AT_REST = Kind("segment file truncated, at rest", "truncate(2) of the closed file")
    TRUNCATED_LIVE = Kind("segment file truncated, live", "truncate(2) of the open file")
    EXTENDED = Kind("segment file extended, at rest and live", "bytes written behind its end")
    DELETED_AT_REST = Kind("segment file deleted, at rest", "unlink(2)")
    DELETED_LIVE = Kind("segment file deleted, live", "unlink(2) of the open file, then a new open")
    ABSURD_HEADER = Kind(
        "crafted header with absurd lengths", "fields of a header set to extremes, its checksum made to fit"
    )
    PICKLE = Kind("a pickle file dropped in the folder", "a pickle that makes a file when it is loaded")
    SYMLINK = Kind("a symlink in place of the folder or a file of it", "symlink(2), before an open and live")
    WRONG_OWNER = Kind("folder or file of another user", "chown(2); as root only")
    LOOSE_MODE = Kind("segment file of a loose mode", "chmod(2)")

    SHORT_READS = Kind("short read at every call index", "preadv that returns less than it was asked for")
    SHORT_WRITES = Kind("short write at every call index", "pwrite that takes less than it was given")
    EIO = Kind("EIO at every call index", "each call of the scenario to the system fails once")
    OTHER_ERRORS = Kind(
        "ENOSPC, EROFS, EACCES, EMFILE, EDQUOT at every call index",
        "each call of the scenario to the system fails once",
    )
    FULL = Kind("ENOSPC", "a real tmpfs of 1 MiB in a mount namespace")
    READ_ONLY = Kind("EROFS at open", "a real tmpfs mounted read-only in a mount namespace")
    NO_PERMISSION = Kind("EACCES", "a folder whose mode was changed while it was open, as a user who is not root")
    NO_DESCRIPTORS = Kind("EMFILE at every call that opens a file", "a real RLIMIT_NOFILE")
    FILE_SIZE = Kind("EFBIG", "a real RLIMIT_FSIZE")

    KILL_STORE = Kind(
        "SIGKILL while blocks are written", "kill(2) at a random moment, with another PYTHONHASHSEED each"
    )
    KILL_MODEL = Kind(
        "SIGKILL while several sessions generate", "kill(2) at a random moment, with another PYTHONHASHSEED after it"
    )
    POWER_LOSS = Kind(
        "power loss, survives: power_loss", "writes and syncs recorded, prefixes replayed without some unsynced pages"
    )
    POWER_LOSS_OF_KILL = Kind("power loss, survives: kill", "the same", control=Control.WRONG_BYTES)
    TWO_PROCESSES = Kind("two processes on one folder", "an open while another process owns it")
    FORK = Kind("a fork of a process that has one open", "fork(2); the child generates, closes, forks, exits")
    EXIT = Kind("interpreter exit without close()", "real exits, in many ways and states")
    UPGRADE = Kind(
        "an upgrade: dtype, block size, RoPE, a weight, adapter, salt, version",
        "blocks of the model as it was are on disk",
        control=Control.WRONG_BYTES,
    )
    NO_UPGRADE = Kind(
        "no upgrade: the same model, loaded again", "blocks of the same model are on disk: all must be found"
    )
    THREADS = Kind("32 threads through the compressors", "each rewrites and reads its slot")

    MODEL_FLIP = Kind(
        "bit flip while a model generates", "a bit of what the file gave, before it is verified",
        Mends.MODEL, Control.WRONG_BYTES,
    )  # fmt: skip
    MODEL_EIO = Kind("EIO of reads while a model generates", "preadv fails", Mends.MODEL)
    MODEL_SHORT = Kind("files truncated while a model generates", "truncate(2) of the open files", Mends.MODEL)
    MODEL_HANG = Kind(
        "a disk that hangs while a model generates", "calls that take longer than io_timeout_s", Mends.MAYBE
    )
    MODEL_NO_WRITES = Kind(
        "no writes while a model generates", "EROFS, EACCES, EIO of calls; real RLIMIT_NOFILE and RLIMIT_FSIZE"
    )


@dataclass(frozen=True, slots=True)
class Met:
    """What became of faults of one kind.

    Every fault that was reached was either detected (a named error, a miss, a quarantined or recomputed block) or
    absorbed (all went as without it), or else what was served was wrong.
    """

    injected: int = 0
    reached: int = 0
    detected: int = 0
    absorbed: int = 0
    recomputed: int = 0
    """Blocks that a model computed again."""
    wrong: int = 0
    """Blocks or tokens."""
    wrong_unchecked: int = 0
    """The same, with verification switched off: the control."""

    def __add__(self, other: Met) -> Met:
        return Met(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


def report(request: pytest.FixtureRequest, row: Row, **counts: int) -> None:
    """Say what a test met. `injected` and `reached` need not be said where `detected` and `absorbed` say it."""
    reached = counts.setdefault("reached", counts.get("detected", 0) + counts.get("absorbed", 0))
    counts.setdefault("injected", reached)
    met = Met(**counts)
    assert met.injected >= met.reached == met.detected + met.absorbed, (row, met)  # not only when all are judged
    request.node.user_properties.append((PROPERTY, (row.name, asdict(met))))


def merged(properties: Iterable[tuple[str, Any]]) -> dict[Row, Met]:
    """All rows, in order, from what the tests said."""
    rows = dict.fromkeys(Row, Met())
    for name, value in properties:
        if name == PROPERTY:
            rows[Row[value[0]]] += Met(**value[1])
    return rows


def problems(rows: Mapping[Row, Met]) -> list[str]:
    """Why a run of all tests does not pass; empty if it does."""
    return [f"{row.value.name}: {problem}" for row, met in rows.items() for problem in _problems(row.value, met)]


def _problems(kind: Kind, met: Met) -> Iterable[str]:
    if met.reached < LEAST_REACHED:
        yield f"reached {met.reached} times, and {LEAST_REACHED} is the least"
    if met.detected + met.absorbed != met.reached:
        yield f"of {met.reached} that were reached, {met.detected} were detected and {met.absorbed} absorbed"
    if met.wrong:
        yield f"{met.wrong} served wrong"
    if kind.mends is Mends.MODEL and not met.recomputed:
        yield "nothing was recomputed"
    if kind.control is Control.WRONG_BYTES and not met.wrong_unchecked:
        yield "with verification switched off nothing was wrong either: the faults do not reach the bytes"


def cells(row: Row, met: Met) -> dict[str, str | int]:
    """A row of the table, by the names of its columns."""
    kind = row.value
    return {
        "fault": kind.name,
        "how it is made": kind.how,
        "injected": met.injected,
        "reached": met.reached,
        "detected": met.detected,
        "absorbed": met.absorbed,
        "recomputed": kind.mends.value if kind.mends is Mends.NOBODY else met.recomputed,
        "wrong": met.wrong,
        "wrong without checks": met.wrong_unchecked if kind.control is Control.WRONG_BYTES else kind.control.value,
    }
