"""The five systems on a real GPU: peaks against predictions, and races against other forms of the same model.

python -m benchmarks.systems measure [WORD ...]   # on a GPU: peak and time of every form
python -m benchmarks.systems parts [WORD ...]     # on a GPU: of ops, layers and losses by themselves
python -m benchmarks.systems race [WORD ...]      # on a GPU: against Hugging Face's models and the dense scan
python -m benchmarks.systems judge                # anywhere: predicts the same, writes results/systems.csv
python -m benchmarks.systems stories              # anywhere: times `oomph systems NAME`: results/stories.csv
python -m benchmarks.systems figures              # anywhere: rows to claims, writes results/claims.csv

Those on a GPU write results/systems_<gpu>.json and results/parts_<gpu>.json after every row. WORDs choose
what has them in its name; `--new` leaves out what has a row already.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import oomph
from benchmarks import RESULTS, ROOT
from benchmarks.accuracy.rows import short_name
from benchmarks.systems.entries import entries
from benchmarks.systems.figures import claim_rows, collect, rows_of
from benchmarks.systems.parts import milliseconds, parts, steps, values
from benchmarks.systems.races import races, run
from oomph.systems import SYSTEMS
from oomph.systems.claims import NO_FIGURE, stored_figures

PEAK_BAR = 2.0  # percent
STORY_BAR = 60.0  # seconds, on two cores


@dataclass(frozen=True)
class Row:
    name: str
    gpu: str
    torch: str
    measured_mib: float
    measured_ms: float
    other_mib: float | None = None  # of a race
    other_ms: float | None = None
    predicted_mib: float | None = None
    predicted_ms: float | None = None
    error_percent: float | None = None
    bar: str = ""
    met: bool | None = None


def measure(words: Sequence[str], out: Path, new: bool = False) -> int:
    stored = {row["name"] for row in json.loads(out.read_text())} if new and out.exists() else set()
    for name, entry in chosen(entries(), words):
        if name in stored:
            continue
        began = time.perf_counter()
        try:
            found = oomph.measure(entry.fixed, steps=3)
        except Exception as error:  # one must not stop the others
            print(f"{name}: FAILED {type(error).__name__}: {error}"[:600], flush=True)
            _free()
            continue
        row = Row(
            name,
            found.gpu_title,
            found.torch,
            found.peak.allocated / 2**20,
            found.seconds_per_step * 1e3,
        )
        _store(out, row)
        print(
            f"{name}: {row.measured_mib:.0f} MiB, {row.measured_ms:.1f} ms a step "
            f"({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
        _free()
    return 0


def measure_parts(words: Sequence[str], out: Path) -> int:
    """Each in a state of its own; `ms` is the median of ten steps, forward and backward."""
    timed = steps()
    for name, part in chosen({**parts(), **values()}, words):
        _free()
        try:
            found = dict(part())
            if name in timed:
                _free()
                found["ms"] = milliseconds(timed[name]())
        except Exception as error:  # one must not stop the others
            print(f"{name}: FAILED {type(error).__name__}: {error}"[:600], flush=True)
            continue
        rows = json.loads(out.read_text()) if out.exists() else {}
        rows[name] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **found}
        out.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{name}: {found}", flush=True)
    return 0


def race(words: Sequence[str], out: Path) -> int:
    for name, each in chosen(races(), words):
        try:
            found = run(each)
        except Exception as error:
            print(f"{name}: FAILED {type(error).__name__}: {error}"[:600], flush=True)
            _free()
            continue
        _store(
            out,
            Row(
                name,
                torch.cuda.get_device_name(),
                torch.__version__,
                found.ours_mib,
                found.ours_ms,
                found.theirs_mib,
                found.theirs_ms,
            ),
        )
        print(
            f"{name}: {found.ours_ms:.2f} ms against {found.theirs_ms:.2f} "
            f"(x{found.ours_ms / found.theirs_ms:.2f}), {found.ours_mib:.0f} MiB against "
            f"{found.theirs_mib:.0f} (x{found.ours_mib / found.theirs_mib:.3f})",
            flush=True,
        )
        _free()
    return 0


def judge(files: Iterable[Path], gpu: str, out: Path, new: bool = False) -> int:
    """new: keep the committed rows of what was predicted before."""
    stored = [Row(**row) for file in files for row in json.loads(file.read_text())]
    known, races_known = entries(), races()
    before = {row["name"]: row for row in rows_of(out)} if new else {}
    rows: list[Any] = []
    for row in stored:
        if before.get(row.name, {}).get("met"):
            rows.append(before[row.name])
            continue
        if row.name in known:
            rows.append(
                _judged_peak(row, oomph.predict(known[row.name].fixed, gpu=gpu), known[row.name].at_most_gib)
            )
        elif row.name in races_known:
            rows.append(_judged_race(row, races_known[row.name].time_bar, races_known[row.name].memory_bar))
        else:
            print(f"{row.name}: no longer run, left out")
            continue
        print(_line(rows[-1]), flush=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row if isinstance(row, dict) else asdict(row) for row in rows)
    missed = sum(not (row["met"] == "True" if isinstance(row, dict) else row.met) for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} rows meet their bars; {out}")
    return 0


def judge_parts(file: Path, out: Path) -> int:
    """Predicts what was measured; values (counts, not memory) are computed on the CPU instead."""
    from oomph.prediction import called

    known, counted = parts(), values()
    rows = []
    for name, measured in json.loads(file.read_text()).items():
        predicted = counted[name]("cpu") if name in counted else called(known[name])
        for field, value in measured.items():
            if field in ("gpu", "torch"):
                continue
            guess = predicted.get(field)
            error = round(100 * (guess / value - 1), 3) if guess is not None and value else None
            rows.append({"name": name, "field": field, "measured": value, "predicted": guess})
            rows[-1] |= {"error_percent": error, "gpu": measured["gpu"], "torch": measured["torch"]}
        print(name, {row["field"]: row["error_percent"] for row in rows if row["name"] == name}, flush=True)
    _write(out, rows)
    return 0


def stories(out: Path) -> int:
    """Every report's story, as a reader runs it: seconds, what each form needs, and the line that fails."""
    rows = []
    for system in SYSTEMS.values():
        command = [sys.executable, "-m", "oomph", "systems", system.name, "--json"]
        began = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        took = time.perf_counter() - began
        for form in json.loads(done.stdout)["forms"]:
            needs = None if form["needs"] is None else round(form["needs"] / 2**30, 2)
            rows.append(
                {
                    "system": system.name,
                    "form": form["form"],
                    "needs_gib": needs,
                    "verdict": form["verdict"],
                    "failure": form["failure"],
                    "command": form["command"],
                    "story_seconds": round(took, 1),
                    "bar_seconds": STORY_BAR,
                }
            )
        print(f"{'met   ' if took <= STORY_BAR else 'MISSED'} {system.name}: {took:.1f} s", flush=True)
    _write(out, rows)
    return 0


def figures(out: Path) -> int:
    """The rows that claims refer to, for the package; and all claims with their columns."""
    found = collect()
    path = ROOT / "src" / "oomph" / "systems" / "figures.json"
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    stored_figures.cache_clear()
    rows = claim_rows()
    _write(out, rows)
    for kind in ("predicted", "measured"):
        has = sum(row[kind] != NO_FIGURE for row in rows)
        print(f"{has} of {len(rows)} claims have a {kind} figure ({100 * has / len(rows):.0f} %)")
    return 0


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _judged_peak(row: Row, prediction: Any, at_most_gib: float | None) -> Row:
    predicted = prediction.peak.allocated / 2**20
    error = 100 * (predicted / row.measured_mib - 1)
    bar, met = f"predicted within {PEAK_BAR:g} %", abs(error) <= PEAK_BAR
    if at_most_gib is not None:
        bar, met = f"{bar}, peak <= {at_most_gib:g} GiB", met and row.measured_mib <= at_most_gib * 1024
    seconds = prediction.step_seconds
    return _rounded(
        row,
        predicted_mib=round(predicted, 1),
        predicted_ms=None if seconds is None else round(1e3 * seconds, 2),
        error_percent=round(error, 3),
        bar=bar,
        met=met,
    )


def _judged_race(row: Row, time_bar: float, memory_bar: float) -> Row:
    assert row.other_mib is not None
    assert row.other_ms is not None
    met = row.measured_ms <= time_bar * row.other_ms and row.measured_mib <= memory_bar * row.other_mib
    bar = f"time <= {time_bar:g} x, memory <= {memory_bar:g} x the other's"
    return _rounded(row, bar=bar, met=met, other_mib=round(row.other_mib, 1), other_ms=round(row.other_ms, 2))


def _rounded(row: Row, **changes: Any) -> Row:
    return Row(
        **{
            **asdict(row),
            "measured_mib": round(row.measured_mib, 1),
            "measured_ms": round(row.measured_ms, 2),
            **changes,
        }
    )


def _line(row: Row) -> str:
    verdict = "met   " if row.met else "MISSED"
    if row.other_ms is not None and row.other_mib is not None:
        return (
            f"{verdict} {row.name:60} {row.measured_ms:9.2f} ms x{row.measured_ms / row.other_ms:.2f} "
            f"{row.measured_mib:9.0f} MiB x{row.measured_mib / row.other_mib:.3f}"
        )
    return (
        f"{verdict} {row.name:60} {row.measured_ms:9.2f} ms {row.measured_mib:9.0f} MiB, "
        f"predicted {row.error_percent:+.2f} %"
    )


def chosen(all_of_them: dict[str, Any] | Any, words: Sequence[str]) -> list[tuple[str, Any]]:
    found = [(name, each) for name, each in all_of_them.items() if not words or any(w in name for w in words)]
    if not found:
        sys.exit(f"error: nothing has {' or '.join(words)} in its name; there is: {'; '.join(all_of_them)}")
    return found


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _store(path: Path, row: Row) -> None:
    """In place of an older row of its name."""
    old = json.loads(path.read_text()) if path.exists() else []
    rows = {each["name"]: each for each in old}
    rows[row.name] = {key: value for key, value in asdict(row).items() if value not in (None, "")}
    path.write_text(json.dumps(list(rows.values()), indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = ("measure", "parts", "race", "judge", "stories", "figures")
    parser.add_argument("command", choices=known)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--new", action="store_true", help="measure only what has no row")
    parser.add_argument("--gpu", default="h200", help="the GPU that the stored rows were measured on")
    given = parser.parse_args()
    if given.command == "judge":
        judge_parts(RESULTS / f"parts_{given.gpu}.json", RESULTS / "parts.csv")
        return judge(
            sorted(RESULTS.glob("systems_*.json")), given.gpu, given.out or RESULTS / "systems.csv", given.new
        )
    if given.command == "stories":
        return stories(given.out or RESULTS / "stories.csv")
    if given.command == "figures":
        return figures(given.out or RESULTS / "claims.csv")
    if not torch.cuda.is_available():
        print("error: measuring needs a CUDA GPU and torch sees none", file=sys.stderr)
        return 2
    short = short_name(torch.cuda.get_device_name())
    if given.command == "parts":
        return measure_parts(given.words, given.out or RESULTS / f"parts_{short}.json")
    out = given.out or RESULTS / f"systems_{short}.json"
    if given.command == "measure":
        return measure(given.words, out, given.new)
    return race(given.words, out)


if __name__ == "__main__":
    sys.exit(main())
