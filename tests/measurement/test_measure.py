"""The order of a measured step, seen by a meter that writes down what it is asked."""

from dataclasses import replace

import pytest
import torch

from oomph.errors import UserError
from oomph.measurement.measure import CudaMeter, Reading, measure, observe, run_steps, summarise
from oomph.workload import Workload

CPU = torch.device("cpu")


class ScriptedMeter(CudaMeter):
    """Notes every call; the peak is a number that grows with each reading since the last reset."""

    def __init__(self, calls):
        super().__init__(CPU)
        self.calls = calls
        self.resets = 0

    def reset_peak(self):
        self.resets += 1
        self.calls.append("reset peak")

    def read(self, step, moment, seconds):
        self.calls.append("read")
        return Reading(step, moment, 10 * self.resets, 100 * self.resets, 1000 * self.resets, seconds)

    def synchronize(self):
        self.calls.append("synchronize")


class Noting(torch.nn.Linear):
    def __init__(self, calls):
        super().__init__(2, 2)
        self.calls = calls

    def train(self, mode=True):
        self.calls.append(f"train {mode}")
        return super().train(mode)

    def forward(self, x):
        self.calls.append(f"forward {self.weight.dtype}".replace("torch.", ""))
        return super().forward(x)


class NotingSGD(torch.optim.SGD):
    calls: list[str]

    def step(self, closure=None):
        assert all(p.grad is not None for group in self.param_groups for p in group["params"])
        self.calls.append("step")
        super().step(closure)

    def zero_grad(self, set_to_none=True):
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)


def noting_workload(calls, **options):
    def model():
        calls.append("model")
        return Noting(calls)

    def batch(device):
        calls.append(f"batch on {device}")
        return torch.ones(1, 2, device=device, dtype=options.get("dtype", torch.float32))

    def optimizer(params):
        calls.append("optimizer")
        made = NotingSGD(params, lr=0.1)
        made.calls = calls
        return made

    def loss(model, batch):
        value = model(batch).sum()
        value.register_hook(lambda grad: calls.append(f"backward of {grad.item():g}"))
        return value

    return Workload(model, batch, loss, **{"optimizer": optimizer, **options})


def test_a_step_is_forward_backward_optimizer_and_zero_grad_in_that_order():
    calls = []
    run_steps(noting_workload(calls), CPU, 2, lambda step, moment: calls.append(f"<{step} {moment}>"))
    one_step = ["forward float32", "backward of 1", "step", "zero_grad"]
    assert [call for call in calls if not call.startswith("<")] == [
        "model",
        "train True",
        "optimizer",
        "batch on cpu",
        *one_step,
        *one_step,
    ]
    assert [call for call in calls if call.startswith("<2")] == [
        "<2 begin>",
        "<2 forward>",
        "<2 backward>",
        "<2 optimizer>",
        "<2 end>",
    ]


def test_accumulation_divides_the_loss_and_steps_once_and_the_model_takes_the_dtype_first():
    calls = []
    workload = noting_workload(calls, accumulate=4, dtype=torch.float64)
    run_steps(workload, CPU, 1, lambda step, moment: None)
    assert calls.count("backward of 0.25") == calls.count("forward float64") == 4
    assert calls.count("step") == 1


def test_autocast_covers_the_loss_and_not_the_backward():
    seen = []

    def loss(model, batch):
        seen.append(torch.is_autocast_enabled("cpu"))
        value = model(batch).float().sum()
        value.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))
        return value

    workload = Workload(lambda: torch.nn.Linear(2, 2), lambda device: torch.ones(1, 2), loss, autocast="bf16")
    run_steps(workload, CPU, 1, lambda step, moment: None)
    assert seen == [True, False]


def test_a_deterministic_step_is_measured_as_one():
    asked = []

    def loss(model, x):
        asked.append(torch.are_deterministic_algorithms_enabled())
        return model(x).sum()

    work = Workload(
        model=lambda: torch.nn.Linear(2, 2),
        batch=lambda device: torch.ones(1, 2),
        loss=loss,
        deterministic=True,
    )
    run_steps(work, CPU, 1, lambda step, moment: None)
    run_steps(replace(work, deterministic=False), CPU, 1, lambda step, moment: None)
    assert asked == [True, False]


def test_without_an_optimizer_the_gradients_stay():
    model = torch.nn.Linear(2, 2)
    workload = Workload(
        lambda: model, lambda device: torch.ones(1, 2), lambda m, x: m(x).sum(), optimizer=None
    )
    run_steps(workload, CPU, 2, lambda step, moment: None)
    assert model.bias.grad.tolist() == [2.0, 2.0]


def test_peaks_are_reset_when_a_step_begins_and_read_when_the_device_is_done():
    calls = []
    readings = observe(noting_workload(calls), CPU, 2, ScriptedMeter(calls))
    assert calls.count("reset peak") == 3
    second_step = calls[len(calls) - calls[::-1].index("reset peak") - 1 :]
    assert second_step[-3:] == ["synchronize", "read", "read"]
    assert [(r.step, r.moment) for r in readings if r.step == 1] == [
        (1, "begin"),
        (1, "forward"),
        (1, "backward"),
        (1, "optimizer"),
        (1, "end"),
    ]


def test_a_function_is_called_once_and_its_step_as_often_as_asked():
    calls = []

    def function():
        calls.append("set up")
        return lambda: calls.append("step")

    readings = observe(function, CPU, 3, ScriptedMeter([]))
    assert calls == ["set up", "step", "step", "step"]
    assert [r.step for r in readings if r.moment == "end"] == [1, 2, 3]


def test_a_function_that_returns_no_step_counts_as_one_step():
    measurement = summarise(observe(lambda: None, CPU, 3, ScriptedMeter([])), 0, "a card")
    assert [step.step for step in measurement.steps] == [1]


def test_the_reported_peak_is_the_largest_of_the_steps():
    readings = [
        Reading(0, "setup", 7, 8, 20, 0.0),
        Reading(1, "end", 50, 100, 200, 9.0),
        Reading(2, "end", 50, 130, 210, 1.0),
        Reading(3, "end", 50, 120, 220, 2.0),
    ]
    measurement = summarise(readings, 999, "a card")
    assert (measurement.peak.allocated, measurement.peak.step) == (130, 2)
    assert (measurement.peak.reserved, measurement.peak.device) == (220, 999)
    assert measurement.before == 7
    assert measurement.seconds_per_step == 1.5
    assert [step.end for step in measurement.steps] == [50, 50, 50]


def test_where_nothing_can_be_measured_it_says_so_in_one_line(monkeypatch):
    with pytest.raises(UserError, match="'cpu' cannot be measured on; valid: cuda"):
        measure(lambda: None, device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"^measure needs a CUDA GPU and torch \S+ sees none; .*$"):
        measure(lambda: None)


def test_zero_steps_are_refused():
    with pytest.raises(UserError, match="steps=0"):
        observe(lambda: None, CPU, 0, ScriptedMeter([]))
