"""Records of conversations, for tests."""

from __future__ import annotations

import hashlib
import math
from array import array
from typing import Any

from kvtier.session_record import SessionRecord


def record(name: str = "alice", num_tokens: int = 50, block_tokens: int = 16, **more: Any) -> SessionRecord:
    """Tokens that depend on the name and their number alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:2], "little")
    fields = {
        "name": name,
        "salt": hashlib.sha256(b"no salt").digest(),
        "namespace": hashlib.sha256(b"namespace 0").digest(),
        "block_tokens": block_tokens,
        "token_ids": array("i", ((seed + 7 * n) % 49152 for n in range(num_tokens))),
        "created_s": 1.7e9,
        "used_s": 1.7e9,
        "ttl_s": math.inf,
        "is_pinned": False,
    }
    return SessionRecord(**{**fields, **more})
