"""Where documents come from: text, JSONL and parquet files, the standard library, the hub.

A corpus is a number of blocks that can be read in any order. Shuffling and the split between training and
validation work on block numbers, so memory grows by a number for each block.
"""

from __future__ import annotations

import glob
import json
import os
import random
import re
import socket
import sysconfig
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO, ClassVar
from urllib.parse import urlsplit

from oomph.errors import UserError
from oomph.units import KiB, MiB
from oomph_lab.training.config import is_run, nearest
from oomph_lab.training.libraries import need

_HUB_SPLIT = re.compile(r"train-\d+-of-\d+\.parquet")
_JSON_LINES = (".jsonl", ".ndjson", ".json")
# Small data are cut into finer blocks, so that there are enough to shuffle.
_LARGEST_BLOCK, _SMALLEST_BLOCK, _WANTED_BLOCKS = MiB, KiB, 64
_READ_BYTES = 64 * KiB
_HASHED_BYTES, _SAMPLE_BYTES = 256 * MiB, 16 * KiB


class Corpus:
    """The blocks of all parts, numbered consecutively.

    A part is a file or a table. It has `blocks`, a number; `size`, in bytes, or an estimate that needs no
    reading; and `read(block)`, which opens, seeks, closes and returns the documents of a block.
    """

    def __init__(self, name: str, parts: Sequence[TextFile | JsonLines | ParquetFile | TextTable]) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.size = sum(part.size for part in self.parts)
        self._ends = list(accumulate(part.blocks for part in self.parts))

    @property
    def blocks(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, block: int) -> Iterator[str]:
        which = bisect_right(self._ends, block)
        first = self._ends[which - 1] if which else 0
        return self.parts[which].read(block - first)

    def fingerprint(self) -> str:
        """A hash of the local files: of all bytes, or of evenly spread samples and the times of the last
        change if they are large."""
        paths = [str(part.path) for part in self.parts if not isinstance(part, TextTable)]
        files = [(path, os.stat(path)) for path in paths if "://" not in path]
        total = sum(stat.st_size for _, stat in files)
        spacing = max(_SAMPLE_BYTES, total * _SAMPLE_BYTES // _HASHED_BYTES)
        digest = sha256()
        for path, stat in files:
            changed = stat.st_mtime_ns if spacing > _SAMPLE_BYTES else ""
            digest.update(f"{stat.st_size} {changed};".encode())
            with open(path, "rb") as file:
                for offset in range(0, stat.st_size, spacing):
                    file.seek(offset)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:16]


# ------------------------------------------------------------------------- order and held-out split


@lru_cache(4)
def shuffled(size: int, *key: int) -> list[int]:
    """range(size) in a random order, which is the same on every machine for the same `key`."""
    order = list(range(size))
    random.Random(repr(key)).shuffle(order)
    return order


class Split:
    """range(size) in two: `held_out` numbers for validation, the others for training.

    It does not depend on the run's seed, so that runs with different seeds compare."""

    KEY = 0x6F6F6D7068

    def __init__(self, size: int, fraction: float) -> None:
        self.size = size
        # At least one of each, if there are two.
        self.held_out = min(max(ceil(size * fraction), 1), size - 1) if fraction > 0 else 0
        self._order = shuffled(size, self.KEY)
        self._held_out = frozenset(self._order[: self.held_out])

    def is_held_out(self, number: int) -> bool:
        return number in self._held_out

    def training(self, index: int) -> int:
        return self._order[self.held_out + index]

    def validation(self, index: int) -> int:
        """In random order, so that the first few represent all."""
        return self._order[index]


# ------------------------------------------------------------------------------- text and JSONL


@dataclass(frozen=True)
class LineFile:
    """A file of lines. Block k runs from the first line that starts at or after k * block_bytes to the start
    of block k + 1. Both ends are found by a seek and a short read: opening a file reads none of it."""

    path: Path
    size: int
    block_bytes: int

    whole_lines: ClassVar[bool] = False  # never cut a line, however long

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block_bytes)

    def read_bytes(self, block: int) -> tuple[int, bytes]:
        """The offset of the block, and its bytes."""
        try:
            with self.path.open("rb") as file:
                start, stop = self._start(file, block), self._start(file, block + 1)
                file.seek(start)
                return start, file.read(stop - start)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error

    def _start(self, file: BinaryIO, block: int) -> int:
        wanted = block * self.block_bytes
        if block == 0 or wanted >= self.size:
            return min(wanted, self.size)
        # From the byte before: a line that starts exactly at `wanted` belongs to this block.
        position = wanted - 1
        file.seek(position)
        while position < self.size and (read := file.read(min(_READ_BYTES, self.size - position))):
            newline = read.find(b"\n")
            if newline >= 0:
                return position + newline + 1
            position += len(read)
            if position >= wanted + self.block_bytes and not self.whole_lines:
                # Inside a long line: at the first byte from `wanted` on that starts a UTF-8 character.
                file.seek(wanted)
                near = file.read(4)
                starts = [shift for shift, byte in enumerate(near) if byte & 0xC0 != 0x80]
                return wanted + (starts[0] if starts else len(near) % 4)
        return self.size


@dataclass(frozen=True)
class TextFile(LineFile):
    """Plain text; each block is a document. skip_undecodable: leave out blocks that are not UTF-8."""

    skip_undecodable: bool = False

    def read(self, block: int) -> Iterator[str]:
        start, content = self.read_bytes(block)
        try:
            text = _decode(self.path, start, content)
        except UserError:
            if self.skip_undecodable:
                return
            raise
        if text:
            yield text


@dataclass(frozen=True)
class JsonLines(LineFile):
    """One JSON object per line; the document is the string in `field`. Empty lines are skipped."""

    field: str = "text"
    whole_lines: ClassVar[bool] = True

    def read(self, block: int) -> Iterator[str]:
        start, content = self.read_bytes(block)
        for number, line in enumerate(content.split(b"\n")):
            if line.strip() and (document := self._document(line, start, number)):
                yield document

    def _document(self, line: bytes, start: int, number: int) -> str:
        try:
            row = json.loads(line)
        except ValueError as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8"
            what = f"broken JSON ({reason}); give one JSON object per line"
            raise self._error(start, number, what) from error
        text = row.get(self.field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            found = f"fields: {', '.join(row)}" if isinstance(row, dict) else f"it is a {type(row).__name__}"
            what = f'no text in field "{self.field}" ({found}); name the field of the text, data.field=...'
            raise self._error(start, number, what)
        # An escaped half of a surrogate pair is valid JSON and not valid text.
        return text.encode("utf-8", "replace").decode() if b"\\u" in line else text

    def _error(self, start: int, number: int, what: str) -> UserError:
        """With file:line. Lines before the block are counted only here."""
        lines = number + 1
        with self.path.open("rb") as file:
            left = start
            while left and (read := file.read(min(MiB, left))):
                lines += read.count(b"\n")
                left -= len(read)
        return UserError(f"{self.path}:{lines}: {what}")


def _decode(path: Path, start: int, content: bytes, final: bool = True) -> str:
    """The text of bytes at offset `start`. final False: the last character may be cut in half."""
    try:
        if (nul := content.find(b"\0")) >= 0:
            raise ValueError(f"a NUL byte at offset {start + nul}")
        return getincrementaldecoder("utf-8-sig" if start == 0 else "utf-8")().decode(content, final)
    except ValueError as error:
        why = f"not UTF-8 at offset {start + error.start}" if isinstance(error, UnicodeDecodeError) else error
        raise UserError(
            f"{path} is not a text file ({why}); give UTF-8 text, JSONL (.jsonl) or parquet (.parquet), or "
            "leave it out with a pattern, e.g. 'folder/*.md'"
        ) from error


# ----------------------------------------------------------------------------- parquet and tables


@dataclass(frozen=True)
class ParquetFile:
    """One column of documents. A block is a row group, or one of `slices` equal parts of its rows."""

    path: str  # or a URL
    groups: int
    slices: int
    size: int
    column: str = "text"

    @property
    def blocks(self) -> int:
        return self.groups * self.slices

    def read(self, block: int) -> Iterator[str]:
        group, part = divmod(block, self.slices)
        with _opened_parquet(self.path) as table:
            rows = table.metadata.row_group(group).num_rows
            first, last = rows * part // self.slices, rows * (part + 1) // self.slices
            row = 0
            for batch in table.iter_batches(256, row_groups=[group], columns=[self.column]):
                if row >= last:
                    return
                wanted = batch.column(0)[max(first - row, 0) : max(last - row, 0)]
                row += len(batch)
                yield from filter(None, wanted.to_pylist())


def open_parquet(path: str, column: str = "text") -> ParquetFile:
    """Reads the footer: columns and row groups."""
    with _opened_parquet(path) as table:
        schema, metadata = table.schema_arrow, table.metadata
        if column not in schema.names:
            raise UserError(
                f'{path} has no column "{column}" (it has {", ".join(schema.names)}); '
                "name the column that holds the text"
            )
        kind = str(schema.field(column).type)
        # "string" also begins string_view; a dictionary is how text may be stored.
        if not kind.removeprefix("dictionary<values=").startswith(("string", "large_string")):
            raise UserError(f'column "{column}" of {path} holds {kind}, not text')
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        sizes = [group.total_byte_size for group in groups]
        slices = 1
        # Few row groups are cut further, if it is cheap to read a group again for each slice.
        if 0 < len(groups) < 32 and max(sizes) <= 8 * MiB:
            slices = max(1, min(-(-32 // len(groups)), min(group.num_rows for group in groups)))
        size = sum(sizes) if metadata.num_rows else 0
        return ParquetFile(path, len(groups), slices, size, column)


@contextmanager
def _opened_parquet(path: str) -> Iterator[Any]:
    arrow = need("pyarrow", "reading parquet")
    parquet = need("pyarrow.parquet", "reading parquet")
    try:
        with need("fsspec", "reading parquet").open(path, "rb") as file:
            yield parquet.ParquetFile(file)
    except (arrow.ArrowInvalid, arrow.ArrowIOError) as error:
        raise UserError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class TextTable:
    """A hub data set mapped from disk, with a line of text per row. A block is 256 rows, one document."""

    table: Any
    size: int
    column: str = "text"
    ROWS: ClassVar[int] = 256

    @property
    def blocks(self) -> int:
        return -(-len(self.table) // self.ROWS)

    def read(self, block: int) -> Iterator[str]:
        rows = self.table[block * self.ROWS : (block + 1) * self.ROWS][self.column]
        text = "".join(row if row.endswith("\n") else row + "\n" for row in rows if row)
        if text:
            yield text


# ----------------------------------------------------------------------------------------- the hub


@dataclass(frozen=True)
class HubEntry:
    """streamed: read over the network block by block, never stored whole."""

    repository: str
    configuration: str | None
    streamed: bool = False


HUB_TEXTS = {
    "wikitext-2": HubEntry("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "wikitext-103": HubEntry("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "fineweb-edu": HubEntry("HuggingFaceFW/fineweb-edu", "sample-10BT", streamed=True),
}
HUB_IMAGES = {"cifar10": HubEntry("uoft-cs/cifar10", None)}
TEXT_NAMES = ("stdlib", *HUB_TEXTS)
IMAGE_NAMES = ("photographs", *HUB_IMAGES)


def open_hub_text(name: str) -> Corpus:
    entry = HUB_TEXTS[name]
    if not entry.streamed:
        table = load_hub(name, entry)
        return Corpus(name, [TextTable(table, int(table.data.nbytes))])
    builder = _from_hub("load_dataset_builder", name, entry)
    # Parquet files: read by row groups, they shuffle and resume like local files.
    urls = [str(url) for url in builder.config.data_files["train"]]
    return Corpus(name, [open_parquet(url) for url in urls])


def load_hub(name: str, entry: HubEntry) -> Any:
    """The rows of the training split."""
    return _from_hub("load_dataset", name, entry, split="train")


def _datasets(name: str) -> Any:
    """`datasets`, after a check that its server answers: its own retries take minutes."""
    datasets = need("datasets", f"the data set {name}")
    settings = (os.environ.get(key, "").upper() for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    if any(value in ("1", "ON", "YES", "TRUE") for value in settings):
        return datasets
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    server = proxy or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not is_reachable(server):
        raise UserError(
            f"{name} is on the hub, and {urlsplit(server).hostname} does not answer; give a path, "
            '"stdlib" (text) or "photographs" (images), or set HF_HUB_OFFLINE=1 if it is on this machine'
        )
    return datasets


def _from_hub(function: str, name: str, entry: HubEntry, **options: Any) -> Any:
    """What a function of `datasets` returns for the entry."""
    load = getattr(_datasets(name), function)
    try:
        return load(entry.repository, entry.configuration, **options)
    except Exception as error:  # the library's, the network's and the formats' errors have no common base
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f'{name} cannot be loaded from the hub ({first}); give a path to a file, or "stdlib"'
        ) from error


def is_reachable(url: str, timeout: float = 5.0) -> bool:
    """Whether a TCP connection can be opened."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        address = (parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443))
        socket.create_connection(address, timeout).close()
    except (OSError, ValueError):
        return False
    return True


# ----------------------------------------------------------------------------------- names and paths


def open_text(source: str, field: str = "text") -> Corpus:
    """The corpus of a name or a path. A name wins over a file of the same name: write ./name for the file."""
    if source == "stdlib":
        return _open_stdlib()
    if source in HUB_TEXTS:
        return open_hub_text(source)
    if source in IMAGE_NAMES:
        raise UserError(f"{source} has images, not text; choose from {', '.join(TEXT_NAMES)} or a path")
    # A bare word that is not a file was meant as a name; one with a separator or a suffix, as a path.
    is_path = os.sep in source or any(sign in source for sign in ".*?[~")
    if not source or not (is_path or Path(source).exists()):
        close = nearest(source, TEXT_NAMES)
        hint = f" (nearest name: {close})" if close else ""
        raise UserError(
            f"there is no data source {source!r}{hint}; choose from {', '.join(TEXT_NAMES)} or a path"
        )
    try:
        return _open_path(source, field)
    except OSError as error:  # the run that would be resumed has not started
        raise UserError(f"{error.filename or source} cannot be read: {error.strerror or error}") from error


def _open_path(source: str, field: str) -> Corpus:
    """A file, a folder (every file below it that is not hidden, sorted) or a glob."""
    path = Path(source).expanduser()
    if path.is_dir():
        paths = _training_split(list(_files_below(path)), source)
    elif path.is_file():
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty; give a file with text in it")
        paths = [path]
    elif glob.has_magic(source):
        paths = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not paths:
            raise UserError(f"no file matches {source}; give a file, a folder or a glob that matches files")
    else:
        close = nearest(path.name, os.listdir(path.parent)) if path.parent.is_dir() else None
        hint = f" (nearest name: {path.parent / close})" if close else ""
        raise UserError(f"{source} does not exist{hint}; give a file, a folder or a glob")
    filled = [path for path in paths if path.stat().st_size > 0]
    if not filled:
        what = "has no files" if not paths else f"has {len(paths)} files, all of them empty"
        raise UserError(f"{source} {what}; give text, JSONL (.jsonl) or parquet (.parquet) files")
    is_parquet = {path: path.suffix.lower() == ".parquet" for path in filled}
    block = _block_bytes(sum(path.stat().st_size for path in filled if not is_parquet[path]))
    parts: list[TextFile | JsonLines | ParquetFile] = []
    for path in filled:
        if is_parquet[path]:
            parts.append(open_parquet(str(path), field))
            continue
        with path.open("rb") as file:  # a binary file is refused before training starts
            _decode(path, 0, file.read(4 * KiB), final=False)
        size = path.stat().st_size
        if path.suffix.lower() in _JSON_LINES:
            parts.append(JsonLines(path, size, block, field))
        else:
            parts.append(TextFile(path, size, block))
    if not any(part.size for part in parts):
        raise UserError(f"{source} has no rows; give a file with text in it")
    return Corpus(source, parts)


def _training_split(paths: list[Path], source: str) -> list[Path]:
    """Of a data set in the hub's layout (NAME/train-00000-of-00001.parquet), the training split; else all."""
    split = [path for path in paths if _HUB_SPLIT.fullmatch(path.name)]
    folders = {str(path.parent): None for path in split}
    if len(folders) > 1:
        raise UserError(f"{source} has {len(folders)} data sets; give one of {', '.join(folders)}")
    return split or paths


def _open_stdlib() -> Corpus:
    """The Python source files of this interpreter's standard library: real text on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sized = [(path, path.stat().st_size) for path in _files_below(root) if path.suffix == ".py"]
    filled = [(path, size) for path, size in sized if size > 0]
    if not filled:
        raise UserError(f"this Python has no source files of its standard library ({root}); give a path")
    block = _block_bytes(sum(size for _, size in filled))
    # Python's own tests have files in other encodings on purpose.
    return Corpus("stdlib", [TextFile(path, size, block, skip_undecodable=True) for path, size in filled])


def _block_bytes(total: int) -> int:
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, total // _WANTED_BLOCKS))


def _files_below(root: Path) -> Iterator[Path]:
    """In a stable order, without hidden files, installed packages and the folders of runs."""

    def fail(error: OSError) -> None:  # by default, what cannot be read would be left out
        raise error

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in ("site-packages", "dist-packages", "__pycache__")
            and not is_run(Path(folder, name))
        )
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path
