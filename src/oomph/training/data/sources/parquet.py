"""Parquet: one column of documents, a row group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from oomph.errors import UserError
from oomph.training.data.needs import need
from oomph.units import MiB

_ROWS_AT_ONCE = 256
# A file of few row groups is cut further, as long as reading a group again for each of its slices is cheap.
_WANTED_BLOCKS = 32
_CHEAP_GROUP = 8 * MiB
_TEXTS = ("string", "large_string")  # the first is also the start of string_view


@dataclass(frozen=True)
class ParquetFile:
    """A block is a row group, or one of `slices` equal parts of its rows."""

    path: str
    open_file: Callable[[str], Any]  # a binary file that can seek
    groups: int
    slices: int
    size: int
    column: str = "text"

    @property
    def blocks(self) -> int:
        return self.groups * self.slices

    def read(self, block: int) -> Iterator[str]:
        group, part = divmod(block, self.slices)
        with _opened(self.path, self.open_file) as table:
            rows = table.metadata.row_group(group).num_rows
            first, last = rows * part // self.slices, rows * (part + 1) // self.slices
            row = 0
            for batch in table.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[self.column]):
                if row >= last:
                    return
                wanted = batch.column(0)[max(first - row, 0) : max(last - row, 0)]
                row += len(batch)
                for document in wanted.to_pylist():
                    if document:
                        yield document


def open_local(path: str) -> BinaryIO:
    return Path(path).open("rb")


def open_parquet(
    path: str, column: str = "text", open_file: Callable[[str], Any] = open_local
) -> ParquetFile:
    """Reads the footer: the columns and the row groups."""
    with _opened(path, open_file) as table:
        schema, metadata = table.schema_arrow, table.metadata
        if column not in schema.names:
            raise UserError(
                f'{path} has no column "{column}" (it has {", ".join(schema.names)}); '
                "name the column that holds the text"
            )
        kind = str(schema.field(column).type)
        if not kind.removeprefix("dictionary<values=").startswith(_TEXTS):  # a dictionary is how it is stored
            raise UserError(f'column "{column}" of {path} holds {kind}, not text')
        groups = metadata.num_row_groups
        sizes = [metadata.row_group(group).total_byte_size for group in range(groups)]
        slices = 1
        if 0 < groups < _WANTED_BLOCKS and max(sizes) <= _CHEAP_GROUP:
            fewest = min(metadata.row_group(group).num_rows for group in range(groups))
            slices = max(1, min(-(-_WANTED_BLOCKS // groups), fewest))
        return ParquetFile(path, open_file, groups, slices, sum(sizes) if metadata.num_rows else 0, column)


@contextmanager
def _opened(path: str, open_file: Callable[[str], Any]) -> Iterator[Any]:
    arrow = need("pyarrow", "reading parquet")
    parquet = need("pyarrow.parquet", "reading parquet")
    try:
        with open_file(path) as file:
            yield parquet.ParquetFile(file)
    except (arrow.ArrowInvalid, arrow.ArrowIOError) as error:
        raise UserError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error
