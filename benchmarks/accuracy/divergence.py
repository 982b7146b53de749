"""Compare a measured op log with a predicted one, largest differences first.

    python -m benchmarks.accuracy diverge NAME measured.jsonl.gz

The logs are aligned by op and outputs, in time that grows with their length. A plain longest common
subsequence is quadratic and too slow for the tens of thousands of rows of a large model. Two logs of one
program agree almost everywhere, so it is enough to walk them together and, where they differ, to look a short
way ahead for the place at which they agree again.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal, NamedTuple

from oomph.cli.measure import predicted_rows
from oomph.measurement.oplog import OpRow, short_name
from oomph.units import counted

Aspect = Literal["only measured", "only predicted", "outputs", "net", "requested", "high", "between ops"]
_MEANING: dict[Aspect, str] = {
    "only measured": "the op ran on the GPU alone",
    "only predicted": "the op was predicted alone",
    "outputs": "other shapes or dtypes",
    "net": "bytes kept by the op (after - before)",
    "requested": "bytes asked for, before rounding",
    "high": "bytes needed while it ran (high - before)",
    "between ops": "bytes that came or went since the row before (frees, mostly)",
}


def write_rows(path: Path, rows: Iterable[OpRow]) -> None:
    """Gzipped JSON lines, one row each."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row._asdict(), separators=(",", ":")) + "\n")


def read_rows(path: Path) -> list[OpRow]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [OpRow(*(row[name] for name in OpRow._fields)) for row in map(json.loads, file)]


def divergence_text(target: Any, measured: Path, gpu: str, limit: int) -> str:
    """The differences between a measured op log and the prediction of the same steps."""
    rows = read_rows(measured)
    return render(compare(rows, predicted_rows(target, gpu, rows)), limit)


class Difference(NamedTuple):
    """One op on which the logs disagree. `bytes` is measured less predicted."""

    aspect: Aspect
    op: str
    phase: str
    bytes: int
    measured: OpRow | None
    predicted: OpRow | None
    row: int  # position in the measured log, or in the predicted one where it ran there alone


class Total(NamedTuple):
    """Differences of one aspect and one kind of op, summed."""

    aspect: Aspect
    op: str
    times: int
    bytes: int  # signed: measured less predicted
    absolute: int
    first: Difference


class Drift(NamedTuple):
    """A place at which the running difference of allocated bytes changed."""

    row: int
    phase: str
    op: str
    outputs: str
    difference: int  # measured less predicted, after this op
    change: int


class High(NamedTuple):
    """The row at which a log stands highest."""

    row: int
    phase: str
    op: str
    outputs: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """Where two logs differ."""

    n_measured: int
    n_predicted: int
    n_aligned: int
    measured_high: High | None
    predicted_high: High | None
    totals: tuple[Total, ...]  # most bytes first
    differences: tuple[Difference, ...]  # in program order
    drift: tuple[Drift, ...]  # in program order


def compare(measured: list[OpRow], predicted: list[OpRow]) -> Report:
    """Align the logs and collect every difference. Views are left out: they own no memory."""
    mine = [row for row in measured if not is_view(row)]
    theirs = [row for row in predicted if not is_view(row)]
    pairs = align(mine, theirs)
    differences = list(_differences(pairs, mine, theirs))
    return Report(
        n_measured=len(mine),
        n_predicted=len(theirs),
        n_aligned=sum(1 for pair in pairs if None not in pair),
        measured_high=_highest(mine),
        predicted_high=_highest(theirs),
        totals=_totals(differences),
        differences=tuple(differences),
        drift=tuple(_drift(pairs, mine, theirs)),
    )


def _differences(
    pairs: Sequence[AlignedRows], mine: list[OpRow], theirs: list[OpRow]
) -> Iterable[Difference]:
    previous: AlignedRows | None = None
    for pair in pairs:
        if pair.predicted is None:
            assert pair.measured is not None
            row = mine[pair.measured]
            yield Difference(
                "only measured", short_name(row.op), row.phase, _weight(row), row, None, pair.measured
            )
        elif pair.measured is None:
            row = theirs[pair.predicted]
            yield Difference(
                "only predicted", short_name(row.op), row.phase, -_weight(row), None, row, pair.predicted
            )
        else:
            m, p = mine[pair.measured], theirs[pair.predicted]
            for aspect, difference in _aspects(m, p):
                yield Difference(aspect, short_name(m.op), m.phase, difference, m, p, pair.measured)
            gap = _gap(previous, pair, mine, theirs)
            if gap:
                yield Difference("between ops", short_name(m.op), m.phase, gap, m, p, pair.measured)
        previous = pair


def _aspects(measured: OpRow, predicted: OpRow) -> Iterable[tuple[Aspect, int]]:
    requested = measured.requested - predicted.requested
    net = (measured.after - measured.before) - (predicted.after - predicted.before)
    high = (measured.high - measured.before) - (predicted.high - predicted.before)
    if measured.outputs != predicted.outputs:
        yield "outputs", requested
    if net:
        yield "net", net
    if requested:
        yield "requested", requested
    if high:
        yield "high", high


def _gap(previous: AlignedRows | None, pair: AlignedRows, mine: list[OpRow], theirs: list[OpRow]) -> int:
    """What came or went between two rows that follow each other on both sides."""
    if previous is None or previous.measured is None or previous.predicted is None:
        return 0
    assert pair.measured is not None
    assert pair.predicted is not None
    measured = mine[pair.measured].before - mine[previous.measured].after
    predicted = theirs[pair.predicted].before - theirs[previous.predicted].after
    return measured - predicted


def _weight(row: OpRow) -> int:
    """What an op that ran on one side alone is worth: the most it held, or what it asked for."""
    return max(row.high - row.before, row.requested, abs(row.after - row.before))


def _totals(differences: Iterable[Difference]) -> tuple[Total, ...]:
    grouped: dict[tuple[Aspect, str], list[Difference]] = {}
    for difference in differences:
        grouped.setdefault((difference.aspect, difference.op), []).append(difference)
    totals = [
        Total(aspect, op, len(group), sum(d.bytes for d in group), sum(abs(d.bytes) for d in group), group[0])
        for (aspect, op), group in grouped.items()
    ]
    return tuple(sorted(totals, key=lambda total: -total.absolute))


def _drift(pairs: Sequence[AlignedRows], mine: list[OpRow], theirs: list[OpRow]) -> Iterable[Drift]:
    running = 0
    for pair in pairs:
        if pair.measured is None or pair.predicted is None:
            continue
        row = mine[pair.measured]
        difference = row.after - theirs[pair.predicted].after
        if difference != running:
            yield Drift(
                pair.measured,
                row.phase,
                short_name(row.op),
                row.outputs,
                difference,
                difference - running,
            )
            running = difference


def _highest(rows: list[OpRow]) -> High | None:
    if not rows:
        return None
    index = max(range(len(rows)), key=lambda i: rows[i].high)
    row = rows[index]
    return High(index, row.phase, short_name(row.op), row.outputs, row.high)


def render(report: Report, limit: int = 20) -> str:
    """The report as plain text: the peaks, the first differences, then the totals by op."""
    lines = [
        f"{report.n_measured} measured ops, {report.n_predicted} predicted, {report.n_aligned} aligned "
        "(views left out)",
        _high_line("measured", report.measured_high),
        _high_line("predicted", report.predicted_high),
    ]
    if report.measured_high and report.predicted_high:
        real, guess = report.measured_high.bytes, report.predicted_high.bytes
        lines.append(
            f"  difference of the highest: {real - guess:+,} B"
            + (f" (predicted {(guess - real) / real:+.3%})" if real else "")
        )
    if not report.differences:
        return "\n".join([*lines, "", "no differences"])
    lines += ["", f"first differences ({min(limit, len(report.differences))} of {len(report.differences)})"]
    lines += [_difference_line(difference) for difference in report.differences[:limit]]
    lines += ["", f"by op, most bytes first ({min(limit, len(report.totals))} of {len(report.totals)})"]
    for total in report.totals[:limit]:
        lines.append(
            f"  {total.op}: {_MEANING[total.aspect]}: {total.times} x, {total.bytes:+,} B in sum, "
            f"{total.absolute:,} B in all; first:"
        )
        lines.append("  " + _difference_line(total.first))
    places = counted(len(report.drift), "place")
    lines += ["", f"running difference of allocated bytes, where it changes ({places})"]
    lines += [_drift_line(drift) for drift in report.drift[:limit]]
    largest = sorted(report.drift[limit:], key=lambda drift: -abs(drift.change))[:limit]
    if largest:
        lines += ["  ... and the largest changes after those"]
        lines += [_drift_line(drift) for drift in sorted(largest)]
    return "\n".join(lines)


def _high_line(side: str, high: High | None) -> str:
    if high is None:
        return f"  {side}: no ops"
    return f"  {side} highest: {high.bytes:,} B at row {high.row} [{high.phase}] {high.op} {high.outputs}"


def _difference_line(difference: Difference) -> str:
    text = f"  row {difference.row} [{difference.phase}] {difference.op}: {difference.aspect} "
    text += f"{difference.bytes:+,} B"
    if difference.measured is not None:
        text += f" | measured {_row_text(difference.measured)}"
    if difference.predicted is not None:
        text += f" | predicted {_row_text(difference.predicted)}"
    return text


def _row_text(row: OpRow) -> str:
    text = f"{row.outputs or '-'} net {row.after - row.before:+,} high {row.high - row.before:+,} "
    return text + f"requested {row.requested:,} in {row.n_allocs}"


def _drift_line(drift: Drift) -> str:
    return (
        f"  row {drift.row} [{drift.phase}] {drift.op} {drift.outputs}: "
        f"{drift.difference:+,} B (changed by {drift.change:+,})"
    )


# ---------------------------------------------------------------------------------------- alignment

_WINDOW = 400  # rows looked ahead on each side: more than a transformer block's forward or backward
_RUNS = (4, 2, 1)  # rows in a row that must agree before two places count as the same; longest first

# Ops whose result shares its input's storage; whether they are logged at all is a detail of the tracer.
_VIEWS = frozenset(
    """
    alias as_strided chunk detach diagonal expand expand_as lift_fresh movedim narrow permute reshape
    select slice split split_with_sizes squeeze swapaxes t transpose unbind unfold unsafe_chunk
    unsafe_split unsqueeze view view_as view_as_complex view_as_real _reshape_alias _unsafe_view _conj
    real imag detach_
    """.split()
)


class AlignedRows(NamedTuple):
    """Positions of one op in the two logs; None where it ran on the other side alone."""

    measured: int | None
    predicted: int | None


def is_view(row: OpRow) -> bool:
    """Whether the op only looks at existing memory (and the log agrees that it took none)."""
    takes_none = row.n_allocs == 0 and row.after == row.before
    # An optimizer's step is bracketed by profiler marks, which are ops in name alone.
    return takes_none and (short_name(row.op) in _VIEWS or row.op.startswith("profiler"))


def align(measured: Sequence[OpRow], predicted: Sequence[OpRow]) -> list[AlignedRows]:
    """In program order; each row of either log appears exactly once."""
    if _phases(measured) == _phases(predicted):
        return _by_phase(measured, predicted)
    return _walk(measured, predicted, 0, 0)


def _phases(rows: Sequence[OpRow]) -> list[str]:
    """The phases in the order in which they come, each run of rows once."""
    return [phase for phase, _, _ in _runs(rows)]


def _runs(rows: Sequence[OpRow]) -> list[tuple[str, int, int]]:
    runs: list[tuple[str, int, int]] = []
    for index, row in enumerate(rows):
        if runs and runs[-1][0] == row.phase:
            runs[-1] = (row.phase, runs[-1][1], index + 1)
        else:
            runs.append((row.phase, index, index + 1))
    return runs


def _by_phase(measured: Sequence[OpRow], predicted: Sequence[OpRow]) -> list[AlignedRows]:
    """Phase by phase, so that a difference in one cannot push the next out of step."""
    pairs: list[AlignedRows] = []
    for (_, m_from, m_to), (_, p_from, p_to) in zip(_runs(measured), _runs(predicted), strict=True):
        pairs += _walk(measured[m_from:m_to], predicted[p_from:p_to], m_from, p_from)
    return pairs


def _walk(measured: Sequence[OpRow], predicted: Sequence[OpRow], m_at: int, p_at: int) -> list[AlignedRows]:
    """Walk the logs together; `m_at` and `p_at` are the positions of their first rows."""
    a = [(short_name(row.op), row.outputs) for row in measured]
    b = [(short_name(row.op), row.outputs) for row in predicted]
    pairs: list[AlignedRows] = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            pairs.append(AlignedRows(m_at + i, p_at + j))
            i, j = i + 1, j + 1
            continue
        skip_a, skip_b = _next_agreement(a, b, i, j)
        pairs += _fill(a[i : i + skip_a], b[j : j + skip_b], m_at + i, p_at + j)
        i, j = i + skip_a, j + skip_b
    pairs += _fill(a[i:], b[j:], m_at + i, p_at + j)
    return pairs


Key = tuple[str, str]


def _next_agreement(a: list[Key], b: list[Key], i: int, j: int) -> tuple[int, int]:
    """How many rows to skip on each side until the logs agree again: the fewest in sum."""
    ahead_a, ahead_b = len(a) - i, len(b) - j
    for run in _RUNS:
        # Positions of every run of keys within the window, nearest first.
        places: dict[tuple[Key, ...], int] = {}
        for y in range(min(_WINDOW, ahead_b - run + 1)):
            places.setdefault(tuple(b[j + y : j + y + run]), y)
        best: tuple[int, int] | None = None
        for x in range(min(_WINDOW, ahead_a - run + 1)):
            if best is not None and x >= sum(best):
                break
            y = places.get(tuple(a[i + x : i + x + run]), -1)
            if y >= 0 and (best is None or x + y < sum(best)):
                best = (x, y)
        if best is not None:
            return best
    return min(_WINDOW, ahead_a), min(_WINDOW, ahead_b)


def _fill(a: list[Key], b: list[Key], m_at: int, p_at: int) -> Iterable[AlignedRows]:
    """Rows between two meeting places: the same op with other outputs still makes a pair."""
    names_a, names_b = [name for name, _ in a], [name for name, _ in b]
    if len(a) > _WINDOW or len(b) > _WINDOW:  # a tail that one side alone has
        yield from _one_sided(range(len(a)), range(len(b)), m_at, p_at)
        return
    matcher = SequenceMatcher(None, names_a, names_b, autojunk=False)
    for tag, a_from, a_to, b_from, b_to in matcher.get_opcodes():
        if tag == "equal":
            for offset in range(a_to - a_from):
                yield AlignedRows(m_at + a_from + offset, p_at + b_from + offset)
        else:
            yield from _one_sided(range(a_from, a_to), range(b_from, b_to), m_at, p_at)


def _one_sided(a: Iterable[int], b: Iterable[int], m_at: int, p_at: int) -> Iterable[AlignedRows]:
    yield from (AlignedRows(m_at + x, None) for x in a)
    yield from (AlignedRows(None, p_at + y) for y in b)
