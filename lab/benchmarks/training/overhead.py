"""What the training loop costs on top of the step: the same steps by the loop and by hand, in turns."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from lab.benchmarks.training.runs import trained_tokenizer
from oomph_lab.training.config import load
from oomph_lab.training.data import open_data
from oomph_lab.training.metrics import Callbacks, MetricsWriter
from oomph_lab.training.run import device_of
from oomph_lab.training.step import to_device, workload
from oomph_lab.training.trainer import Trainer

# Short blocks, many of them: how fast a host starts kernels changes by several percent within seconds.
STEPS, ROUNDS = 4, 15
_CHANGES = (
    "training.save=false",
    "training.eval_every=null",
    "training.accumulate=2",
    "data.curriculum=null",
)


def measured(config_file: Path, changes: Sequence[str]) -> dict[str, float]:
    """Milliseconds a step: medians over blocks."""
    with tempfile.TemporaryDirectory() as folder:
        config = load(config_file, [*_CHANGES, *changes, f"output.dir={folder}/run"])
        device = device_of(config)
        with trained_tokenizer(config, Path(folder) / "run"):
            data = open_data(config, Path(folder) / "run", workers=1)
        trainer = Trainer(config, workload(config), data, Path(folder) / "run", device, Callbacks())
        trainer.metrics = MetricsWriter(Path(folder) / "run", None)
        batches = [to_device(next(data.train), device) for _ in range(2)]

        def bare() -> None:
            """What any loop has to do."""
            losses = [trainer.forward_backward(batch, 1 / len(batches)) for batch in batches]
            assert losses
            if config.training.clip is not None:
                torch.nn.utils.clip_grad_norm_(trainer.optimizer_step.trained, config.training.clip)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=not config.training.cuda_graph)

        def fed() -> None:
            """The same with new batches, to tell what of the loop's cost is theirs."""
            batches[:] = [to_device(next(data.train), device) for _ in batches]
            bare()

        def looped() -> None:
            trainer.train_step()
            trainer._report_results()

        trainer.start_measuring()
        steps = {"bare": bare, "fed": fed, "loop": looped}
        times: dict[str, list[float]] = {name: [] for name in steps}
        launched: list[float] = []  # until the host is done: a GPU that is then still busy is the slower one
        order = random.Random(0)  # batches that the worker made meanwhile are those of whoever comes next
        for number in range(ROUNDS + 1):  # the first round compiles kernels
            for name in order.sample(list(steps), len(steps)):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(STEPS):
                    steps[name]()
                host = time.perf_counter() - began
                torch.cuda.synchronize()
                if number:
                    times[name].append((time.perf_counter() - began) / STEPS * 1e3)
                    if name == "bare":
                        launched.append(host / STEPS * 1e3)
        trainer.metrics.close()
        data.train.close()
    bare_ms, fed_ms, loop_ms = (statistics.median(times[name]) for name in steps)
    return {
        "bare_ms": round(bare_ms, 3),
        "bare_host_ms": round(statistics.median(launched), 3),
        "fed_ms": round(fed_ms, 3),
        "loop_ms": round(loop_ms, 3),
        "percent": round(100 * (loop_ms / bare_ms - 1), 2),
    }
