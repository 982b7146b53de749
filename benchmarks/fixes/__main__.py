"""Fixes on a real GPU: the peak and the time of a step with each, against what was predicted.

python -m benchmarks.fixes measure [MODEL ...]   # on a GPU; results/fixes_<gpu>.json
python -m benchmarks.fixes judge                 # anywhere: predicts the same, writes results/fixes.csv
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.benchmarks.systems.entries import on_the_gpu

import oomph
from benchmarks import RESULTS
from benchmarks.fixes.pairs import MODELS
from benchmarks.rows import (
    chosen,
    error_percent,
    errors_of,
    need_gpu,
    read_json,
    short_name,
    store_json,
    write,
)
from oomph.records import FixUse
from oomph.report.fixes import fix_word

STEPS = 6
PEAK_THRESHOLD, TIME_THRESHOLD = 2.0, 25.0  # percent


@dataclass(frozen=True)
class Row:
    model: str
    fixes: str  # "" for the model as it is
    gpu: str
    torch: str
    measured_mib: float
    measured_ms: float
    predicted_mib: float | None = None
    peak_error_percent: float | None = None
    measured_slowdown: float | None = None
    predicted_slowdown: float | None = None
    slowdown_error_percent: float | None = None


def named(uses: Sequence[FixUse]) -> str:
    return " + ".join(map(fix_word, uses))


def measure(models: Sequence[str], out: Path | None) -> int:
    """All of a model's tries in one process, one after the other; the model as it is first."""
    need_gpu()
    for name in models:
        model = MODELS[name]
        for uses in ((), *model.tries):
            began = time.perf_counter()
            try:
                row = _measured(name, uses, model.workload)
            except Exception as error:  # one must not stop the others
                print(f"{name} [{named(uses)}]: FAILED {type(error).__name__}: {error}"[:600], flush=True)
                continue
            out = out or RESULTS / f"fixes_{short_name(row['gpu'])}.json"
            store_json(out, row, "model", "fixes")
            print(
                f"{name} [{named(uses)}]: {row['measured_mib']:.0f} MiB, {row['measured_ms']:.1f} ms a step "
                f"({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
    return 0


def _measured(name: str, uses: Sequence[FixUse], workload: oomph.Workload) -> dict[str, Any]:
    found = oomph.measure(_fixed(uses, workload), steps=STEPS)
    return {
        "model": name,
        "fixes": named(uses),
        "gpu": found.gpu_title,
        "torch": found.torch,
        "measured_mib": found.peak.allocated / 2**20,
        "measured_ms": found.seconds_per_step * 1e3,
    }


def _fixed(uses: Sequence[FixUse], workload: oomph.Workload) -> oomph.Workload:
    return oomph.apply(uses, replace(workload, model=on_the_gpu(workload.model)))


def judge(files: Sequence[Path], gpu: str, out: Path) -> int:
    known = [row for file in files for row in read_json(file)]
    bases: dict[str, tuple[Row, oomph.Prediction]] = {}
    rows: list[Row] = []
    for stored in known:
        model = MODELS[stored["model"]]
        uses = next(uses for uses in ((), *model.tries) if named(uses) == stored["fixes"])
        prediction = oomph.predict(_fixed(uses, model.workload), gpu=gpu)
        row = _judged(Row(**stored), prediction, bases.get(stored["model"]))
        if not uses:
            bases[stored["model"]] = row, prediction
        rows.append(row)
        print(_line(row), flush=True)
    write(out, rows)
    print(summary(rows))
    return 0


def _judged(row: Row, prediction: oomph.Prediction, base: tuple[Row, oomph.Prediction] | None) -> Row:
    predicted = prediction.peak.allocated / 2**20
    row = replace(
        row,
        predicted_mib=round(predicted, 1),
        peak_error_percent=error_percent(predicted, row.measured_mib),
        measured_mib=round(row.measured_mib, 1),
        measured_ms=round(row.measured_ms, 2),
    )
    if base is None or not row.fixes or not prediction.step_seconds or not base[1].step_seconds:
        return row
    measured = row.measured_ms / base[0].measured_ms
    slowdown = prediction.step_seconds / base[1].step_seconds
    return replace(
        row,
        measured_slowdown=round(measured, 3),
        predicted_slowdown=round(slowdown, 3),
        slowdown_error_percent=error_percent(slowdown, measured, 1),
    )


def summary(rows: Sequence[Row]) -> str:
    pairs = [row for row in rows if row.fixes]
    near, timed = (
        sum(abs(error) <= threshold for error in errors_of(pairs, f"{kind}_error_percent"))
        for kind, threshold in (("peak", PEAK_THRESHOLD), ("slowdown", TIME_THRESHOLD))
    )
    return (
        f"{len(pairs)} pairs: peak within {PEAK_THRESHOLD:g} % on {near}, "
        f"slowdown within {TIME_THRESHOLD:g} % on {timed}"
    )


def _line(row: Row) -> str:
    text = f"{row.model:20} {row.fixes or '(as it is)':45} {row.measured_mib:9.0f} MiB"
    text += f" {row.peak_error_percent:+7.2f} %"
    if row.measured_slowdown is None:
        return f"{text}  {row.measured_ms:8.1f} ms"
    return (
        f"{text}  x{row.measured_slowdown:.2f}, predicted x{row.predicted_slowdown:.2f} "
        f"({row.slowdown_error_percent:+.0f} %)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("measure", "judge"))
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gpu", default="h200", help="the GPU that the stored rows were measured on")
    given = parser.parse_args()
    if given.command == "measure":
        return measure(chosen(given.models, MODELS, "model"), given.out)
    files = sorted(RESULTS.glob("fixes_*.json"))
    return judge(files, given.gpu, given.out or RESULTS / "fixes.csv")


if __name__ == "__main__":
    sys.exit(main())
