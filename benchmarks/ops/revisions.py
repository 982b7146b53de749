"""Our ops of the installed oomph, without peers, for comparing two revisions of the code on one GPU.

    PYTHONPATH=OLD/src:. python -m benchmarks.ops.revisions old1.json
    PYTHONPATH=src:. python -m benchmarks.ops.revisions new1.json
    python -m benchmarks.ops.revisions --compare old1.json new1.json old2.json new2.json OUT.csv

Run the two in turns, twice each: the first pair compiles the kernels. The faster run of each counts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from benchmarks.ops.__main__ import CASES
from benchmarks.ops.runs import run_case, this_machine
from benchmarks.rows import need_gpu, write

SHAPES = {
    "cross_entropy": {"16384x2560x151936", "8192x1024x151936"},
    "mlp": {"SwiGLU 131072x2560x9216"},
    "modulated": {"65536x4096x14336x16"},
    "attention": {"B64 H8 N1024 D64"},
    "rotary": {"B1 H32/8 T65536 D128"},
    "kda": {"B4 T8192 H32 D128", "B1 T32768 H32 D128", "B16 T256 H8 D64"},
    "nsa": {"B1 T32768 HQ64 H4 D128"},
    "selective_scan": {"B64 L512 d512 n16 bf16"},
    "lif_gate": {"B4 T4096 H12 D64"},
}


def measure(out: Path, rounds: int = 8) -> None:
    machine, rows = this_machine(cpu=False), {}
    for name, shapes in SHAPES.items():
        for case in CASES[name]([], False):
            if case.shape in shapes:
                ours = [contender for contender in case.contenders if contender.ours]
                for row in run_case(replace(case, contenders=ours, limit=None), machine, rounds):
                    rows[f"{row.op} | {row.shape} | {row.contender}"] = [row.median_ms, row.peak_mib]
    out.write_text(json.dumps({"gpu": machine.gpu, "rows": rows}, indent=1))


def compare(files: list[Path], out: Path) -> None:
    """Files of the old and the new revision in turns."""
    runs = [json.loads(file.read_text())["rows"] for file in files]
    rows = []
    for key in runs[0]:
        old, new = (min(run[key][0] for run in runs[first::2]) for first in (0, 1))
        times = {"old_ms": f"{old:.4f}", "new_ms": f"{new:.4f}", "time_ratio": f"{new / old:.3f}"}
        memory = {
            f"{which}_mib": f"{run[key][1]:.1f}" for which, run in zip(("old", "new"), runs, strict=False)
        }
        rows.append({"op": key, **times, **memory})
    write(out, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="what to write; with --compare, it comes last")
    parser.add_argument("--compare", action="store_true", help="of the old and the new revision in turns")
    given = parser.parse_args()
    if given.compare:
        compare(given.files[:-1], given.files[-1])
    else:
        need_gpu()
        measure(given.files[0])
