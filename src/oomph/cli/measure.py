"""`oomph measure`: a step on the real GPU beside its prediction, as it is and with a plan."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

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
from oomph.cli.targets import TargetOptions, find_target, one_process
from oomph.errors import ExitStatus, OomphError, ProgramError, UserError
from oomph.records import Measurement, OpDifference, OpRow, Prediction, Progress
from oomph.report.measurement import Comparison, measurement_text, measurement_to_json
from oomph.report.terminal import report_console

_STEPS = 5
_RECORDED_STEPS = 2  # op by op
_EXPLAINED = 0.002  # of the measured peak: a larger difference is explained op by op


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
    one_process(options, "measure")
    fixes = fix_words(options.fix, options.plan)
    target = options.target, options.overrides, options.module, options.torchrun, options.config
    asked = PredictOptions(*target, launch=options.launch, gpu=options.gpu, fix=fixes, html=options.html)
    check_options(asked)
    if options.gpu is None:
        asked = replace(asked, gpu=_this_gpu())
    else:
        _this_gpu()  # there must be one
    cases = {"as it is": replace(asked, fix=())}
    if fixes:
        cases["with the plan" if options.plan else "with the fixes"] = asked
    predictions = [predict_target(case) for case in cases.values()]  # refuses fixes that do not apply
    comparisons = [
        _comparison(case, title, prediction)
        for (title, case), prediction in zip(cases.items(), predictions, strict=True)
    ]
    if options.json:
        write_json(measurement_to_json(comparisons))
    else:
        write_stdout(measurement_text(comparisons, report_console()))
    if options.html is not None:
        runs = [(one.title, one.predicted) for one in comparisons]
        write_page(options.html, asked.typed, runs, measured=comparisons)
    return ExitStatus.FITS


def _this_gpu() -> str:
    """The catalogue's name of the GPU, or its size."""
    import torch

    from oomph.measurement.measure import cuda_device

    asked = gpus.ask_device() if torch.cuda.device_count() else None  # which leaves CUDA alone
    if asked is None:
        cuda_device("cuda")  # says what is missing
        raise UserError("there is no GPU here")
    card, _ = asked
    return card.name if card.bandwidth is not None else f"{card.memory >> 20}MiB"


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
    from oomph.measurement.oplog import describe, op_differences
    from oomph.prediction.child import predict_ops
    from oomph.prediction.isolation import run_isolated
    from oomph.prediction.retry import run_silently

    def predicted(progress: Progress) -> list[OpRow]:
        with _opened(options) as target:
            return predict_ops(target, gpus.find(str(options.gpu)), measured, describe, progress)

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
    with options.open() as target:
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
    from oomph.prediction.program import run_as_main

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
