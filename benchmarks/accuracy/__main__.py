"""Predicted against measured memory, workload by workload.

python -m benchmarks.accuracy measure [names...]   # on a GPU; one fresh process per workload
python -m benchmarks.accuracy predict [names...]   # anywhere; --check compares and writes nothing
python -m benchmarks.accuracy oplog NAME --out F   # on a GPU; for the divergence finder
python -m benchmarks.accuracy diverge NAME F       # anywhere: where the prediction parts from that log
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.accuracy.gpu_runs import measure_all, measure_here, oplog_here
from benchmarks.accuracy.rows import (
    ACCURACY,
    Comparison,
    changes,
    compare_rows,
    measured_rows,
    out_of_bounds,
)
from benchmarks.rows import chosen, read, write


def predict(names: list[str], gpu: str, out: Path, check: bool) -> int:
    """Predict every measured workload and write the comparison. A failure is printed and skipped.

    `check` writes nothing, and also fails where a row leaves its bounds or differs from the one in `out`.
    """
    import torch

    import oomph
    from benchmarks.accuracy.workloads import ALL

    measured = measured_rows()
    wanted = chosen(names, [name for name in ALL if name in measured], "measured workload")
    done = {row.workload: row for row in read(out, Comparison)}
    failed = 0
    for name in wanted:
        try:
            prediction = oomph.predict(ALL[name].target, gpu=gpu)
        except Exception as error:  # one workload must not stop the others
            failed += 1
            print(f"{name}: FAILED {type(error).__name__}: {error}", file=sys.stderr)
            continue
        row = compare_rows(measured[name], prediction, torch.__version__, ALL[name].convolutions)
        print(_line(row), flush=True)
        if check:
            problems = out_of_bounds(row) + (changes(row, done[name]) if name in done else [])
            failed += bool(problems)
            for problem in problems:
                print(f"{name}: {problem}", file=sys.stderr)
        else:
            done[name] = row
            write(out, [done[name] for name in ALL if name in done])
    print(f"{len(wanted)} workloads, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


def _line(row: Comparison) -> str:
    return (
        f"{row.workload:28s} allocated {row.allocated_error_percent:+7.3f} %   "
        f"reserved {row.reserved_error_percent:+7.3f} %   {row.seconds:5.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    measure = commands.add_parser("measure", help="measure on this machine's GPU")
    measure.add_argument("names", nargs="*", help="workloads (default: all)")
    measure.add_argument("--out", type=Path, help="JSON file to write (default: results/measured_...)")
    measure.add_argument("--jobs", type=int, default=6, help="processes that prepare models at a time")
    measure.add_argument("--limit", type=int, default=120, help="seconds each may hold the GPU")
    measure.add_argument("--missing", action="store_true", help="only those without a stored row")

    one = commands.add_parser("measure-here", help="measure one workload in this process")
    one.add_argument("name")
    one.add_argument("--lock", type=Path, help="file to lock while the GPU is in use")
    one.add_argument("--limit", type=int, default=120)

    oplog = commands.add_parser("oplog", help="log the ops of the first two steps on the GPU")
    oplog.add_argument("name")
    oplog.add_argument("--out", type=Path, required=True)
    oplog.add_argument("--steps", type=int, default=2)

    predicted = commands.add_parser("predict", help="predict what was measured, and compare")
    predicted.add_argument("names", nargs="*", help="workloads (default: all that were measured)")
    predicted.add_argument("--gpu", default="h200")
    predicted.add_argument("--out", type=Path, default=ACCURACY)
    predicted.add_argument("--check", action="store_true", help="compare with the bounds and with --out")

    parted = commands.add_parser("diverge", help="where a prediction parts from an op log")
    parted.add_argument("name")
    parted.add_argument("log", type=Path)
    parted.add_argument("--gpu", default="h200")
    parted.add_argument("--limit", type=int, default=20)

    commands.add_parser("list", help="print the names of the workloads")

    given = parser.parse_args()
    if given.command == "predict":
        return predict(given.names, given.gpu, given.out, given.check)

    from benchmarks.accuracy.workloads import ALL

    if given.command == "list":
        for name, entry in ALL.items():
            print(f"{name:28s} {entry.about}")
        return 0
    if given.command == "measure":
        names = chosen(given.names, ALL, "workload")
        return measure_all(names, given.out, given.jobs, given.limit, given.missing)
    entry = ALL[chosen([given.name], ALL, "workload")[0]]
    if given.command == "diverge":
        from benchmarks.accuracy.divergence import divergence_text

        print(divergence_text(entry.target, given.log, given.gpu, given.limit))
        return 0
    if given.command == "measure-here":
        return measure_here(given.name, entry, given.lock, given.limit)
    return oplog_here(entry, given.out, given.steps)


if __name__ == "__main__":
    sys.exit(main())
