"""An exported session out of an nvme folder, without its model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvtier.archive_header import ArchiveHeader
from kvtier.errors import ArchiveError
from kvtier.folder_session import FolderSession, read_blocks
from kvtier.fsck_words import counted
from kvtier.session_archive import write_archive, zero_behind
from kvtier.session_folder import SessionFolder
from kvtier.session_record import KvLayout
from kvtier.stores.slot_format import Geometry
from kvtier.terminal import printable
from kvtier.types import BlockShape


def export_session(
    folder: SessionFolder, session: FolderSession, file: Path, *, overwrite: bool = False, partial: bool = False
) -> tuple[int, int]:
    """Write a session's tokens and blocks to a file of its own; how many tokens, and bytes.

    Args:
        partial: where blocks are missing, those before them: a beginning of the conversation.

    Raises:
        ArchiveError: blocks are missing, the file cannot be written or is there; or the name is none that a file holds.
        StoreError: a block is damaged, or was overwritten by whoever uses the folder.
        After each of them the file is what it was.
    """
    record, num_blocks = session.record, len(session.labels)
    name = printable(record.name)
    if not num_blocks:
        raise ArchiveError(f"session {name} has no tokens yet: there is nothing to export")
    if session.num_leading < num_blocks:
        first = counted(session.num_leading * record.block_tokens, "token")
        if not partial or not session.num_leading:
            raise ArchiveError(
                f"session {name}: {num_blocks - session.num_found} of {num_blocks} blocks are not in {folder.path}. "
                f"Mend: go on with it once, which computes them, or export the first {first} with --partial"
            )
        num_blocks = session.num_leading
    kv = record.kv
    if kv is None:
        why = "does not say how its KV lies, or not all of it is in blocks"
        raise ArchiveError(f"session {name} {why}. Mend: go on with it once, or use session.export")
    token_ids = record.token_ids[: num_blocks * record.block_tokens]
    shape = _shape(session, kv)
    if any(place.segment.geometry != Geometry.of(shape) for places in session.places for place in places):
        raise ArchiveError(f"session {name}: its blocks in {folder.path} are not of its size. Mend: delete it")
    try:
        header = ArchiveHeader(
            name=record.name,
            salt=record.salt,
            namespace=record.namespace,
            block_tokens=record.block_tokens,
            block_bytes=shape.block_bytes,
            dtype=kv.dtype,
            model=kv.model,
            token_ids=token_ids,
            created_s=record.created_s,
            ttl_s=record.ttl_s,
        )
    except ValueError as error:
        raise ArchiveError(f"session {name} cannot be exported: {' '.join(str(error).split())}") from None
    return len(token_ids), write_archive(file, header, _blocks(folder, session, shape, header), overwrite=overwrite)


def _shape(session: FolderSession, kv: KvLayout) -> BlockShape:
    """Of its blocks, as the record says; whether they are so is for the caller to see."""
    geometry, block_tokens = session.places[0][0].segment.geometry, session.record.block_tokens
    token_dims = kv.kv_heads * (kv.key_dim + kv.value_dim)
    element_bytes = max(1, geometry.slice_bytes // (token_dims * block_tokens))
    return BlockShape(geometry.num_slices, kv.kv_heads, block_tokens, kv.key_dim, kv.value_dim, element_bytes)


def _blocks(
    folder: SessionFolder, session: FolderSession, shape: BlockShape, header: ArchiveHeader
) -> Iterator[memoryview]:
    left = len(header.token_ids)
    for block in read_blocks(folder.view, session, header.num_blocks):
        zero_behind(block, shape, left)
        yield block.data
        left -= shape.block_tokens
