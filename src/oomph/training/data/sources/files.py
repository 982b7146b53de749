"""From what a user wrote (a file, a folder, a glob, "stdlib") to a corpus; bad paths are one line each."""

from __future__ import annotations

import difflib
import glob
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from oomph.errors import UserError
from oomph.training.data.sources.corpus import Corpus, Part
from oomph.training.data.sources.lines import JsonLines, TextFile, check_text
from oomph.training.data.sources.parquet import open_parquet
from oomph.training.run_folder import is_run
from oomph.units import KiB, MiB

_JSON_LINES = (".jsonl", ".ndjson", ".json")
# A block is the unit of shuffling and of what is held out. Small data are cut finer, to have enough.
_LARGEST_BLOCK = MiB
_SMALLEST_BLOCK = KiB
_WANTED_BLOCKS = 64


def open_path(source: str, field: str = "text") -> Corpus:
    """A file, a folder (every file below it that is not hidden, sorted) or a glob."""
    found = _matches(source)
    paths = found if isinstance(found, list) else [found]
    filled = [path for path in paths if path.stat().st_size > 0]
    if not filled:
        if isinstance(found, Path):
            raise UserError(f"{found} is empty; give a file with text in it")
        what = "has no files" if not paths else f"has {len(paths)} files, all of them empty"
        raise UserError(f"{source} {what}; give text, JSONL (.jsonl) or parquet (.parquet) files")
    parts = _parts(filled, field)
    if not any(part.size for part in parts):
        raise UserError(f"{source} has no rows; give a file with text in it")
    return Corpus(source, parts)


def open_stdlib() -> Corpus:
    """The Python source files of the standard library of this interpreter: real text on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sized = [(path, path.stat().st_size) for path in _below(root) if path.suffix == ".py"]
    filled = [(path, size) for path, size in sized if size > 0]
    if not filled:
        raise UserError(f"this Python has no source files of its standard library ({root}); give a path")
    block = _block_bytes(sum(size for _, size in filled))
    # Python's own tests have files in other encodings on purpose.
    return Corpus("stdlib", [TextFile(path, size, block, skip_undecodable=True) for path, size in filled])


def _parts(paths: list[Path], field: str) -> list[Part]:
    lines = [path for path in paths if path.suffix.lower() != ".parquet"]
    block = _block_bytes(sum(path.stat().st_size for path in lines))
    parts: list[Part] = []
    for path in paths:
        if path.suffix.lower() == ".parquet":
            parts.append(open_parquet(str(path), field))
            continue
        check_text(path)
        size = path.stat().st_size
        if path.suffix.lower() in _JSON_LINES:
            parts.append(JsonLines(path, size, block, field))
        else:
            parts.append(TextFile(path, size, block))
    return parts


def _block_bytes(total: int) -> int:
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, total // _WANTED_BLOCKS))


def _matches(source: str) -> Path | list[Path]:
    """One file as itself; the files of a folder or a glob as a sorted list."""
    path = Path(source).expanduser()
    if path.is_dir():
        return list(_below(path))
    if path.is_file():
        return path
    if glob.has_magic(source):
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        files = [name for name in found if name.is_file()]
        if not files:
            raise UserError(f"no file matches {source}; give a file, a folder or a glob that matches files")
        return files
    raise UserError(f"{source} does not exist{_nearest(path)}; give a file, a folder or a glob")


def _below(root: Path) -> Iterator[Path]:
    """Files below a folder in a stable order, without hidden ones, installed packages and what runs wrote."""
    for folder, folders, files in os.walk(root):
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


def _nearest(path: Path) -> str:
    """The name in the same folder that looks most like the one given; or the first folder that is missing."""
    for parent in path.parents:
        if parent.is_dir():
            missing = path.relative_to(parent).parts[0]
            close = difflib.get_close_matches(missing, os.listdir(parent), n=1)
            return f" (nearest name: {parent / close[0]})" if close else ""
    return ""
