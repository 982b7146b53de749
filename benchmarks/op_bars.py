"""The bars that the ops must reach, read off the rows. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import op_bars_sequence
from op_bar import NOISE, Bar, on_gpu, over
from op_rows import Row


def bars(rows: Sequence[Row]) -> list[Bar]:
    """All bars that these rows say something about."""
    parts: tuple[Callable[[Sequence[Row]], Iterator[Bar]], ...] = (
        _cross_entropy,
        _pareto,
        _cross_entropy_errors,
        _mlp,
        _modulated,
        _attention,
        *op_bars_sequence.PARTS,
        _cpu,
        _flat,
        _predictions,
    )
    return [bar for part in parts for bar in part(rows)]


def report(rows: Sequence[Row]) -> str:
    found = bars(rows)
    missed = sum(bar.met is False for bar in found)
    unknown = sum(bar.met is None for bar in found)
    met = len(found) - missed - unknown
    last = f"{met} of {len(found)} bars met, {missed} missed, {unknown} not measured"
    return "\n".join([*(bar.line() for bar in found), last])


def _cross_entropy(rows: Sequence[Row]) -> Iterator[Bar]:
    for shape, group in on_gpu(rows, "cross_entropy").items():
        ours, small = group.get("oomph"), group.get("oomph 64MiB")
        tokens, features = (int(size) for size in shape.split("x")[:2])
        about = f"cross_entropy {shape}"
        # The narrower the layer, the less the products take of the whole: a bar is given for 1024 only.
        most = 1.12 if features >= 2560 else 1.22
        if features >= 1024:
            yield Bar(f"{about}: default, time over the 3-GEMM limit", ours and ours.ratio_to_limit, most)
        yield Bar(
            f"{about}: default, peak above the floor",
            ours and ours.above_floor_mib,
            1024 if tokens >= 131072 else 512,
            "MiB",
        )
        if tokens < 131072:  # there the default alone is run
            if features >= 1024:
                yield Bar(f"{about}: 64MiB, time over the 3-GEMM limit", small and small.ratio_to_limit, 1.5)
            yield Bar(f"{about}: 64MiB, peak above the floor", small and small.above_floor_mib, 64, "MiB")


def _pareto(rows: Sequence[Row]) -> Iterator[Bar]:
    for shape, group in on_gpu(rows, "cross_entropy").items():
        for name in ("oomph", "oomph 64MiB"):
            ours = group.get(name)
            if ours is None or not any(row.peer for row in group.values()):
                continue  # nobody to compare with
            found = dominating(ours, list(group.values()))
            by = f" ({', '.join(found)})" if found else ""
            yield Bar(
                f"cross_entropy {shape}: exact peers both smaller and faster than {name}{by}",
                None if ours.median_ms is None else float(len(found)),
                0,
                "",
            )


def dominating(ours: Row | None, others: Sequence[Row]) -> list[str]:
    """The exact contenders that are not ours and beat this row in time and memory alike."""
    if ours is None or ours.median_ms is None or ours.peak_mib is None:
        return []
    return [
        row.contender
        for row in others
        if row.exact
        and not row.ours
        and "limit" not in row.contender
        and row.median_ms is not None
        and row.peak_mib is not None
        and row.median_ms < ours.median_ms
        and row.peak_mib < ours.peak_mib
    ]


def _errors(rows: Sequence[Row], op: str, most: float) -> Iterator[Bar]:
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row.op == op:
            groups.setdefault((row.shape, row.data), {})[row.contender] = row
    for (shape, data), group in groups.items():
        for row in group.values():
            if not row.ours:
                continue
            for name, value in (("dX", "dx_error"), ("dW", "dw_error")):
                off = over(row, group.get("eager"), value)
                yield Bar(f"{op} {shape} {data}: {row.contender}, {name} error over eager's", off, most)


def _cross_entropy_errors(rows: Sequence[Row]) -> Iterator[Bar]:
    return _errors(rows, "cross_entropy errors", 1.05)


def _mlp(rows: Sequence[Row]) -> Iterator[Bar]:
    for shape, group in on_gpu(rows, "mlp").items():
        ours = group.get("oomph")
        yield Bar(f"mlp {shape}: time over eager's", over(ours, group.get("eager")), 1.27)
        if shape.startswith("SwiGLU 131072x2560x9216"):
            yield Bar(f"mlp {shape}: peak", ours and ours.peak_mib, 1800, "MiB")
    yield from (bar for bar in _errors(rows, "mlp errors", 1.02) if "dW" in bar.about)


def _modulated(rows: Sequence[Row]) -> Iterator[Bar]:
    for shape, group in on_gpu(rows, "modulated").items():
        ours, bare = group.get("oomph"), group.get("bare h W")
        yield Bar(f"modulated {shape}: time over the bare product", over(ours, bare), 1.12)
        held = over(ours, bare, "held_mib")
        yield Bar(f"modulated {shape}: held after forward, over the bare product", held, 1.02)


def _attention(rows: Sequence[Row]) -> Iterator[Bar]:
    for shape, group in on_gpu(rows, "attention").items():
        for kind in ("fp32", "bf16"):
            ours = group.get(f"oomph {kind}")
            fused = [row for name, row in group.items() if name.startswith("SDPA") and name.endswith(kind)]
            ran = [row for row in fused if row.median_ms]
            best = min(ran, key=lambda row: row.median_ms or 0, default=None)
            if ours is not None and fused:
                name = best.contender if best else "the best fused backend"
                yield Bar(f"attention {shape}: {kind}, time over {name}", over(ours, best), NOISE)
        local, flash = group.get("oomph bf16 locality"), group.get("SDPA flash bf16")
        if local is not None:
            yield Bar(f"attention {shape}: bias function, time over flash", over(local, flash), 1.5)
            memory = over(local, flash, "peak_mib")
            yield Bar(f"attention {shape}: bias function, peak over flash's", memory, 1.3)


def _cpu(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        if row.op == "kda" or not row.gpu.startswith("cpu"):  # that has a bar of its own
            continue
        if row.ours and "errors" not in row.op and " at " not in row.shape:
            about = f"{row.op} {row.shape} on the CPU: {row.contender}, time over eager's"
            yield Bar(about, row.ratio_to_limit, 1.15)


def _flat(rows: Sequence[Row]) -> Iterator[Bar]:
    """More tokens, the same temporaries: what is predicted above the floor may not grow as the floor does.

    A twentieth of it may: a few numbers for each token (its log-sum-exp, say) are no temporaries.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        shape, at, times = row.shape.partition(" at ")
        if row.ours and at and times.endswith("N"):
            groups.setdefault((row.op, shape, row.contender), []).append(row)
    for (op, shape, contender), group in groups.items():
        ends = f"{group[0].shape.split()[-1]} to {group[-1].shape.split()[-1]}"
        about = f"{op} {shape}: {contender}, growth of temporaries over that of the floor, {ends}"
        yield Bar(about, _growth(group[0], group[-1]), 5, "%")


def _growth(less: Row, more: Row) -> float | None:
    if None in (less.predicted_mib, more.predicted_mib, less.floor_mib, more.floor_mib):
        return None
    floor = (more.floor_mib or 0) - (less.floor_mib or 0)
    return 100 * ((more.predicted_mib or 0) - (less.predicted_mib or 0) - floor) / floor


def _predictions(rows: Sequence[Row]) -> Iterator[Bar]:
    for row in rows:
        if row.ours and row.peak_mib is not None:
            off = row.prediction_error
            about = f"{row.op} {row.shape}: {row.contender}, prediction off the measured peak by"
            yield Bar(about, None if off is None else 100 * abs(off), 1, "%")
