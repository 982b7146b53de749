"""A script or module, run as `python train.py --its --flags` runs it, until its steps repeat."""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import runpy
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from oomph.errors import ProgramError, UserError, program_traceback, user_line
from oomph.prediction.program import STEPS, next_evaluation
from oomph.prediction.tracer.tracer import Tracer
from oomph.prediction.tracer.workers import gpus_of_node
from oomph.records import Prediction, Progress

# An optimizer that has not stepped while another made so many times the steps is not waited for.
_MOST_ROUNDS = 10
_OF_TORCHRUN = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
)
WATCH_THREAD = "oomph watch"  # its name
_ENDLESS_S = 60.0  # a program without an optimizer whose peak has not risen for so long is stopped


@dataclass(frozen=True, slots=True)
class Script:
    """`python path arguments`, or with `module` `python -m path arguments`."""

    path: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    steps: int = STEPS
    torchrun: bool = False  # with the environment of the first of its `ranks`
    ranks: int = 1
    # Called with each optimizer that it makes, or with the first model that it trains before any.
    on_optimizer: Callable[[Any], None] | None = None
    # Called with the first of those, if it still exists, and the prediction, before the process ends.
    on_end: Callable[[Any, Prediction], Prediction] | None = None
    repeat_last_step: bool = False  # its last step is known to be like the one before, and is not run

    @property
    def name(self) -> str:
        return self.path if self.module else Path(self.path).name


def run_script(
    script: Script, tracer: Tracer, progress: Progress, finish: Callable[[Tracer], NoReturn]
) -> None:
    """Run the script. `finish` is called as soon as its steps repeat, from inside the script, and never
    returns: no handler of the script's can catch it, and nothing that it would do next is waited for."""
    if script.torchrun:
        tracer.ranks = script.ranks
    steps = _ScriptSteps(script, tracer, progress, finish)
    tracer.on_optimizer_made, tracer.on_optimizer_step = steps.made, steps.stepped
    tracer.on_parameter_update = steps.updated
    steps.begin(1)
    steps.start_watch()
    seed_generators()
    try:
        with tracer.in_phase("forward"):
            run_as_main(script)
    except SystemExit as error:
        if error.code not in (None, 0):
            status = error.code if isinstance(error.code, str) else f"status {error.code}"
            if error.code == 2 and not script.arguments and not tracer.recorder.allocations:  # of argparse
                status += "; arguments of a script come after --, as `train.py -- --lr 1e-3`"
            raise ProgramError(f"{script.name} ended with {status}", *user_line(error)) from error
    except KeyError as error:
        if script.torchrun or error.args[0] not in _OF_TORCHRUN:
            raise
        message = f"KeyError: {error.args[0]!r}, which torchrun sets in the environment: add --torchrun"
        raise ProgramError(message, *user_line(error), program_traceback(error)) from error
    except PermissionError as error:
        if error.errno != errno.EACCES:
            raise
        hint = "a library that opens files for writing by itself, as h5py does, needs --allow-subprocesses"
        message = f"{type(error).__name__}: {error}; {hint}"
        raise ProgramError(message, *user_line(error), program_traceback(error)) from error
    steps.check_trained()


def seed_generators() -> None:
    """A program that sets no seeds loads its data in the same order at every prediction."""
    random.seed(0)
    torch.default_generator.manual_seed(0)
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed(0)


def run_as_main(script: Script) -> None:
    """Run it as `python` or `python -m` would, in this process."""
    if script.torchrun:
        in_node = gpus_of_node(script.ranks)
        sizes = (script.ranks, in_node, script.ranks // in_node, 0, 0, 0, "127.0.0.1", _free_port())
        os.environ.update(zip(_OF_TORCHRUN, map(str, sizes), strict=True))
    sys.argv = [script.path, *script.arguments]
    if script.module:
        sys.path.insert(0, os.getcwd())
        _check_module(script.path)
        runpy.run_module(script.path, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script.path).resolve().parent))
        runpy.run_path(script.path, run_name="__main__")


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

    def _remember(self, made: Any) -> None:
        if self._tracer.trained is None:
            self._tracer.trained = weakref.ref(made)

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
            self._end()
        if is_complete:
            recorder, events = self._tracer.recorder, self._tracer.recorder.events[self._first_event :]
            repeats = self._script.repeat_last_step and 1 < min(self._counts.values()) == wanted - 1
            self.begin(most + 1)
            if repeats and recorder.repeat(events, wanted):
                self._end()

    def updated(self) -> None:
        """A parameter was written after a backward pass, by the program itself."""
        if any(self._counts.values()):
            return
        self._updates += 1
        if self._updates > 1:
            self._tracer.work.end_step()
        if self._updates > self._script.steps:
            self._end()
        if self._updates > 1:
            self.begin(self._updates)

    def _end(self, why: str | None = None) -> NoReturn:
        self._check_gpu()
        what = "saving" if self._tracer.modules.evaluated else "evaluation or saving"
        later = (
            f"what it would do later, such as {what} after an epoch, is not included (--steps N traces more)"
        )
        step = self._tracer.guard.call("evaluation", "a Trainer", next_evaluation, lambda: None)
        if step is not None:
            later = (
                f"its evaluation after step {step}, which may need more, is not included "
                f"(--steps {step + 1} includes it)"
            )
        why = why or f"after {self._steps_made()}: {later}"
        self._tracer.recorder.note(f"{self._script.name} was stopped {why}")
        self._tracer.stopped_within_step = len(self._counts) > 1
        self._tracer.work.keep_step()
        self._tracer.label_parameters()
        self._finish(self._tracer)

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
                # What the program does meanwhile is not in the copy of the events.
                self._end(f"because it trains nothing and its peak had not risen for {_ENDLESS_S:.0f} s")

    def _check_gpu(self) -> None:
        if self._script.on_optimizer is not None and not self._counts and not self._model_found:
            raise UserError(no_model_error(self._script.name))
        if not self._tracer.recorder.allocations:
            name = self._script.name
            raise UserError(f"{name} put nothing on the GPU; build its model and data on device 'cuda'")

    @property
    def trained(self) -> int:
        return self._most or self._updates

    def check_trained(self) -> None:
        """The script has ended by itself."""
        name, steps = self._script.name, self.trained
        self._tracer.work.keep_step()
        self._check_gpu()
        trained = self._tracer.ran_backward
        if not trained and not steps and (self._tracer.optimizers or not self._tracer.modules.completed):
            made = "it made an optimizer, but " if self._tracer.optimizers else ""
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
