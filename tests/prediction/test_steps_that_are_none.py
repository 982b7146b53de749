"""What a user's function may return, and what is said where no training step came of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_programs import notes_of, workload
from torch import nn

import oomph
from oomph import UserError


def on_gpu() -> nn.Module:
    return nn.Linear(64, 64).cuda()


def train_once(model: nn.Module) -> torch.Tensor:
    loss = model(torch.randn(8, 64, device="cuda")).sum()
    loss.backward()
    torch.optim.SGD(model.parameters()).step()
    return loss


def model_and_step() -> Any:
    model = on_gpu()
    return model, functools.partial(train_once, model)


def generator() -> Iterator[None]:
    model = on_gpu()
    while True:
        train_once(model)
        yield


async def coroutine() -> None:
    train_once(on_gpu())


def step_that_needs_a_batch() -> Callable[[Any], Any]:
    model = on_gpu()

    def step(batch: torch.Tensor, scale: float = 1.0) -> None:
        model(batch).sum().backward()

    return step


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (on_gpu, r"on_gpu\(\) returned a model \(Linear\)"),
        (lambda: nn.Linear(4, 4), r"the function returned a model \(Linear\)"),
        (lambda: nn.Linear, "returned the class Linear"),
        (model_and_step, r"returned a tuple of a model \(Linear\) and a partial"),
        (
            lambda: [on_gpu(), train_once],
            r"returned a list of a model \(Linear\) and a function \(train_once\)",
        ),
        (lambda: {"w": workload()}, "returned a dict of a Workload"),
        (
            lambda: (on_gpu(), 1, 2, 3, 4),
            r"returned a tuple of a model \(Linear\), an int, an int and 2 more",
        ),
        (lambda: torch.optim.SGD(on_gpu().parameters()), r"returned an optimizer \(SGD\)"),
        (generator, "returned a generator"),
        (coroutine, "returned a coroutine"),
        (step_that_needs_a_batch, r"returned a function \(step\), which needs arguments \(batch\)"),
    ],
    ids=[
        "model",
        "model on the host",
        "class",
        "tuple",
        "list",
        "dict",
        "long tuple",
        "optimizer",
        "generator",
        "coroutine",
        "needs arguments",
    ],
)
def test_what_is_no_step_is_named_in_one_line_with_what_is_valid(function, returned):
    with pytest.raises(UserError, match=returned) as caught:
        oomph.predict(function, gpu="24GiB")
    assert "return a function of no arguments that does one training step, or a Workload" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "outcome",
    [
        lambda model, loss: None,
        lambda model, loss: loss,
        lambda model, loss: loss.item(),
        lambda model, loss: {"loss": loss, "steps": 1},
        lambda model, loss: model,  # trained, and handed back
        lambda model, loss: (model, train_once),
        lambda model, loss: "trained",
    ],
    ids=["nothing", "loss", "number", "metrics", "model", "tuple", "string"],
)
def test_a_function_that_trains_by_itself_may_return_what_it_likes(outcome):
    def train() -> Any:
        model = on_gpu()
        return outcome(model, train_once(model))

    prediction = oomph.predict(train)
    assert prediction.peak.allocated > 3 * 64 * 64 * 4


def test_a_function_without_a_backward_pass_is_predicted_and_said_to_be_no_training_step():
    prediction = oomph.predict(lambda: on_gpu()(torch.randn(8, 64, device="cuda")))
    assert "the function ran no backward pass" in notes_of(prediction)
    assert prediction.steps == ()


def test_a_step_or_a_workload_that_is_returned_gets_no_such_note():
    def setup() -> Callable[[], Any]:
        return functools.partial(train_once, on_gpu())

    for target in (setup, workload):
        prediction = oomph.predict(target, gpu="h200")
        assert [step.step for step in prediction.steps] == [1, 2, 3]
        assert prediction.notes == ()


def test_a_program_that_puts_nothing_on_the_gpu_is_told_what_it_returned():
    with pytest.raises(UserError, match="put nothing on the GPU and returned a tensor; build"):
        oomph.predict(lambda: torch.randn(3))
    with pytest.raises(UserError, match="put nothing on the GPU; build"):
        oomph.predict(lambda: None)
