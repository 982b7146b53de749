"""Interrupt predictions at random moments and check that nothing of the process has changed.

python -m benchmarks.interrupts [--times 200]    # results/interrupts.csv

Two threads train and save real models all the while.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import oomph
from benchmarks import RESULTS


def program() -> Any:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(60)]).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        Path("weights.pt").write_text("x")
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def state() -> tuple[Any, ...]:
    """What a prediction could leave changed."""
    watched = (torch, torch.cuda, torch.Tensor, nn.Module, nn.Parameter, torch.optim.Optimizer, os, threading)
    names = {(owner.__name__, name): id(value) for owner in watched for name, value in vars(owner).items()}
    return (
        names,
        type(torch.ones(2)),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.backends.cudnn.enabled,
        os.getcwd(),
        Path("weights.pt").read_bytes(),
    )


def train(number: int, stop: threading.Event, failures: list[BaseException]) -> None:
    try:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        while not stop.is_set():
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.save(model.state_dict(), f"real{number}.pt")
            assert torch.load(f"real{number}.pt")["weight"].shape == (8, 8)
            time.sleep(0.001)
    except BaseException as error:
        failures.append(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    times = parser.parse_args().times
    results = RESULTS.resolve() / "interrupts.csv"
    stop, failures = threading.Event(), []  # type: tuple[threading.Event, list[BaseException]]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("weights.pt").write_text("mine")
        peak = oomph.predict(program).peak
        threads = [threading.Thread(target=train, args=(number, stop, failures)) for number in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(2)  # what torch imports for them is there
        before = state()
        random.seed(0)
        interrupted = changed = other_peaks = 0
        for _ in range(times):
            timer = threading.Timer(random.uniform(0, 1.2), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                other_peaks += oomph.predict(program).peak != peak
                timer.cancel()
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
            changed += state() != before
        stop.set()
        for thread in threads:
            thread.join()
        os.chdir(results.parent)
    row = {
        "predictions": times,
        "interrupted": interrupted,
        "changed": changed,
        "other_peaks": other_peaks,
        "failed_threads": len(failures),
        "torch": torch.__version__,
    }
    with results.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerow(row)
    print(row)
    return int(bool(changed or other_peaks or failures))


if __name__ == "__main__":
    raise SystemExit(main())
