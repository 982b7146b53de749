"""The five systems on a real GPU: peaks against predictions, and races against other forms of the same model.

python -m benchmarks.systems measure [WORD ...]   # on a GPU: peak and time of every form
python -m benchmarks.systems race [WORD ...]      # on a GPU: against Hugging Face's models and the dense scan
python -m benchmarks.systems judge                # anywhere: predicts the same, writes results/systems.csv

Both on a GPU write results/systems_<gpu>.json. WORDs choose what has them in its name.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import oomph
from benchmarks import RESULTS
from benchmarks.accuracy.rows import short_name
from benchmarks.systems.entries import entries
from benchmarks.systems.races import races, run

PEAK_BAR = 2.0  # percent


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
    error_percent: float | None = None
    bar: str = ""
    met: bool | None = None


def measure(words: Sequence[str], out: Path) -> int:
    for name, entry in chosen(entries(), words):
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


def judge(files: Iterable[Path], gpu: str, out: Path) -> int:
    stored = [Row(**row) for file in files for row in json.loads(file.read_text())]
    known, races_known = entries(), races()
    rows = []
    for row in stored:
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
        writer.writerows(asdict(row) for row in rows)
    print(f"{sum(bool(row.met) for row in rows)} of {len(rows)} rows meet their bars; {out}")
    return 0


def _judged_peak(row: Row, prediction: Any, at_most_gib: float | None) -> Row:
    predicted = prediction.peak.allocated / 2**20
    error = 100 * (predicted / row.measured_mib - 1)
    bar, met = f"predicted within {PEAK_BAR:g} %", abs(error) <= PEAK_BAR
    if at_most_gib is not None:
        bar, met = f"{bar}, peak <= {at_most_gib:g} GiB", met and row.measured_mib <= at_most_gib * 1024
    return _rounded(row, predicted_mib=round(predicted, 1), error_percent=round(error, 3), bar=bar, met=met)


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
    parser.add_argument("command", choices=("measure", "race", "judge"))
    parser.add_argument("words", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gpu", default="h200", help="the GPU that the stored rows were measured on")
    given = parser.parse_args()
    if given.command == "judge":
        return judge(sorted(RESULTS.glob("systems_*.json")), given.gpu, given.out or RESULTS / "systems.csv")
    if not torch.cuda.is_available():
        print("error: measuring needs a CUDA GPU and torch sees none", file=sys.stderr)
        return 2
    short = short_name(torch.cuda.get_device_name())
    out = given.out or RESULTS / f"systems_{short}.json"
    return {"measure": measure, "race": race}[given.command](given.words, out)


if __name__ == "__main__":
    sys.exit(main())
