"""Repeated layers as one row: tensors of the same line, shape, dtype and stage, their modules collapsed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from oomph.records import Alive, Site, Stage


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors at the peak that a reader would call the same one."""

    bytes: int  # of all of them together
    count: int
    shape: tuple[int, ...]
    dtype: str
    ops: tuple[str, ...]  # each once, in order of first appearance
    module: str  # "transformer.h.{0..11}.attn"
    site: Site | None
    stage: Stage


def group_alike(at_peak: Iterable[Alive]) -> list[Group]:
    """One Group per (line, shape, dtype, stage), largest first.

    Without a line, tensors are alike only if their modules differ in nothing but layer numbers:
    two matrices of the same shape in unrelated modules stay apart.
    """
    members: dict[tuple[object, ...], list[Alive]] = {}
    for alive in at_peak:
        one = alive.allocation
        where = (one.site.file, one.site.line) if one.site else (_pattern(one.module), one.op)
        members.setdefault((where, one.shape, one.dtype, one.stage), []).append(alive)
    groups = [_merge(alike) for alike in members.values()]
    return sorted(groups, key=lambda group: -group.bytes)  # stable: ties keep their order


def collapse_modules(paths: Iterable[str]) -> str:
    """Many module paths as one: `h.{0..11}.attn`; never names a module that is not among `paths`."""
    distinct = list(dict.fromkeys(path for path in paths if path))
    if not distinct:
        return ""
    by_pattern: dict[str, list[str]] = {}
    for path in distinct:
        by_pattern.setdefault(_pattern(path), []).append(path)
    collapsed = [_collapse_numbers(alike) for alike in by_pattern.values()]
    whole = _collapse_names(collapsed)
    if whole is not None:
        return whole
    more = len(distinct) - len(next(iter(by_pattern.values())))
    return f"{collapsed[0]} and {more} more"


def _merge(alike: list[Alive]) -> Group:
    first = alike[0].allocation
    return Group(
        bytes=sum(alive.bytes for alive in alike),
        count=len(alike),
        shape=first.shape,
        dtype=first.dtype,
        ops=tuple(dict.fromkeys(alive.allocation.op for alive in alike)),
        module=collapse_modules(alive.allocation.module for alive in alike),
        site=first.site,
        stage=first.stage,
    )


def _pattern(module: str) -> str:
    """The path with its layer numbers blanked: two layers of one stack have the same pattern."""
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))


def _collapse_numbers(paths: list[str]) -> str:
    """Paths of one pattern; a varying number becomes `{0..11}`, or `*` where a range would claim too much."""
    columns = _distinct_parts([path.split(".") for path in paths])
    every_combination = math.prod(map(len, columns)) == len(paths)
    return ".".join(
        column[0] if len(column) == 1 else (_numbers(column) if every_combination else "*")
        for column in columns
    )


def _distinct_parts(paths: list[list[str]]) -> list[list[str]]:
    """For each position in paths of one length, the parts that occur there, each once."""
    return [list(dict.fromkeys(parts)) for parts in zip(*paths, strict=True)]


def _numbers(parts: list[str]) -> str:
    values = sorted(map(int, parts))
    if len(values) > 2 and values[-1] - values[0] == len(values) - 1:
        return f"{{{values[0]}..{values[-1]}}}"
    if len(values) <= 4:
        return "{" + ",".join(map(str, values)) + "}"
    return f"{{{len(values)} of {values[0]}..{values[-1]}}}"


def _collapse_names(paths: list[str]) -> str | None:
    """Paths that differ in one name become `attn.{q_proj,k_proj}`; None when they differ in more."""
    if len(paths) == 1:
        return paths[0]
    parts = [_split(path) for path in paths]
    if len({len(one) for one in parts}) != 1 or len(paths) > 4:
        return None
    columns = _distinct_parts(parts)
    varying = [column for column in columns if len(column) > 1]
    if len(varying) != 1 or any("{" in name or name == "*" for name in varying[0]):
        return None
    return ".".join(column[0] if len(column) == 1 else "{" + ",".join(column) + "}" for column in columns)


def _split(path: str) -> list[str]:
    """At the dots, but not at those inside `{0..11}`."""
    return re.findall(r"(?:\{[^}]*\}|[^.{])+", path)
