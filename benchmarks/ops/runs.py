"""Contenders for one op, run side by side: times, peaks and predictions. Rows come out.

Every contender of a case runs once per round, in turn, so that a clock that falls or a neighbour that wakes
up meets all of them. A contender that fails becomes a row with its error.
"""

from __future__ import annotations

import functools
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.ops.rows import Row

MiB = 2**20
Inputs = dict[str, Any]  # tensors and modules by name
Step = Callable[[], None]


@dataclass(frozen=True)
class Contender:
    """`forward` takes the case's inputs; the input named `grad` is sent back through its result.

    Without `grad` the result is a scalar. A `forward` that returns None has done all the work itself.
    """

    name: str
    forward: Callable[[Inputs], Tensor | None]
    grad: str | None = None
    peer: str = ""
    exact: bool = True
    against: str | None = None  # the contender its time is divided by, where that is not the case's limit
    floor: int | None = None  # where it differs from the case's: other dtype

    @property
    def ours(self) -> bool:
        return self.name.split()[0] == "oomph"


@dataclass(frozen=True)
class Case:
    """One op at one shape. `make` builds the inputs without looking at their values: it is traced as well."""

    op: str
    shape: str
    make: Callable[[torch.device], Inputs]
    contenders: Sequence[Contender]
    floor: int
    limit: str | None = None  # the contender that the others' times are divided by
    data: str = ""
    held: bool = False  # also what is held between forward and backward
    rounds: int | None = None  # at most so many, where a step takes so long that many would take minutes
    predicted_only: Sequence[Contender] = field(default=())  # too large to run; a row with its prediction


@dataclass(frozen=True)
class Machine:
    """Where the rows come from."""

    device: torch.device
    gpu: str
    triton: str

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def row(self, case: Case, contender: Contender, **values: Any) -> Row:
        floor = contender.floor if contender.floor is not None else case.floor
        return Row(
            op=case.op,
            shape=case.shape,
            contender=contender.name,
            gpu=self.gpu,
            torch=torch.__version__,
            triton=self.triton,
            peer=contender.peer,
            data=case.data,
            exact=contender.exact,
            floor_mib=floor / MiB,
            **values,
        )


def this_machine(cpu: bool) -> Machine:
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    if cpu:
        return Machine(torch.device("cpu"), f"cpu, {torch.get_num_threads()} threads", version)
    return Machine(torch.device("cuda"), torch.cuda.get_device_name(), version)


def run_case(case: Case, machine: Machine, rounds: int) -> list[Row]:
    """Warm-ups, peaks, then the interleaved rounds; one row for each contender. Predictions come later."""
    began = time.perf_counter()
    torch.manual_seed(0)
    inputs = case.make(machine.device)
    rows: dict[str, Row] = {}
    running: dict[str, Step] = {}
    if machine.cuda:
        busy()  # makes its matrix before anything is measured
    for contender in case.contenders:
        step = step_of(contender, inputs)
        try:
            for _ in range(3 if case.rounds is None else 2):
                step()
            _wait(machine)
            peaks = peaks_of(contender, inputs, case.held) if machine.cuda else (None, None)
        except Exception as error:  # one contender must not stop the others
            rows[contender.name] = machine.row(case, contender, error=first_line(error))
            _say(f"  {contender.name}: {first_line(error)}")
        else:
            running[contender.name] = step
            rows[contender.name] = machine.row(case, contender, peak_mib=peaks[0], held_mib=peaks[1])
        clean(inputs)
    times = interleaved(running, machine, rounds if case.rounds is None else min(rounds, case.rounds))
    for contender in case.contenders:
        name = contender.name
        if name in times:
            ratio = _ratio(times, name, contender.against or case.limit)
            rows[name] = replace(rows[name], **summary(times[name]), ratio_to_limit=ratio)
    del inputs, running
    clean({})
    others = [machine.row(case, contender, error="not run") for contender in case.predicted_only]
    _say(f"{case.op} {case.shape}: {time.perf_counter() - began:.0f} s")
    return [*(rows[contender.name] for contender in case.contenders), *others]


def step_of(contender: Contender, inputs: Inputs) -> Step:
    """Forward and backward, with gradients that do not exist before."""
    params = tuple(leaves(inputs))

    def step() -> None:
        for param in params:
            param.grad = None
        out = contender.forward(inputs)
        if out is not None:
            out.backward(None if contender.grad is None else inputs[contender.grad])

    return step


def leaves(inputs: Inputs) -> Iterator[Tensor]:
    for value in inputs.values():
        if isinstance(value, nn.Module):
            yield from (param for param in value.parameters() if param.requires_grad)
        elif isinstance(value, Tensor) and value.requires_grad:
            yield value


def clean(inputs: Inputs) -> None:
    for param in leaves(inputs):
        param.grad = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peaks_of(contender: Contender, inputs: Inputs, held: bool) -> tuple[float, float | None]:
    """MiB above what is resident, at the peak and after forward. To be called after warm-ups.

    Libraries keep their workspaces after the first call, so that these count as resident.
    """
    clean(inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step_of(contender, inputs)()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / MiB
    if not held:
        return peak, None
    clean(inputs)
    out = contender.forward(inputs)
    after = (torch.cuda.memory_allocated() - before) / MiB
    del out
    return peak, after


def interleaved(steps: dict[str, Step], machine: Machine, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every round, each in an order of its own.

    What ran before matters: a contender that always follows a light one finds the GPU cooler than the others
    do, and clocks take longer to settle than a run takes.
    """
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for _ in range(rounds if names else 0):
        order.shuffle(names)
        for name in names:
            times[name].append(_milliseconds(steps[name], machine))
    return times


def _milliseconds(step: Step, machine: Machine) -> float:
    if not machine.cuda:
        began = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - began)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    busy()
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


@functools.cache
def _matrix() -> Tensor:
    return torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)


def busy() -> None:
    """About 30 ms of matrix products, for what comes before an op in a training step.

    The GPU then runs at the clock it can hold, for every contender alike, whatever ran before it; and the
    time that Python takes to start the op's first kernel is hidden, as it is in training.
    """
    for _ in range(20):
        torch.mm(_matrix(), _matrix())


def summary(times: Sequence[float]) -> dict[str, float | int]:
    if len(times) < 2:
        return {"median_ms": times[0], "rounds": len(times)}
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return {
        "median_ms": statistics.median(times),
        "p20_ms": fifths[0],
        "p80_ms": fifths[3],
        "rounds": len(times),
    }


def _ratio(times: dict[str, list[float]], name: str, limit: str | None) -> float | None:
    if limit is None or limit not in times:
        return None
    return statistics.median(times[name]) / statistics.median(times[limit])


def target_of(case: Case, contender: Contender) -> Callable[[], Step]:
    """What oomph.predict takes: the contender's step, without the gradients of the step before."""

    def target() -> Step:
        inputs = case.make(torch.device("cuda"))
        step = step_of(contender, inputs)

        def cleared() -> None:
            step()
            for param in leaves(inputs):
                param.grad = None

        return cleared

    return target


def predicted_mib(case: Case, contender: Contender) -> float:
    """What oomph.predict says of the step: its peak above what the step before it left."""
    import oomph

    steps = oomph.predict(target_of(case, contender), gpu="h200").steps
    return (steps[-1].allocated - steps[-2].end) / MiB


def with_predictions(rows: Sequence[Row], cases: Iterable[Case]) -> list[Row]:
    """Ours, and those too large to run, with what oomph.predict says of them. Needs no GPU."""
    found: dict[tuple[str, str, str], float | None] = {}
    for case in cases:
        _say(f"{case.op} {case.shape}")
        for contender in (*(c for c in case.contenders if c.ours), *case.predicted_only):
            found[case.op, case.shape, contender.name] = predicted(case, contender)
    return [
        replace(row, predicted_mib=found.get((row.op, row.shape, row.contender), row.predicted_mib))
        for row in rows
    ]


def predicted(case: Case, contender: Contender) -> float | None:
    try:
        return predicted_mib(case, contender)
    except Exception as error:
        _say(f"  {contender.name}: no prediction: {first_line(error)}")
        return None


def relative_error(found: Tensor | None, right: Tensor) -> float | None:
    """Frobenius norm of the difference over that of `right`, in float64, some rows at a time."""
    if found is None:
        return None
    found, right = found.reshape(-1, right.shape[-1]), right.reshape(-1, right.shape[-1])
    off = right.new_zeros((), dtype=torch.float64)
    size = off.clone()
    for here, there in zip(found.split(8192), right.split(8192), strict=True):
        off += (here.double() - there.double()).square().sum()
        size += there.double().square().sum()
    return float((off / size).sqrt())


def _wait(machine: Machine) -> None:
    if machine.cuda:
        torch.cuda.synchronize()


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


Gradients = Mapping[str, Tensor]


def float64_gradients(
    made: Inputs, names: Sequence[str], forward: Callable[[Inputs], Tensor], grad: str
) -> Gradients:
    """Those of the named inputs, by autograd, with everything that is a floating-point number in float64."""
    wide = {
        name: value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in made.items()
    }
    wanted = {name: wide[name].requires_grad_() for name in names}
    forward(wide).backward(wide[grad])
    return {name: value.grad for name, value in wanted.items() if value.grad is not None}


def gradient_errors(
    case: Case, machine: Machine, names: Sequence[str], forward: Callable[[Inputs], Tensor], grad: str
) -> list[Row]:
    """A row for each contender and gradient, its name in `data` and its error in `dx_error`."""

    def compare(made: Inputs) -> Callable[[], Iterator[tuple[str, dict[str, float | None]]]]:
        right = float64_gradients(made, names, forward, grad)
        return lambda: (
            (f"d{name}", {"dx_error": relative_error(made[name].grad, right[name])}) for name in names
        )

    return error_rows(replace(case, op=f"{case.op} errors"), machine, compare)


Errors = Iterator[tuple[str, dict[str, float | None]]]  # what a row's `data` is, and its errors


def error_rows(case: Case, machine: Machine, compare: Callable[[Inputs], Callable[[], Errors]]) -> list[Row]:
    """Rows of what `compare(inputs)()` finds after each contender's step; computed first is what is right."""
    torch.manual_seed(0)
    made = case.make(machine.device)
    errors = compare(made)
    rows = []
    for contender in case.contenders:
        try:
            step_of(contender, made)()
            rows += [machine.row(replace(case, data=data), contender, **off) for data, off in errors()]
        except Exception as error:  # one contender must not stop the others
            rows.append(machine.row(case, contender, error=first_line(error)))
        clean(made)
    del made, errors
    clean({})
    return rows
