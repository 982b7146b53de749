"""Intervals of predictions that do not know: whether they hold what was measured, and how wide they are.

python -m benchmarks.accuracy.intervals --measure --seed 3     # on a GPU: draws programs and measures them
python -m benchmarks.accuracy.intervals --predict --seed 3     # anywhere: without cuDNN and without Triton
python -m benchmarks.accuracy.intervals --seed 3               # coverage, widths and verdicts of the rows
python -m benchmarks.accuracy.intervals --calibrate            # the reach of intervals, from seeds 1, 2

A measurement runs a program for three steps in a process of its own, and then again within smaller limits of
the allocator, to find the memory in which it still runs.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.machinery
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import RESULTS
from benchmarks.rows import in_process, need_gpu, send, stored, write

_STEPS, _PROBES = 3, 5
_COUNTS = {"compiled": 26, "convolution": 60, "data": 20}
_LIMITS = [0.7 + 0.025 * step for step in range(25)]  # times the memory in which the program runs
_SECONDS = 60  # that a measurement may take
_MEASURED = "kind seed number program gpu torch cudnn commit date allocated reserved runs_in fails_in".split()
_PREDICTED = (
    "reason predicted_allocated predicted_reserved least_allocated most_allocated least_reserved "
    "most_reserved refused_in fits_in predicted_torch predicted_commit"
).split()
_BISECTIONS = 8


def measure(kind: str, seed: int, number: int) -> dict[str, Any]:
    """Peaks of three steps in bytes, and the memory in which the program still runs, and no longer does."""
    import torch

    from benchmarks.accuracy.drawn import draw

    total = torch.cuda.get_device_properties(0).total_memory

    def run(limit: int | None) -> bool:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / total)
        try:
            step = program()
            for _ in range(_STEPS):
                step()
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return False
        finally:
            step = None
        return True

    about, program = draw(kind, seed, number)
    run(None)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    fails, runs = allocated - 1, reserved
    for _ in range(_PROBES if kind != "compiled" else 0):
        middle = (fails + runs) // 2
        if run(middle):
            runs = middle
        else:
            fails = middle
    return {
        "program": about,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.date.today().isoformat(),
        "allocated": allocated,
        "reserved": reserved,
        "runs_in": runs,
        "fails_in": fails,
    }


def predict(kind: str, seed: int, number: int, raw: bool) -> dict[str, Any]:
    """With the limits up to which the verdict is that it does not fit, and from which it fits. `raw`: the
    least and the most that were traced, without verdicts."""
    _hide_triton()
    import torch

    import oomph
    from benchmarks.accuracy.drawn import draw
    from oomph.prediction import intervals
    from oomph.prediction.result import verdicts_at

    if raw:
        for reason, (reach, _) in intervals.REACH.items():
            whole = intervals.Reach(1, 1, 0, reach.limit)
            intervals.REACH[reason] = whole, whole
    found = oomph.predict(draw(kind, seed, number)[1], gpu="h200")
    interval, needed = found.interval, found.needed
    low, high = (interval.low, interval.high) if interval else (needed, needed)

    def last(verdict: str, below: int, above: int) -> tuple[int, int]:
        """The limits between which the verdict stops to be this one."""
        for _ in range(_BISECTIONS):
            middle = (below + above) // 2
            is_still = verdicts_at(found, [middle])[0] == verdict
            below, above = (middle, above) if is_still else (below, middle)
        return below, above

    below, above = int(0.7 * low.allocated), int(1.3 * max(high.reserved, needed.reserved))
    return {
        "reason": interval.reason if interval else "",
        "predicted_allocated": needed.allocated,
        "predicted_reserved": needed.reserved,
        "least_allocated": low.allocated,
        "most_allocated": high.allocated,
        "least_reserved": low.reserved,
        "most_reserved": high.reserved,
        "refused_in": "" if raw else last("does not fit", below, above)[0],
        "fits_in": "" if raw else last("fits", above, below)[0],
        "predicted_torch": torch.__version__,
    }


def _hide_triton() -> None:
    class WithoutTriton(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
            return None if name.partition(".")[0] == "triton" else super().find_spec(name, path, target)

    sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = WithoutTriton


Key = tuple[str, str, str]


def _key(row: dict[str, str]) -> Key:
    return row["kind"], row["seed"], row["number"]


def _run_all(what: str, keys: list[Key], options: argparse.Namespace) -> int:
    rows: dict[Key, dict[str, Any]] = {_key(row): dict(row) for row in stored(options.out)}
    variables = {} if what == "measure" else {"CUDA_VISIBLE_DEVICES": "", "OOMPH_CUDNN": "0"}
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {}
        for key in keys:
            given = json.dumps([what, *key, options.raw])
            words = "benchmarks.accuracy.intervals", "--one", given
            seconds = _SECONDS if what == "measure" else None
            running[pool.submit(in_process, *words, seconds=seconds, **variables)] = key
        for done in as_completed(running):
            kind, seed, number = key = running[done]
            commit = "commit" if what == "measure" else "predicted_commit"
            try:
                found = {"kind": kind, "seed": seed, "number": number, commit: options.commit}
                rows[key] = rows.get(key, {}) | found | done.result()
            except RuntimeError as error:
                failed += 1
                print(*key, error, file=sys.stderr, flush=True)
            write(options.out, [rows[each] for each in sorted(rows, key=_place)], _MEASURED + _PREDICTED)
    return failed


def _place(key: Key) -> tuple[str, int, int]:
    return key[0], int(key[1]), int(key[2])


class Found(NamedTuple):
    """Of programs that were predicted and measured. Shares are of booleans; widths of the predicted peak."""

    programs: int
    with_interval: int
    inside: dict[str, list[bool]]  # of allocated and reserved
    widths: dict[str, tuple[float, float]]  # median and 90th percentile
    too_close: list[bool]  # of verdicts
    fits_wrongly: list[bool]
    refused_wrongly: list[bool]


def share(values: list[bool]) -> str:
    return f"{sum(values):,} of {len(values):,} ({100 * sum(values) / len(values):.0f} %)" if values else ""


def found_of(rows: Sequence[Mapping[str, str]], kind: str) -> Found | None:
    found = [row for row in rows if kind == row["kind"] and row["predicted_allocated"] and row["allocated"]]
    if not found:
        return None
    inside, widths = {}, {}
    for what in ("allocated", "reserved"):
        # Without an interval, what is said is the prediction, within a percent.
        inside[what] = [
            (int(row[f"least_{what}"]) - slack <= int(row[what]) <= int(row[f"most_{what}"]) + slack)
            for row in found
            for slack in [0 if row["reason"] else int(row[what]) // 100]
        ]
        each = sorted(
            (int(row[f"most_{what}"]) - int(row[f"least_{what}"])) / int(row[f"predicted_{what}"])
            for row in found
        )
        widths[what] = statistics.median(each), each[int(0.9 * (len(each) - 1))]
    # In how much a compiled program still runs was not measured.
    judged = [row for row in found if row["fits_in"] and kind != "compiled"]
    asked = [(part * int(row["runs_in"]), row) for row in judged for part in _LIMITS]
    fits = [limit >= int(row["fits_in"]) for limit, row in asked]
    refused = [limit <= int(row["refused_in"]) for limit, row in asked]
    return Found(
        len(found),
        sum(bool(row["reason"]) for row in found),
        inside,
        widths,
        [not any(each) for each in zip(fits, refused, strict=True)],
        [is_fit and limit <= int(row["fails_in"]) for is_fit, (limit, row) in zip(fits, asked, strict=True)],
        [
            is_not and limit >= int(row["runs_in"])
            for is_not, (limit, row) in zip(refused, asked, strict=True)
        ],
    )


def report(rows: list[dict[str, str]]) -> None:
    for kind in _COUNTS:
        found = found_of(rows, kind)
        if found is None:
            continue
        print(f"{kind}: {found.programs} programs, {found.with_interval} with an interval")
        for what, (median, tenth) in found.widths.items():
            print(
                f"  {what}: inside {share(found.inside[what])}; width: median {100 * median:.1f} %, "
                f"90th percentile {100 * tenth:.1f} %"
            )
        print(f"  too close to call: {share(found.too_close)}")
        print(f"  fits, where the program fails: {share(found.fits_wrongly)}")
        print(f"  does not fit, where the program runs: {share(found.refused_wrongly)}")


def calibrate(rows: list[dict[str, Any]], coverage: float) -> None:
    """The narrowest reach that holds as many of the rows as split-conformal prediction asks for."""
    for reason in sorted({row["reason"] for row in rows if row["reason"]}):
        for kind in ("allocated", "reserved"):
            known = [
                tuple(int(row[name]) for name in (f"predicted_{kind}", f"least_{kind}", f"most_{kind}", kind))
                for row in rows
                if row["reason"] == reason
            ]
            best = min(_reaches(known, coverage), default=None)
            print(reason, kind, len(known), best and best[1:])


def _reaches(known: list[tuple[int, ...]], coverage: float) -> Any:
    from oomph.prediction.intervals import Reach, ends

    sides = (0, 0.1, 0.2, 0.25, 0.3, 0.5, 0.75, 0.9, 0.95, 1, 1.5, 2)
    besides = (0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.12, 0.15)
    for reach in itertools.starmap(Reach, itertools.product(sides, sides, besides)):
        found = [ends(least, at, most, reach) for at, least, most, _ in known]
        inside = sum(low <= one[3] <= high for (low, high), one in zip(found, known, strict=True))
        if inside >= min(len(known), coverage * (len(known) + 1)):
            widths = sorted((high - low) / one[0] for (low, high), one in zip(found, known, strict=True))
            yield statistics.median(widths) + widths[int(0.9 * (len(widths) - 1))] / 4, reach, inside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "intervals_h200.csv")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--raw", action="store_true", help="predict the least and the most, for --calibrate")
    parser.add_argument("--seed", default="3")
    parser.add_argument("--counts", nargs="*", default=[], help="kind=count; 60, 20 and 26 by default")
    parser.add_argument("--commit", default="")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, kind, seed, number, raw = json.loads(options.one)
        program = kind, int(seed), int(number)
        send(measure(*program) if what == "measure" else predict(*program, raw))
        return 0
    counts = dict(each.split("=") for each in options.counts) or _COUNTS
    rows = [row for row in stored(options.out) if row["seed"] == options.seed]
    keys = [(kind, options.seed, str(n)) for kind, count in counts.items() for n in range(int(count))]
    if options.measure:
        need_gpu()
        return bool(_run_all("measure", keys, options))
    if options.predict:
        return bool(_run_all("predict", keys, options))
    if options.calibrate:
        from oomph.prediction.intervals import COVERAGE

        measured = [row for row in stored(options.out) if row["allocated"]]
        calibrate([row for row in measured if row["seed"] in ("1", "2")], COVERAGE)
    else:
        report(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
