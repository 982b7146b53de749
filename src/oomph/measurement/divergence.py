"""Lay a measured op log beside a predicted one and say where they part, largest differences first.

A developer's tool: `python -m oomph.measurement.divergence measured.jsonl.gz predicted.jsonl.gz`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from oomph.errors import UserError
from oomph.measurement.alignment import Pair, align, is_view, short_name
from oomph.measurement.oplog import OpRow, read_rows
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
    """Where two logs part."""

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


def _differences(pairs: Sequence[Pair], mine: list[OpRow], theirs: list[OpRow]) -> Iterable[Difference]:
    previous: Pair | None = None
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


def _gap(previous: Pair | None, pair: Pair, mine: list[OpRow], theirs: list[OpRow]) -> int:
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


def _drift(pairs: Sequence[Pair], mine: list[OpRow], theirs: list[OpRow]) -> Iterable[Drift]:
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
    text += f"requested {row.requested:,} in {row.n_allocs}"
    return text + (f" {list(row.allocs[:6])}" if row.allocs else "")


def _drift_line(drift: Drift) -> str:
    return (
        f"  row {drift.row} [{drift.phase}] {drift.op} {drift.outputs}: "
        f"{drift.difference:+,} B (changed by {drift.change:+,})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m oomph.measurement.divergence",
        description="Compare the op log of a real GPU run with the predicted one.",
    )
    parser.add_argument("measured", type=Path, help="op log of a GPU run (.jsonl.gz)")
    parser.add_argument("predicted", type=Path, help="op log of the prediction (.jsonl.gz)")
    parser.add_argument("--limit", type=int, default=20, help="lines per section (default 20)")
    parser.add_argument("--phase", default="", help='only phases that begin so, e.g. "step 2"')
    given = parser.parse_args(arguments)
    try:
        logs = [_read(path, given.phase) for path in (given.measured, given.predicted)]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(render(compare(*logs), given.limit))
    return 0


def _read(path: Path, phase: str) -> list[OpRow]:
    try:
        rows = read_rows(path)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path} is not an op log ({error}); give a .jsonl.gz written by record_ops"
        ) from None
    return [row for row in rows if row.phase.startswith(phase)]


if __name__ == "__main__":
    sys.exit(main())
