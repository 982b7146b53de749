"""oomph.predict: trace a step on fake tensors, replay its events through the simulated allocator."""

from __future__ import annotations

import builtins
import contextlib
import functools
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypeVar

import torch

from oomph import gpus
from oomph.errors import ArgumentError, OomphError, ProgramError, UserError
from oomph.gpus import GPU
from oomph.prediction import program
from oomph.prediction.allocator import (
    MIN_BLOCK,
    Replay,
    allocator_settings,
    is_convolution_workspace,
    margin,
    replay,
    round_up,
)
from oomph.prediction.cuda import cudnn
from oomph.prediction.isolation import (
    TookTooLong,
    again,
    autograd_breaks_in_forks,
    autograd_runs,
    can_restart,
    discard_output,
    finish,
    is_isolated,
    restart,
    run_in_new_interpreter,
    run_isolated,
    show_progress,
    trace_lock,
    without_collection,
)
from oomph.prediction.program import Script, run_script
from oomph.prediction.tracer.batch_sizes import BatchSizes, Sizes
from oomph.prediction.tracer.dispatch import WrongDevice, count_uses_of_gradient
from oomph.prediction.tracer.session import tracing
from oomph.prediction.tracer.tracer import OpLog, Tracer
from oomph.prediction.tracer.values import Assumptions, Condition, assuming
from oomph.prediction.tracer.work import RELEASE_SECONDS, step_work
from oomph.records import (
    CUDNN_SEARCH,
    SIZES_DEPEND_ON_VALUES,
    Allocation,
    AllocatorSettings,
    BatchTensor,
    EmbeddingUse,
    Event,
    Growth,
    Interval,
    Note,
    OpRow,
    Peak,
    Prediction,
    Progress,
    Site,
    StepPeak,
    Verdict,
    alive_after,
)
from oomph.torch_internals import (
    current_dispatch_modes,
    keystr,
    self_test,
    storage_id,
    tree_flatten_with_path,
)
from oomph.units import MiB, check_batch_sizes, format_bytes, parse_bytes
from oomph.workload import Workload, allocator_of_environment, ignored_allocator

DEFAULT_GPU = "h200"  # whose CUDA paths are assumed when no GPU is named: the one oomph is measured against
_CONDITIONS_SHOWN = 5
_MOST = 3.0  # times the typical number of elements, where it depends on values; also of the peak
_MOST_OF_EACH = 1.5  # where such sizes multiply each other
_SAME_PEAK = 1.1  # times the least peak of a step, where steps are alike
_SAME_SIZES = 1.01  # likewise, where also their sizes are
_STEPS_APART = 2
_VALUES_APART = 0.1  # of the peak; benchmarks/results/public_programs_h200.csv
# All runs with other sizes together: twice as long as the first run, within these.
_LEAST_SECONDS_MORE, _MOST_SECONDS_MORE = 60.0, 180.0
_MOST_CONDITIONS = 8  # that get the other answer because the program fails after them
# Of a communicator of NCCL, estimated and not measured: 16 channels with two connections, each with a
# buffer of 4 MiB (NCCL_BUFFSIZE) and about 1 MiB for other protocols.
_NCCL_COMMUNICATOR = 16 * 2 * 5 * MiB
_depth = 0
_tracer_with_model: Tracer | None = None  # while `model_built_once` keeps its trace open
T = TypeVar("T")


def predict(
    target: Workload | Script | Callable[[], Any],
    *,
    gpu: str | GPU | None = None,
    max: str | int | None = None,
    sizes: Sizes | None = None,
    allow: Collection[str] = (),
    progress: Progress | None = None,
    search: bool = True,
) -> Prediction:
    """The memory of a training step on `gpu`, without one.

    `target` is a Workload, or a function of no arguments, which is called once; if it returns a Workload,
    that is predicted; if it returns a callable, that is the step and is called three times. A Script is run
    as it is until its optimizers have stepped three times; a Trainer of transformers makes three steps.
    `gpu` is a name of the catalogue or a size ("24GiB"); `max` limits the allocator further.
    `sizes` replaces sizes of a Workload. The batches of other programs get the sizes B, T, H or W that it
    gives, as {"T": 4096}, or in place of a size, as {"512": 4096}, or those of the longest sample of their
    data sets ("longest").
    The program runs in a child process and changes no file; `allow` may name "subprocesses", to let it start
    other programs, and "network".
    `progress` receives a text and, where it is known, the fraction that is done.
    `search=False` leaves out the free memory that torch.backends.cudnn.benchmark takes for a moment.
    """
    target = program.as_program(target)
    card = _card(gpu)
    limit = None if max is None else parse_bytes(max)
    if gpu is not None:
        limit = card.limit(max, nccl=nccl_buffers(target))
    if isinstance(target, Script) and autograd_breaks_in_forks():
        with show_progress(progress) as report:
            return run_in_new_interpreter(
                predict, report, target, gpu=gpu, max=max, sizes=sizes, allow=allow, search=search
            )
    began = time.perf_counter()

    if sizes is not None and isinstance(target, Workload):
        target, sizes = with_sizes(target, sizes), None
    elif sizes is not None:
        check_batch_sizes(sizes)

    def prediction(tracer: Tracer) -> Prediction:
        if tracer.batch_sizes is not None:
            tracer.batch_sizes.check_applied(tuple(tracer.batches.moved))
        found = _prediction(tracer, target, card, gpu is not None, limit)
        found = replace(found, seconds=time.perf_counter() - began)
        if isinstance(target, Script) and target.on_end is not None:
            found = target.on_end(tracer.training.trained and tracer.training.trained(), found)
        return found

    def run(progress: Progress) -> Prediction:
        return prediction(
            trace(
                target,
                card,
                progress,
                sizes=sizes,
                finish=lambda tracer: finish(prediction(tracer)),
                search_limit=(limit or card.limit()) if search else 0,
            )
        )

    with show_progress(progress) as report:
        return predict_isolated(run, report, allow)


def with_sizes(workload: Workload, sizes: Sizes) -> Workload:
    if sizes == "longest":
        raise UserError('sizes="longest" is for scripts and functions; a Workload names its sizes')
    return workload.with_sizes(sizes)


def predict_isolated(
    function: Callable[[Progress], Prediction],
    progress: Progress,
    allow: Collection[str] = (),
) -> Prediction:
    """`function` predicts in a child process; in fresh ones again where the outcome depends on a guess.

    If the program fails after conditions on unknown values, they get the other answer, one after the other.
    If it gives what a mask selects a shape for another number of elements, the mask selects that number.
    If sizes depend on values, the interval is found with the most and with the fewest elements, where that
    does not take long.
    """
    if is_isolated():
        return function(progress)
    if not torch.accelerator.is_available() and not current_dispatch_modes():
        _check_torch()  # once here, and not in every child; forks can run backward passes after it
    began = time.perf_counter()
    prediction, assumed, took = _that_does_not_fail(function, progress, allow)
    if prediction.interval is not None and prediction.interval.reason == SIZES_DEPEND_ON_VALUES:
        prediction = _with_interval(prediction, function, progress, allow, assumed, took)
        prediction = replace(prediction, seconds=time.perf_counter() - began)
    return prediction


def _that_does_not_fail(
    function: Callable[[Progress], Prediction], progress: Progress, allow: Collection[str]
) -> tuple[Prediction, Assumptions, float]:
    """The prediction, the assumptions under which the program does not fail, and the seconds of that run."""
    assumed = Assumptions()
    failed: dict[Condition, OomphError] = {}
    as_guessed: OomphError | None = None  # before masks selected what the failure states
    shown = progress
    while True:
        started = time.monotonic()
        try:
            with assuming(assumed):
                prediction = run_isolated(function, shown, allow)
            break
        except OomphError as error:
            if isinstance(error, ProgramError) and error.share and len(assumed.shares) < _MOST_CONDITIONS:
                file, line, share = error.share
                if (file, line) not in assumed.shares:
                    as_guessed = as_guessed or error
                    shown = again(progress, "with a mask that selects another share")
                    assumed = replace(assumed, shares={**assumed.shares, (file, line): share})
                    continue
            first = as_guessed or next(iter(failed.values()), error)
            last = error.last_condition if isinstance(error, ProgramError) else None
            if last is None or last[:3] in {each[:3] for each in failed} or len(failed) == _MOST_CONDITIONS:
                if first is error:
                    raise
                raise first from None
            failed[last] = error
            shown = again(progress, "with the other answer to a condition")
            assumed = replace(assumed, failed=frozenset(failed))
    notes = []
    for (file, line, *_), failure in failed.items():
        text = str(failure).split("\n")[0]
        text = f"a condition on values has the answer with which the program does not fail ({text})"
        notes.append(Note(text, Site(file, line, "")))
    prediction = replace(prediction, assumptions=(*notes, *prediction.assumptions))
    return prediction, assumed, time.monotonic() - started


def _with_interval(
    prediction: Prediction,
    function: Callable[[Progress], Prediction],
    progress: Progress,
    allow: Collection[str],
    assumed: Assumptions,
    took: float,
) -> Prediction:
    """With the peaks of runs with the most and the fewest elements. `took`: seconds of one run.

    The interval is at least as wide as programs with other data than the predicted run's were off.
    """
    until = time.monotonic() + min(builtins.max(2 * took, _LEAST_SECONDS_MORE), _MOST_SECONDS_MORE)
    left_out: list[str] = []

    def other(sizes: Literal["fewest", "most"], most: float = _MOST) -> Prediction:
        name = "largest" if sizes == "most" else "smallest"
        shown = again(progress, f"with the {name} sizes")
        try:
            if until - time.monotonic() < took / 2:
                raise TookTooLong
            with assuming(replace(assumed, sizes=sizes, most=most)):
                return run_isolated(functools.partial(run_silently, function), shown, allow, until)
        except TookTooLong:
            left_out.append(name)
        except OomphError:  # the program cannot run with such sizes
            pass
        return prediction

    high = other("most")
    if high.needed.allocated > _MOST * prediction.needed.allocated:
        lower = other("most", _MOST_OF_EACH)
        high = high if left_out else lower
    low = other("fewest")
    if left_out:
        names = " and ".join(dict.fromkeys(left_out))
        text = f"sizes depend on values; the {names} were not traced, because one run takes {took:.0f} s"
        prediction = replace(prediction, assumptions=(*prediction.assumptions, Note(text)))
    intervals = [each.interval for each in (prediction, low, high) if each.interval is not None]
    apart = int(_VALUES_APART * prediction.needed.allocated)
    intervals.append(Interval(_changed(prediction.needed, -apart), _changed(prediction.needed, apart)))
    low_peak, high_peak = (
        replace(
            choose(peaks, key=lambda peak: peak.allocated),
            reserved=choose(peak.reserved for peak in peaks),
            device=choose(peak.device for peak in peaks),
        )
        for choose, peaks in (
            (min, [each.low for each in intervals]),
            (builtins.max, [each.high for each in intervals]),
        )
    )
    verdict, limit = prediction.verdict, prediction.limit
    # Where cached memory has to be released, the run with the most elements decides alone.
    between = limit is not None and prediction.needed.reserved <= limit < high_peak.reserved
    if verdict == "fits" and (high.verdict != "fits" or between):
        verdict = "too close to call"
    return replace(prediction, interval=Interval(low_peak, high_peak), verdict=verdict)


def nccl_buffers(target: Any) -> int:
    """Bytes, estimated: of the group of all ranks, and those of tensor and context parallelism."""
    parallel = target.parallel if isinstance(target, Workload) else target
    if getattr(parallel, "ranks", 1) == 1:
        return 0
    groups = 1 + sum(getattr(parallel, name, 1) > 1 for name in ("tp", "cp"))
    return groups * _NCCL_COMMUNICATOR


def _of_ranks(found: Prediction, ranks: int, nccl: int) -> Prediction:
    """The prediction of the first rank, with what is true of several."""
    notes = [
        f"the first of {ranks} ranks: tensors are sharded in parts of equal size, rounded up, so no rank "
        "holds more; the last ranks may hold less",
        f"NCCL's buffers are estimated at {format_bytes(nccl)}, beside the allocator; the CUDA context is "
        "that of a single process",
        f"a rank sends {format_bytes(found.work.sent)} in a step (ring algorithms); its time assumes "
        f"nominal links and {gpus.NODE} GPUs in a node",
    ]
    peak = replace(found.peak, device=found.peak.device + nccl)
    needed = found.without_search and replace(found.needed, device=found.needed.device + nccl)
    steps = tuple(replace(step, device=step.device + nccl) for step in found.steps)
    noted = (*map(Note, notes), *found.notes)
    return replace(found, ranks=ranks, nccl=nccl, peak=peak, without_search=needed, steps=steps, notes=noted)


def run_silently(function: Callable[[Progress], T], progress: Progress) -> T:
    """The program has printed all that it prints before."""
    if is_isolated():
        discard_output()
    return function(progress)


def _allocator_settings(tracer: Tracer) -> tuple[AllocatorSettings, list[Note]]:
    """Those of the Workload, or else of the environment, which a script may have changed."""
    found = allocator_of_environment()
    if tracer.allocator is not None or found is None:
        return allocator_settings(tracer.allocator), []
    name, text = found
    note = Note(f"with the allocator's settings of {name}={text}{ignored_allocator()}")
    try:
        return allocator_settings(text), [note]
    except UserError as error:
        return AllocatorSettings(), [Note(f"{name} is not applied: {error}")]


@without_collection()
def _prediction(
    tracer: Tracer,
    target: Workload | Script | Callable[[], Any],
    card: GPU,
    named: bool,
    limit: int | None,
) -> Prediction:
    events, notes = tuple(tracer.recorder.events), (*tracer.recorder.notes, *tracer.estimates.notes())
    allocations = tuple(pending.finish() for pending in tracer.recorder.allocations)
    settings, settings_notes = _allocator_settings(tracer)
    shown = replay(events, allocations, settings=settings)
    searches = any(one.op == CUDNN_SEARCH and one.bytes for one in allocations)
    replays = _replays(events, allocations, settings, tracer.freed_at_last)
    unlimited = replays[0]() if searches else shown
    sizes_assumed = tracer.estimates.sizes_assumed
    compiled = tracer.compile_seconds > 0
    residual = margin(unlimited.peak_reserved, allocations, sizes_assumed, compiled, card, torch.__version__)
    off_by = _off_by(replays, unlimited, residual)
    verdict, request = _verdict(replays, unlimited, limit, off_by, residual)
    step_seconds, work = step_work(tracer.work.kernels, card)
    release_seconds, smaller_workspaces = 0.0, False
    if verdict == "fits" and limit is not None and limit < unlimited.highest_reserved:
        limited = replays[0](limit=limit)
        release_seconds, smaller_workspaces = limited.released * RELEASE_SECONDS, limited.smaller_workspaces
        step_seconds = None if step_seconds is None else step_seconds + release_seconds
    whole_steps = unlimited.steps[:-1] if tracer.stopped_within_step else unlimited.steps
    growth = _growth(whole_steps, unlimited, events, allocations)
    one_optimizer = isinstance(target, Script) and not tracer.stopped_within_step
    peak, needed = (_peak(replayed, events, allocations, card) for replayed in (shown, unlimited))
    found = Prediction(
        gpu=card.name if named else None,
        gpu_title=card.title,
        capacity=card.memory if named else None,
        limit=limit,
        verdict=verdict,
        refused=None if request is None else allocations[request],
        peak=peak,
        steps=tuple(replace(step, device=step.reserved + card.context) for step in shown.steps),
        at_peak=shown.at_peak,
        timeline=shown.timeline,
        without_search=needed if needed != peak else None,
        events=events,
        allocations=allocations,
        allocator=settings,
        freed_at_last=tuple(tracer.freed_at_last.items()),
        notes=(
            *_notes_on_target(target),
            *notes,
            *settings_notes,
            *_notes_on_prediction(card, named, growth, release_seconds, smaller_workspaces, allocations),
            *_notes_on_steps(unlimited.steps if one_optimizer else (), tracer.batches.lengths_differ()),
        ),
        seconds=0.0,
        compile_seconds=tracer.compile_seconds,
        step_seconds=step_seconds,
        work=work,
        growth=growth,
        margin=off_by,
        batch=_batch(tracer),
        sizes=tuple(tracer.sizes.items()),
        dimensions=tuple(tracer.modules.dimensions.items()),
        embeddings=tuple(EmbeddingUse(*key, used) for key, used in tracer.embeddings.items()),
        holders=tracer.holders.found(),
        assumptions=tuple(_assumptions(tracer)),
        interval=_interval(tracer, needed, unlimited, residual if sizes_assumed else 0, one_optimizer),
    )
    return _of_ranks(found, tracer.ranks, nccl_buffers(target)) if tracer.ranks > 1 else found


def _interval(tracer: Tracer, peak: Peak, run: Replay, off_by: int, one_optimizer: bool) -> Interval | None:
    """`off_by`: of a program whose sizes depend on values, as their other values are predicted as well.

    Other steps may be as far from those that were traced as these are apart, or twice as far, where batches
    differ or layers are dropped. Of a program that is compiled but traced as eager: nanoGPT, measured, kept
    70 % of what is not there for the whole run; half is the least that is expected.
    """
    steps = sorted(step.allocated for step in run.steps[1:]) if one_optimizer else []
    apart = steps[-1] - steps[0] if steps else 0
    if steps and (tracer.batches.lengths_differ() or steps[-1] > _SAME_SIZES * steps[0]):
        off_by += _STEPS_APART * apart
    if tracer.estimates.sizes_assumed:
        return Interval(_changed(peak, -off_by), _changed(peak, off_by))
    if not tracer.compiled_as_eager:
        low, high = _changed(peak, -off_by), _changed(peak, off_by)
        return Interval(low, high, "steps differ, and others may need more or less") if off_by else None
    kinds = ("activation", "temporary", "workspace")
    less = sum(alive.bytes for alive in run.at_peak if alive.allocation.kind in kinds) // 2
    return Interval(_changed(peak, -less), peak, "torch.compile is traced as eager")


def _changed(peak: Peak, by: int) -> Peak:
    by = min(max(by, -peak.allocated // 2), int((_MOST - 1) * peak.allocated))
    return replace(peak, allocated=peak.allocated + by, reserved=peak.reserved + by, device=peak.device + by)


def _batch(tracer: Tracer) -> tuple[BatchTensor, ...]:
    """Of a Workload, its batch; of other programs, what they moved to the GPU."""
    leaves = [
        BatchTensor(
            re.sub(r"[][.']+", ".", keystr(path)).strip("."),
            tuple(leaf.shape),
            str(leaf.dtype).removeprefix("torch."),
        )
        for path, leaf in tree_flatten_with_path(tracer.batch)[0]
        if isinstance(leaf, torch.Tensor)
    ]
    return tuple(leaves) or tracer.batches.tensors()


def _assumptions(tracer: Tracer) -> Iterator[Note]:
    """Guesses that changed what was traced, and what a script for several ranks lacks."""
    if tracer.ranks > 1 and not tracer.has_process_group:
        yield Note(
            "every rank holds and computes everything, because the program makes no process group: call "
            "torch.distributed.init_process_group(), then fully_shard or DistributedDataParallel"
        )
    if tracer.batch_sizes is not None and tracer.batch_sizes.has_short_sequences:
        yield Note(
            "--sizes changed batches, but not the lengths with which the program packs them: this is a "
            "lower bound"
        )
    if tracer.batches.lengths_differ():
        yield Note(
            "no batch is longer than those that were traced, which differ in length; one of the longest "
            "samples may need more (--sizes longest)"
        )
    yield from tracer.estimates.loops_cut
    conditions, missing = tracer.estimates.conditions, ""
    if not tracer.training.ran_backward:
        missing = "no backward pass ran"
        if not conditions:
            yield Note(f"{missing}: this is the memory of inference, not of a training step")
    elif tracer.training.optimizers and not tracer.training.optimizer_steps:
        missing = "no optimizer stepped"
    for site, taken in list(conditions.items())[:_CONDITIONS_SHOWN] if missing else ():
        yield Note(f"{missing}, where a condition on values is taken as {taken}", site)


def _freed_later(events: Sequence[Event], until: Mapping[int, int]) -> list[Event]:
    """`until`: for ids of allocations, the index of the event before which each is freed."""

    def place(index: int) -> int:
        action, id, _ = events[index]
        return max(index, until.get(id, 0)) if action == "free" else index

    return [events[index] for index in sorted(range(len(events)), key=place)]


def _replays(
    events: Sequence[Event],
    allocations: Sequence[Allocation],
    settings: AllocatorSettings,
    freed_at_last: Mapping[int, int],
) -> Sequence[Callable[..., Replay]]:
    """What decides: cuDNN's search takes what is free, and does without where nothing is. And what else may
    happen: segments at rising addresses, and buckets of DDP that NCCL frees at last."""
    needed = functools.partial(replay, allocations=allocations, settings=settings, search=False)
    replays = [functools.partial(needed, events), functools.partial(needed, events, rising=True)]
    if freed_at_last:
        replays.append(functools.partial(needed, _freed_later(events, freed_at_last)))
    return replays


def _off_by(replays: Sequence[Callable[..., Replay]], unlimited: Replay, residual: int) -> int:
    off_by = residual
    for other in replays[1:]:
        if other(limit=unlimited.highest_reserved + residual).refused is not None:
            off_by = max(off_by, other().highest_reserved - unlimited.highest_reserved)
    return off_by


@without_collection()
def fits_on(prediction: Prediction, cards: Sequence[GPU]) -> list[bool]:
    """Whether other cards would serve the same requests. Where sizes depend on values, those of the upper end
    of the interval must fit, too, without releasing cached memory."""
    events, allocations = prediction.events, prediction.allocations
    replays = _replays(events, allocations, prediction.allocator, dict(prediction.freed_at_last))
    unlimited = replays[0]()
    off_by = functools.cache(functools.partial(_off_by, replays, unlimited))
    interval = prediction.interval
    high = interval.high if interval is not None and interval.reason == SIZES_DEPEND_ON_VALUES else None
    compiled = prediction.compile_seconds > 0

    def fits(card: GPU) -> bool:
        peak, limit = unlimited.peak_reserved, card.limit(nccl=prediction.nccl)
        residual = margin(peak, allocations, high is not None, compiled, card, torch.__version__)
        if high is not None and limit < high.reserved:
            return False
        return _verdict(replays, unlimited, limit, off_by(residual), residual)[0] == "fits"

    return list(map(fits, cards))


def _verdict(
    replays: Sequence[Callable[..., Replay]],
    unlimited: Replay,
    limit: int | None,
    margin: int,
    residual: int,
) -> tuple[Verdict | None, int | None]:
    """Whether the allocator serves all requests within `limit`, and the id of the one that it refuses.

    `limit` itself decides only if a limit that is higher or lower by `residual` gives the same answer in all
    `replays`, of which the first is the prediction.
    """
    if limit is None:
        return None, None
    if unlimited.highest_reserved + margin <= limit:
        return "fits", None
    if all(replayed(limit=limit - residual).refused is None for replayed in replays):
        return "fits", None
    request = replays[0](limit=limit).refused
    if all(replayed(limit=limit + residual).refused is not None for replayed in replays):
        return "does not fit", request
    return "too close to call", request


def _notes_on_target(target: Workload | Script | Callable[[], Any]) -> tuple[Note, ...]:
    if isinstance(target, Script):
        return (Note("losses and other values that the program prints are not real: nothing is computed"),)
    names = ", ".join(use.fix for use in target.fixes) if isinstance(target, Workload) else ""
    return (Note(f"with the fixes {names}"),) if names else ()


def trace(
    target: Workload | Script | Callable[[], Any],
    card: GPU,
    progress: Progress,
    log: OpLog | None = None,
    finish: Callable[[Tracer], NoReturn] | None = None,
    sizes: Sizes | None = None,
    search_limit: int = 0,
) -> Tracer:
    """Run the target on the fake GPU; its own failures come out as ProgramError.

    `finish` ends the process of a Script whose steps repeat, or of a function that trains without end.
    `search_limit`: bytes that torch.backends.cudnn.benchmark may fill.
    """

    def run(tracer: Tracer) -> Tracer:
        tracer.progress, tracer.search_limit = progress, search_limit
        if sizes is not None:
            tracer.batch_sizes = BatchSizes(sizes, tracer.recorder.note)
        if isinstance(target, Workload):
            program.run_workload(target, tracer, progress)
        elif isinstance(target, Script):
            if finish is None or not is_isolated():
                raise UserError("a script is predicted in a child process, which is not possible here")
            run_script(target, tracer, progress, finish)
        elif callable(target) and not isinstance(target, torch.nn.Module):
            program.run_function(target, tracer, progress, finish if is_isolated() else None)
        else:
            raise UserError(
                f"predict takes a Workload, a function of no arguments or oomph.Script(path); "
                f"{type(target).__name__} was given"
            )
        tracer.label_parameters()
        return tracer

    return _traced(run, card, log)


def predict_ops(
    target: Workload | Script | Callable[[], Any],
    card: GPU,
    measured: Collection[OpRow],
    describe: Callable[[Any], str],
    progress: Progress,
) -> list[OpRow]:
    """The ops of the steps that `measured` has, in the same format. `describe`: an op's result in words."""
    log = OpLog(describe)
    steps = {row.phase.split()[1] for row in measured if row.phase.startswith("step")}

    def rows(tracer: Tracer) -> list[OpRow]:
        return _rows_of(log, tracer, steps)

    return rows(trace(target, card, progress, log, lambda tracer: finish(rows(tracer))))


def _rows_of(log: OpLog, tracer: Tracer, steps: Collection[str]) -> list[OpRow]:
    events = tracer.recorder.events
    allocations = [pending.finish() for pending in tracer.recorder.allocations]
    settings, _ = _allocator_settings(tracer)
    replayed = replay(events, allocations, settings=settings)
    allocated = {moment.event: moment.allocated for moment in replayed.timeline}
    after_event, level = [], 0
    for index in range(len(events)):
        level = allocated.get(index, level)
        after_event.append(level)
    rows = []
    for op, outputs, phase, first, last in log.rows:
        if phase != "setup" and phase.split()[1] not in steps:
            continue
        inside = after_event[first:last]
        before = after_event[first - 1] if first else 0
        sizes = [allocations[event.id].bytes for event in events[first:last] if event.action == "alloc"]
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


@contextlib.contextmanager
def model_built_once(
    workload: Workload, card: GPU, max: int, repeat_first_step: bool
) -> Iterator[Callable[[Callable[[Workload], Workload]], Prediction]]:
    """The workload's model is built, and the trace stays open: a fork of this process predicts the workload
    as a function changes it. Building takes as long as a step of some models. `repeat_first_step`: the
    forward and backward passes of the second step are known to be those of the first, and are not traced
    again."""
    global _tracer_with_model
    limit = card.limit(max, nccl=nccl_buffers(workload))
    with _open_trace(card) as tracer:
        tracer.repeat_first_step = repeat_first_step
        model = _run_traced(lambda tracer: program.build_model(workload, tracer), tracer)
        with_model = replace(workload, model=lambda: model)

        def predicted(change: Callable[[Workload], Workload]) -> Prediction:
            changed = change(with_model)

            def run(tracer: Tracer) -> Prediction:
                program.run_workload(changed, tracer, lambda text, fraction: None)
                tracer.label_parameters()
                return _prediction(tracer, changed, card, True, limit)

            return _run_traced(run, tracer)

        _tracer_with_model = tracer
        try:
            yield predicted
        finally:
            _tracer_with_model = None


def fake_model(workload: Workload) -> torch.nn.Module:
    """The workload's model on tensors without data, as it is before it is moved to the GPU."""
    if _tracer_with_model is not None:
        return program.build_model(workload, _tracer_with_model)
    return _traced(lambda tracer: program.build_model(workload, tracer), _card(None))


def call_on_fake_gpu(function: Callable[[], Any]) -> Any:
    """What the user's function returns, run on a fake GPU."""
    return _traced(lambda tracer: function(), _card(None))


def _traced(run: Callable[[Tracer], T], card: GPU, log: OpLog | None = None) -> T:
    with _open_trace(card, log) as tracer:
        return _run_traced(run, tracer)


@contextlib.contextmanager
def _open_trace(card: GPU, log: OpLog | None = None) -> Iterator[Tracer]:
    global _depth
    _check_torch()
    with trace_lock:
        if _depth:
            raise UserError("predict was called by a program that is itself being predicted; call it outside")
        _depth += 1
        try:
            with tracing(card, log) as tracer:
                yield tracer
        finally:
            _depth -= 1


@functools.cache
def _check_torch() -> None:
    """Once per process, before the first trace."""
    if not torch.cuda.device_count():
        # Autograd starts a thread for each device at the first backward pass, and torch runs none in a fork
        # after that. Within a FakeTensorMode, a machine without a GPU has one.
        autograd_runs()
    with trace_lock:
        self_test()
        count_uses_of_gradient()


def _run_traced(run: Callable[[Tracer], T], tracer: Tracer) -> T:
    tracer.boundary.outside |= {_run_traced.__code__, _restarting.__code__, run.__code__}
    try:
        return _restarting(run, tracer)
    except WrongDevice as error:
        _check_batch_device(error, tracer)
        raise _program_error(error, tracer) from error
    except ArgumentError as error:
        raise _program_error(error, tracer) from error  # the program's own call of an op, at its own line
    except (OomphError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise _program_error(error, tracer) from error


def _restarting(run: Callable[[Tracer], T], tracer: Tracer) -> T:
    """A failure after blocks were repeated may be ours: the program runs again, all of it traced."""
    try:
        return run(tracer)
    except Exception:
        if tracer.blocks_repeated and can_restart():
            restart()
        raise


def _program_error(error: BaseException, tracer: Tracer) -> ProgramError:
    """The program's own failure, with the guesses that it branched on before."""
    found, estimates = ProgramError.of(error), tracer.estimates
    if tracer.batch_sizes is not None and tracer.batch_sizes.resized:
        found.args = (tracer.batch_sizes.explain_failure(found.args[0]),)
    found.last_condition = estimates.last_condition
    if isinstance(error, (RuntimeError, IndexError)):
        found.share = estimates.share_stated(str(error))
    found.assumed = tuple(
        f"{site.file}:{site.line}: a condition on values is taken as {taken}"
        for site, taken in list(estimates.conditions.items())[-_CONDITIONS_SHOWN:]
    )
    return found


def _card(gpu: str | GPU | None) -> GPU:
    return gpu if isinstance(gpu, GPU) else gpus.find(gpu if gpu is not None else DEFAULT_GPU)


def _peak(run: Replay, events: Sequence[Event], allocations: Sequence[Allocation], card: GPU) -> Peak:
    event = events[run.peak_event] if run.peak_event >= 0 else None
    last = allocations[event.id] if event is not None and event.action == "alloc" else None
    return Peak(
        allocated=run.peak_allocated,
        reserved=run.peak_reserved,
        device=run.peak_reserved + card.context,
        step=run.peak_step,
        stage=last.during if last else None,
        site=last.site if last else None,
    )


def _check_batch_device(error: WrongDevice, tracer: Tracer) -> None:
    """If the stray tensor is the batch's own, the mistake is in the Workload's batch function."""
    stray = storage_id(error.tensor.untyped_storage())  # a view of it counts as itself
    for path, value in tree_flatten_with_path(tracer.batch)[0]:
        if isinstance(value, torch.Tensor) and storage_id(value.untyped_storage()) == stray:
            name = f"batch{keystr(path)}" if path else "a tensor"
            raise UserError(
                f"Workload batch(device) returned {name} on {error.tensor.device}; "
                "build every tensor on the device it is given: "
                "batch=lambda device: torch.randint(..., device=device)"
            ) from error


def _notes_on_prediction(
    card: GPU,
    named: bool,
    growth: Growth | None,
    release_seconds: float,
    smaller_workspaces: bool,
    allocations: Sequence[Allocation],
) -> Iterator[Note]:
    if not named or card.bandwidth is None:
        yield Note(
            "the GPU's generation is not known: kernels, workspaces and the CUDA context "
            f"({format_bytes(card.context)}) are assumed to be those of an H200 (sm_90); "
            "a name of `oomph gpus` gives those of that card"
        )
    if any(map(is_convolution_workspace, allocations)):
        version = cudnn.version(card)
        if version is None:
            yield Note(
                "convolution workspaces are estimated: cuDNN, which CUDA builds of torch have, was not asked"
            )
        else:
            yield Note(
                f"convolution workspaces are those that cuDNN {version} states; parts of sums, which depend "
                "on how the card's multiprocessors are grouped, may take some MiB more or less"
            )
    if any(one.op == CUDNN_SEARCH and one.bytes for one in allocations):
        yield Note(
            "torch.backends.cudnn.benchmark: at the first call of a convolution, cuDNN tries algorithms in "
            "memory that is free; the peak contains an estimate of it, the verdict does not"
        )
    if smaller_workspaces:
        yield Note(
            "the step fits because convolutions without memory for their workspace take another algorithm of "
            "cuDNN, which needs less and may be slower"
        )
    if release_seconds:
        yield Note(
            "the step fits because the allocator releases cached memory in every step, "
            f"in about {1e3 * release_seconds:.1f} ms"
        )
    if growth is not None:
        grown = format_bytes(growth.bytes)
        yield Note(
            f"memory grows by {grown} with every step: tensors of earlier steps stay alive", growth.site
        )


def _notes_on_steps(steps: Sequence[StepPeak], lengths_differ: bool) -> Iterator[Note]:
    """From the second step on: the first makes the optimizer's state."""
    peaks = sorted(step.allocated for step in steps[1:])
    least, most = (format_bytes(peak) for peak in ((peaks[0], peaks[-1]) if peaks else (0, 0)))
    if least != most and (lengths_differ or peaks[-1] > _SAME_PEAK * peaks[0]):
        yield Note(
            f"the traced steps need from {least} to {most}: sizes change from step to step, and other steps "
            f"may need more (--steps {4 * len(steps)} traces more of them)"
        )


def _growth(
    steps: Sequence[StepPeak], run: Replay, events: Sequence[Event], allocations: Sequence[Allocation]
) -> Growth | None:
    """What every step leaves behind; None where later steps leave no more than those before."""
    if len(steps) < 3:
        return None
    growth = steps[-1].end - steps[-2].end
    if growth < MiB or steps[-2].end - steps[-3].end < MiB:
        return None
    (alive,) = alive_after(events, run.timeline, [len(events) - 1])
    kept: dict[Site | None, int] = {}
    for id in alive:
        one = allocations[id]
        if one.step == steps[-2].step and one.stage != "optimizer state":  # L-BFGS fills a history
            kept[one.site] = kept.get(one.site, 0) + round_up(one.bytes, MIN_BLOCK)
    if sum(kept.values()) < MiB:  # only the last batch, or a memory that is replaced, was longer than before
        return None
    return Growth(growth, max(kept, key=lambda site: kept[site]))
