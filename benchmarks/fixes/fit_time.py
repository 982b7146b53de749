"""How long `oomph fit` takes on two cores, the first prediction included, and the plan that it finds.

python -m benchmarks.fixes.fit_time [names...] [--out F]     # results/fit_time.csv

Each case runs in a fresh process on two cores, after its imports. `seconds` pass on the clock; where other
programs use the cores too, `cpu_seconds` tell more. nanogpt is karpathy/nanoGPT's train.py with its defaults,
if NANOGPT names a clone with its data/openwebtext/train.bin and val.bin.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.rows import in_process, send, stored, write

_LONG = "configs/longctx_4b_24gb.yaml training.memory_limit=null fixes=[]"
# Name: the target as in benchmarks.fixes.plans, the limit, what is allowed, and the seconds that it may take.
CASES: dict[str, tuple[str, float | str, tuple[str, ...], float]] = {
    "gpt2": ("speed:gpt2", 0.5, ("exact",), 10),
    "llama-1b": ("speed:llama-1b", 0.5, ("exact",), 30),
    "llama-8b": ("speed:llama-8b", 0.6, ("exact",), 60),
    "longctx-4b-131072": (_LONG, "23GiB", ("exact", "precision"), 90),
    "char_gpt.py": ("char_gpt.py", 0.5, ("exact",), 0),
    "nanogpt": ("speed:nanogpt", 0.6, ("exact",), 0),
}


@dataclass(frozen=True)
class Row:
    case: str
    threshold_seconds: float
    seconds: float
    cpu_seconds: float
    load: float  # of the machine when it began, in processes
    predictions: int
    fits: bool
    limit: int  # bytes
    reserved: int
    slowdown: float
    fixes: str


def fit_case(name: str) -> Row:
    import oomph
    from benchmarks.accuracy.speed import cpu_seconds
    from benchmarks.fixes.plans import target_of
    from oomph.report.fixes import fix_word
    from oomph.torch_internals import FakeTensorMode

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    FakeTensorMode()  # its imports are imports, too
    target, limit, allow, threshold = CASES[name]
    program = target_of(target)
    if isinstance(limit, str):
        limits: dict[str, Any] = {"budget": limit}
    else:
        limits = {"max": int(limit * oomph.predict(program, gpu="h200").peak.reserved)}
    began, before, load = time.perf_counter(), cpu_seconds(), os.getloadavg()[0]
    plan = oomph.fit(program, gpu="h200", allow=allow, host_memory="128GiB", **limits)
    return Row(
        name,
        threshold,
        round(time.perf_counter() - began, 1),
        round(cpu_seconds() - before, 1),
        round(load, 1),
        plan.predictions,
        plan.fits,
        plan.limit,
        plan.after.peak.reserved,
        round(plan.after.slowdown, 4),
        " + ".join(map(fix_word, plan.fixes)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS / "fit_time.csv")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        send(asdict(fit_case(given.here)))
        return 0
    rows: dict[str, Any] = {row["case"]: row for row in stored(given.out)}
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in given.names or [name for name in CASES if name != "nanogpt" or "NANOGPT" in os.environ]:
        rows[name] = in_process("benchmarks.fixes.fit_time", "--here", name, **variables)
        print(" ".join(map(str, rows[name].values())), flush=True)
        write(given.out, [rows[name] for name in CASES if name in rows])
    missed = [row for row in rows.values() if 0 < float(row["threshold_seconds"]) < float(row["seconds"])]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
