"""Kill a rank of a run at random, again and again: torchrun starts the ranks again, and nothing is lost.

python -m lab.benchmarks.training.killed_ranks [--kills 10] [--ranks 2] [--out results/killed_ranks.csv]

Trains configs/longctx_tiny.yaml on CPU ranks under `torchrun --max-restarts`. A rank that is chosen at random
is killed (SIGKILL) a random time after the run has made progress. The weights at the end are compared with
those of a run without kills. About 20 s for a kill on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import SOURCES
from benchmarks.rows import write


def command(folder: Path, ranks: int, restarts: int, steps: int) -> list[str]:
    words = [
        *("data.batch_size=4", "data.workers=0", f"training.steps={steps}", "training.save_every=2"),
        *("training.device=cpu", "training.eval_every=null", "training.log_every=1", f"output.dir={folder}"),
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    config = "longctx_tiny"
    return [*torchrun, f"--max-restarts={restarts}", "-m", "oomph_lab", "train", config, *words]


def last_step(folder: Path) -> int:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    return max(steps, default=0)


def workers_of(launcher: int) -> list[int]:
    """Process ids of the ranks, which are children of torchrun."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                name = (entry / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue
            if parent == launcher and b"oomph" in name:
                found.append(int(entry.name))
    return found


def run_with_kills(folder: Path, ranks: int, kills: int, steps: int) -> list[dict[str, float]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES), "OMP_NUM_THREADS": "1"}
    log = (folder.parent / "log.txt").open("w")
    run = subprocess.Popen(command(folder, ranks, kills + 2, steps), env=environment, stdout=log, stderr=log)
    rows: list[dict[str, float]] = []
    chosen = random.Random(0)
    seen = 0
    while run.poll() is None:
        time.sleep(0.2)
        step = last_step(folder)
        if len(rows) < kills and step > seen and (workers := workers_of(run.pid)):
            time.sleep(chosen.random())
            rank = chosen.randrange(len(workers))
            try:
                os.kill(workers[rank], signal.SIGKILL)
            except ProcessLookupError:
                continue
            rows.append({"kill": len(rows) + 1, "after_step": last_step(folder), "rank": rank})
            print(f"kill {len(rows)} after step {last_step(folder)}", flush=True)
            seen = last_step(folder)
            time.sleep(2)  # torchrun notices, and ends the others
    if run.returncode:
        print((folder.parent / "log.txt").read_text()[-3000:], file=sys.stderr)
        raise SystemExit(f"the run ended with status {run.returncode}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import torch

    from oomph_lab.training.checkpoint import find, load

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = run_with_kills(folder / "killed", given.ranks, given.kills, given.steps)
        run_with_kills(folder / "whole", given.ranks, 0, given.steps)
        killed, whole = (load(find(folder / run / "checkpoints")) for run in ("killed", "whole"))
        metrics = [
            json.loads(line) for line in (folder / "killed" / "metrics.jsonl").read_text().splitlines()
        ]
        steps = sorted(row["step"] for row in metrics if row["kind"] == "train")
        complete = steps == list(range(1, given.steps + 1))
        same = all(torch.equal(tensor, whole["model"][key]) for key, tensor in killed["model"].items())
    for row in rows:
        row |= {"ranks": given.ranks, "every_step_once": complete, "same_weights": same}
    if given.out is not None and rows:
        write(given.out, rows)
    print(f"{len(rows)} kills; every step logged once: {complete}; same weights bit for bit: {same}")
    return 0 if complete and same and len(rows) == given.kills else 1


if __name__ == "__main__":
    sys.exit(main())
