"""The rows of one cache: one sequence each, all of one length in columns. Knows no tiers."""

from __future__ import annotations

from kvtier.block_table import BlockTable
from kvtier.errors import IntegrityError
from kvtier.metrics import SequenceMetrics
from kvtier.origin import Origin


class Batch:
    """The block tables of one cache's rows, in row order. The tier manager forks, drops and reorders them."""

    __slots__ = ("metrics", "origin", "tables")

    def __init__(self, tables: list[BlockTable], metrics: SequenceMetrics, origin: Origin | None = None) -> None:
        self.tables = tables
        self.origin = origin
        """The model that its KV is computed with, if its blocks may be labelled; None: they are not."""
        self.metrics = metrics
        """Of all its rows, past ones included."""

    @property
    def length(self) -> int:
        """Columns that every row holds: tokens and padding. 0 without rows."""
        return self.tables[0].length if self.tables else 0

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.tables)

    @property
    def is_padded(self) -> bool:
        """Whether any row holds padding."""
        return any(table.padding for table in self.tables)

    def check_integrity(self) -> None:
        """Raise IntegrityError if rows differ in length or one contradicts itself."""
        for table in self.tables:
            table.check_integrity()
            if table.length != self.length:
                raise IntegrityError(f"rows of {table.length} and {self.length} columns in one batch")
