"""Which ops do the accuracy Workloads call, and how many of them call each?

python -m benchmarks.accuracy.ops_used [NAME ...]

All are predicted in this process, whose registry then has every op that was looked up. docs/rules.md lists
those of which no entry, tag or schema says what they are.
"""

from __future__ import annotations

import sys
from collections import Counter

import torch

import oomph
from benchmarks import RESULTS
from benchmarks.accuracy.workloads import ALL
from benchmarks.rows import chosen, revision, write
from oomph.prediction import isolation
from oomph.prediction.ops.registry import FACTS

USED = RESULTS / "ops_used.csv"


def main() -> int:
    isolation._inside = True
    programs: Counter[str] = Counter()
    for name in chosen(sys.argv[1:], list(ALL), "workload"):
        FACTS.clear()
        oomph.predict(ALL[name].target, gpu="h200")
        programs.update(str(func) for func in FACTS)
        print(f"{name}: {len(FACTS)} ops, {len(programs)} in all", flush=True)
    more = {"torch": torch.__version__, **revision()}
    write(USED, [{"op": op, "programs": number, **more} for op, number in sorted(programs.items())])
    return 0


if __name__ == "__main__":
    sys.exit(main())
