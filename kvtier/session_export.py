"""An exported session out of an nvme folder, without its model."""

from __future__ import annotations

from pathlib import Path

from kvtier.archive_header import ArchiveHeader
from kvtier.errors import ArchiveError
from kvtier.fsck_words import counted
from kvtier.session_archive import write_archive
from kvtier.session_folder import FolderSession, SessionFolder
from kvtier.terminal import printable

UNKNOWN = "unknown"
"""Dtype and model of a session that was exported without its model: the namespace tells both, to who has it."""


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
    token_ids = record.token_ids[: num_blocks * record.block_tokens]
    sizes = {places[0].segment.geometry.payload_bytes for places in session.places[:num_blocks]}
    if len(sizes) > 1:
        raise ArchiveError(f"session {name}: its blocks are of different sizes, {sizes}: the folder is damaged")
    try:
        header = ArchiveHeader(
            name=record.name,
            salt=record.salt,
            namespace=record.namespace,
            block_tokens=record.block_tokens,
            block_bytes=sizes.pop(),
            dtype=UNKNOWN,
            model=UNKNOWN,
            token_ids=token_ids,
            created_s=record.created_s,
            ttl_s=record.ttl_s,
        )
    except ValueError as error:
        raise ArchiveError(f"session {name} cannot be exported: {' '.join(str(error).split())}") from None
    blocks = (block.data for block in folder.blocks(session, num_blocks))
    return len(token_ids), write_archive(file, header, blocks, overwrite=overwrite)
