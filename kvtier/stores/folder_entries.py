"""What may lie in an nvme folder, by name and type."""

from __future__ import annotations

import enum
import re
import stat

LOCK_NAME = "lock"
SEGMENT_NAME = re.compile(r"segment-\d{5,}\.kvt")
NAMESPACE_NAME = re.compile(r"namespace-([0-9a-f]{64})")
SESSION_NAME = re.compile(r"session-([0-9a-f]{64})")
WRITES_NAME = "writes"
NEW_SUFFIX = ".new"
_WRITES_NAMES = (WRITES_NAME, WRITES_NAME + NEW_SUFFIX)
_TEMPORARY_NAME = re.compile(r"(run|new)-\d+-[0-9a-f]+")  # of another process, which shares the folder as its root


class EntryKind(enum.Enum):
    """What an entry of a folder is, by its name and type."""

    LOCK = "lock"
    SEGMENT = "segment"
    NAMESPACE = "namespace"
    SESSION = "session"
    WRITES = "count of bytes written"
    TEMPORARY = "folder of one process"
    STRANGER = "not kvtier's"


def entry_kind(name: str, mode: int) -> EntryKind:
    """`mode` is `st_mode` of the entry itself: a symlink is a stranger, whatever its name."""
    if stat.S_ISREG(mode):
        if name == LOCK_NAME:
            return EntryKind.LOCK
        if SEGMENT_NAME.fullmatch(name):
            return EntryKind.SEGMENT
        if NAMESPACE_NAME.fullmatch(name):
            return EntryKind.NAMESPACE
        if is_session(name):
            return EntryKind.SESSION
        if name in _WRITES_NAMES:
            return EntryKind.WRITES
    if stat.S_ISDIR(mode) and _TEMPORARY_NAME.fullmatch(name):
        return EntryKind.TEMPORARY
    return EntryKind.STRANGER


def is_data(name: str) -> bool:
    """Whether a file of that name goes when a folder is emptied: all but the lock."""
    is_pattern = bool(SEGMENT_NAME.fullmatch(name) or NAMESPACE_NAME.fullmatch(name) or is_session(name))
    return is_pattern or name in _WRITES_NAMES


def is_session(name: str) -> bool:
    """Whether a file of that name is a session, or one that is being written."""
    return bool(SESSION_NAME.fullmatch(name.removesuffix(NEW_SUFFIX)))


def session_name(key: bytes) -> str:
    """The file of the session with that key of 32 bytes."""
    return f"session-{key.hex()}"


def namespace_name(namespace: bytes) -> str:
    """The file that tells when a namespace was last opened."""
    return f"namespace-{namespace.hex()}"


def namespace_of(name: str) -> bytes:
    """The namespace that a file of kind NAMESPACE speaks of."""
    return bytes.fromhex(name.removeprefix("namespace-"))
