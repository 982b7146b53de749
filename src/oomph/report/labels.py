"""Short labels: file names relative to the project, ranges of modules, and groups of tensors alike."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oomph.records import Alive, Site, Stage

_INSTALLED = ("site-packages", "dist-packages")


def printable(text: str, most: int = 300) -> str:
    """`text` on one line of at most `most` characters, with control characters as escapes."""
    if len(text) > most:
        text = f"{text[: most * 2 // 3]}...{text[-most // 4 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def short_path(file: str, base: Path | None = None) -> str:
    """`file` relative to `base` (default: the current directory) when below it, otherwise its last parts."""
    if file.startswith("<"):  # "<stdin>", "<string>": not a file at all
        return file
    path = Path(file)
    # An environment often lives below the current directory, so this comes first.
    for marker in _INSTALLED:
        if marker in path.parts:
            last = len(path.parts) - 1 - path.parts[::-1].index(marker)
            return Path(*path.parts[last + 1 :]).as_posix()
    if not path.is_absolute():
        return path.as_posix()
    base = base or Path.cwd()
    if path.is_relative_to(base):
        return path.relative_to(base).as_posix()
    if len(path.parts) <= 4:
        return path.as_posix()
    return ".../" + Path(*path.parts[-3:]).as_posix()


def file_and_line(site: Site, base: Path | None = None) -> str:
    """`loss.py:41`"""
    return f"{printable(short_path(site.file, base))}:{site.line}"


def source_code(site: Site) -> str:
    """The line itself; "" where its file cannot be read."""
    return printable(linecache.getline(site.file, site.line).strip())


def called_from(site: Site) -> str:
    """`first called from train.py:31  trainer.train()`; "" for a line of the user's own."""
    caller = site.caller
    return f"first called from {file_and_line(caller)}  {source_code(caller)}".rstrip() if caller else ""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one source line, shape, dtype and stage: one row of a report. Its strings are printable."""

    bytes: int  # of all of them together
    count: int
    shape: tuple[int, ...]
    dtype: str
    ops: tuple[str, ...]  # each once, in order of first appearance
    module: str  # "transformer.h.{0..11}.attn"
    site: Site | None
    stage: Stage


def group_tensors(at_peak: Iterable[Alive]) -> list[TensorGroup]:
    """One group per (line, shape, dtype, stage), largest first.

    Tensors without a line are grouped only if their modules differ in nothing but layer numbers: two matrices
    of the same shape in unrelated modules stay apart.
    """
    members: dict[tuple[object, ...], list[Alive]] = {}
    for alive in at_peak:
        one = alive.allocation
        where = (one.site.file, one.site.line) if one.site else (without_numbers(one.module), one.op)
        members.setdefault((where, one.shape, one.dtype, one.stage), []).append(alive)
    groups = [_group(alike) for alike in members.values()]
    return sorted(groups, key=lambda group: -group.bytes)  # stable: ties keep their order


def collapse_modules(paths: Iterable[str]) -> str:
    """Many module paths as one: `h.{0..11}.attn`; never names a module that is not among `paths`."""
    distinct = list(dict.fromkeys(path for path in paths if path))
    if not distinct:
        return ""
    stacks: dict[str, list[str]] = {}
    for path in distinct:
        stacks.setdefault(without_numbers(path), []).append(path)
    collapsed = [_collapse_numbers(stack) for stack in stacks.values()]
    whole = _collapse_names(collapsed)
    if whole is not None:
        return whole
    more = len(distinct) - len(next(iter(stacks.values())))
    return f"{collapsed[0]} and {more} more"


def _group(alike: list[Alive]) -> TensorGroup:
    first = alike[0].allocation
    return TensorGroup(
        bytes=sum(alive.bytes for alive in alike),
        count=len(alike),
        shape=first.shape,
        dtype=printable(first.dtype),
        ops=tuple(map(printable, dict.fromkeys(alive.allocation.op for alive in alike))),
        module=printable(collapse_modules(alive.allocation.module for alive in alike)),
        site=first.site,
        stage=first.stage,
    )


def without_numbers(module: str) -> str:
    """Two layers of one stack give the same result."""
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))


def _collapse_numbers(paths: list[str]) -> str:
    """Paths of one stack; a varying number becomes `{0..11}`, or `*` where a range would claim too much."""
    columns = _distinct_parts([path.split(".") for path in paths])
    every_combination = math.prod(map(len, columns)) == len(paths)
    return ".".join(
        column[0] if len(column) == 1 else (_range(column) if every_combination else "*")
        for column in columns
    )


def _collapse_names(paths: list[str]) -> str | None:
    """Paths that differ in one name become `attn.{q_proj,k_proj}`; None when they differ in more."""
    if len(paths) == 1:
        return paths[0]
    # Split at the dots, but not at those inside `{0..11}`.
    parts = [re.findall(r"(?:\{[^}]*\}|[^.{])+", path) for path in paths]
    if len({len(one) for one in parts}) != 1 or len(paths) > 4:
        return None
    columns = _distinct_parts(parts)
    varying = [column for column in columns if len(column) > 1]
    if len(varying) != 1 or any("{" in name or name == "*" for name in varying[0]):
        return None
    return ".".join(column[0] if len(column) == 1 else "{" + ",".join(column) + "}" for column in columns)


def _distinct_parts(paths: list[list[str]]) -> list[list[str]]:
    """For each position in paths of one length, the parts that occur there, each once."""
    return [list(dict.fromkeys(parts)) for parts in zip(*paths, strict=True)]


def _range(parts: list[str]) -> str:
    values = sorted(map(int, parts))
    if len(values) > 2 and values[-1] - values[0] == len(values) - 1:
        return f"{{{values[0]}..{values[-1]}}}"
    if len(values) <= 4:
        return "{" + ",".join(map(str, values)) + "}"
    return f"{{{len(values)} of {values[0]}..{values[-1]}}}"
