"""The five systems on a real GPU: peaks against predictions, and races against other forms of the same model.

python -m lab.benchmarks.systems measure [WORD ...]   # on a GPU: peak and time of every form
python -m lab.benchmarks.systems parts [WORD ...]     # on a GPU: of ops, layers and losses by themselves
python -m lab.benchmarks.systems race [WORD ...]      # on a GPU: against Hugging Face and the dense scan
python -m lab.benchmarks.systems predict [WORD ...]   # anywhere: the same forms and parts
python -m lab.benchmarks.systems judge                # anywhere: compares, writes systems.csv and parts.csv
python -m lab.benchmarks.systems stories              # anywhere: times `oomph systems NAME`: stories.csv
python -m lab.benchmarks.systems figures              # anywhere: the figures in the package's claims.csv

Those on a GPU write results/systems_<gpu>.json and results/parts_<gpu>.json after every row. WORDs choose
what has them in its name; `--new` leaves out what has a row already.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.rows import error_percent, need_gpu, read_json, short_name, store_json, stored, write

import oomph
from lab.benchmarks import RESULTS
from lab.benchmarks.systems.claims import CLAIMS, NO_FIGURE, claim_rows
from lab.benchmarks.systems.entries import Entry, entries
from lab.benchmarks.systems.figures import PREDICTED, part_rows
from lab.benchmarks.systems.parts import milliseconds, parts, steps, values
from lab.benchmarks.systems.races import Race, races, run
from oomph.errors import OomphError
from oomph.prediction import call_on_fake_gpu
from oomph_lab.systems import SYSTEMS

PEAK_THRESHOLD = 2.0  # percent
STORY_THRESHOLD = 60.0  # seconds, on two cores


@dataclass(frozen=True)
class Row:
    name: str
    gpu: str
    torch: str
    measured_mib: float
    measured_ms: float | None = None  # None: other processes used the GPU
    other_mib: float | None = None  # of a race
    other_ms: float | None = None
    predicted_mib: float | None = None
    error_percent: float | None = None
    threshold: str = ""
    met: bool | None = None


def run_each(
    every: Mapping[str, Any],
    words: Sequence[str],
    run: Callable[[str, Any], str],
    known: Collection[str] = (),
) -> int:
    """`run` stores the row of one and returns its line. One that fails must not stop the others."""
    for name, each in chosen(every, words):
        if name in known:
            continue
        gc.collect()
        torch.cuda.empty_cache()
        try:
            line = run(name, each)
        except Exception as error:
            line = f"FAILED {type(error).__name__}: {error}"[:600]
        print(f"{name}: {line}", flush=True)
    return 0


def measure(words: Sequence[str], out: Path, new: bool = False) -> int:
    known = {row["name"] for row in read_json(out)} if new else set()

    def run_step(name: str, entry: Entry) -> str:
        measurement = oomph.measure(entry.fixed, steps=3)
        mib, ms = measurement.peak.allocated / 2**20, measurement.seconds_per_step * 1e3
        store_json(out, _known(Row(name, measurement.gpu_title, measurement.torch, mib, ms)), "name")
        return f"{mib:.0f} MiB, {ms:.1f} ms a step"

    return run_each(entries(), words, run_step, known)


def measure_parts(words: Sequence[str], out: Path) -> int:
    """Each in a state of its own; `ms` is the median of ten steps, forward and backward."""
    timed = steps()

    def run_part(name: str, part: Callable[[], Mapping[str, float]]) -> str:
        fields = dict(part())
        if name in timed:
            gc.collect()
            torch.cuda.empty_cache()
            fields["ms"] = milliseconds(timed[name]())
        rows = json.loads(out.read_text()) if out.exists() else {}
        rows[name] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **fields}
        out.write_text(json.dumps(rows, indent=1) + "\n")
        return str(fields)

    return run_each({**parts(), **values()}, words, run_part)


def race(words: Sequence[str], out: Path) -> int:
    def run_race(name: str, each: Race) -> str:
        (mib, ms), (other_mib, other_ms) = run(each)
        row = Row(name, torch.cuda.get_device_name(), torch.__version__, mib, ms, other_mib, other_ms)
        store_json(out, _known(row), "name")
        return (
            f"{ms:.2f} ms against {other_ms:.2f} (x{ms / other_ms:.2f}), "
            f"{mib:.0f} MiB against {other_mib:.0f} (x{mib / other_mib:.3f})"
        )

    return run_each(races(), words, run_race)


def predict(words: Sequence[str], gpu: str, out: Path, new: bool = False) -> int:
    """Everything that is measured, without a GPU. Values (counts, not memory) are computed on the CPU."""
    every: dict[str, Callable[[], dict[str, float]]] = {
        **{name: partial(_predicted_step, entry, gpu) for name, entry in entries().items()},
        **{name: partial(_predicted_part, name, part, gpu) for name, part in parts().items()},
        **{name: partial(value, "cpu") for name, value in values().items()},
    }
    rows = json.loads(out.read_text()) if out.exists() else {}
    for name, figure in chosen(every, words):
        if new and name in rows:
            continue
        try:
            rows[name] = dict(figure())
        except OomphError as error:
            print(f"{name}: FAILED {error}"[:600], flush=True)
            continue
        out.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
        print(name, rows[name], flush=True)
    return 0


def _predicted_step(entry: Entry, gpu: str) -> dict[str, float]:
    prediction = oomph.predict(entry.fixed, gpu=gpu)
    return {"peak": prediction.peak.allocated, "ms": 1e3 * (prediction.step_seconds or 0)}


def _predicted_part(name: str, part: Callable[[], Mapping[str, float]], gpu: str) -> dict[str, float]:
    fields = dict(call_on_fake_gpu(part))
    if name in steps():

        def setup() -> Callable[[], None]:
            step = steps()[name]()

            def run_once() -> None:
                step.clear()
                step.backward(step.forward())

            return run_once

        fields["ms"] = 1e3 * (oomph.predict(setup, gpu=gpu).step_seconds or 0)
    return fields


def judge(measured: Sequence[Path], parts_measured: Path, predictions: Path, out: Path) -> int:
    """What was measured beside what was predicted."""
    predicted = json.loads(predictions.read_text())
    known, races_known = entries(), races()
    rows = []
    for row in (Row(**row) for file in measured for row in read_json(file)):
        if row.name in known and row.name not in predicted:
            rows.append(_rounded(row))
        elif row.name in known:
            rows.append(_judged_peak(row, predicted[row.name], known[row.name].at_most_gib))
        elif row.name in races_known:
            rows.append(
                _judged_race(
                    row, races_known[row.name].time_threshold, races_known[row.name].memory_threshold
                )
            )
        else:
            print(f"{row.name}: no longer run, left out")
            continue
        print(_line(rows[-1]), flush=True)
    write(out, [asdict(row) for row in rows])
    print(f"{sum(bool(row.met) for row in rows)} of {len(rows)} rows meet their thresholds; {out}")
    if parts_measured.exists():
        write(out.with_name("parts.csv"), part_rows(json.loads(parts_measured.read_text()), predicted))
    return 0


def stories(words: Sequence[str], out: Path) -> int:
    """Every report's story, as a reader runs it: seconds, what each form needs, and the line that fails."""
    rows: list[dict[str, Any]] = [dict(row) for row in stored(out) if words and row["system"] not in words]
    for _, system in chosen(SYSTEMS, words):
        command = [sys.executable, "-m", "oomph", "systems", system.name, "--json"]
        began, used = time.perf_counter(), _cpu_seconds()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        took, used = time.perf_counter() - began, _cpu_seconds() - used
        for form in json.loads(done.stdout)["forms"]:
            needs = None if form["needs"] is None else round(form["needs"] / 2**30, 2)
            row = {"system": system.name, "form": form["form"], "needs_gib": needs}
            row |= {key: form[key] for key in ("verdict", "failure", "command")}
            row |= {"story_seconds": round(took, 1), "cpu_seconds": round(used, 1)}
            rows.append(row | {"threshold_seconds": STORY_THRESHOLD})
        verdict = "met   " if took <= STORY_THRESHOLD else "MISSED"
        print(f"{verdict} {system.name}: {took:.1f} s, {used:.1f} s of the CPU", flush=True)
        write(out, rows)
    return 0


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figures(out: Path) -> int:
    """Compute the figures of the claims again."""
    rows = claim_rows()
    write(out, rows)
    for kind in ("derived", "predicted", "measured"):
        has = sum(row[kind] != NO_FIGURE for row in rows)
        print(f"{has} of {len(rows)} claims have a {kind} figure ({100 * has / len(rows):.0f} %)")
    return 0


def _judged_peak(row: Row, prediction: Mapping[str, float], at_most_gib: float | None) -> Row:
    predicted = prediction["peak"] / 2**20
    error = error_percent(predicted, row.measured_mib)
    assert error is not None
    threshold, met = f"predicted within {PEAK_THRESHOLD:g} %", abs(error) <= PEAK_THRESHOLD
    if at_most_gib is not None:
        threshold, met = (
            f"{threshold}, peak <= {at_most_gib:g} GiB",
            met and row.measured_mib <= at_most_gib * 1024,
        )
    return _rounded(row, predicted_mib=round(predicted, 1), error_percent=error, threshold=threshold, met=met)


def _judged_race(row: Row, time_threshold: float, memory_threshold: float) -> Row:
    assert row.other_mib is not None
    assert row.other_ms is not None
    assert row.measured_ms is not None
    met = (
        row.measured_ms <= time_threshold * row.other_ms
        and row.measured_mib <= memory_threshold * row.other_mib
    )
    threshold = f"time <= {time_threshold:g} x, memory <= {memory_threshold:g} x the other's"
    return _rounded(
        row, threshold=threshold, met=met, other_mib=round(row.other_mib, 1), other_ms=round(row.other_ms, 2)
    )


def _rounded(row: Row, **changes: Any) -> Row:
    ms = None if row.measured_ms is None else round(row.measured_ms, 2)
    return replace(row, measured_mib=round(row.measured_mib, 1), measured_ms=ms, **changes)


def _line(row: Row) -> str:
    verdict = "met   " if row.met else "MISSED"
    if row.other_ms is not None and row.other_mib is not None and row.measured_ms is not None:
        return (
            f"{verdict} {row.name:60} {row.measured_ms:9.2f} ms x{row.measured_ms / row.other_ms:.2f} "
            f"{row.measured_mib:9.0f} MiB x{row.measured_mib / row.other_mib:.3f}"
        )
    error = "not predicted" if row.error_percent is None else f"predicted {row.error_percent:+.2f} %"
    return f"{verdict} {row.name:60} {row.measured_mib:9.0f} MiB, {error}"


def _known(row: Row) -> dict[str, Any]:
    return {key: value for key, value in asdict(row).items() if value not in (None, "")}


def chosen(all_of_them: dict[str, Any] | Any, words: Sequence[str]) -> list[tuple[str, Any]]:
    rows = [(name, each) for name, each in all_of_them.items() if not words or any(w in name for w in words)]
    if not rows:
        sys.exit(f"error: nothing has {' or '.join(words)} in its name; there is: {'; '.join(all_of_them)}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = ("measure", "parts", "race", "predict", "judge", "stories", "figures")
    parser.add_argument("command", choices=known)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--new", action="store_true", help="measure only what has no row")
    parser.add_argument("--gpu", default="h200", help="the GPU that the stored rows were measured on")
    given = parser.parse_args()
    if given.command == "predict":
        return predict(given.words, given.gpu, given.out or PREDICTED, given.new)
    if given.command == "judge":
        measured = [RESULTS / f"{kind}_{given.gpu}.json" for kind in ("systems", "parts")]
        return judge(measured[:1], measured[1], PREDICTED, given.out or RESULTS / "systems.csv")
    if given.command == "stories":
        return stories(given.words, given.out or RESULTS / "stories.csv")
    if given.command == "figures":
        return figures(given.out or CLAIMS)
    need_gpu()
    short = short_name(torch.cuda.get_device_name())
    if given.command == "parts":
        return measure_parts(given.words, given.out or RESULTS / f"parts_{short}.json")
    out = given.out or RESULTS / f"systems_{short}.json"
    if given.command == "measure":
        return measure(given.words, out, given.new)
    return race(given.words, out)


if __name__ == "__main__":
    sys.exit(main())
