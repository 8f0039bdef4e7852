"""What a check of an nvme folder tells of sessions: for programs a part of its document, for people a table."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from kvtier.fsck_words import ago, iso, shown_name


@dataclass(slots=True)
class SessionReport:
    """One conversation whose record is whole. Times as `NamespaceReport`'s; the name may hold anything."""

    name: str
    key: bytes
    namespace: bytes
    num_tokens: int
    block_tokens: int
    num_blocks: int
    """That its tokens make, a partly filled last one included."""
    created_s: float
    used_s: float
    ttl_s: float
    is_pinned: bool
    num_found: int | None = None
    """Of its blocks, how many verify in the folder. None: not looked for, there are too many sessions."""

    def is_expired(self, now_s: float) -> bool:
        """As `SessionRecord.is_expired`."""
        return not self.is_pinned and now_s - self.used_s > self.ttl_s

    def document(self, now_s: float) -> dict[str, Any]:
        return {
            "name": self.name,
            "key": self.key.hex(),
            "namespace": self.namespace.hex(),
            "tokens": self.num_tokens,
            "block_tokens": self.block_tokens,
            "blocks": self.num_blocks,
            "blocks_found": self.num_found,
            "created": iso(self.created_s),
            "last_used": iso(self.used_s),
            "ttl_s": None if math.isinf(self.ttl_s) else self.ttl_s,
            "pinned": self.is_pinned,
            "expired": self.is_expired(now_s),
        }

    def row(self, now_s: float) -> list[Text]:
        found = "?" if self.num_found is None else str(self.num_found)
        kept = "pinned" if self.is_pinned else "expired" if self.is_expired(now_s) else ""
        shown = (
            shown_name(self.name),
            str(self.num_tokens),
            f"{found} of {self.num_blocks}",
            ago(self.used_s, now_s),
            kept,
        )
        return [Text(each) for each in shown]


def session_table(sessions: Iterable[SessionReport], max_shown: int) -> Table:
    """Those that were used last."""
    table = Table("session", "tokens", "blocks found", "last used", "kept", box=box.SIMPLE, pad_edge=False)
    for column in table.columns[1:]:
        column.no_wrap = True
    now_s = time.time()
    for each in sorted(sessions, key=lambda told: -told.used_s)[:max_shown]:
        table.add_row(*each.row(now_s))
    return table
