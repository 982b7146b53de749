"""Recording and integrations on a real GPU; about six minutes on an H200.

python -m benchmarks.report.on_gpu --rows results/integrations_h200.csv [parts...]

Three parts: the peaks of a Trainer of transformers, of Lightning and of a plain loop, predicted and measured;
the time that recording costs; the report of a script that runs out of memory. Every run has a process of its
own, and predictions run without the GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.rows import Threshold, in_process, send, stored, write_thresholds

STEPS = 3
RUNS = 5  # of the overhead, with and without in turns


def model(layers: int = 12) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers))


def rows_of_data(length: int = 1024) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50257, (64, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def hf(**options: Any) -> Callable[[], None]:
    def train() -> None:
        from transformers import Trainer, TrainingArguments

        folder = tempfile.mkdtemp()
        args = TrainingArguments(
            folder, max_steps=STEPS, report_to=[], save_strategy="no", disable_tqdm=True, **options
        )
        Trainer(model(), args, train_dataset=rows_of_data()).train()

    return train


def lightning(precision: str) -> Callable[[], None]:
    def train() -> None:
        import lightning as L
        import torch

        class Module(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = model()

            def training_step(self, batch: Any, index: int) -> Any:
                return self.net(**batch).loss

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters())

        loader = torch.utils.data.DataLoader(rows_of_data(), batch_size=8)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(accelerator="gpu", devices=1, max_steps=STEPS, precision=precision, **quiet)
        trainer.fit(Module(), loader)

    return train


def plain() -> None:
    import torch

    net = model().cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    loader = iter(torch.utils.data.DataLoader(rows_of_data(), batch_size=8))
    for _ in range(STEPS):
        batch = {name: value.cuda() for name, value in next(loader).items()}
        net(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


CASES: dict[str, Callable[[], None]] = {
    "plain loop, fp32": plain,
    "Trainer, fp32": hf(per_device_train_batch_size=8),
    "Trainer, bf16": hf(per_device_train_batch_size=8, bf16=True),
    "Trainer, bf16, accumulated": hf(per_device_train_batch_size=4, bf16=True, gradient_accumulation_steps=4),
    "Trainer, bf16, checkpointed": hf(per_device_train_batch_size=16, bf16=True, gradient_checkpointing=True),
    "Lightning, fp32": lightning("32-true"),
    "Lightning, bf16": lightning("bf16-mixed"),
}


# -------------------------------------------------------------------------------- in processes of their own


def child(part: str, case: str) -> Any:
    import torch

    if part == "predict":
        import oomph

        peak = oomph.predict(CASES[case], gpu="h200").peak
        return peak.allocated, peak.reserved
    if part == "measure":
        CASES[case]()
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return _seconds_of_steps()


def _seconds_of_steps() -> list[tuple[float, float]]:
    """Without and with recording, in turns. Small layers: the more requests a second, the more it costs."""
    import torch

    from oomph.measurement.oplog import record_history

    net = model().cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    batch = torch.randint(0, 50257, (4, 512), device="cuda")

    def seconds() -> float:
        for step in range(40):
            if step == 10:
                torch.cuda.synchronize()
                began = time.perf_counter()
            net(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / 30

    found = []
    for _ in range(RUNS):
        torch.cuda.memory._record_memory_history(enabled=None)
        plain_seconds = seconds()
        record_history()
        found.append((plain_seconds, seconds()))
    return found


def _run(part: str, case: str) -> Any:
    """None where a package is missing or the run fails; the reason is printed."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if part == "predict" else {}
    try:
        return in_process("benchmarks.report.on_gpu", "--child", part, case, seconds=300, **hidden)
    except RuntimeError as error:
        print(f"{part} {case}: {error}", file=sys.stderr)
        return None


OUT_OF_MEMORY = """
import torch
torch.cuda.set_per_process_memory_fraction({fraction})
from benchmarks.report.on_gpu import plain
plain()
"""


def accuracy(predict_only: bool = False) -> Iterator[Threshold]:
    for case in CASES:
        predicted = _run("predict", case)
        measured = None if predict_only else _run("measure", case)
        if predict_only and predicted:
            print(case, *(f"{one / 2**20:.1f} MiB" for one in predicted))
        if predicted and measured:
            for name, a, b in zip(("allocated", "reserved"), predicted, measured, strict=True):
                yield case, f"{name}, % off the measured {b / 2**20:.0f} MiB", 100 * (a / b - 1), 0.5


def overhead() -> Iterator[Threshold]:
    pairs = _run("time", "")
    ratio = statistics.median(recorded / plain for plain, recorded in pairs)
    yield "GPT-2, 4 x 512, a step", "% slower with recording", 100 * (ratio - 1), 3


def out_of_memory() -> Iterator[Threshold]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(OUT_OF_MEMORY.format(fraction=0.03))
        words = [sys.executable, "-m", "oomph", "run", "--html", f"{folder}/oom.html", str(script)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=500)
        print(done.stderr[-6000:], file=sys.stderr)
        yield "oomph run, out of memory", "exit status less that of the script, 1", done.returncode - 1, 0
        missing = [
            word
            for word in (
                "OutOfMemoryError",
                "ran out of memory with",
                "tried to allocate",
                "modeling_gpt2.py",
            )
            if word not in done.stderr
        ]
        yield "oomph run, out of memory", f"parts missing from the report {missing}", len(missing), 0
        yield "oomph run, out of memory", "no page", not Path(f"{folder}/oom.html").exists(), 0


PARTS = {"accuracy": accuracy, "overhead": overhead, "out_of_memory": out_of_memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"all by default: {', '.join(PARTS)}")
    parser.add_argument("--rows", type=Path, default=RESULTS / "integrations_h200.csv", help="appended to")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        send(child(*options.child))
        return
    if options.predict_only:
        list(accuracy(predict_only=True))
        return
    found = itertools.chain(*(PARTS[part]() for part in options.parts or PARTS))
    write_thresholds(options.rows, found, kept=stored(options.rows))


if __name__ == "__main__":
    main()
