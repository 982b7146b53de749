"""The thresholds that the ops must reach, read from the stored rows. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.ops.rows import Row

# Two medians of one run differ by so much without a reason: "never slower" allows it.
NOISE = 1.03


@dataclass(frozen=True)
class Threshold:
    """One demand: what it is about, what was measured, and the most that it may be."""

    about: str
    measured: float | None  # None: a row that it needs is missing or failed
    at_most: float
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else self.measured <= self.at_most

    def line(self) -> str:
        verdict = {True: "met", False: "MISSED", None: "not measured"}[self.met]
        measured, threshold = self._show(self.measured), self._show(self.at_most)
        return f"{verdict:12s} {measured:>12s}  (threshold {threshold})  {self.about}"

    def _show(self, value: float | None) -> str:
        if value is None:
            return "-"
        return {"x": f"{value:.3f} x", "MiB": f"{value:,.0f} MiB", "%": f"{value:.2f} %"}.get(
            self.unit, f"{value:.0f}{self.unit}"
        )


def on_gpu(rows: Sequence[Row], op: str) -> dict[str, dict[str, Row]]:
    """Rows of one op by shape and contender, without those of a CPU."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.op == op and not row.gpu.startswith("cpu"):
            found.setdefault(row.shape, {})[row.contender] = row
    return found


def over(row: Row | None, other: Row | None, value: str = "median_ms") -> float | None:
    above, below = getattr(row, value, None), getattr(other, value, None)
    return above / below if above is not None and below else None


GiB = 1024  # in MiB
REPORT = "B16 T256 H8 D64"  # report 000's layer
REPORT_MIB = 60  # for forward and backward; 40 with a tight budget
DENSE_MIB = 2056  # of the report's form, forward alone, as it was announced
CPU_SPEEDUP = 10
DENSE = "SDPA cuDNN dense"
FLA_NSA = "fla, no window"
LONG = 32768  # tokens from which on sparse attention must be faster than dense attention
LONGEST = "B1 T131072 HQ32 H8 D128"
GRADIENT_ERROR = 1.0  # %: bfloat16 rounds to 0.2 %, a wrong kernel is off by tens


def kda(rows: Sequence[Row]) -> Iterator[Threshold]:
    for shape, group in on_gpu(rows, "kda").items():
        ours, tight, fla = group.get("oomph"), group.get("oomph tight"), group.get("fla")
        about = f"kda {shape}"
        if fla is not None:
            yield Threshold(f"{about}: time over fla's", over(ours, fla), NOISE)
            yield Threshold(f"{about}: peak over fla's", over(ours, fla, "peak_mib"), 0.5)
        if fla is not None and (fla.peak_mib or 0) > GiB:
            yield Threshold(f"{about}: tight budget, peak over fla's", over(tight, fla, "peak_mib"), 0.25)
            yield Threshold(f"{about}: tight budget, time over fla's", over(tight, fla), 1.5)
        if shape == REPORT:
            yield Threshold(f"{about}: peak", ours and ours.peak_mib, REPORT_MIB, "MiB")
            yield Threshold(f"{about}: tight budget, peak", tight and tight.peak_mib, 40, "MiB")
            dense = group.get("dense scan, forward alone")
            share = over(ours, dense, "peak_mib")
            yield Threshold(
                f"{about}: peak over the dense scan's, forward alone", share, REPORT_MIB / DENSE_MIB
            )


def kda_on_cpu(rows: Sequence[Row]) -> Iterator[Threshold]:
    for row in rows:
        if row.op == "kda" and row.gpu.startswith("cpu") and row.ours and row.median_ms is not None:
            about = f"kda {row.shape} on the CPU: {row.contender}, time over the loop over tokens"
            yield Threshold(about, row.ratio_to_limit, 1 / CPU_SPEEDUP)


def nsa(rows: Sequence[Row]) -> Iterator[Threshold]:
    groups = on_gpu(rows, "nsa")
    for shape, group in groups.items():
        dense, fla, about = group.get(DENSE), group.get(FLA_NSA), f"nsa {shape}"
        for name in ("oomph", "oomph learned"):
            ours = group.get(name)
            if ours is None and name != "oomph":
                continue
            if tokens_of(shape) >= LONG:
                most = 1 / 3 if shape == LONGEST else 1.0
                yield Threshold(f"{about}: {name}, time over dense attention's", over(ours, dense), most)
            memory = over(ours, dense, "peak_mib")
            yield Threshold(f"{about}: {name}, peak over dense attention's", memory, 1.2)
            if fla is not None:
                yield Threshold(f"{about}: {name}, time over fla's", over(ours, fla), 1.0)
    yield from _linear(groups)


def _linear(groups: dict[str, dict[str, Row]]) -> Iterator[Threshold]:
    """Between the fewest and the most tokens, does the peak grow faster than their number?"""
    families: dict[str, list[tuple[int, Row]]] = {}
    for shape, group in groups.items():
        if "oomph" in group:
            family = re.sub(r" T\d+", "", shape)
            families.setdefault(family, []).append((tokens_of(shape), group["oomph"]))
    for family, found in families.items():
        (few, less), (many, more) = min(found, key=_first), max(found, key=_first)
        if many > few:
            growth = over(more, less, "peak_mib")
            about = f"nsa {family}: growth of the peak over that of the tokens, T{few} to T{many}"
            yield Threshold(about, None if growth is None else growth * few / many, 1.05)


def _first(pair: tuple[int, Row]) -> int:
    return pair[0]


def tokens_of(shape: str) -> int:
    found = re.search(r"\bT(\d+)", shape)
    return int(found.group(1)) if found else 0


def selective_scan(rows: Sequence[Row]) -> Iterator[Threshold]:
    for shape, group in on_gpu(rows, "selective_scan").items():
        ours = group.get("oomph")
        inputs = scan_inputs_mib(shape)
        peak = None if ours is None or ours.peak_mib is None else ours.peak_mib
        # The inputs are resident: they are not in the peak, but are part of the memory it takes.
        whole = None if peak is None else (inputs + peak) / (2 * inputs)
        yield Threshold(f"selective_scan {shape}: memory over that of inputs and gradients", whole, 2)


def scan_inputs_mib(shape: str) -> float:
    """Of the sequences, as `B64 L512 d512 n16 bf16` names them; A and D are some kilobytes."""
    b, length, d, n = (int(size) for size in re.findall(r"[BLdn](\d+)", shape)[:4])
    ways, item = (2 if "both" in shape else 1), (4 if "fp32" in shape else 2)
    return b * length * (d + ways * (d + 2 * n)) * item / 2**20


def errors(rows: Sequence[Row]) -> Iterator[Threshold]:
    """Every gradient of ours on the GPU against float64: Triton has miscompiled kernels of this kind."""
    for row in rows:
        if row.op in ("kda errors", "nsa errors", "selective_scan errors") and row.ours:
            if row.gpu.startswith("cpu"):
                continue
            off = None if row.dx_error is None else 100 * row.dx_error
            yield Threshold(
                f"{row.op} {row.shape}: {row.contender}, {row.data} off by", off, GRADIENT_ERROR, "%"
            )


SEQUENCE_PARTS: tuple[Callable[[Sequence[Row]], Iterator[Threshold]], ...] = (
    kda,
    kda_on_cpu,
    nsa,
    selective_scan,
    errors,
)


def thresholds(rows: Sequence[Row]) -> list[Threshold]:
    """All thresholds that these rows say something about."""
    parts: tuple[Callable[[Sequence[Row]], Iterator[Threshold]], ...] = (
        _cross_entropy,
        _pareto,
        _cross_entropy_errors,
        _mlp,
        _modulated,
        _attention,
        *SEQUENCE_PARTS,
        _cpu,
        _flat,
        _predictions,
    )
    return [threshold for part in parts for threshold in part(rows)]


def report(rows: Sequence[Row]) -> str:
    found = thresholds(rows)
    missed = sum(threshold.met is False for threshold in found)
    unknown = sum(threshold.met is None for threshold in found)
    met = len(found) - missed - unknown
    last = f"{met} of {len(found)} thresholds met, {missed} missed, {unknown} not measured"
    return "\n".join([*(threshold.line() for threshold in found), last])


def _cross_entropy(rows: Sequence[Row]) -> Iterator[Threshold]:
    for shape, group in on_gpu(rows, "cross_entropy").items():
        ours, small = group.get("oomph"), group.get("oomph 64MiB")
        tokens, features = (int(size) for size in shape.split("x")[:2])
        about = f"cross_entropy {shape}"
        # The narrower the layer, the less the products take of the whole: a threshold is given for 1024 only.
        most = 1.12 if features >= 2560 else 1.22
        if features >= 1024:
            yield Threshold(
                f"{about}: default, time over the 3-GEMM limit", ours and ours.ratio_to_limit, most
            )
        yield Threshold(
            f"{about}: default, peak above the floor",
            ours and ours.above_floor_mib,
            1024 if tokens >= 131072 else 512,
            "MiB",
        )
        if tokens < 131072:  # there the default alone is run
            if features >= 1024:
                yield Threshold(
                    f"{about}: 64MiB, time over the 3-GEMM limit", small and small.ratio_to_limit, 1.5
                )
            yield Threshold(
                f"{about}: 64MiB, peak above the floor", small and small.above_floor_mib, 64, "MiB"
            )


def _pareto(rows: Sequence[Row]) -> Iterator[Threshold]:
    for shape, group in on_gpu(rows, "cross_entropy").items():
        for name in ("oomph", "oomph 64MiB"):
            ours = group.get(name)
            if ours is None or not any(row.peer for row in group.values()):
                continue  # nobody to compare with
            found = dominating(ours, list(group.values()))
            by = f" ({', '.join(found)})" if found else ""
            yield Threshold(
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


def _errors(rows: Sequence[Row], op: str, most: float) -> Iterator[Threshold]:
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
                yield Threshold(f"{op} {shape} {data}: {row.contender}, {name} error over eager's", off, most)


def _cross_entropy_errors(rows: Sequence[Row]) -> Iterator[Threshold]:
    return _errors(rows, "cross_entropy errors", 1.05)


def _mlp(rows: Sequence[Row]) -> Iterator[Threshold]:
    for shape, group in on_gpu(rows, "mlp").items():
        ours = group.get("oomph")
        yield Threshold(f"mlp {shape}: time over eager's", over(ours, group.get("eager")), 1.27)
        if shape.startswith("SwiGLU 131072x2560x9216"):
            yield Threshold(f"mlp {shape}: peak", ours and ours.peak_mib, 1800, "MiB")
    yield from (threshold for threshold in _errors(rows, "mlp errors", 1.02) if "dW" in threshold.about)


def _modulated(rows: Sequence[Row]) -> Iterator[Threshold]:
    for shape, group in on_gpu(rows, "modulated").items():
        ours, bare = group.get("oomph"), group.get("bare h W")
        yield Threshold(f"modulated {shape}: time over the bare product", over(ours, bare), 1.12)
        held = over(ours, bare, "held_mib")
        yield Threshold(f"modulated {shape}: held after forward, over the bare product", held, 1.02)


def _attention(rows: Sequence[Row]) -> Iterator[Threshold]:
    for shape, group in on_gpu(rows, "attention").items():
        for kind in ("fp32", "bf16"):
            ours = group.get(f"oomph {kind}")
            fused = [row for name, row in group.items() if name.startswith("SDPA") and name.endswith(kind)]
            ran = [row for row in fused if row.median_ms]
            best = min(ran, key=lambda row: row.median_ms or 0, default=None)
            if ours is not None and fused:
                name = best.contender if best else "the best fused backend"
                yield Threshold(f"attention {shape}: {kind}, time over {name}", over(ours, best), NOISE)
        local, flash = group.get("oomph bf16 locality"), group.get("SDPA flash bf16")
        if local is not None:
            yield Threshold(f"attention {shape}: bias function, time over flash", over(local, flash), 1.5)
            memory = over(local, flash, "peak_mib")
            yield Threshold(f"attention {shape}: bias function, peak over flash's", memory, 1.3)


def _cpu(rows: Sequence[Row]) -> Iterator[Threshold]:
    for row in rows:
        if row.op == "kda" or not row.gpu.startswith("cpu"):  # that has a threshold of its own
            continue
        if row.ours and "errors" not in row.op and " at " not in row.shape:
            about = f"{row.op} {row.shape} on the CPU: {row.contender}, time over eager's"
            yield Threshold(about, row.ratio_to_limit, 1.15)


def _flat(rows: Sequence[Row]) -> Iterator[Threshold]:
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
        yield Threshold(about, _growth(group[0], group[-1]), 5, "%")


def _growth(less: Row, more: Row) -> float | None:
    if None in (less.predicted_mib, more.predicted_mib, less.floor_mib, more.floor_mib):
        return None
    floor = (more.floor_mib or 0) - (less.floor_mib or 0)
    return 100 * ((more.predicted_mib or 0) - (less.predicted_mib or 0) - floor) / floor


def _predictions(rows: Sequence[Row]) -> Iterator[Threshold]:
    for row in rows:
        if row.ours and row.peak_mib is not None:
            off = row.prediction_error
            about = f"{row.op} {row.shape}: {row.contender}, prediction off the measured peak by"
            yield Threshold(about, None if off is None else 100 * abs(off), 1, "%")
