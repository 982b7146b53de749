"""kill -9 at random moments of a training run, and whether what is resumed is the run that was never killed.

python -m lab.benchmarks.training.kills [--kills 20] [--per-run 5] [--seed 0] [--out kills.csv]

Every run is killed a few times, at a moment drawn at random: while it starts, in a step, while it saves. Then
it is let to its end, and its state (weights, optimizer, generators, data position) and its metrics are
compared, bit for bit, with those of the same run undisturbed. One process imports torch and forks the others.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard
import torchdata.stateful_dataloader  # noqa: F401  (imported before forking, not by every child)
from benchmarks.rows import write
from torch.utils._pytree import tree_leaves

from lab.benchmarks import RESULTS
from oomph_lab.training.checkpoint import find, load
from oomph_lab.training.config import RUN_CONFIG, TrainConfig, load_dict
from oomph_lab.training.metrics import Callbacks, StepReport, read_metrics
from oomph_lab.training.run import train

OUT = RESULTS / "kills.csv"
STEPS = 30
_MOST_STEPS, _LONGEST = 5, 0.1  # the kill comes so many steps after the first, and so many seconds


@dataclass(frozen=True)
class Row:
    """killed_at: the last step that was logged. resumed_at: the step that the next process went on from; 0
    where there was no checkpoint yet. equal: the run that this kill belongs to, at its end, is the one that
    was never killed."""

    seed: int
    workers: int  # processes that read the data
    kill: int
    killed_at: int
    started: bool  # false: before its first step, while it was being set up or read from its checkpoint
    while_saving: bool
    resumed_at: int
    equal: bool


class Shared(Callbacks):
    """Callbacks whose numbers another process can read: the step, and where it was resumed."""

    _FORM = struct.Struct("qq")

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, self._FORM.size)
        self.clear()

    def clear(self) -> None:
        self._step, self._resumed = -1, -1
        self._put()

    def read(self) -> tuple[int, int]:
        step, resumed = self._FORM.unpack(self.memory[:])
        return step, resumed

    def on_step(self, report: StepReport) -> None:
        self._step, self._resumed = report.step, max(self._resumed, 0)
        self._put()

    def on_message(self, message: str) -> None:
        if message.startswith("no checkpoint yet"):
            self._resumed = 0
        elif message.startswith("resumed at step "):
            self._resumed = int(message.rsplit(" ", 1)[1])
        self._put()

    def _put(self) -> None:
        self.memory[:] = self._FORM.pack(self._step, self._resumed)


def workers_of(seed: int) -> int:
    """None as on a CPU, or one as on a GPU."""
    return seed // 2 % 2


def config_of(folder: Path, seed: int) -> TrainConfig:
    text = folder.parent / "text.txt"
    if not text.exists():
        text.parent.mkdir(parents=True)
        text.write_text("".join(f"line {number}: {number * number}\n" for number in range(2000)))
    return load_dict(
        {
            "system": "pythia",
            "model": {
                "preset": "report",
                "vocab_size": 260,
                "hidden_size": 64,
                "num_layers": 2,
                "num_heads": 4,
                "intermediate_size": 256,
                "dropout": 0.1,
            },
            "data": {
                "source": str(text),
                "tokenizer": "bytes",
                "seq_len": 16,
                "batch_size": 2,
                "shuffle_window": 16,
                "workers": workers_of(seed),
            },
            "training": {
                "steps": STEPS,
                "schedule": "cosine",
                "warmup": 5,
                "clip": 1.0,
                "log_every": 1,
                "eval_every": 15,
                "eval_batches": 1,
                "save_every": 1 + seed % 2,
                "seed": seed,
                "device": "cpu",
            },
            "output": {"dir": str(folder)},
        },
        "killed",
    )


def in_child(work: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def finished(pid: int) -> None:
    status = os.waitpid(pid, 0)[1]
    if not os.WIFEXITED(status) or os.WEXITSTATUS(status):
        raise SystemExit(f"a run failed with status {status}")


def killed(config: TrainConfig, shared: Shared, draw: random.Random) -> bool:
    """Start or resume the run, and kill it. False: it ended before."""
    shared.clear()
    folder = Path(config.output.dir or "")
    pid = in_child(lambda: train(config, resume=(folder / RUN_CONFIG).exists(), callbacks=shared))
    began = time.perf_counter()
    if draw.random() > 0.2:  # else while it is being set up
        first, more = -1, draw.randrange(_MOST_STEPS)

        def running() -> bool:
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

        while (first < 0 or shared.read()[0] < first + more) and running():
            time.sleep(0.0005)
            first = shared.read()[0] if first < 0 else first
        time.sleep(draw.uniform(0, _LONGEST))
    else:
        time.sleep(draw.uniform(0, max(0.02, time.perf_counter() - began + 0.1)))
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def one_run(folder: Path, seed: int, kills: int, shared: Shared) -> list[Row]:
    draw = random.Random(seed)
    straight, config = config_of(folder / "straight", seed), config_of(folder / "killed", seed)
    finished(in_child(lambda: train(straight)))
    rows: list[Row] = []
    checkpoints = folder / "killed" / "checkpoints"
    for number in range(1, kills + 1):
        left = _unfinished(checkpoints)
        if not killed(config, shared, draw):
            break
        step, resumed = shared.read()
        rows = _resumed_at(rows, resumed)
        saving = bool(_unfinished(checkpoints) - left)
        rows.append(Row(seed, workers_of(seed), number, max(step, resumed, 0), step >= 0, saving, -1, False))
    shared.clear()
    finished(
        in_child(lambda: train(config, resume=(folder / "killed" / RUN_CONFIG).exists(), callbacks=shared))
    )
    rows = _resumed_at(rows, shared.read()[1])
    equal = same(folder / "straight", folder / "killed")
    return [replace(row, equal=equal) for row in rows]


def _resumed_at(rows: list[Row], step: int) -> list[Row]:
    """Known once the next process tells; those killed before they could tell leave it open to the next."""
    if step < 0:
        return rows
    return [
        replace(row, resumed_at=step, killed_at=max(step, row.killed_at)) if row.resumed_at < 0 else row
        for row in rows
    ]


def _unfinished(checkpoints: Path) -> set[str]:
    """What a killed process was writing or deleting; the next one takes it away once it gets that far."""
    return {path.name for pattern in (".saving-*", ".deleting-*") for path in checkpoints.glob(pattern)}


def same(one: Path, other: Path) -> bool:
    states = [tree_leaves(load(find(folder / "checkpoints"))) for folder in (one, other)]
    if len(states[0]) != len(states[1]):
        return False
    equal = all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*states, strict=True)
    )
    return equal and all(
        numbers(one, kind) == numbers(other, kind) for kind in ("train", "evaluation", "sample")
    )


def numbers(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = read_metrics(folder / "metrics.jsonl", kind)
    return [{key: row[key] for key in row if key != "tokens_per_second"} for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--per-run", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    # Python 3.12 warns of every fork where there are threads, and numpy has some.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    torch.compiler.reset()  # imports what every optimizer does
    rows: list[Row] = []
    seed = options.seed
    with tempfile.TemporaryDirectory() as folder:
        while len(rows) < options.kills:
            wanted = min(options.per_run, options.kills - len(rows))
            found = one_run(Path(folder) / str(seed), seed, wanted, Shared())
            for row in found:
                print(*(f"{name}={value}" for name, value in asdict(row).items()), flush=True)
            rows += found
            seed += 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(options.out, rows)
    equal, saving = sum(row.equal for row in rows), sum(row.while_saving for row in rows)
    print(f"{len(rows)} kills, {saving} of them while saving: {equal} in runs that ended as if undisturbed")
    return 0 if equal == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
