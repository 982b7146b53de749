"""The whole way, through the real tracer: command line in, verdict and exit status out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from oomph.workload import Workload

print("a program may print")

def loss(model, batch):
    return model(batch).square().mean()

workload = Workload(
    model=lambda: torch.nn.Linear(1024, 4096, bias=False),
    batch=lambda device: torch.ones(2048, 1024, device=device),
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params),
)

def make():
    return workload

def broken_loss(model, batch):
    return model(batch[:, 1:]).mean()

broken = Workload(model=workload.model, batch=workload.batch, loss=broken_loss)
"""


def _oomph(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oomph", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(autouse=True)
def _train(program):
    program(PROGRAM)


@pytest.mark.parametrize("name", ["workload", "make"])
def test_a_small_step_fits_a_large_card(name):
    done = _oomph("predict", f"train.py:{name}", "--gpu", "h200", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["fits"] is True
    assert sum(one["bytes"] for one in made["at_peak"]) == made["peak"]["allocated"]
    # The output of the layer alone is 2048 x 4096 floats.
    assert made["peak"]["allocated"] >= 2048 * 4096 * 4
    assert made["lines"][0]["file"].endswith("train.py")
    assert "a program may print" in done.stderr


def test_a_step_above_the_limit_ends_with_one_and_names_the_line():
    done = _oomph("predict", "train.py:workload", "--max", "40MiB")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("does not fit: needs ")
    assert "; the limit is 40 MiB; " in done.stdout.splitlines()[0]
    assert "out of memory at train.py:" in done.stdout


def test_a_model_that_raises_ends_with_three_and_its_own_line():
    done = _oomph("predict", "train.py:broken")
    assert done.returncode == 3
    assert done.stdout == ""
    assert "oomph: the program failed at train.py:21: RuntimeError: " in done.stderr.splitlines()[-1]


WITHOUT_A_STEP = """
import torch

def model():
    return torch.nn.Linear(64, 64).cuda()

def setup():
    built = model()
    return built, lambda: built(torch.ones(2, 64, device="cuda")).sum().backward()

def leaking():
    built, kept = model(), []
    def step():
        kept.append(torch.ones(1024, 1024, device="cuda"))
        built(torch.ones(2, 64, device="cuda")).sum().backward()
    return step
"""


@pytest.mark.parametrize(
    ("name", "returned"),
    [("model", "a model (Linear)"), ("setup", "a tuple of a model (Linear) and a function")],
)
def test_a_function_that_returns_no_step_is_a_mistake_and_no_verdict(program, name, returned):
    program(WITHOUT_A_STEP)
    done = _oomph("predict", f"train.py:{name}", "--gpu", "24GiB")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert f"{name}() returned {returned}" in line


def test_a_leak_is_in_the_verdict_and_the_exit_status_stays(program):
    program(WITHOUT_A_STEP)
    done = _oomph("predict", "train.py:leaking", "--gpu", "24GiB")
    assert done.returncode == 0, done.stderr
    verdict = done.stdout.splitlines()[0]
    assert verdict.startswith("fits for now: ")
    assert "grows by 4.0 MiB per step: out of memory after about" in verdict
