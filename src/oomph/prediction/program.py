"""What is traced: the step of a Workload, a function and what it returned, a Trainer, or a script.

A script or module runs as `python train.py --its --flags` runs it, until its steps repeat.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import inspect
import numbers
import os
import random
import runpy
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from oomph import notebooks
from oomph.errors import ProgramError, UserError, missing_arguments, place, user_line
from oomph.prediction.allocator import allocator_settings
from oomph.prediction.compat import registry
from oomph.prediction.garbage import without_collection
from oomph.prediction.isolation import can_restart, finish, restart
from oomph.prediction.notebook import LeftOut, run_notebook, say_left_out
from oomph.prediction.tracer.fake_cuda import gpus_of_node
from oomph.prediction.tracer.fast_path import FastPath
from oomph.prediction.tracer.streams import DEVICE
from oomph.prediction.tracer.tracer import Tracer
from oomph.prediction.tracer.work import KernelsMark
from oomph.prediction.trainers import on_each_training_loop
from oomph.records import Event, Note, Prediction, Progress
from oomph.torch_internals import (
    FakeTensor,
    batches_drawn,
    deterministic_algorithms,
    init_fake_process_group,
    tree_flatten,
)
from oomph.workload import Workload, check_loss

_RECORDED_PASSES = 4  # of a step whose passes accumulate; later ones find blocks that they can use again
_RECORDED_EVENTS = 16_000  # of them; where there would be more, two passes are recorded
_FIRST_STEP_ONLY = ("workspace", "optimizer state")  # kinds of allocations; optimizers may step in backward
_STEPS_AT_THE_PEAK = 50  # of a function's own loop, after which it is stopped
_MOST_STEPS = 500
STEPS = 3  # the optimizer's state appears in the first; from the second on, steps repeat


def run_workload(workload: Workload, tracer: Tracer, progress: Progress) -> None:
    """Build on the host, move to the GPU, then STEPS times forward, backward, update."""
    allocator_settings(workload.allocator)  # a mistake there is reported before the trace, not after
    with deterministic_algorithms(workload.deterministic), _process_group(workload, tracer):
        _build_and_step(workload, tracer, progress)


@contextlib.contextmanager
def _process_group(workload: Workload, tracer: Tracer) -> Iterator[None]:
    """A fake one of the workload's ranks, of which the first is traced."""
    if workload.parallel is None:
        yield
        return
    tracer.set_ranks(workload.parallel.ranks)
    init_fake_process_group(tracer.ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _build_and_step(workload: Workload, tracer: Tracer, progress: Progress) -> None:
    tracer.allocator, tracer.sizes = workload.allocator, workload.sizes or {}
    progress("building the model", None)
    model = build_model(workload, tracer)
    tracer.name_modules(model)
    if workload.dtype is not None:
        model.to(workload.dtype)
    called = workload.place(model, DEVICE)
    tracer.label_parameters()
    model.train()
    optimizer = workload.make_optimizer(model)
    tracer.batch = batch = workload.make_batch(DEVICE)
    repeated = _RepeatedPasses(tracer, list(model.parameters()))

    def step(number: int) -> None:
        passes = workload.passes(batch)
        for index, (part, factor) in enumerate(passes):
            if repeated.repeat(index, part):
                continue
            of = f" (part {index + 1} of {len(passes)})" if len(passes) > 1 else ""
            progress(f"step {number} of {STEPS}: forward{of}", _done(number, index / len(passes)))
            with repeated.tracing(index, part, accumulated=len(passes) > 1):
                with tracer.in_phase("forward"), tracer.loss_after_model():
                    with workload.autocast_context("cuda"):
                        repeated.set_loss(workload.loss(called, part))
                    check_loss(repeated.loss)
                    scaled = workload.scaled(repeated.loss, factor)
                done = _done(number, (index + 0.3) / len(passes))
                progress(f"step {number} of {STEPS}: backward{of}", done)
                scaled.backward()
                del scaled
        if optimizer is not None:
            progress(f"step {number} of {STEPS}: optimizer", _done(number, 0.95))
            optimizer.step()
            optimizer.zero_grad()

    # Optimizers of others may do something only at every third step. That of a fix may have one inside.
    stepped: Any = optimizer
    while type(stepped).__module__.startswith("oomph."):
        inner = getattr(stepped, "inner", getattr(stepped, "_inner", None))
        if inner is None:
            break
        stepped = inner
    is_known = stepped is None or type(stepped).__module__.startswith(("torch.optim", "oomph."))
    _repeat(step, tracer, repeated if is_known else None)


class _TracedPass(NamedTuple):
    events: Sequence[Event]
    kernels: KernelsMark
    requests: Sequence[tuple[int, str]]  # bytes and op of each allocation, without those of _FIRST_STEP_ONLY
    forward_requests: Sequence[tuple[int, str]]


class _FirstPass(NamedTuple):
    """A step's first pass that leaves its loss, gradients and no more. Workspaces are allocated once."""

    forward: Sequence[Event]
    backward: Sequence[Event]
    loss: int  # its allocation
    gradients: Mapping[int, torch.nn.Parameter]  # by their allocations


class _RepeatedPasses:
    """Forward and backward passes of a Workload that repeat an earlier one: its events are recorded again.

    The first passes of the first two steps are traced; that of the second step is not if the steps are known
    to be the same (Tracer.repeat_first_step). From the second pass on, gradients are accumulated, and all
    passes of one shape are the same: one of them is traced, if its forward pass is that of the first.
    """

    def __init__(self, tracer: Tracer, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._tracer, self._parameters = tracer, parameters
        self._fast_path = FastPath(tracer.fake_mode)
        self._first_passes: dict[Any, _TracedPass] = {}  # by the shapes of the batch
        self._accumulated_passes: dict[Any, _TracedPass] = {}
        self._repeatable: dict[Any, _FirstPass | None] = {}
        self._repeated: dict[Any, bool] = {}  # whether the last pass of these shapes could be
        self.same_in_all_steps = tracer.log is None  # the first pass of every step, so far
        self.loss: Any = None  # alive until the next one takes its place, as in the loop that this stands for
        self._backward_begins = 0  # with which event

    def set_loss(self, loss: Any) -> None:
        self._backward_begins = len(self._tracer.recorder.events)
        self.loss = loss

    @contextlib.contextmanager
    def tracing(self, index: int, part: Any, accumulated: bool) -> Iterator[None]:
        tracer, work, key = self._tracer, self._tracer.work, _shapes(part)
        counting, work.counting = work.counting, work.counting or accumulated or tracer.repeat_first_step
        events, made = len(tracer.recorder.events), len(tracer.recorder.allocations)
        kernels = work.mark()
        yield
        new = [each for each in tracer.recorder.allocations[made:] if each.kind not in _FIRST_STEP_ONLY]
        traced = _TracedPass(
            tracer.recorder.events[events:],
            kernels.until_now(),
            [(each.bytes, _op(each)) for each in new],
            [(each.bytes, _op(each)) for each in new if each.during != "backward"],
        )
        work.counting = counting
        if index > 0:
            self._accumulated_passes[key] = traced
            return
        before = self._first_passes.get(key)
        self.same_in_all_steps &= before is None or before.requests == traced.requests
        self._first_passes[key] = traced
        if before is None and tracer.repeat_first_step:
            find = functools.partial(self._first_pass, traced.events, self._backward_begins - events)
            self._repeatable[key] = tracer.guard.call("repetition", "the first pass", find, lambda: None)

    def _first_pass(self, events: Sequence[Event], backward_begins: int) -> _FirstPass | None:
        recorder = self._tracer.recorder
        loss = recorder.allocation_of(self.loss) if type(self.loss) is FakeTensor else None
        gradients: dict[int, torch.nn.Parameter] = {}
        for parameter, grad in ((each, each.grad) for each in self._parameters if each.grad is not None):
            is_dense = type(grad) is FakeTensor and grad.layout is torch.strided
            allocation = recorder.allocation_of(grad) if is_dense else None
            layouts = ((each.stride(), each.dtype) for each in (parameter, grad) if is_dense)
            if allocation is None or allocation.bytes != grad.nbytes or len(set(layouts)) > 1:
                return None
            gradients[allocation.id] = parameter
        made = {event.id for event in events if event.action == "alloc"}
        freed = {event.id for event in events if event.action == "free"}
        left = made - freed
        stay = {id for id in left if recorder.allocations[id].kind == "workspace"}
        if loss is None or not freed <= made or left - stay != {loss.id, *gradients}:
            return None
        forward, backward = (
            [event for event in half if event.id not in stay]
            for half in (events[:backward_begins], events[backward_begins:])
        )
        return _FirstPass(forward, backward, loss.id, gradients)

    def repeat(self, index: int, part: Any) -> bool:
        """Record the events of an earlier pass, if this one would be the same."""
        key = _shapes(part)
        first, known = self._first_passes.get(key), self._accumulated_passes.get(key)
        if first is None or not self.same_in_all_steps:
            return False
        same_forward = known is not None and first.forward_requests == known.forward_requests
        if index == 0:
            found = self._repeatable.get(key)  # none unless the steps are known to be the same
            if found is None or any(each.grad is not None for each in self._parameters):
                return False
            self._repeat_first(found)
            known = first
        elif known is None or not same_forward:
            return False
        else:
            recorded = index < 2 or (
                index < _RECORDED_PASSES and index * len(known.events) < _RECORDED_EVENTS
            )
            if recorded or key not in self._repeated:
                self._repeated[key] = self._tracer.recorder.repeat(known.events, self._tracer.step, recorded)
            if not self._repeated[key]:
                return False
        known.kernels.repeat()
        return True

    @without_collection()
    def _repeat_first(self, found: _FirstPass) -> None:
        recorder, step, ids = self._tracer.recorder, self._tracer.step, dict[int, int]()
        recorder.record_again(found.forward, step, ids)
        storage = self.loss.untyped_storage()  # which stands for that of the new loss from here on
        recorder.release(storage)
        recorder.record_again(found.backward, step, ids)
        recorder.watch(storage, recorder.allocations[ids[found.loss]])
        for id, parameter in found.gradients.items():
            parameter.grad = self._fast_path.empty(parameter.shape, parameter.stride(), parameter.dtype)
            recorder.watch(parameter.grad.untyped_storage(), recorder.allocations[ids[id]])


def _op(made: Any) -> str:
    """FSDP2 allocates a gathered parameter by an op, and from then on by resizing its storage."""
    return "aten.empty.memory_format" if made.op == "parameter" else str(made.op)


def _shapes(part: Any) -> Any:
    leaves, structure = tree_flatten(part)
    return str(structure), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
    )


def build_model(workload: Workload, tracer: Tracer) -> torch.nn.Module:
    """A model that was there before is the user's own: a copy of it is changed and traced."""
    return workload.make_model(lambda model: _on_fake_tensors(model, tracer))


def run_function(
    function: Callable[[], Any],
    tracer: Tracer,
    progress: Progress,
    finish: Callable[[Tracer], NoReturn] | None = None,
) -> None:
    """Called once; if it returns a callable, that is the step and is called three times.

    `finish` ends the process of a function that trains without end."""
    progress("running the program", None)
    name = name_of(function)
    loop = _OwnLoop(name, tracer, progress, finish)
    tracer.training.on_optimizer_step = loop.stepped
    tracer.growth.on_runaway = loop.stop if finish is not None else None
    tracer.work.begin(counting=True)  # if it is no preparation of steps, the call itself is the step
    with tracer.in_phase("forward"):
        result = function()
    tracer.training.on_optimizer_step = None
    tracer.work.keep_step()
    if isinstance(result, Workload):
        if tracer.batch_sizes is not None:
            result, tracer.batch_sizes = result.with_sizes(tracer.batch_sizes.wanted), None
        run_workload(result, tracer, progress)
    elif is_step(result):
        check_step(result, name)
        tracer.mark_live_as_batch()

        def step(number: int) -> None:
            progress(f"step {number} of {STEPS}", _done(number, 0))
            with tracer.in_phase("forward"):
                result()

        _repeat(step, tracer)
    else:
        _check_own_training(result, name, tracer)
    if not tracer.recorder.allocations:
        what = "" if result is None or is_step(result) else f" and returned {described(result)}"
        raise UserError(
            f"the program put nothing on the GPU{what}; build its model and data on device 'cuda'"
        )


class _OwnLoop:
    """All steps of a function's own loop are traced, since later ones may differ, unless there is no end to
    them; the progress text says what would be faster."""

    def __init__(
        self, name: str, tracer: Tracer, progress: Progress, finish: Callable[[Tracer], NoReturn] | None
    ) -> None:
        self._name, self._tracer, self._progress, self._finish = name, tracer, progress, finish
        self._counts: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._steps = self._peak = self._since = 0

    def begin(self, number: int) -> None:
        tracer = self._tracer
        tracer.step = number
        tracer.work.begin(counting=True)
        tracer.recorder.mark(f"step {number}")

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if self._counts[optimizer] <= self._steps:  # a program may have an optimizer for each parameter
            return
        self._steps += 1
        tracer, steps = self._tracer, self._steps
        tracer.work.end_step()
        self.begin(steps + 1)
        if steps > STEPS:
            running = f"running the program, optimizer step {steps}"
            self._progress(
                f"{running}; a script, or a function that returns its step, is traced for three", None
            )
        if tracer.recorder.peak_bytes > self._peak:
            self._peak, self._since = tracer.recorder.peak_bytes, steps
        if steps >= min(self._since + _STEPS_AT_THE_PEAK, _MOST_STEPS) and self._finish is not None:
            self.stop(f"after {steps} optimizer steps: what it does later is not included")

    def stop(self, why: str) -> None:
        if self._finish is not None:
            self._tracer.recorder.note(f"{self._name} was stopped {why}")
            self._tracer.work.keep_step()
            self._tracer.label_parameters()
            self._finish(self._tracer)


def _check_own_training(result: Any, name: str, tracer: Tracer) -> None:
    """The function was all there is: was it a training step?"""
    if not tracer.training.ran_backward and not tracer.training.optimizer_steps:
        check_result(result, name)
    if tracer.training.optimizer_steps == 1:
        tracer.recorder.note(
            f"only one optimizer step of {name} was traced: the optimizer's state, made in it, may raise the "
            "peak of the second; a function that returns its step is traced for three"
        )


def _done(step: int, part: float) -> float:
    """How much of the trace is behind: steps take about the same time, the backward pass most of it."""
    return (step - 1 + part) / STEPS


def _repeat(step: Callable[[int], None], tracer: Tracer, passes: _RepeatedPasses | None = None) -> None:
    """`passes`: if the second step's are those of the first, the last step repeats the second's events."""
    recorder, before = tracer.recorder, 0
    for number in range(1, STEPS + 1):
        tracer.step = number
        recorder.mark(f"step {number}")
        same = number == STEPS and passes is not None and passes.same_in_all_steps
        if same and recorder.repeat(recorder.events[before:-1], number):
            break
        before = len(recorder.events)
        tracer.work.begin(counting=number == STEPS or (passes is not None and number > 1))
        step(number)
    tracer.label_parameters()
    recorder.close()  # before the program's own objects go: what is left now is left after a step


def _on_fake_tensors(model: torch.nn.Module, tracer: Tracer) -> torch.nn.Module:
    """A model that existed before the trace is the user's: trace a copy of it that holds no data."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(isinstance(tensor, torch.nn.Parameter) and _is_real(tensor) for tensor in tensors):
        return model
    memo: dict[int, Any] = {}
    for tensor in tensors:
        if _is_real(tensor) and tensor.device.type != "meta":
            memo[id(tensor)] = tracer.fake_copy(tensor)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise UserError(
            f"Workload model() returned a model that was built before and cannot be copied ({error}); "
            "build it inside the function: model=lambda: MyModel(...)"
        ) from error


def _is_real(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor)


# -------------------------------------------------------------------------- what a function returned

_DEEPEST_NESTING = 4  # collections in collections; some hold themselves
_MOST_NAMED = 4  # parts of a collection
VALID = (
    "return a function of no arguments that does one training step, or a Workload; "
    "or do the training inside and return nothing"
)


def is_step(result: Any) -> bool:
    """Models, tensors and classes can be called, but calling them is no training step."""
    return callable(result) and not isinstance(result, (torch.nn.Module, torch.Tensor, type))


def check_step(step: Callable[[], Any], function: str) -> None:
    """Refuse a step that needs arguments; Python would only say that one is missing."""
    if needed := required_arguments(step):
        raise UserError(
            f"{function} returned {described(step)}, which needs arguments ({', '.join(needed)}); {VALID}"
        )


def required_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-ins have no signature
        return []
    given = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in given]


def check_result(result: Any, function: str) -> None:
    """Of a function that trained nothing: what it returned must be the outcome of what it did."""
    made_by_calling = inspect.isgenerator(result) or inspect.iscoroutine(result)
    if made_by_calling:
        result.close()  # it will not be run; left alone it would complain
    if made_by_calling or not _is_outcome(result):
        raise UserError(f"{function} returned {described(result)}, and no training step was traced; {VALID}")


def name_of(function: Callable[..., Any]) -> str:
    """`setup()`"""
    name = getattr(function, "__name__", type(function).__name__)
    return "the function" if name == "<lambda>" else f"{name}()"


def described(value: Any) -> str:
    """`a model (GPT2)`, `a tuple of a model (GPT2), a function (step)`"""
    if type(value) in (tuple, list) and 0 < len(value) <= _MOST_NAMED:
        return f"a {type(value).__name__} of {', '.join(map(_described, value))}"
    return _described(value)


def _described(value: Any) -> str:
    name = value.__name__ if inspect.isroutine(value) else type(value).__name__
    kinds: dict[Any, str] = {
        torch.nn.Module: "a model",
        torch.optim.Optimizer: "an optimizer",
        Callable: "a function",
    }
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if name == "<lambda>":
        return "a function"
    known = next((what for kind, what in kinds.items() if isinstance(value, kind)), None)
    return f"{known} ({name})" if known else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _is_outcome(result: Any) -> bool:
    """Nothing, numbers, words, tensors, and collections with nothing in them that could still be trained."""
    leaves = _leaves(result)
    if any(leaf is result for leaf in leaves):
        return isinstance(result, numbers.Number | str | bytes | PurePath | None) or hasattr(
            type(result), "__array__"
        )
    trainable = (torch.nn.Module, torch.optim.Optimizer, Workload)
    return not any(isinstance(leaf, trainable) or is_step(leaf) for leaf in leaves)


def _leaves(result: Any, depth: int = 0) -> list[Any]:
    """Also of sets, mappings and dataclasses, which are leaves to torch."""
    if isinstance(result, Mapping):
        parts = list(result.values())
    elif isinstance(result, tuple | list | set | frozenset):
        parts = list(result)
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        parts = [getattr(result, field.name, None) for field in dataclasses.fields(result)]
    else:
        return [result]
    if depth == _DEEPEST_NESTING:
        return []
    return [leaf for part in parts for leaf in _leaves(part, depth + 1)]


# ---------------------------------------------------------------------------------------------------- scripts

# An optimizer that has not stepped while another made so many times the steps is not waited for.
_MOST_ROUNDS = 10
_OF_TORCHRUN = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
)
_NAMED = 6  # of what a notebook left out
_LONG_EPOCH = 300  # steps, which take minutes to trace
_MORE = 10  # times as many steps, where it is not known how many reach what comes later
WATCH_THREAD = "oomph watch"  # its name
_ENDLESS_S = 60.0  # a program without an optimizer whose peak has not risen for so long is stopped


@dataclass(frozen=True, slots=True)
class Script:
    """`python path arguments`, or with `module` `python -m path arguments`; or a notebook."""

    path: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    steps: int = STEPS
    torchrun: bool = False  # with the environment of the first of its `ranks`
    ranks: int = 1
    # Called with each optimizer that it makes, or with the first model that it trains before any; and before,
    # with each TrainingLoop.
    on_optimizer: Callable[[Any], None] | None = None
    # Called with the first of those, if it still exists, and the prediction, before the process ends.
    on_end: Callable[[Any, Prediction], Prediction] | None = None
    repeat_last_step: bool = False  # its last step is known to be like the one before, and is not run
    model: str = ""  # the name of a model, whose step is all that the script does

    @property
    def name(self) -> str:
        return self.model or (self.path if self.module else Path(self.path).name)


def run_script(
    script: Script, tracer: Tracer, progress: Progress, finish: Callable[[Tracer], NoReturn]
) -> None:
    """Run the script. `finish` is called as soon as its steps repeat, from inside the script, and never
    returns: no handler of the script's can catch it, and nothing that it would do next is waited for."""
    if script.torchrun:
        tracer.set_ranks(script.ranks)
    steps = _ScriptSteps(script, tracer, progress, finish)
    tracer.training.on_optimizer_made, tracer.training.on_optimizer_step = steps.made, steps.stepped
    tracer.training.on_parameter_update = steps.updated
    tracer.growth.on_runaway = steps.end
    steps.begin(1)
    steps.start_watch()
    seed_generators()
    defined: dict[str, Any] = {}
    ended_at = ""
    try:
        with tracer.in_phase("forward"), steps.watching_loops():
            defined = run_as_main(script, steps.leave_out)
    except SystemExit as error:
        file, line = user_line(error)
        ended_at = place(Path(file).name, line) if file and line else ""
        if error.code not in (None, 0):
            status = error.code if isinstance(error.code, str) else f"status {error.code}"
            if not script.arguments and not tracer.recorder.allocations:
                status += missing_arguments(error)
            raise ProgramError(f"{script.name} ended with {status}", *user_line(error)) from error
    steps.check_trained(defined, ended_at)


def seed_generators() -> None:
    """A program that sets no seeds loads its data in the same order at every prediction."""
    random.seed(0)
    torch.default_generator.manual_seed(0)
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed(0)


def run_as_main(script: Script, left_out: LeftOut = say_left_out) -> dict[str, Any]:
    """Run it as `python` or `python -m` would, or Jupyter, in this process. What it defines."""
    if script.torchrun:
        in_node = gpus_of_node(script.ranks)
        sizes = (script.ranks, in_node, script.ranks // in_node, 0, 0, 0, "127.0.0.1", _free_port())
        os.environ.update(zip(_OF_TORCHRUN, map(str, sizes), strict=True))
    sys.argv = [script.path, *script.arguments]
    if notebooks.is_notebook(script.path):
        sys.path.insert(0, "")  # the current folder, also after %cd
        return run_notebook(script.path, left_out)
    if script.module:
        sys.path.insert(0, os.getcwd())
        _check_module(script.path)
        return runpy.run_module(script.path, run_name="__main__", alter_sys=True)
    sys.path.insert(0, str(Path(script.path).resolve().parent))
    return runpy.run_path(script.path, run_name="__main__")


def _is_target(value: Any) -> bool:
    """Whether it is a Workload or a function of no arguments, which a script defines and does not run."""
    if isinstance(value, Workload):
        return True
    return inspect.isfunction(value) and value.__module__ == "__main__" and not required_arguments(value)


def _check_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package above it lacks another module
        found = None
    if found is None:
        raise UserError(f"module {name!r} was not found; give one that `python -m` could run")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def on_first_training_call(call: Callable[[torch.nn.Module], None]) -> Any:
    """Call it with the first model that runs with gradients, before it does; a handle to end that."""

    def hook(module: torch.nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and module.training and _is_trained(module):
            handle.remove()
            call(module)

    handle = register_module_forward_pre_hook(hook)
    return handle


def _is_trained(module: torch.nn.Module) -> bool:
    """A model with parameters of its own, not a loss or a layer that is called by itself."""
    of_torch = type(module).__module__.startswith("torch.nn")
    return (not of_torch or isinstance(module, torch.nn.Sequential)) and any(
        parameter.requires_grad for parameter in module.parameters()
    )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def no_model_error(script: str) -> str:
    return (
        f"no fix was applied: {script} made no optimizer of torch.optim, and called no nn.Module with "
        "parameters in training mode"
    )


class _ScriptSteps:
    """Counts the steps of every optimizer, and says when enough were seen."""

    def __init__(
        self, script: Script, tracer: Tracer, progress: Progress, finish: Callable[[Tracer], NoReturn]
    ) -> None:
        self._script, self._tracer, self._progress, self._finish = script, tracer, progress, finish
        self._counts: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._most = 0  # steps of one optimizer, which may be gone
        self._updates = 0  # of parameters, without an optimizer
        self._first_event = 0  # of the step
        self._model_found = False
        self._left_out: list[str] = []  # of a notebook
        self._elsewhere = ""
        self._first_call: Any = None
        if script.on_optimizer is not None or script.on_end is not None:
            self._first_call = on_first_training_call(self._trains)

    def begin(self, number: int) -> None:
        tracer = self._tracer
        tracer.step = number
        tracer.work.begin(counting=number <= self._script.steps)  # later ones wait for another optimizer
        tracer.recorder.mark(f"step {number}")
        self._first_event = len(tracer.recorder.events)
        wanted = self._script.steps
        of = f"of {wanted}" if number <= wanted else f"(until each optimizer has stepped {wanted} times)"
        self._progress(f"running {self._script.name}: step {number} {of}", None)

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        self._counts[optimizer] = 0
        self._remember(optimizer)
        if self._first_call is not None:
            self._first_call.remove()
        if self._script.on_optimizer is not None:
            self._script.on_optimizer(optimizer)

    def leave_out(self, what: str, how: str) -> None:
        """Of a notebook: a magic, a command, or a program that trains in another process."""
        if how:
            say_left_out(what, how)
        if "oomph predict" in how:
            self._elsewhere = f"{what} is {how}"
            self._tracer.note(self._elsewhere)
            return
        self._tracer.recorder.notes.pop(self._note_of_left_out(), None)
        self._left_out.append(what)
        self._tracer.recorder.notes[self._note_of_left_out()] = None

    def _note_of_left_out(self) -> Note:
        more = f" and {len(self._left_out) - _NAMED} more" if len(self._left_out) > _NAMED else ""
        commands = "; --allow-subprocesses runs commands" if any("!" in one for one in self._left_out) else ""
        return Note(f"{self._script.name}: not run: {', '.join(self._left_out[:_NAMED])}{more}{commands}")

    def watching_loops(self) -> contextlib.AbstractContextManager[None]:
        if self._script.on_optimizer is None:
            return contextlib.nullcontext()
        return on_each_training_loop(self._script.on_optimizer)

    def _remember(self, made: Any) -> None:
        if self._tracer.training.trained is None:
            self._tracer.training.trained = weakref.ref(made)

    def _trains(self, model: torch.nn.Module) -> None:
        self._model_found = True
        self._remember(model)
        if self._script.on_optimizer is None:
            return
        process = os.getpid()
        self._script.on_optimizer(model)
        if os.getpid() != process:  # a fork, which has none of the threads
            self.start_watch()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        wanted, most = self._script.steps, max(self._counts.values())
        self._most = max(self._most, most)
        # Not for one that has not stepped while others train its parameters: it wraps another, as SAM does,
        # or gives its settings to an inner loop, as with `higher`.
        seen = [each for each, count in self._counts.items() if count >= wanted]
        trained = {id(parameter) for each in seen for parameter in _parameters(each)}
        waiting = [
            each
            for each, count in self._counts.items()
            if count < wanted and (count or not all(id(one) in trained for one in _parameters(each)))
        ]
        is_complete = self._counts[optimizer] == most == self._tracer.step
        if is_complete and self._tracer.work.counting:
            self._tracer.work.end_step()
        if not waiting or most >= _MOST_ROUNDS * wanted:
            if waiting:
                self._tracer.note(
                    f"{len(waiting)} of {len(self._counts)} optimizers stepped fewer than {wanted} times"
                )
            self.end()
        if is_complete:
            recorder, events = self._tracer.recorder, self._tracer.recorder.events[self._first_event :]
            repeats = self._script.repeat_last_step and 1 < min(self._counts.values()) == wanted - 1
            self.begin(most + 1)
            if repeats and recorder.repeat(events, wanted):
                self.end()

    def updated(self) -> None:
        """A parameter was written after a backward pass, by the program itself."""
        if any(self._counts.values()):
            return
        self._updates += 1
        if self._updates > 1:
            self._tracer.work.end_step()
        if self._updates > self._script.steps:
            self.end()
        if self._updates > 1:
            self.begin(self._updates)

    def end(self, why: str | None = None) -> NoReturn:
        try:
            with self._tracer.lock:  # other threads of the program wait, or the program does for the watch
                self._stop(why)
        except Exception as error:  # which the program may catch, and which would only end the watch
            if not isinstance(error, UserError) and self._tracer.blocks_repeated and can_restart():
                restart()
            finish(error)

    def _stop(self, why: str | None) -> NoReturn:
        self._check_gpu()
        what = "saving" if self._tracer.modules.evaluated else "evaluation or saving"
        later = f"what it would do later, such as {what} after an epoch, is not included ({self._more()})"
        step = self._tracer.guard.call("evaluation", "a trainer", registry.next_evaluation, lambda: None)
        if step is not None:
            later = (
                f"its evaluation after step {step}, which may need more, is not included "
                f"(--steps {step + 1} includes it)"
            )
        if why or not self._script.model:
            why = why or f"after {self._steps_made()}: {later}"
            self._tracer.recorder.note(f"{self._script.name} was stopped {why}")
        self._tracer.several_optimizers = self._tracer.last_step_is_partial = len(self._counts) > 1
        self._tracer.work.keep_step()
        self._tracer.label_parameters()
        self._finish(self._tracer)

    def _more(self) -> str:
        """What includes the end of an epoch, where the DataLoader that the steps read has a length."""
        traced, steps = self._tracer.step, 0
        loader = max(self._tracer.training.data_loaders, key=batches_drawn, default=None)
        if loader is not None and (batches := batches_drawn(loader) // traced):  # of a step
            with contextlib.suppress(Exception):  # a data set of the program's, which may have no length
                steps = -(-len(loader) // batches)
        if steps > _LONG_EPOCH:
            return f"an epoch has {steps:,} steps: to include its end, give the script less data, and --steps"
        if steps >= traced:
            return f"--steps {steps + 1} includes it"
        return f"--steps {_MORE * traced} includes what comes before step {_MORE * traced}"

    def _steps_made(self) -> str:
        """With several optimizers, as of a GAN, a new step begins where the first of them makes one more."""
        counts = list(self._counts.values())
        if len(counts) < 2:
            return f"{self._tracer.step} steps"
        fewest, most = min(counts), max(counts)
        each = f"{most} steps of each" if fewest == most else f"{fewest} to {most} steps"
        return f"{each} of its {len(counts)} optimizers (steps here are counted by the one that steps most)"

    def start_watch(self) -> None:
        threading.Thread(target=self.watch, name=WATCH_THREAD, daemon=True).start()

    def watch(self) -> None:
        """Runs in a thread: end a program that would never do so, such as a loop of forward passes."""
        peak, seen, since = -1, 0, time.monotonic()
        while True:
            time.sleep(1)
            recorder = self._tracer.recorder
            active = len(recorder.allocations) > seen  # else it prepares something on the host
            seen = len(recorder.allocations)
            if recorder.peak_bytes != peak or self._counts or self._updates or not active:
                peak, since = recorder.peak_bytes, time.monotonic()
            elif time.monotonic() - since > _ENDLESS_S:
                self.end(f"because it trains nothing and its peak had not risen for {_ENDLESS_S:.0f} s")

    def _check_gpu(self, defined: Mapping[str, Any] | None = None, ended_at: str = "") -> None:
        if self._script.on_optimizer is not None and not self._counts and not self._model_found:
            raise UserError(no_model_error(self._script.name))
        if not self._tracer.recorder.allocations:
            name, path = self._script.name, self._script.path
            targets = [
                f"`oomph predict {path}:{each}`"
                for each, value in (defined or {}).items()
                if _is_target(value)
            ]
            what = f"predict what it defines, {' or '.join(targets[:4])}, or " if targets else ""
            ended = f" before it ended itself at {ended_at}" if ended_at else ""
            build = f"{what}build its model and data on device 'cuda'"
            build = self._elsewhere or build
            raise UserError(f"{name} put nothing on the GPU{ended}; {build}")

    @property
    def trained(self) -> int:
        return self._most or self._updates

    def check_trained(self, defined: Mapping[str, Any], ended_at: str) -> None:
        """The script has ended by itself; `ended_at`: where, if by sys.exit."""
        name, steps = self._script.name, self.trained
        self._tracer.work.keep_step()
        self._tracer.last_step_is_partial = 0 < steps < self._tracer.step
        self._check_gpu(defined, ended_at)
        training = self._tracer.training
        trained, called = training.ran_backward, self._tracer.modules.completed
        if not trained and not steps and (training.optimizers or not called):
            made = "it made an optimizer, but " if training.optimizers else ""
            raise ProgramError(f"{name} ended without a training step: {made}it ran no backward pass")
        if trained and not steps:
            self._tracer.recorder.note(
                f"{name} ended without an optimizer step: this is the memory of what it did"
            )
        elif steps == 1:
            self._tracer.recorder.note(
                f"{name} ended after one optimizer step; the optimizer's state, made in it, may raise the "
                "peak of the second"
            )
