"""Files of lines: plain text and JSONL, cut into blocks at line boundaries by arithmetic on offsets.

Block k of a file runs from the first line that starts at or after k * block_bytes to where block k + 1
starts. Both ends are found by a seek and a short read, so opening a file of any size reads none of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

from oomph.errors import UserError
from oomph.units import KiB, MiB

_STEP = 64 * KiB


@dataclass(frozen=True)
class LineFile:
    """What text and JSONL have in common: where the blocks of a file begin and end."""

    path: Path
    size: int
    block_bytes: int

    # Whether a line may never be cut, however long it is.
    _whole_lines: ClassVar[bool] = False

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block_bytes)

    def _block(self, block: int) -> tuple[int, bytes]:
        """Where the block starts in the file, and its bytes."""
        try:
            with self.path.open("rb") as file:
                start = self._cut(file, block)
                stop = self._cut(file, block + 1)
                file.seek(start)
                return start, file.read(stop - start)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error

    def _cut(self, file: BinaryIO, block: int) -> int:
        wanted = block * self.block_bytes
        if block == 0 or wanted >= self.size:
            return min(wanted, self.size)
        # From the byte before: a line that starts exactly at `wanted` belongs to this block.
        position = wanted - 1
        file.seek(position)
        while position < self.size:
            read = file.read(min(_STEP, self.size - position))
            if not read:
                break
            newline = read.find(b"\n")
            if newline >= 0:
                return position + newline + 1
            position += len(read)
            if position >= wanted + self.block_bytes and not self._whole_lines:
                return self._character_boundary(file, wanted)
        return self.size

    @staticmethod
    def _character_boundary(file: BinaryIO, position: int) -> int:
        """The first byte at or after `position` that starts a UTF-8 character."""
        file.seek(position)
        near = file.read(4)
        for shift, byte in enumerate(near):
            if byte & 0xC0 != 0x80:
                return position + shift
        return position + len(near) % 4  # the file's end; or no UTF-8, which reading will say

    def _decoded(self, start: int, content: bytes) -> str:
        nul = content.find(b"\0")
        if nul >= 0:
            raise not_text(self.path, f"a NUL byte at offset {start + nul}")
        try:
            return content.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise not_text(self.path, f"not UTF-8 at offset {start + error.start}") from error


@dataclass(frozen=True)
class TextFile(LineFile):
    """Plain text. A file of one block is one document; each block of a longer one counts as a document."""

    skip_undecodable: bool = False

    def read(self, block: int) -> Iterator[str]:
        start, content = self._block(block)
        try:
            text = self._decoded(start, content)
        except UserError:
            if self.skip_undecodable:
                return
            raise
        if text:
            yield text


@dataclass(frozen=True)
class JsonLines(LineFile):
    """One JSON object per line; the document is the string in `field`. Empty lines are passed over."""

    field: str = "text"
    _whole_lines: ClassVar[bool] = True

    def read(self, block: int) -> Iterator[str]:
        start, content = self._block(block)
        for before, line in enumerate(content.split(b"\n")):
            if line.strip():
                document = self._document(line, start, before)
                if document:
                    yield document

    def _document(self, line: bytes, start: int, before: int) -> str:
        try:
            row = json.loads(line)
        except ValueError as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8"
            raise UserError(
                f"{self._place(start, before)}: broken JSON ({reason}); every line is to be one JSON object"
            ) from error
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise UserError(
                f"{self._place(start, before)}: a {kind}; every line is to be a JSON object "
                f'with a field "{self.field}"'
            )
        text = row.get(self.field)
        if not isinstance(text, str):
            fields = ", ".join(row) or "none"
            held = "null" if text is None else f"a {type(text).__name__}"
            found = f"it holds {held}" if self.field in row else f"there are: {fields}"
            null = text is None and self.field in row
            advice = "leave such lines out" if null else "name the one that holds the text, data.field=..."
            raise UserError(
                f'{self._place(start, before)}: no text in field "{self.field}" ({found}); ' + advice
            )
        # An escaped half of a surrogate pair is valid JSON and no valid text.
        return text.encode("utf-8", "replace").decode() if b"\\u" in line else text

    def _place(self, start: int, before: int) -> str:
        """file:line. Lines before the block are counted now, because only an error needs the number."""
        lines = before + 1
        with self.path.open("rb") as file:
            left = start
            while left and (read := file.read(min(MiB, left))):
                lines += read.count(b"\n")
                left -= len(read)
        return f"{self.path}:{lines}"


def not_text(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is not a text file ({why}); give UTF-8 text, JSONL (.jsonl) or parquet (.parquet), or leave "
        "it out with a pattern, e.g. 'folder/*.md'"
    )


def check_text(path: Path) -> None:
    """Refuses a binary file by its first bytes, before any training starts."""
    with path.open("rb") as file:
        head = file.read(4 * KiB)
    if b"\0" in head:
        raise not_text(path, f"a NUL byte at offset {head.index(0)}")
    try:
        head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The last character may be cut in half by the end of what was read.
        if len(head) < 4 * KiB or error.start < len(head) - 3:
            raise not_text(path, f"not UTF-8 at offset {error.start}") from error
