"""Compare a measured op log with a predicted one: first differences, then sums by op.

    python -m benchmarks.accuracy diverge NAME measured.jsonl.gz

Two logs of one program agree almost everywhere, so they are walked together; where they differ, the rows
until they agree again are found a short way ahead.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from oomph.cli.measure import predicted_rows
from oomph.measurement.oplog import OpRow, short_name

_MEANING = {
    "only measured": "the op ran on the GPU alone",
    "only predicted": "the op was predicted alone",
    "outputs": "other shapes or dtypes",
    "net": "bytes kept by the op (after - before)",
    "requested": "bytes asked for, before rounding",
    "high": "bytes needed while it ran (high - before)",
    "between ops": "bytes that came or went since the row before (frees, mostly)",
}
_WINDOW = 400  # rows looked ahead on each side: more than a transformer block's forward or backward
# Ops whose result shares its input's storage; whether they are logged at all is a detail of the tracer.
_VIEWS = frozenset(
    """
    alias as_strided chunk detach diagonal expand expand_as lift_fresh movedim narrow permute reshape
    select slice split split_with_sizes squeeze swapaxes t transpose unbind unfold unsafe_chunk
    unsafe_split unsqueeze view view_as view_as_complex view_as_real _reshape_alias _unsafe_view _conj
    real imag detach_
    """.split()
)


def write_rows(path: Path, rows: Iterable[OpRow]) -> None:
    """Gzipped JSON lines, one row each."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row._asdict(), separators=(",", ":")) + "\n")


def divergence_text(target: Any, measured: Path, gpu: str, limit: int) -> str:
    """The differences between a measured op log and the prediction of the same steps."""
    with gzip.open(measured, "rt", encoding="utf-8") as file:
        rows = [OpRow(*(row[name] for name in OpRow._fields)) for row in map(json.loads, file)]
    return render(rows, predicted_rows(target, gpu, rows), limit)


class Difference(NamedTuple):
    """One op on which the logs disagree. `bytes` is measured less predicted."""

    aspect: str
    bytes: int
    measured: OpRow | None
    predicted: OpRow | None

    @property
    def op(self) -> str:
        return short_name((self.measured or self.predicted).op)  # type: ignore[union-attr]


def render(measured: Sequence[OpRow], predicted: Sequence[OpRow], limit: int = 20) -> str:
    """The peaks, the first differences, then the sums by op. Views are left out: they own no memory."""
    mine, theirs = ([row for row in rows if not is_view(row)] for rows in (measured, predicted))
    pairs = list(align(mine, theirs))
    aligned = sum(None not in pair for pair in pairs)
    lines = [f"{len(mine)} measured ops, {len(theirs)} predicted, {aligned} aligned (views left out)"]
    for side, rows in (("measured", mine), ("predicted", theirs)):
        if rows:
            high = max(rows, key=lambda row: row.high)
            lines.append(f"  {side} highest: {high.high:,} B [{high.phase}] {high.op} {high.outputs}")
    found = list(_differences(pairs))
    if not found:
        return "\n".join([*lines, "", "no differences"])
    lines += ["", f"first differences ({min(limit, len(found))} of {len(found)})", *map(_line, found[:limit])]
    groups: dict[tuple[str, str], list[Difference]] = {}
    for one in found:
        groups.setdefault((one.aspect, one.op), []).append(one)
    most = sorted(groups.items(), key=lambda item: -sum(abs(one.bytes) for one in item[1]))
    lines += ["", f"by op, most bytes first ({min(limit, len(most))} of {len(most)})"]
    for (aspect, op), group in most[:limit]:
        total = sum(one.bytes for one in group)
        lines += [f"  {op}: {_MEANING[aspect]}: {len(group)} x, {total:+,} B in sum; first:", _line(group[0])]
    return "\n".join(lines)


def _line(one: Difference) -> str:
    text = f"  [{(one.measured or one.predicted).phase}] {one.op}: {one.aspect} {one.bytes:+,} B"  # type: ignore[union-attr]
    for side, row in (("measured", one.measured), ("predicted", one.predicted)):
        if row is not None:
            text += f" | {side} {row.outputs or '-'} net {row.after - row.before:+,}"
            text += f" high {row.high - row.before:+,} requested {row.requested:,} in {row.n_allocs}"
    return text


Pair = tuple[OpRow | None, OpRow | None]  # of the two logs; None where the op ran on the other side alone


def _differences(pairs: Sequence[Pair]) -> Iterator[Difference]:
    previous: Pair = (None, None)
    for m, p in pairs:
        if m is None or p is None:
            row: OpRow = m or p  # type: ignore[assignment]
            weight = max(row.high - row.before, row.requested, abs(row.after - row.before))
            yield (
                Difference("only predicted", -weight, None, p)
                if m is None
                else Difference("only measured", weight, m, None)
            )
        else:
            requested = m.requested - p.requested
            if m.outputs != p.outputs:
                yield Difference("outputs", requested, m, p)
            gap = 0
            if (
                previous[0] is not None and previous[1] is not None
            ):  # these rows follow each other on both sides
                gap = (m.before - previous[0].after) - (p.before - previous[1].after)
            sizes = {
                "net": (m.after - m.before) - (p.after - p.before),
                "requested": requested,
                "high": (m.high - m.before) - (p.high - p.before),
                "between ops": gap,
            }
            yield from (Difference(aspect, size, m, p) for aspect, size in sizes.items() if size)
        previous = m, p


def is_view(row: OpRow) -> bool:
    """Whether the op only looks at existing memory (and the log agrees that it took none)."""
    takes_none = row.n_allocs == 0 and row.after == row.before
    # An optimizer's step is bracketed by profiler marks, which are ops in name alone.
    return takes_none and (short_name(row.op) in _VIEWS or row.op.startswith("profiler"))


def align(measured: Sequence[OpRow], predicted: Sequence[OpRow]) -> Iterator[Pair]:
    """In program order; each row of either log once. Phase by phase, so that a difference in one cannot push
    the next out of step."""
    runs = [[list(run) for _, run in groupby(rows, lambda row: row.phase)] for rows in (measured, predicted)]
    if [run[0].phase for run in runs[0]] != [run[0].phase for run in runs[1]]:
        runs = [[list(measured)], [list(predicted)]]
    for mine, theirs in zip(*runs, strict=True):
        yield from _walk(mine, theirs)


def _walk(mine: list[OpRow], theirs: list[OpRow]) -> Iterator[Pair]:
    a, b = ([(short_name(row.op), row.outputs) for row in rows] for rows in (mine, theirs))
    i = j = 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and a[i] == b[j]:
            yield mine[i], theirs[j]
            i, j = i + 1, j + 1
            continue
        ahead = SequenceMatcher(None, a[i : i + _WINDOW], b[j : j + _WINDOW], autojunk=False)
        # The last of the blocks is empty: nothing agrees within the window.
        skip_a, skip_b, _ = ahead.get_matching_blocks()[0]
        yield from _same_names(mine[i : i + skip_a], theirs[j : j + skip_b])
        i, j = i + skip_a, j + skip_b


def _same_names(mine: Sequence[OpRow], theirs: Sequence[OpRow]) -> Iterator[Pair]:
    """Rows between two places that agree: the same op with other outputs still makes a pair."""
    names = ([short_name(row.op) for row in rows] for rows in (mine, theirs))
    for tag, i, k, j, m in SequenceMatcher(None, *names, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from zip(mine[i:k], theirs[j:m], strict=True)
        else:
            yield from ((row, None) for row in mine[i:k])
            yield from ((None, row) for row in theirs[j:m])
