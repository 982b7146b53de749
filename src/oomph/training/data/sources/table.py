"""Rows of a table that is indexed like a list (a data set of the hub, mapped from disk), as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_ROWS = 256


@dataclass(frozen=True)
class TextTable:
    """A block is 256 rows, joined to one document: these tables hold a line of an article per row."""

    table: Any
    size: int
    column: str = "text"

    @property
    def blocks(self) -> int:
        return -(-len(self.table) // _ROWS)

    def read(self, block: int) -> Iterator[str]:
        rows = self.table[block * _ROWS : (block + 1) * _ROWS][self.column]
        text = "".join(row if row.endswith("\n") else row + "\n" for row in rows if row)
        if text:
            yield text
