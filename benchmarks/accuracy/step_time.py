"""Predicted against measured seconds: of whole training steps, and of single ops forward and backward.

python -m benchmarks.accuracy.step_time [names...]    # predicts, prints rows, updates results/step_time.csv
python -m benchmarks.accuracy.step_time --stored      # the medians of the stored rows

Measured rows are those of the accuracy benchmark (measured_*.json) and of the op benchmark (ops_h200.csv),
on one H200. A step's time is the faster of the second and third step of a fresh process: rough, and with a
host that is still warming up. The constants of src/oomph/prediction/tracer/work.py were fitted to every other
row (marked "fit"); the rest (marked "test") judges them. Ops are timed with the host's part hidden, so that
only the GPU's seconds are compared.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import RESULTS
from benchmarks.accuracy.rows import measured_rows
from benchmarks.rows import median, read, stored, write

OUT = RESULTS / "step_time.csv"
GPU = "h200"
# Not fitted to, whatever their turn: an optimizer of many scalar ops, each of them Python of its own.
LEFT_OUT = {"llama-adafactor"}
# From one row each a constant was set by hand: depthwise convolutions, copies from memory that is not pinned.
BY_HAND = {"convnext-tiny", "save-on-cpu"}
# Ops with constants of their own, set from these very rows; and ops whose kernels are taken for plain passes
# over memory, which were fitted to nothing. Every other row of the rest was used, as with the steps.
OWN_CONSTANTS = ("kda", "selective_scan", "locality")
PLAIN_PASSES = ("nsa", "lif_gate", "chunked")


@dataclass(frozen=True)
class StepTime:
    """One row. `bound` says what takes the predicted time: the GPU or the host that starts its kernels."""

    name: str
    used_for: str  # "fit" or "test"
    measured_ms: float
    predicted_ms: float
    error_percent: float
    bound: str
    gpu_ms: float
    host_ms: float
    tflop: float
    gigabytes: float
    launches: int


def measured_steps() -> list[tuple[str, float]]:
    """(workload, seconds of the faster of the steps after the first), in the order of the file."""
    found = []
    for name, row in measured_rows().items():
        ends = [one["seconds"] for one in row["readings"] if one["moment"] == "end" and one["step"] > 1]
        found.append((name, min(ends) if ends else row["seconds_per_step"]))
    return found


def measured_ops() -> dict[tuple[str, str, str], float]:
    return {
        (row["op"], row["shape"], row["contender"]): float(row["median_ms"]) / 1e3
        for row in stored(RESULTS / "ops_h200.csv")
        if row["median_ms"]
    }


def step_rows(names: Sequence[str]) -> Iterator[StepTime]:
    import oomph
    from benchmarks.accuracy.workloads import ALL

    for index, (name, seconds) in enumerate(measured_steps()):
        if name in ALL and _wanted(name, names):
            try:
                prediction = oomph.predict(ALL[name].target, gpu=GPU)
            except Exception as error:  # one workload must not stop the others
                print(f"{name}: FAILED {type(error).__name__}: {error}", file=sys.stderr)
                continue
            assert prediction.step_seconds is not None
            fitted = name in BY_HAND or (index % 2 == 0 and name not in LEFT_OUT)
            yield row_of(name, fitted, seconds, prediction.step_seconds, prediction.work)


def op_rows(names: Sequence[str]) -> Iterator[StepTime]:
    """Ours, and what plain torch does; other libraries' kernels cannot be traced."""
    import oomph
    from benchmarks.ops.__main__ import CASES
    from benchmarks.ops.runs import target_of

    measured = measured_ops()
    wanted = [
        (case, contender)
        for make in CASES.values()
        for case in make([], False)
        for contender in case.contenders
        if not contender.peer and "flex" not in contender.name and "loop" not in contender.name
    ]
    turn = 0
    for case, contender in wanted:
        key = (case.op, case.shape, contender.name)
        name = " / ".join(key)
        if key not in measured:
            continue
        fitted, turn = _op_is_fitted(name, contender.name, turn)
        if not _wanted(name, names):
            continue

        work = oomph.predict(target_of(case, contender), gpu=GPU).work
        yield row_of(name, fitted, measured[key], work.gpu_seconds, work)


def _wanted(name: str, names: Sequence[str]) -> bool:
    return not names or name in names or name.partition(" / ")[0] in names


def _op_is_fitted(name: str, contender: str, turn: int) -> tuple[bool, int]:
    if "dense" not in contender:
        if any(word in name for word in PLAIN_PASSES):
            return False, turn
        if any(word in name for word in OWN_CONSTANTS):
            return True, turn
    return turn % 2 == 0, turn + 1


def row_of(name: str, fitted: bool, measured: float, predicted: float, work: Any) -> StepTime:
    return StepTime(
        name=name,
        used_for="fit" if fitted else "test",
        measured_ms=round(measured * 1e3, 3),
        predicted_ms=round(predicted * 1e3, 3),
        error_percent=round(100 * (predicted / measured - 1), 1),
        bound="gpu" if work.gpu_seconds >= 0.9 * predicted else "host",
        gpu_ms=round(work.gpu_seconds * 1e3, 3),
        host_ms=round(work.host_seconds * 1e3, 3),
        tflop=round(work.flops / 1e12, 3),
        gigabytes=round(work.bytes / 1e9, 3),
        launches=work.launches,
    )


def is_op(row: StepTime) -> bool:
    return " / " in row.name


def summary(rows: Sequence[StepTime]) -> str:
    """Medians of the errors' sizes, and how many rows are within a quarter."""
    steps, ops = ([row for row in rows if is_op(row) == wanted] for wanted in (False, True))
    tested = [row for row in steps if row.used_for == "test"]
    groups = {
        "steps, not fitted": tested,
        "  of these the GPU's": [row for row in tested if row.bound == "gpu"],
        "  and the host's": [row for row in tested if row.bound == "host"],
        "steps, fitted": [row for row in steps if row.used_for == "fit"],
        "ops, not fitted": [row for row in ops if row.used_for == "test"],
        "ops, fitted": [row for row in ops if row.used_for == "fit"],
    }
    lines = []
    for title, group in groups.items():
        if group:
            furthest = max(group, key=lambda row: abs(math.log1p(row.error_percent / 100)))
            lines.append(
                f"{title:22s} {len(group):3d} rows: {_sizes([row.error_percent for row in group])}, "
                f"worst {furthest.error_percent:+.0f} % ({furthest.name})"
            )
    return "\n".join(lines)


def _sizes(errors: Sequence[float]) -> str:
    near = sum(abs(error) <= 25 for error in errors)
    return f"median {median(errors):4.1f} %, {near} of {len(errors)} within 25 %"


# The same step with one thing changed, at one batch: before and after.
PAIRS = (
    ("transformer-encoder", "transformer-encoder-autocast"),
    ("custom-function", "custom-function-autocast"),
    ("bias-attention-fp32", "bias-attention-bf16"),
    ("checkpoint-reentrant", "checkpoint-selective"),
)
OP_PAIRS = (
    ("eager", "oomph"),
    ("oomph", "oomph 64MiB"),
    ("eager fp32", "SDPA efficient fp32"),
    ("oomph", "oomph tight"),
)


def ratios(rows: Sequence[StepTime]) -> str:
    """How much slower or faster a change makes a step, predicted and measured: what predictions are for."""
    by_name = {row.name: row for row in rows}
    pairs = list(PAIRS)
    for name in by_name:
        op, _, contender = name.rpartition(" / ")
        pairs += [(name, f"{op} / {after}") for before, after in OP_PAIRS if op and contender == before]
    lines, errors = [], []
    for before, after in pairs:
        if before in by_name and after in by_name:
            a, b = by_name[before], by_name[after]
            measured, predicted = b.measured_ms / a.measured_ms, b.predicted_ms / a.predicted_ms
            errors.append(100 * (predicted / measured - 1))
            lines.append(
                f"{before} -> {after.rpartition(' / ')[2]}: measured {measured:.2f}, "
                f"predicted {predicted:.2f} ({errors[-1]:+.0f} %)"
            )
    if errors:
        lines.append(f"ratios: {_sizes(errors)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="workloads, or ops (default: all)")
    parser.add_argument("--stored", action="store_true", help="judge the stored rows")
    given = parser.parse_args()
    rows = []
    for make in () if given.stored else (step_rows, op_rows):
        for row in make(given.names):
            rows.append(row)
            print(
                f"{row.name:60s} {row.measured_ms:9.2f} ms  predicted {row.predicted_ms:9.2f} ms "
                f"{row.error_percent:+6.0f} %  {row.bound}",
                flush=True,
            )
    if given.names or given.stored:
        fresh = {row.name: row for row in rows}
        rows = [fresh.pop(row.name, row) for row in read(OUT, StepTime)] + list(fresh.values())
    write(OUT, rows)
    print(ratios(rows))
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
