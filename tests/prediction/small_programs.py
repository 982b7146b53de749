"""Models small enough to count by hand, small programs, and questions about their predictions."""

import functools
import inspect

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import oomph
from oomph import Workload

MiB = 1 << 20


def mean_square(model, batch):
    return model(batch).square().mean()


def workload(model=lambda: nn.Linear(64, 64), **changes):
    options = {
        "model": model,
        "batch": lambda device: torch.randn(32, 64, device=device),
        "loss": mean_square,
    }
    return Workload(**options | changes)


def predict_step(step, width=64):
    """Predict a program whose step is `step(model, x)`, on the GPU."""

    def train():
        model = nn.Linear(width, width).cuda()
        x = torch.randn(32, width, device="cuda")
        return lambda: step(model, x)

    return oomph.predict(train, gpu="h200")


def in_trace(check=lambda found: True):
    """Make a test of a program: it is predicted in this process, and `check` holds for the prediction."""

    def decorate(program):
        @pytest.mark.usefixtures("in_process")
        @functools.wraps(program)
        def test(**arguments):
            assert check(oomph.predict(functools.partial(program, **arguments), gpu="h200"))

        return test

    return decorate


def line_of(function, text):
    lines, start = inspect.getsourcelines(function)
    return next(start + index for index, line in enumerate(lines) if text in line)


def notes_of(prediction):
    return "\n".join(note.text for note in prediction.notes)


def linear_workload(**changes):
    """One matrix of 4 MiB in float32, on 64 rows."""
    options = {
        "model": lambda: nn.Linear(1024, 1024, bias=False),
        "batch": lambda device: torch.randn(64, 1024, device=device),
        "loss": mean_square,
    }
    return Workload(**options | changes)


class Block(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self, depth=4, use_reentrant=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def stack_batch(device):
    return torch.randn(8192, 256, device=device, requires_grad=True)  # reentrant checkpointing needs it


def stack_workload(model=Stack, **changes):
    return Workload(**{"model": model, "batch": stack_batch, "loss": mean_square} | changes)


def requested(prediction, **wanted):
    """Bytes asked for by the tensors alive at the peak that have these attributes."""
    return sum(alive.allocation.bytes for alive in prediction.at_peak if _has(alive.allocation, wanted))


def made(prediction, **wanted):
    return [each for each in prediction.allocations if _has(each, wanted)]


def _has(allocation, wanted):
    return all(getattr(allocation, name) == value for name, value in wanted.items())
