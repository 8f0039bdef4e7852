"""Whose conversation an exported session is: the header of an archive, and its bytes. docs/session-archive.md."""

from __future__ import annotations

import math
import sys
from array import array
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kvtier.errors import ArchiveError

MAX_FIELDS_BYTES = 1 << 16
MAX_TOKENS = 1 << 26  # a sparse file is as long as it likes: this bounds what is read of it before a digest is known


def _printable(text: str) -> str:
    if not text.isprintable():  # a terminal would obey it
        raise ValueError("must be printable")
    return text


_Printable = Annotated[str, Field(min_length=1), AfterValidator(_printable)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Fields(BaseModel):
    """The part of a header that lies in the file as JSON, and what may be in it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    name: _Printable
    salt: _Digest
    namespace: _Digest
    block_tokens: Annotated[int, Field(ge=1, lt=1 << 31)]
    block_bytes: Annotated[int, Field(ge=1, lt=1 << 63)]
    dtype: _Printable
    model: _Printable
    created_s: Annotated[float, Field(ge=0)]
    ttl_s: Annotated[float, Field(gt=0)] | None


@dataclass(frozen=True, slots=True)
class ArchiveHeader:
    """Whose conversation an archive holds, and how its blocks are cut.

    Raises:
        ValueError: a field that no archive can hold: digests that are not 32 bytes, sizes below 1, text that is empty
            or not printable, times that are negative or not finite.
    """

    name: str
    """The session's."""
    salt: bytes
    """Digest of the tenant's salt, 32 bytes."""
    namespace: bytes
    """Whose KV it is (`hf/fingerprint.py`), 32 bytes. The reader compares it with nothing: who imports must."""
    block_tokens: int
    block_bytes: int
    """Of every block, a tail's too."""
    dtype: str
    """Of the KV, as torch calls it, with or without `torch.` before it."""
    model: str
    """Class and shape, for people. It proves nothing."""
    token_ids: array[int]
    """32 bits each, oldest first; any value."""
    created_s: float
    """Seconds since the epoch."""
    ttl_s: float
    """For so long the session may be kept; `inf`: until it is deleted."""

    def __post_init__(self) -> None:
        if self.token_ids.typecode != "i":
            raise ValueError(f"archive: token_ids are an array of {self.token_ids.typecode!r}, not of 'i'")
        if len(self.token_ids) > MAX_TOKENS:
            raise ValueError(f"archive: {len(self.token_ids)} tokens, at most {MAX_TOKENS} fit")
        self._fields()

    @property
    def num_blocks(self) -> int:
        """Blocks that these tokens take; the last may be a tail."""
        return -(-len(self.token_ids) // self.block_tokens)

    def _fields(self) -> _Fields:
        return _Fields(
            name=self.name,
            salt=self.salt.hex(),
            namespace=self.namespace.hex(),
            block_tokens=self.block_tokens,
            block_bytes=self.block_bytes,
            dtype=self.dtype,
            model=self.model,
            created_s=self.created_s,
            ttl_s=None if self.ttl_s == math.inf else self.ttl_s,
        )

    def encoded(self) -> tuple[bytes, bytes]:
        """The fields as JSON, and the token ids. Raises ArchiveError for names that are too long together."""
        fields = self._fields().model_dump_json().encode()
        if len(fields) > MAX_FIELDS_BYTES:
            raise ArchiveError(
                f"session {self.name:.40}… cannot be exported: its name, with the model's, takes {len(fields)} bytes "
                f"of the {MAX_FIELDS_BYTES} that an archive has for them. Mend: give it a shorter name"
            )
        return fields, _little(self.token_ids).tobytes()

    @classmethod
    def decoded(cls, fields: bytes, ids: memoryview) -> ArchiveHeader:
        """What `encoded` was made of. Raises ValueError: another field, type or value than it writes."""
        known = _Fields.model_validate_json(fields)
        token_ids = array("i")
        token_ids.frombytes(ids)
        ttl_s = math.inf if known.ttl_s is None else known.ttl_s
        digests = {"salt": bytes.fromhex(known.salt), "namespace": bytes.fromhex(known.namespace)}
        return cls(**known.model_dump() | digests | {"token_ids": _little(token_ids), "ttl_s": ttl_s})


def _little(ids: array[int]) -> array[int]:
    """In the order of a little-endian machine, or back."""
    if sys.byteorder != "little":
        ids = ids[:]
        ids.byteswap()
    return ids
