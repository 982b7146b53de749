"""From a trace to a Prediction: peaks, verdict, margin, interval, notes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from oomph import gpus
from oomph.errors import UserError
from oomph.gpus import GPU
from oomph.prediction.allocator import (
    MIN_BLOCK,
    Replay,
    allocator_settings,
    is_convolution_workspace,
    margin,
    replay,
    round_up,
)
from oomph.prediction.convolution import cudnn
from oomph.prediction.garbage import without_collection
from oomph.prediction.intervals import MOST, calibrated, enclosing
from oomph.prediction.program import Script
from oomph.prediction.tracer.tracer import Tracer
from oomph.prediction.tracer.work import RELEASE_SECONDS, step_work
from oomph.records import (
    CUDNN_SEARCH,
    SIZES_DEPEND_ON_VALUES,
    WORKSPACES_ESTIMATED,
    Allocation,
    AllocatorSettings,
    BatchTensor,
    EmbeddingUse,
    Event,
    Growth,
    Interval,
    Note,
    Peak,
    Prediction,
    Site,
    StepPeak,
    Verdict,
    alive_after,
)
from oomph.torch_internals import keystr, tree_flatten_with_path
from oomph.units import MiB, format_bytes
from oomph.workload import Workload, allocator_of_environment, ignored_allocator

DEFAULT_GPU = "h200"  # whose CUDA paths are assumed when no GPU is named: the one oomph is measured against
_CONDITIONS_SHOWN = 5
_SAME_PEAK = 1.1  # times the least peak of a step, where steps are alike
_SAME_SIZES = 1.01  # the same, where the shapes of their batches are equal, too
_STEPS_APART = 2
_TRACED_AS_EAGER = "torch.compile is traced as eager"
# Of a communicator of NCCL, estimated and not measured: 16 channels with two connections, each with a
# buffer of 4 MiB (NCCL_BUFFSIZE) and about 1 MiB for other protocols.
_NCCL_COMMUNICATOR = 16 * 2 * 5 * MiB
_P = TypeVar("_P", Peak, StepPeak)


@without_collection()
def prediction_of(
    tracer: Tracer,
    target: Workload | Script | Callable[[], Any],
    card: GPU,
    named: bool,
    limit: int | None,
) -> Prediction:
    events, notes = tuple(tracer.recorder.events), (*tracer.recorder.notes, *tracer.estimates.notes())
    allocations = tuple(pending.finish() for pending in tracer.recorder.allocations)
    settings, settings_notes = settings_of(tracer)
    shown = replay(events, allocations, settings=settings)
    searches = any(one.op == CUDNN_SEARCH and one.bytes for one in allocations)
    replays = _replays(events, allocations, settings, tracer.freed_at_last)
    unlimited = replays[0]() if searches else shown
    others = [_peak(replays[0](allocations=each), events, each, card) for each in _estimated(allocations)]
    sizes_assumed = tracer.estimates.sizes_assumed
    compiled = tracer.compile_seconds > 0
    residual = margin(unlimited.peak_reserved, allocations, sizes_assumed, compiled, card, torch.__version__)
    off_by = _off_by(replays, unlimited, residual)
    one_optimizer = isinstance(target, Script) and not tracer.several_optimizers
    peak, needed = (_peak(replayed, events, allocations, card) for replayed in (shown, unlimited))
    whole_steps = unlimited.steps[:-1] if tracer.last_step_is_partial else unlimited.steps
    interval = _interval(tracer, needed, others, unlimited, whole_steps if one_optimizer else ())
    verdict, request = _verdict(replays, unlimited, limit, off_by, residual)
    if needed == peak:
        verdict = _outside(interval, verdict, limit)
    elif interval is not None:
        interval = replace(interval, high=enclosing(interval.high, peak)[1])
    step_seconds, work = step_work(tracer.work.kernels, card)
    release_seconds, smaller_workspaces = 0.0, False
    if verdict == "fits" and limit is not None and limit < unlimited.highest_reserved:
        limited = replays[0](limit=limit)
        release_seconds, smaller_workspaces = limited.released * RELEASE_SECONDS, limited.smaller_workspaces
        step_seconds = None if step_seconds is None else step_seconds + release_seconds
    growth = tracer.growth.found or _growth(whole_steps, unlimited, events, allocations)
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
            *_notes_on_steps(whole_steps if one_optimizer else (), tracer.batches.lengths_differ()),
        ),
        seconds=0.0,
        compile_seconds=tracer.compile_seconds,
        step_seconds=step_seconds,
        release_seconds=release_seconds,
        work=work,
        growth=growth,
        pinned=tracer.pinned.most,
        margin=off_by,
        batch=_batch(tracer),
        sizes=tuple(tracer.sizes.items()),
        dimensions=tuple(tracer.modules.dimensions.items()),
        embeddings=tuple(EmbeddingUse(*key, used) for key, used in tracer.embeddings.items()),
        holders=tracer.holders.found(),
        assumptions=tuple(_assumptions(tracer)),
        interval=interval,
    )
    return _of_ranks(found, tracer.ranks, nccl_buffers(target)) if tracer.ranks > 1 else found


def card_of(gpu: str | GPU | None) -> GPU:
    return gpu if isinstance(gpu, GPU) else gpus.find(gpu if gpu is not None else DEFAULT_GPU)


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

    def beside(peak: _P) -> _P:
        return replace(peak, device=peak.device + nccl)

    interval = found.interval
    return replace(
        found,
        ranks=ranks,
        nccl=nccl,
        peak=beside(found.peak),
        without_search=found.without_search and beside(found.without_search),
        interval=interval and replace(interval, low=beside(interval.low), high=beside(interval.high)),
        steps=tuple(map(beside, found.steps)),
        notes=(*map(Note, notes), *found.notes),
    )


def settings_of(tracer: Tracer) -> tuple[AllocatorSettings, list[Note]]:
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


def _interval(
    tracer: Tracer, peak: Peak, others: Sequence[Peak], run: Replay, steps: Sequence[StepPeak]
) -> Interval | None:
    """`others`: with the least and the most of what is estimated. Other values are predicted as well.
    `steps`: those of one optimizer, from its first to its last.

    Other steps may be as far from those that were traced as these are apart, or twice as far, where batches
    differ or layers are dropped. Of a program that is compiled but traced as eager: nanoGPT, measured, kept
    70 % of what is not there for the whole run; half is the least that is expected.
    """
    peaks = sorted(step.allocated for step in steps[1:])
    apart = _STEPS_APART * (peaks[-1] - peaks[0]) if peaks else 0
    differ = apart and (tracer.batches.lengths_differ() or peaks[-1] > _SAME_SIZES * peaks[0])
    found: list[Interval] = []
    if tracer.estimates.sizes_assumed:
        found.append(calibrated(peak, [], SIZES_DEPEND_ON_VALUES))
    if tracer.compiled_as_eager:
        kinds = ("activation", "temporary", "workspace")
        less = sum(alive.bytes for alive in run.at_peak if alive.allocation.kind in kinds) // 2
        found.append(Interval(changed(peak, -less), peak, _TRACED_AS_EAGER))
    if differ:
        reason = "steps differ, and others may need more or less"
        found.append(Interval(changed(peak, -apart), changed(peak, apart), reason))
    if others:
        found.append(calibrated(peak, others, WORKSPACES_ESTIMATED))
    if not found:
        return None
    low, high = enclosing(*(end for each in found for end in (each.low, each.high)))
    return Interval(low, high, found[0].reason)


def changed(peak: Peak, by: int) -> Peak:
    by = min(max(by, -peak.allocated // 2), int((MOST - 1) * peak.allocated))
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
    # Smaller workspaces than estimated ones are not known to be enough.
    estimated = functools.partial(needed, events, smaller_workspaces=False)
    replays += [functools.partial(estimated, allocations=each) for each in _estimated(allocations)]
    return replays


def _estimated(allocations: Sequence[Allocation]) -> list[list[Allocation]]:
    """With the least and with the most bytes of those that are estimated; none where none are."""
    if all(one.most is None for one in allocations):
        return []
    sizes = (lambda one: 0), (lambda one: one.most)
    return [
        [one if one.most is None else one._replace(bytes=size(one)) for one in allocations] for size in sizes
    ]


def _off_by(replays: Sequence[Callable[..., Replay]], unlimited: Replay, residual: int) -> int:
    off_by = residual
    for other in replays[1:]:
        if other(limit=unlimited.highest_reserved + residual).refused is not None:
            off_by = max(off_by, other().highest_reserved - unlimited.highest_reserved)
    return off_by


@without_collection()
def fits_on(prediction: Prediction, cards: Sequence[GPU]) -> list[bool]:
    """Whether other cards would serve the same requests."""
    verdict = _verdict_of(prediction)
    return [verdict(card.limit(nccl=prediction.nccl), card) == "fits" for card in cards]


@without_collection()
def verdicts_at(prediction: Prediction, limits: Sequence[int]) -> list[Verdict | None]:
    """Whether the card of the prediction would serve the same requests within these limits."""
    verdict, card = _verdict_of(prediction), card_of(prediction.gpu)
    return [verdict(limit, card) for limit in limits]


def _verdict_of(prediction: Prediction) -> Callable[[int, GPU], Verdict | None]:
    """Where sizes depend on values, all are larger or smaller as the ends of the interval are."""
    events, allocations = prediction.events, prediction.allocations
    replays = _replays(events, allocations, prediction.allocator, dict(prediction.freed_at_last))
    unlimited, interval, ends = replays[0](), prediction.interval, [1.0, 1.0]
    searches = prediction.without_search is not None  # in memory that is free, which the interval contains
    off_by = functools.cache(functools.partial(_off_by, replays, unlimited))
    depends = interval is not None and interval.reason == SIZES_DEPEND_ON_VALUES
    if interval is not None and depends:
        ends = [end.allocated / prediction.needed.allocated for end in (interval.high, interval.low)]
    compiled = prediction.compile_seconds > 0

    def verdict(limit: int, card: GPU) -> Verdict | None:
        residual = margin(unlimited.peak_reserved, allocations, depends, compiled, card, torch.__version__)
        with_most, with_fewest = (
            _verdict(replays, unlimited, int(limit / end), off_by(residual), residual)[0] for end in ends
        )
        if with_most != with_fewest:
            return "too close to call"
        return with_most if searches else _outside(interval, with_most, limit)

    return verdict


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


def _outside(interval: Interval | None, verdict: Verdict | None, limit: int | None) -> Verdict | None:
    """What fits only if the program needs less than it may, and the reverse, is too close to call."""
    if interval is None or limit is None:
        return verdict
    is_more = verdict == "fits" and limit < interval.high.allocated
    is_less = interval.reason == _TRACED_AS_EAGER and limit >= interval.low.allocated
    return "too close to call" if is_more or (verdict == "does not fit" and is_less) else verdict


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


def _notes_on_target(target: Workload | Script | Callable[[], Any]) -> tuple[Note, ...]:
    if isinstance(target, Script):
        return (Note("losses and other values that the program prints are not real: nothing is computed"),)
    names = ", ".join(use.fix for use in target.fixes) if isinstance(target, Workload) else ""
    return (Note(f"with the fixes {names}"),) if names else ()


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
        repeated = "call of the model here" if growth.calls else "step"
        yield Note(
            f"memory grows by {grown} with every {repeated}: tensors of earlier ones stay alive", growth.site
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
