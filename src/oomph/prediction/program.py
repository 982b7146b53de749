"""What is traced: the step of a Workload, or a function of the user's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from oomph.deterministic import deterministic_algorithms
from oomph.errors import UserError
from oomph.prediction import returned
from oomph.prediction.allocator_settings import allocator_settings
from oomph.prediction.trace.pretend_cuda import DEVICE
from oomph.prediction.trace.tracer import Tracer
from oomph.workload import Workload

STEPS = 3  # the optimizer's state appears in the first; from the second on, steps repeat
Progress = Callable[[str, float | None], None]


def run_workload(workload: Workload, tracer: Tracer, progress: Progress) -> None:
    """Build on the host, move to the GPU, then three times forward, backward, update."""
    with deterministic_algorithms(workload.deterministic):
        _build_and_step(workload, tracer, progress)


def _build_and_step(workload: Workload, tracer: Tracer, progress: Progress) -> None:
    allocator_settings(workload.allocator)  # a mistake there is told before the work, not after
    tracer.allocator = workload.allocator
    progress("building the model", None)
    model = build_model(workload, tracer)
    tracer.modules.name(model)
    if workload.dtype is not None:
        model.to(workload.dtype)
    model.to(DEVICE)
    tracer.label_parameters()
    model.train()
    optimizer = workload.optimizer(model.parameters()) if workload.optimizer is not None else None
    batch = workload.make_batch(DEVICE)
    tracer.batch = batch

    loss: Any = None  # alive until the next one takes its place, as in the loop that this stands for

    def step(number: int) -> None:
        nonlocal loss
        passes = workload.passes(batch)
        for index, (part, factor) in enumerate(passes):
            of = f" (part {index + 1} of {len(passes)})" if len(passes) > 1 else ""
            progress(f"step {number} of {STEPS}: forward{of}", _done(number, index / len(passes)))
            with tracer.doing("forward"), tracer.loss_after_model():
                with _autocast(workload):
                    loss = workload.loss(model, part)
                _check_loss(loss)
                scaled = workload.scaled(loss, factor)
            progress(f"step {number} of {STEPS}: backward{of}", _done(number, (index + 0.3) / len(passes)))
            scaled.backward()
            del scaled
        if optimizer is not None:
            progress(f"step {number} of {STEPS}: optimizer", _done(number, 0.95))
            optimizer.step()
            optimizer.zero_grad()

    _repeat(step, tracer)


def build_model(workload: Workload, tracer: Tracer) -> torch.nn.Module:
    """A model that was there before is the user's own: a copy of it is changed and traced."""
    return workload.make_model(lambda model: _on_fake_tensors(model, tracer))


def run_function(function: Callable[[], Any], tracer: Tracer, progress: Progress) -> None:
    """Called once; if it returns a callable, that is the step and is called three times."""
    progress("running the program", None)
    name = returned.name_of(function)
    tracer.on_optimizer_step = partial(_tell_of_own_loop, tracer, progress)
    tracer.work.begin(counting=True)  # if it is no preparation of steps, the call itself is the step
    with tracer.doing("forward"):
        result = function()
    tracer.work.counting, tracer.on_optimizer_step = False, None
    if isinstance(result, Workload):
        run_workload(result, tracer, progress)
    elif returned.is_step(result):
        returned.check_step(result, name)
        tracer.treat_so_far_as_setup()

        def step(number: int) -> None:
            progress(f"step {number} of {STEPS}", _done(number, 0))
            with tracer.doing("forward"):
                result()

        _repeat(step, tracer)
    else:
        _judge_own_training(result, name, tracer)
    if not tracer.ledger.drafts:
        told = result is None or returned.is_step(result)
        what = "" if told else f" and returned {returned.described(result)}"
        raise UserError(
            f"the program put nothing on the GPU{what}; build its model and data on device 'cuda'"
        )


def _tell_of_own_loop(tracer: Tracer, progress: Progress) -> None:
    """All its steps are traced, since later ones may differ; whoever waits is told of the short way."""
    if tracer.optimizer_steps > 3:
        told = f"running the program, optimizer step {tracer.optimizer_steps}"
        progress(f"{told}; a function that returns its step is traced for three", None)


def _judge_own_training(result: Any, name: str, tracer: Tracer) -> None:
    """The function was all there is: was it a training step?"""
    trained = any(event.label == "backward" for event in tracer.ledger.events)
    if not trained and not tracer.optimizer_steps:
        returned.check_result(result, name)
    if not trained:
        tracer.ledger.note(
            f"{name} ran no backward pass: this is the memory of what it did, not of a training step; "
            "for that, return the step"
        )
    elif tracer.optimizer_steps == 1:
        tracer.ledger.note(
            f"only one optimizer step of {name} was traced: the optimizer's state, made in it, may raise the "
            "peak of the second; a function that returns its step is traced for three"
        )


def _done(step: int, part: float) -> float:
    """How much of the trace is behind: steps take about the same time, the backward pass most of it."""
    return (step - 1 + part) / STEPS


def _repeat(step: Callable[[int], None], tracer: Tracer) -> None:
    for number in range(1, STEPS + 1):
        tracer.step = number
        tracer.work.begin(counting=number == STEPS)
        tracer.ledger.mark(f"step {number}")
        step(number)
    tracer.label_parameters()
    tracer.ledger.close()  # before the program's own objects go: what is left now is left after a step


def _autocast(workload: Workload) -> contextlib.AbstractContextManager[Any]:
    if workload.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cuda", workload.autocast)  # type: ignore[arg-type]


def _check_loss(loss: Any) -> None:
    valid = "the loss function must return a tensor with one element"
    if not isinstance(loss, torch.Tensor):
        raise UserError(f"Workload loss returned {type(loss).__name__}; {valid}")
    if loss.numel() != 1:
        raise UserError(f"Workload loss returned a tensor of shape {list(loss.shape)}; {valid}")
    if not loss.requires_grad:
        raise UserError(
            "Workload loss does not depend on any trainable parameter; "
            "check for torch.no_grad(), .detach() or parameters that are all frozen"
        )


def _on_fake_tensors(model: torch.nn.Module, tracer: Tracer) -> torch.nn.Module:
    """A model that existed before the trace is the user's: trace a copy of it that holds no data."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(isinstance(tensor, torch.nn.Parameter) and _is_real(tensor) for tensor in tensors):
        return model
    memo: dict[int, Any] = {}
    for tensor in tensors:
        if _is_real(tensor) and tensor.device.type != "meta":
            memo[id(tensor)] = tracer.imitate(tensor)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise UserError(
            f"Workload model() returned a model that was built before and cannot be copied ({error}); "
            "build it inside the function: model=lambda: MyModel(...)"
        ) from error


def _is_real(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor)
