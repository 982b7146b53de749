"""oomph.fit: the cheapest set of fixes with which a training step fits.

Every fix that applies is priced by itself: by a prediction, or where the model has many identical blocks by
one of a model with two of them, whose events are edited to stand for all (reduced.py). That gives its step
time and, for the highest moment of each part of the step (forward, loss, backward, optimizer), what it leaves
of parameters, gradients, activations and so on. Several fixes together are estimated to leave the product of
these shares, and to take the sum of their times. Sets are predicted in the order of their estimated times,
with and without what they are not estimated to need, until no other is estimated to fit and be faster.
Identical blocks need only a count: how many of them are checkpointed is interpolated.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oomph import gpus
from oomph.errors import OomphError, UserError
from oomph.fixes.application import apply
from oomph.fixes.registry import FixContext, all_fixes, conflict, find, position
from oomph.fixes.scripts import ModelChange, on_each_optimizer, propose_for, trained_model
from oomph.gpus import GPU
from oomph.planning.reduced import Reduction, reduction
from oomph.prediction import Script, called, predict
from oomph.prediction.api import silently
from oomph.prediction.isolation import (
    autograd_breaks_in_forks,
    finish,
    run_forked,
    run_in_new_interpreter,
    run_isolated,
)
from oomph.records import (
    FIX_KINDS,
    Allocation,
    Event,
    FixKind,
    FixUse,
    Peak,
    Plan,
    Prediction,
    PricedFixes,
    Proposal,
)
from oomph.units import format_bytes, parse_bytes
from oomph.workload import Workload

Progress = Callable[[str, float | None], None]
Fixes = tuple[FixUse, ...]
# Bytes at the highest moment of a part of the step, by what they are: {"backward": {"gradients": 123, ...}}
Parts = Mapping[str, Mapping[str, int]]

_TRIES = 6  # sets that are predicted before the search ends with the best one
_COUNTS = 8  # numbers of checkpointed blocks that are considered
_WORTH = 0.99  # of the best time so far: what a set must be estimated to take to be tried
_SAFE = 0.99  # of the limit: what an estimate may need for fixes to be left out
_ALIKE = 0.02  # of the peak, by which the events of a reduced model may be off
_LESS = 0.75  # of the memory of a set: what one that takes longer must be estimated to need to be shown
_SAME_TIME = 0.005  # sets whose times differ by less are ordered by the number of fixes
_RATES_OF = "h200"  # for a card of which only the size is known


@dataclass(frozen=True, eq=False)
class _Option:
    """One way to use a fix, or a few that belong together, with what it leaves and costs."""

    fixes: Fixes
    parts: Parts
    seconds: float  # more than without
    host_bytes: int


@dataclass
class _Set:
    """Options that can be combined, with their estimated peak and time."""

    options: tuple[_Option, ...]
    peak: float  # bytes that the allocator reserves
    seconds: float  # more than without

    @property
    def fixes(self) -> Fixes:
        return _fixes(self.options)

    def rank(self, base: float) -> tuple[int, int, float]:
        """The fastest, of equals that with the fewest fixes, of these the smallest."""
        return round(self.seconds / base / _SAME_TIME), len(self.fixes), self.peak


@dataclass(frozen=True)
class _Trial:
    priced: PricedFixes
    parts: Parts


def fit(
    target: Workload | Script | Callable[[], Any],
    *,
    gpu: str | GPU | None = None,
    budget: str | int | None = None,
    max: str | int | None = None,
    allow: Collection[str] = ("exact",),
    host_memory: str | int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The cheapest set of fixes with which the step fits `gpu`, a name or a size.

    `budget` is what the process may take of the card, with the CUDA context; `max` limits the allocator.

    To a function that sets up and returns the step, and to a Script, fixes of the model alone are applied,
    where the program makes its optimizer.

    `allow` names the kinds of fixes that may be used: "exact", "precision", "training". `host_memory` limits
    what fixes may pin on the host; by default what this machine has. If nothing fits, the plan is the closest
    set that was found, and `needs` names the kinds that would have to be allowed.
    """
    if not isinstance(target, Workload | Script) and not callable(target):
        raise UserError(f"fit takes a Workload, a function or a Script; {type(target).__name__} was given")
    if gpu is None and budget is None and max is None:
        raise UserError("fit needs a card or a budget: gpu='rtx4090', or budget='20GiB'")
    for kind in allow:
        if kind not in FIX_KINDS:
            raise UserError(f"{kind!r} is not a kind of fix; valid: {', '.join(FIX_KINDS)}")
    kinds = tuple(kind for kind in FIX_KINDS if kind in allow)
    card = gpu if isinstance(gpu, GPU) else gpus.find(str(gpu or budget or _RATES_OF))
    limits = [card.memory - card.context]
    limits += [parse_bytes(budget) - card.context] if budget is not None else []
    limits += [parse_bytes(max)] if max is not None else []
    limit = min(limits)
    if limit <= 0:
        context = format_bytes(card.context)
        raise UserError(f"the CUDA context alone takes {context}, which is more than there is")
    host = _host_memory() if host_memory is None else parse_bytes(host_memory)
    report = progress or (lambda text, fraction: None)
    card = _with_rates(card)
    if isinstance(target, Script) and autograd_breaks_in_forks():
        options = {"gpu": gpu, "budget": budget, "max": max, "allow": kinds, "host_memory": host}
        return run_in_new_interpreter(fit, report, target, **options)
    if isinstance(target, Script):
        return _Search(_ScriptProgram(target, card, limit), card, limit, host).plan(kinds, report)

    def search(report: Progress) -> Plan:
        found = target if isinstance(target, Workload) else called(target)
        if isinstance(found, Workload):
            program: _WorkloadProgram | _FunctionProgram = _WorkloadProgram(found, card, limit)
        else:
            program = _FunctionProgram(target, card, limit)  # type: ignore[arg-type]
        return _Search(program, card, limit, host).plan(kinds, report)

    return run_isolated(search, report)


def _with_rates(card: GPU) -> GPU:
    """Step times are compared with each other only, so another card's rates serve."""
    if card.bandwidth is not None:
        return card
    known = gpus.find(_RATES_OF)
    return replace(
        card, bandwidth=known.bandwidth, bf16_tflops=known.bf16_tflops, fp32_tflops=known.fp32_tflops
    )


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # Windows
        return 1 << 62


class _WorkloadProgram:
    """Predicts a Workload with fixes. Runs in an isolated process, whose forks have all that it imported."""

    reduction: Reduction | None = None  # known after `proposals`

    def __init__(self, workload: Workload, card: GPU, limit: int) -> None:
        self._workload, self._link = workload, card.host_link
        self._predict = functools.partial(predict, gpu=card, max=limit)

    def predict(self) -> Prediction:
        return self._predict(self._workload)

    def predict_with(self, sets: Sequence[Fixes]) -> Iterator[tuple[int, Prediction | Exception]]:
        """(position, prediction or why there is none), as they come."""

        return self._predict_all(self._workload, sets)

    def predict_reduced(self, sets: Sequence[Fixes]) -> Iterator[tuple[int, Prediction | Exception]]:
        assert self.reduction is not None
        return self._predict_all(self.reduction.workload(self._workload), sets)

    def _predict_all(
        self, workload: Workload, sets: Sequence[Fixes]
    ) -> Iterator[tuple[int, Prediction | Exception]]:
        def predicted(fixes: Fixes) -> Prediction:
            return self._predict(apply(list(fixes), workload))

        return run_forked([functools.partial(predicted, fixes) for fixes in sets], _jobs())

    def proposals(self, prediction: Prediction) -> tuple[str, list[Proposal]]:
        """The model in words, and the fixes that apply."""
        context = FixContext(prediction, self._workload)
        found = [
            proposal
            for fix in all_fixes()
            if fix.name != "fsdp2"  # needs more than one GPU
            for proposal in fix.proposals(context)
            if not any(conflict(proposal.use, use) for use in self._workload.fixes)
        ]
        self.reduction = reduction(context.model, self._link)
        return _described(context.model), found


class _FunctionProgram:
    """Predicts a function that sets up and returns the step, with fixes of its model. Isolated, too."""

    def __init__(self, function: Callable[[], Any], card: GPU, limit: int) -> None:
        self._function = function
        self._predict = functools.partial(predict, gpu=card, max=limit)

    def predict(self) -> Prediction:
        return self._predict(self._function)

    def predict_with(self, sets: Sequence[Fixes]) -> Iterator[tuple[int, Prediction | Exception]]:
        changes = [self._calling(ModelChange(fixes)) for fixes in sets]
        return run_forked([functools.partial(self._predict, change) for change in changes], _jobs())

    def proposals(self, prediction: Prediction) -> tuple[str, list[Proposal]]:
        def propose(optimizer: Any) -> None:
            raise _Proposals(_proposals_for(prediction, optimizer))

        ((_, found),) = run_forked([functools.partial(self._predict, self._calling(propose))], 1)
        if isinstance(found, _Proposals):
            return found.found
        if isinstance(found, Exception):
            raise found
        return "", []  # it made no optimizer

    def _calling(self, call: Callable[[Any], None]) -> Callable[[], Any]:
        """The function, with a call for each optimizer that it makes."""

        def function() -> Any:
            with on_each_optimizer(call):
                return self._function()

        return function


class _ScriptProgram:
    """Predicts a script with fixes of its model, each time in a process of its own."""

    def __init__(self, script: Script, card: GPU, limit: int) -> None:
        self._script = script
        self._predict = functools.partial(predict, gpu=card, max=limit)

    def predict(self) -> Prediction:
        return self._predict(self._script)

    def predict_with(self, sets: Sequence[Fixes]) -> Iterator[tuple[int, Prediction | Exception]]:
        for number, fixes in enumerate(sets):
            fixed = replace(self._script, on_optimizer=ModelChange(fixes))
            try:
                yield number, self._run_silently(fixed)
            except OomphError as error:
                yield number, error

    def proposals(self, prediction: Prediction) -> tuple[str, list[Proposal]]:
        """The script runs until it makes its optimizer."""
        asked = replace(
            self._script, on_optimizer=lambda optimizer: finish(_proposals_for(prediction, optimizer))
        )
        found = self._run_silently(asked)
        return found if isinstance(found, tuple) else ("", [])  # it made no optimizer

    def _run_silently(self, script: Script) -> Any:
        """It has printed all that it prints before."""
        run = functools.partial(silently, lambda progress: self._predict(script))
        return run_isolated(run, lambda text, fraction: None)


def _jobs() -> int:
    """Predictions at a time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Proposals(OomphError):
    """Ends a function that was called for its proposals alone."""

    @property
    def found(self) -> tuple[str, list[Proposal]]:
        return self.args[0]


def _proposals_for(prediction: Prediction, optimizer: Any) -> tuple[str, list[Proposal]]:
    model = trained_model(optimizer)
    return _described(model), propose_for(model, prediction)


def _described(model: Any) -> str:
    return f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters"


class _Search:
    def __init__(
        self, program: _WorkloadProgram | _FunctionProgram | _ScriptProgram, card: GPU, limit: int, host: int
    ) -> None:
        self.program, self.card, self.limit, self.host = program, card, limit, host
        self.trials: dict[Any, _Trial] = {}
        self.options: dict[Any, _Option] = {}
        self.sets: list[_Set] = []  # not predicted
        self.began = time.perf_counter()

    def plan(self, kinds: tuple[FixKind, ...], progress: Progress) -> Plan:
        progress("predicting the step as it is", None)
        prediction = self.program.predict()
        self.prediction, self.base = prediction, self._trial((), prediction)
        base = chosen = self.base
        model, conditions = "", dict[str, str]()
        needs: tuple[FixKind, ...] = ()
        if not base.priced.fits:
            model, found = self.program.proposals(prediction)
            conditions = {one.fix: one.condition for one in found if one.condition}
            chosen = self._search([one for one in found if one.kind in kinds], progress)
            if not chosen.priced.fits and set(kinds) != set(FIX_KINDS):
                needs = self._needs(found, kinds, progress)
        return Plan(
            fixes=chosen.priced.fixes,
            fits=chosen.priced.fits,
            gpu=self.card.name,
            gpu_title=self.card.title,
            limit=self.limit,
            before=base.priced,
            after=chosen.priced,
            allowed=kinds,
            model=model,
            front=self._front(kinds),
            conditions=tuple(
                f"{use.fix}: {conditions[use.fix]}" for use in chosen.priced.fixes if use.fix in conditions
            ),
            needs=needs,
            predictions=len(self.trials),
            seconds=time.perf_counter() - self.began,
        )

    def _needs(
        self, found: Sequence[Proposal], kinds: tuple[FixKind, ...], progress: Progress
    ) -> tuple[FixKind, ...]:
        """The kinds that would have to be allowed besides, for a set that fits."""
        for kind in FIX_KINDS:
            if kind not in kinds:
                kinds = (*kinds, kind)
                chosen = self._search([one for one in found if one.kind in kinds], progress)
                if chosen.priced.fits:
                    used = {find(use.fix).kind for use in chosen.priced.fixes}
                    return tuple(each for each in FIX_KINDS if each in used)
        return ()

    # ------------------------------------------------------------------------------------ predictions

    def _predict(self, sets: Sequence[Fixes], progress: Progress, what: str) -> list[_Trial]:
        """Those of the sets that their fixes do not refuse."""
        new = list({_key(fixes): fixes for fixes in sets if _key(fixes) not in self.trials}.values())
        for done, (number, result) in enumerate(self.program.predict_with(new), 1):
            progress(what, done / len(new))
            if isinstance(result, Prediction):
                self._trial(new[number], result)
            elif not isinstance(result, OomphError):
                raise result  # a bug of ours
        return [self.trials[_key(fixes)] for fixes in sets if _key(fixes) in self.trials]

    def _trial(self, fixes: Fixes, prediction: Prediction) -> _Trial:
        seconds = prediction.step_seconds or math.nan
        slowdown = seconds / self.base.priced.step_seconds if fixes else 1.0
        host = _host_bytes(prediction) if fixes else 0
        fits = bool(prediction.fits) and host <= self.host
        trial = _Trial(
            PricedFixes(fixes, prediction.peak, fits, seconds, slowdown, host),
            _parts(prediction.events, prediction.allocations),
        )
        self.trials[_key(fixes)] = trial
        return trial

    # --------------------------------------------------------------------------------------- options

    def _price(self, candidates: Sequence[tuple[Proposal, ...]], progress: Progress) -> None:
        """Fill `options`. A candidate that its fixes refuse has none."""
        new = [each for each in candidates if _key(_uses(each)) not in self.options]
        for each in new:
            if each[0].fix == "allocator":  # its events are the same
                self.options[_key(_uses(each))] = self._of_allocator(each[0])
        new = [each for each in new if each[0].fix != "allocator"]
        if not self._price_reduced(new, progress):
            trials = self._predict([_uses(each) for each in new], progress, "predicting each fix by itself")
            for trial in trials:
                more = trial.priced.step_seconds - self.base.priced.step_seconds
                self.options[_key(trial.priced.fixes)] = _Option(
                    trial.priced.fixes, trial.parts, more, trial.priced.host_bytes
                )

    def _price_reduced(self, candidates: Sequence[tuple[Proposal, ...]], progress: Progress) -> bool:
        """By predictions of a reduced model; False where there is none that stands for the whole."""
        program, whole = self.program, self.prediction
        if not isinstance(program, _WorkloadProgram) or program.reduction is None:
            return False
        reduction = program.reduction
        sets = [(), *(tuple(map(reduction.use, each)) for each in candidates)]
        found: dict[int, Prediction] = {}
        for done, (number, result) in enumerate(program.predict_reduced(sets), 1):
            progress("pricing each fix by itself", done / len(sets))
            if isinstance(result, Prediction):
                found[number] = result
            elif not isinstance(result, OomphError):
                raise result
        reduced = found.pop(0, None)
        parts = _parts(reduced.events, reduction.allocations(reduced)) if reduced is not None else {}
        if reduced is None or not _is_like(parts, self.base.parts):
            program.reduction = None
            return False
        for number, fixed in found.items():
            each = candidates[number - 1]
            seconds = max(reduction.seconds(one, fixed, reduced, whole) for one in each)
            with_fix = _parts(fixed.events, reduction.allocations(fixed))
            self.options[_key(_uses(each))] = _Option(
                _uses(each),
                _rescaled(with_fix, parts, self.base.parts),
                seconds - self.base.priced.step_seconds,
                reduction.host_bytes(each[-1], _host_bytes(fixed)),
            )
        return True

    def _of_allocator(self, proposal: Proposal) -> _Option:
        share = 1 - (proposal.saving or 0) / self.base.priced.peak.reserved
        parts = {
            part: {what: round(share * size) for what, size in bytes_of.items()}
            for part, bytes_of in self.base.parts.items()
        }
        return _Option((proposal.use,), parts, 0.0, 0)

    def _axes(self, proposals: Sequence[Proposal], progress: Progress) -> list[list[_Option]]:
        """For each fix its options; options of one axis exclude each other."""
        first = {one.fix: one for one in reversed(proposals)}
        candidates: list[tuple[Proposal, ...]] = [
            (one,)
            for one in proposals
            if (one.fix not in _OF_ACTIVATIONS or "blocks" not in one.options)  # counts are interpolated
            and (one.fix != "no_foreach" or "fused_optimizer" not in first)  # which is better at all it does
        ]
        if set(_OF_ACTIVATIONS) <= set(first):
            candidates.append(tuple(first[name] for name in _OF_ACTIVATIONS))
        self._price(candidates, progress)
        axes: dict[str, list[_Option]] = {}
        for each in candidates:
            option = self.options.get(_key(_uses(each)))
            if option is None:
                continue
            axis = "activations" if each[0].fix in _OF_ACTIVATIONS else each[0].fix
            axes.setdefault(axis, []).append(option)
            if axis == "activations" and len(each) == 1:
                axes[axis] += self._counted(option, each[0].where)
        return list(axes.values())

    def _counted(self, all_blocks: _Option, names: Sequence[str]) -> Iterator[_Option]:
        """The same for fewer of the blocks, interpolated."""
        for step in range(1, _COUNTS):
            count = round(len(names) * step / _COUNTS)
            share = count / len(names)
            if 0 < count < len(names):
                use = replace(
                    all_blocks.fixes[0],
                    options={**all_blocks.fixes[0].options, "blocks": list(names[:count])},
                )
                parts = _between(self.base.parts, all_blocks.parts, share)
                yield _Option((use,), parts, share * all_blocks.seconds, int(share * all_blocks.host_bytes))

    # ----------------------------------------------------------------------------------------- search

    def _search(self, proposals: Sequence[Proposal], progress: Progress) -> _Trial:
        """Predict sets in the order of their estimated times, while one may be faster than the best found.

        What a prediction shows of a set corrects the estimates of others.
        """
        axes = self._axes(proposals, progress)
        self.sets = sets = self._sets(axes)
        closest = min(self.trials.values(), key=_closeness)
        base, optimism = self.base.priced.step_seconds, 1.0
        for _ in range(_TRIES):
            most = _WORTH * closest.priced.step_seconds if closest.priced.fits else math.inf
            fitting = (one for one in sets if one.peak * optimism <= self.limit and base + one.seconds < most)
            chosen = min(fitting, key=lambda one: one.rank(base), default=None)
            if chosen is None:
                break
            sets.remove(chosen)
            tried = [self._without_needless(chosen.options), chosen.fixes]
            trials = self._predict(tried, progress, f"predicting {', '.join(use.fix for use in tried[0])}")
            if not trials:
                continue
            closest = min(closest, *trials, key=_closeness)
            if not trials[-1].priced.fits:
                optimism = max(optimism, trials[-1].priced.peak.reserved / chosen.peak)
            late = trials[-1].priced.step_seconds - base - chosen.seconds
            costly = max(chosen.options, key=lambda option: abs(option.seconds))
            for one in sets:
                if costly in one.options:
                    one.seconds += late
        if not closest.priced.fits and sets:
            smallest = min(sets, key=lambda one: one.peak).fixes
            trials = self._predict([smallest], progress, "predicting the smallest set")
            closest = min(closest, *trials, key=_closeness)
        return closest

    def _sets(self, axes: Sequence[Sequence[_Option]]) -> list[_Set]:
        """Every combination of options that is worth a thought. What costs no time is in all of them."""
        choices: list[list[_Option | None]] = []
        for axis in axes:
            useful = [option for option in axis if self._saves(option) or self._is_faster(option)]
            free = [option for option in useful if self._costs_nothing(option)]
            paid: list[_Option | None] = [option for option in useful if option not in free]
            choices.append([min(free, key=self._alone), *paid] if free else [None, *paid])
        uses = [[use for option in axis if option is not None for use in option.fixes] for axis in choices]
        for choice, own in zip(choices, uses, strict=True):
            others = [use for each in uses if each is not own for use in each]
            if None not in choice and any(conflict(a, b) for a in own for b in others):
                choice.append(None)
        found: list[_Set] = []
        sizes = [(part, what, size) for part, held in self.base.parts.items() for what, size in held.items()]
        shares = {
            id(option): [_share(option.parts, part, what, size) for part, what, size in sizes]
            for axis in choices
            for option in axis
            if option is not None
        }

        def extend(position: int, options: tuple[_Option, ...], left: list[float]) -> None:
            if position == len(choices):
                if options and sum(option.host_bytes for option in options) <= self.host:
                    seconds = sum(option.seconds for option in options)
                    found.append(_Set(options, self._reserved(sizes, left), seconds))
                return
            for option in choices[position]:
                if option is None:
                    extend(position + 1, options, left)
                elif not any(conflict(a, b) for each in options for a in each.fixes for b in option.fixes):
                    rest = [a * b for a, b in zip(left, shares[id(option)], strict=True)]
                    extend(position + 1, (*options, option), rest)

        extend(0, (), [float(size) for *_, size in sizes])
        return found

    def _reserved(self, sizes: Sequence[tuple[str, str, int]], left: Sequence[float]) -> float:
        """Bytes that the allocator reserves if so much is left of each size at the highest moments."""
        highest: dict[str, float] = {}
        for (part, *_), size in zip(sizes, left, strict=True):
            highest[part] = highest.get(part, 0.0) + size
        peak = self.base.priced.peak
        return max(highest.values(), default=0.0) * peak.reserved / max(1, peak.allocated)

    def _estimate(self, options: Sequence[_Option]) -> float:
        sizes = [(part, what, size) for part, held in self.base.parts.items() for what, size in held.items()]
        left = [
            size * math.prod(_share(option.parts, part, what, size) for option in options)
            for part, what, size in sizes
        ]
        return self._reserved(sizes, left)

    def _alone(self, option: _Option) -> float:
        return self._estimate([option])

    def _saves(self, option: _Option) -> bool:
        """At the highest moment of some part: the peak may be there when others have lowered it elsewhere."""
        return any(
            sum(option.parts.get(part, {}).values()) < 0.995 * sum(bytes_of.values())
            for part, bytes_of in self.base.parts.items()
        )

    def _costs_nothing(self, option: _Option) -> bool:
        return option.seconds <= _SAME_TIME * self.base.priced.step_seconds

    def _is_faster(self, option: _Option) -> bool:
        return option.seconds < -_SAME_TIME * self.base.priced.step_seconds

    def _without_needless(self, options: Sequence[_Option]) -> Fixes:
        """Without fixes that are estimated not to be needed and do not make the step faster."""
        kept = list(options)
        for option in sorted(options, key=self._alone, reverse=True):
            rest = [each for each in kept if each is not option]
            if rest and not self._is_faster(option) and self._estimate(rest) <= _SAFE * self.limit:
                kept = rest
        return _fixes(kept)

    def _front(self, kinds: Collection[FixKind]) -> tuple[PricedFixes, ...]:
        """What was predicted and is neither slower nor larger than another, fastest first; where estimated
        sets need much less, these too."""
        front: list[PricedFixes] = []
        allowed = [
            trial.priced
            for trial in self.trials.values()
            if all(find(use.fix).kind in kinds for use in trial.priced.fixes)
        ]
        for one in sorted(allowed, key=lambda one: (one.step_seconds, one.peak.reserved, len(one.fixes))):
            if not front or one.peak.reserved < front[-1].peak.reserved:
                front.append(one)
        base, context = self.base.priced, self.base.priced.peak.device - self.base.priced.peak.reserved
        for estimated in sorted(self.sets, key=lambda one: (one.seconds, one.peak)):
            fixes, reserved = estimated.fixes, round(estimated.peak)
            seconds = base.step_seconds + estimated.seconds
            is_allowed = all(find(use.fix).kind in kinds for use in fixes)
            if is_allowed and seconds > front[-1].step_seconds and reserved < _LESS * front[-1].peak.reserved:
                allocated = round(reserved * base.peak.allocated / base.peak.reserved)
                peak = Peak(allocated, reserved, reserved + context)
                host = sum(option.host_bytes for option in estimated.options)
                slowdown = seconds / base.step_seconds
                front.append(PricedFixes(fixes, peak, reserved <= self.limit, seconds, slowdown, host, True))
        return tuple(front)


_OF_ACTIVATIONS = ("activation_checkpointing", "activation_offloading")


def _key(fixes: Fixes) -> Any:
    return frozenset((use.fix, repr(sorted(use.options.items()))) for use in fixes)


def _closeness(trial: _Trial) -> tuple[float, float]:
    """Those that fit first, the fastest of them; then by what is missing."""
    priced = trial.priced
    return (0.0, priced.step_seconds) if priced.fits else (float(priced.peak.reserved), 0.0)


def _share(parts: Parts, part: str, what: str, size: int) -> float:
    return parts.get(part, {}).get(what, 0) / size


def _between(base: Parts, other: Parts, share: float) -> Parts:
    return {
        part: {
            what: round(size + share * (other.get(part, {}).get(what, 0) - size))
            for what, size in bytes_of.items()
        }
        for part, bytes_of in base.items()
    }


def _fixes(options: Iterable[_Option]) -> Fixes:
    uses = [use for option in options for use in option.fixes]
    return tuple(sorted(uses, key=lambda use: position(use.fix)))


def _uses(proposals: Iterable[Proposal]) -> Fixes:
    return tuple(proposal.use for proposal in proposals)


def _host_bytes(prediction: Prediction) -> int:
    return sum(phase.to_host for phase in prediction.work.phases)


def _is_like(parts: Parts, base: Parts) -> bool:
    """Whether the events of a reduced model give the whole one's peaks."""
    highest = max(sum(held.values()) for held in base.values())
    return all(
        abs(sum(parts.get(part, {}).values()) - sum(held.values())) <= _ALIKE * highest
        for part, held in base.items()
    )


def _rescaled(parts: Parts, reduced: Parts, base: Parts) -> Parts:
    """From the reduced model's to the whole one's: the same shares of the base."""

    def rescale(part: str, what: str, size: int) -> int:
        before, whole = reduced.get(part, {}).get(what, 0), base.get(part, {}).get(what, 0)
        return round(size * whole / before) if before and whole else size

    return {
        part: {what: rescale(part, what, size) for what, size in held.items()} for part, held in parts.items()
    }


def _parts(events: Sequence[Event], allocations: Sequence[Allocation]) -> Parts:
    """What is allocated when each part of the step is at its highest."""
    held: dict[str, int] = {}
    highest: dict[str, tuple[int, dict[str, int]]] = {}
    total = 0
    for event in events:
        if event.action == "mark":
            continue
        made = allocations[event.id]
        size = made.bytes if event.action == "alloc" else -made.bytes
        total += size
        held[made.stage] = held.get(made.stage, 0) + size
        part = made.during or "setup"
        if size > 0 and made.step and total > highest.get(part, (0, {}))[0]:
            highest[part] = total, dict(held)
    return {part: {what: size for what, size in at.items() if size > 0} for part, (_, at) in highest.items()}
