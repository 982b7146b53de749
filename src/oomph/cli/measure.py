"""`oomph measure`: a step on the real GPU beside its prediction, as it is and with a plan."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oomph import gpus
from oomph.cli.common import (
    Html,
    Json,
    fix_words,
    program_output,
    write_json,
    write_page,
    write_stdout,
)
from oomph.cli.predict import PredictOptions, check_options, predict_target, script_with_fixes, with_fixes
from oomph.cli.targets import TargetOptions, find_target, open_target
from oomph.errors import ExitStatus, OomphError, ProgramError, UserError
from oomph.records import Measurement, Prediction, Progress
from oomph.report.measurement import Comparison, OpDifference, measurement_text, measurement_to_json
from oomph.report.terminal import report_console

if TYPE_CHECKING:
    from oomph.measurement.oplog import OpRow
    from oomph.prediction.tracer.tracer import AllocationRecorder, OpLog, Tracer

_STEPS = 5
_RECORDED_STEPS = 2  # op by op
_EXPLAINED = 0.002  # of the measured peak: a larger difference is explained op by op
_MOST_OPS = 6


@dataclass(frozen=True, slots=True)
class MeasureOptions(TargetOptions):
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU to predict for; default: this machine's.")
    ] = None
    plan: Annotated[
        str | None,
        typer.Option(metavar="FILE.json", help="Also measure with the fixes of a plan of `oomph fit`."),
    ] = None
    fix: Annotated[
        tuple[str, ...], typer.Option(metavar="FIX", help="Also measure with this fix; repeatable.")
    ] = ()
    json: Json = False
    html: Html = None


def run_measure(given: MeasureOptions) -> ExitStatus:
    """Run steps on the real GPU: predicted beside measured memory and time."""
    # Every run has a process of its own: what else lives in one would be counted.
    options = find_target(given, "measure")
    fixes = fix_words(options.fix, options.plan)
    target = options.target, options.overrides, options.module, options.torchrun
    asked = PredictOptions(*target, gpu=options.gpu, fix=fixes, html=options.html)
    check_options(asked)
    if options.gpu is None:
        asked = replace(asked, gpu=_this_gpu())
    else:
        _this_gpu()  # there must be one
    cases = {"as it is": replace(asked, fix=())}
    if fixes:
        cases["with the plan" if options.plan else "with the fixes"] = asked
    predictions = [predict_target(case) for case in cases.values()]  # refuses fixes that do not apply
    found = [
        _comparison(case, title, prediction)
        for (title, case), prediction in zip(cases.items(), predictions, strict=True)
    ]
    if options.json:
        write_json(measurement_to_json(found))
    else:
        write_stdout(measurement_text(found, report_console()))
    if options.html is not None:
        runs = [(one.title, one.predicted) for one in found]
        write_page(options.html, asked.typed, runs, measured=found)
    return ExitStatus.FITS


def _this_gpu() -> str:
    """The catalogue's name of the GPU, or its size. Asked in a process of its own: predictions fork this one,
    and forks of a process that uses CUDA cannot use it."""
    import torch

    from oomph.measurement.measure import cuda_device

    code = (
        "import json, torch; p = torch.cuda.is_available() and torch.cuda.get_device_properties(0); "
        "print(json.dumps(p and [p.name, p.total_memory, p.major, p.minor]))"
    )
    found: Any = None
    if torch.cuda.device_count():  # which leaves CUDA alone
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if asked.returncode:
            raise UserError(f"the GPU cannot be used:\n{asked.stderr.strip()}")
        found = json.loads(asked.stdout.splitlines()[-1])
    if not found:
        cuda_device("cuda")  # says what is missing
    name, memory, *capability = found
    card = gpus.for_device(name, memory, tuple(capability))
    return card.name if card.bandwidth is not None else f"{memory >> 20}MiB"


def _comparison(options: PredictOptions, title: str, prediction: Prediction) -> Comparison:
    measured = _in_fresh_process(options, ops=False)
    if not isinstance(measured, Measurement):
        return Comparison(title, prediction, None, (), str(measured))
    op_differences: tuple[OpDifference, ...] = ()
    difference = measured.peak.allocated - prediction.peak.allocated
    if abs(difference) > _EXPLAINED * measured.peak.allocated:
        op_differences = _op_differences(options)
    return Comparison(title, prediction, measured, op_differences)


def _op_differences(options: PredictOptions) -> tuple[OpDifference, ...]:
    """The ops whose measured and predicted bytes differ, those with the most first."""
    from oomph.prediction.api import run_silently
    from oomph.prediction.isolation import run_isolated

    def predicted(progress: Progress) -> list[OpRow]:
        with _opened(options) as target:
            return predicted_rows(target, str(options.gpu), measured, progress)

    try:
        measured = _in_fresh_process(options, ops=True)
        if not isinstance(measured, list):
            return ()
        with program_output() as report:
            return op_differences(measured, run_isolated(partial(run_silently, predicted), report))
    except OomphError as error:  # programs may behave differently where each op is recorded
        print(
            f"oomph: the difference is not explained, because ops could not be recorded: {error}",
            file=sys.stderr,
        )
        return ()


def op_differences(measured: Sequence[OpRow], predicted: Sequence[OpRow]) -> tuple[OpDifference, ...]:
    """Measured less predicted bytes: at the peak, then those that each kind of op needs while it runs, the
    largest first. Ops of a step are compared with those of the same step."""
    difference: Counter[_Kind] = Counter()
    runs: Counter[_Kind] = Counter()
    extra: Counter[_Kind] = Counter()  # runs on the GPU less those predicted
    in_place: Counter[_Kind] = Counter()  # where ops are recorded, autograd makes a new tensor of these sums
    for row in predicted:
        step, op, output = _kind(row)
        if op in ("add", "add_") and row.high == row.before:
            in_place[step, "add", output] += 1
            extra[step, "add", output] -= op == "add_"
    for sign, rows in ((1, measured), (-1, predicted)):
        for row in rows:
            kind = _kind(row)
            extra[kind] += sign
            runs[kind] += sign == 1
            if sign == 1 and in_place[kind] > 0:
                in_place[kind] -= 1
            else:
                difference[kind] += sign * (row.high - row.before)
    found: dict[tuple[str, str], OpDifference] = {}
    for kind, size in difference.items():
        aspect = "only measured" if extra[kind] > 0 else "only predicted" if extra[kind] < 0 else "high"
        same = found.get((kind[1], aspect), OpDifference(kind[1], aspect, 0, 0))
        times = same.times + (abs(extra[kind]) or runs[kind])
        if size:
            found[kind[1], aspect] = OpDifference(kind[1], aspect, times, same.bytes + size)
    by_op = sorted(found.values(), key=lambda each: -abs(each.bytes))[:_MOST_OPS]
    return (*_at_peak(measured, predicted), *by_op)


def _at_peak(measured: Sequence[OpRow], predicted: Sequence[OpRow]) -> Iterator[OpDifference]:
    """The op of the measured peak: what was kept before it, and what it needs while it runs."""
    if not measured:
        return
    highest = max(range(len(measured)), key=lambda index: measured[index].high)
    kind = _kind(measured[highest])
    position = sum(_kind(row) == kind for row in measured[:highest])
    same = [row for row in predicted if _kind(row) == kind]
    if position < len(same):
        m, p = measured[highest], same[position]
        kept, needed = m.before - p.before, (m.high - m.before) - (p.high - p.before)
        for aspect, size in (("kept before the peak", kept), ("at the peak", needed)):
            if size:
                yield OpDifference(kind[1], aspect, 1, size)


_Kind = tuple[str, str, str]


def _kind(row: OpRow) -> _Kind:
    """Step, op and first output: cuDNN's batch norm has one output more than the native one."""
    from oomph.measurement.oplog import short_name

    return " ".join(row.phase.split()[:2]), short_name(row.op), row.outputs.partition("]")[0]


def predicted_rows(
    target: Any, gpu: str, measured: Sequence[OpRow], progress: Progress = lambda text, fraction: None
) -> list[OpRow]:
    """The predicted op log of the steps that `measured` has, in the same format."""
    from oomph.measurement.oplog import describe
    from oomph.prediction.api import trace
    from oomph.prediction.isolation import finish
    from oomph.prediction.tracer.tracer import OpLog

    log = OpLog(describe)
    steps = {row.phase.split()[1] for row in measured if row.phase.startswith("step")}

    def rows(tracer: Tracer) -> list[OpRow]:
        return _rows_of(log, tracer.recorder, steps)

    return rows(trace(target, gpus.find(gpu), progress, log, lambda tracer: finish(rows(tracer))))


def _rows_of(log: OpLog, recorder: AllocationRecorder, steps: Collection[str]) -> list[OpRow]:
    from oomph.measurement.oplog import OpRow
    from oomph.prediction.replay import replay

    allocations = [pending.finish() for pending in recorder.allocations]
    allocated = {moment.event: moment.allocated for moment in replay(recorder.events, allocations).timeline}
    after_event, level = [], 0
    for index in range(len(recorder.events)):
        level = allocated.get(index, level)
        after_event.append(level)
    rows = []
    for op, outputs, phase, first, last in log.rows:
        if phase != "setup" and phase.split()[1] not in steps:
            continue
        inside = after_event[first:last]
        before = after_event[first - 1] if first else 0
        sizes = [
            allocations[event.id].bytes for event in recorder.events[first:last] if event.action == "alloc"
        ]
        rows.append(
            OpRow(
                op=op,
                outputs=outputs,
                before=before,
                after=inside[-1] if inside else before,
                high=max([before, *inside]),
                phase=phase,
                n_allocs=len(sizes),
                requested=sum(sizes),
            )
        )
    return rows


# ------------------------------------------------------------------------------ in a process of its own


def _in_fresh_process(options: PredictOptions, ops: bool) -> Any:
    """A Measurement, or rows of ops; a text where it ran out of memory."""
    from oomph.prediction.isolation import run_in_new_interpreter

    with program_output() as report:
        return run_in_new_interpreter(_measured, report, options, ops)


def _measured(options: PredictOptions, ops: bool, progress: Progress) -> Any:
    import torch

    from oomph.prediction.isolation import discard_output

    progress("recording ops on the GPU" if ops else "measuring on the GPU", None)
    if ops:
        discard_output()  # the program has printed it before
    try:
        return (_measured_script if options.is_script else _measured_workload)(options, ops)
    except torch.cuda.OutOfMemoryError as error:
        return str(error).split(". ")[0]
    except OomphError:
        raise
    except Exception as error:
        raise ProgramError.of(error) from None


def _measured_workload(options: PredictOptions, ops: bool) -> Any:
    from oomph.measurement.measure import measure, measured_ops

    with _opened(options) as target:
        return measured_ops(target, _RECORDED_STEPS) if ops else measure(target, steps=_STEPS)


@contextmanager
def _opened(options: PredictOptions) -> Iterator[Any]:
    """The target with its fixes."""
    if options.is_script:
        yield script_with_fixes(options)
        return
    with open_target(options.target, options.overrides) as target:
        yield with_fixes(target, options.fixes) if options.fixes else target


def _measured_script(options: PredictOptions, ops: bool) -> Any:
    """The script until an optimizer has stepped often enough, or to its end."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from oomph.fixes import uses_of
    from oomph.fixes.scripts import ModelChange, on_each_optimizer, set_allocator_for
    from oomph.measurement.measure import Reading, summarise
    from oomph.measurement.oplog import MeasuredOps, record_ops
    from oomph.prediction.isolation import finish
    from oomph.prediction.script import run_as_main

    readings: list[Any] = [Reading(0, "setup", 0, 0, 0, 0.0)]
    counts: Counter[int] = Counter()  # steps of each optimizer
    began = time.perf_counter()

    def result() -> Any:
        return log.rows if ops else summarise(readings, 0, torch.cuda.get_device_name())

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal began
        counts[id(optimizer)] += 1
        if counts[id(optimizer)] < len(readings):
            return  # another optimizer has ended this step
        torch.cuda.synchronize()
        now, stats = time.perf_counter(), torch.cuda
        sizes = stats.memory_allocated(), stats.max_memory_allocated(), stats.max_memory_reserved()
        readings.append(Reading(len(readings), "end", *sizes, now - began))
        began = now
        log.phase = f"step {len(readings)}"
        if len(readings) > (_RECORDED_STEPS if ops else _STEPS):
            finish(result())  # from inside the script, which need not end by itself

    register_optimizer_step_post_hook(stepped)
    uses = uses_of(options.fixes)
    set_allocator_for(uses)
    change: Any = ModelChange(uses) if uses else (lambda optimizer: None)
    with on_each_optimizer(change), record_ops() if ops else nullcontext(MeasuredOps()) as log:
        log.phase = "step 1"
        run_as_main(options.script())
    if len(readings) == 1:
        raise UserError(f"{options.target} ended before an optimizer of torch.optim stepped")
    return result()
