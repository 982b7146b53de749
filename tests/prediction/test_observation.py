"""A program that is observed, by a debugger, a profiler or flags of Python, has the same prediction."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import oomph


def solve(x):
    for _ in range(60):
        x = x * 0.99
        if x.abs().max() < 1e-3:
            break
    return x


def loops():
    x = torch.randn(64, device="cuda", requires_grad=True)
    sum(solve(x).sum() for _ in range(2)).backward()


def layers():
    """Repeated blocks, some of them checkpointed, and passes that accumulate."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(6)).cuda()
    optimizer = torch.optim.AdamW(blocks.parameters())

    def step():
        for _ in range(2):
            x = torch.randn(32, 64, device="cuda")
            for index, block in enumerate(blocks):
                x = checkpoint(block, x, use_reentrant=False) if index % 2 else block(x).relu()
            x.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def trace(*event):
    return trace


class Tracer:
    """As coverage's, which changes what it traces a frame with."""

    def __call__(self, frame, event, argument):
        return Tracer() if event == "call" else self


OBSERVERS = {
    "sys.settrace": (sys.settrace, trace),
    "a tracer of each frame": (sys.settrace, Tracer()),
    "sys.setprofile": (sys.setprofile, lambda *event: None),
    "threading.settrace": (threading.settrace, trace),
}


@pytest.fixture(scope="module", params=[loops, layers], ids=lambda program: program.__name__)
def program(request):
    return request.param, answer(request.param)


def answer(program):
    found = oomph.predict(program, gpu="h200")
    texts = [each.text for each in (*found.assumptions, *found.notes)]
    return found.peak, [(each.bytes, each.allocation.site) for each in found.at_peak], texts


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_prediction_is_the_same_under_a_tracer(program, observer):
    install, function = OBSERVERS[observer]
    run, expected = program
    before = sys.gettrace(), sys.getprofile()
    try:
        install(function)
        observed = answer(run)
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        threading.settrace(None)
    assert observed == expected


WITH_FLAGS = """
import warnings
import oomph
from test_observation import layers

def warns():
    warnings.warn("mine")

print(oomph.predict(layers, gpu="h200").peak.allocated)
try:
    oomph.predict(warns, gpu="h200")
except oomph.ProgramError as error:
    print(error)
"""


def test_a_prediction_is_the_same_with_flags_of_python():
    """And a warning of the program is an error where it would be one in its own run. For -O Python compiles
    all of torch again: benchmarks/accuracy/flags.py."""
    flags = ("-X", "dev", "-W", "error")
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, *flags, "-c", WITH_FLAGS]
    run = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.stdout.split("\n")[:2] == [str(answer(layers)[0].allocated), "UserWarning: mine"], run.stderr
