"""oomph.fit: the cheapest set of fixes with which a training step fits.

Every fix that applies is predicted by itself. That gives its step time and, for the highest moment of each
part of the step (forward, loss, backward, optimizer), what it leaves of parameters, gradients, activations
and so on. Several fixes together are estimated to leave the product of these shares, and to take the sum of
their times. Sets are tried in the order of their estimated times; the first that fits in a prediction of its
own is the plan, less what it does not need. Identical blocks need only a count: how many of them are
checkpointed is interpolated.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oomph import gpus
from oomph.errors import OomphError, UserError
from oomph.fixes.application import apply
from oomph.fixes.registry import FixContext, all_fixes, conflict, find, position
from oomph.fixes.scripts import ModelChange, on_each_optimizer, propose_for, trained_model
from oomph.gpus import GPU
from oomph.prediction import Script, called, predict
from oomph.prediction.api import silently
from oomph.prediction.isolation import (
    autograd_breaks_in_forks,
    finish,
    run_forked,
    run_in_new_interpreter,
    run_isolated,
)
from oomph.records import FIX_KINDS, FixKind, FixUse, Plan, Prediction, PricedFixes, Proposal
from oomph.units import format_bytes, parse_bytes
from oomph.workload import Workload

Progress = Callable[[str, float | None], None]
Fixes = tuple[FixUse, ...]
# Bytes at the highest moment of a part of the step, by what they are: {"backward": {"gradients": 123, ...}}
Parts = Mapping[str, Mapping[str, int]]

_JOBS = 2  # predictions at a time
_TRIES = 8  # sets that are predicted before the search ends with the closest one
_COUNTS = 8  # numbers of checkpointed blocks that are considered
_HIGHER = 1.02  # estimates may be above the limit by so much and are still tried
_SAME_TIME = 0.005  # sets whose times differ by less are ordered by the number of fixes
_RATES_OF = "h200"  # for a card of which only the size is known


@dataclass(frozen=True)
class _Option:
    """One way to use a fix, or a few that belong together, with what it leaves and costs."""

    fixes: Fixes
    parts: Parts
    seconds: float  # more than without
    host_bytes: int


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

    def __init__(self, workload: Workload, card: GPU, limit: int) -> None:
        self._workload = workload
        self._predict = functools.partial(predict, gpu=card, max=limit)

    def predict(self) -> Prediction:
        return self._predict(self._workload)

    def predict_with(self, sets: Sequence[Fixes]) -> Iterator[tuple[int, Prediction | Exception]]:
        """(position, prediction or why there is none), as they come."""

        def predicted(fixes: Fixes) -> Prediction:
            return self._predict(apply(list(fixes), self._workload))

        return run_forked([functools.partial(predicted, fixes) for fixes in sets], _JOBS)

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
        return run_forked([functools.partial(self._predict, change) for change in changes], _JOBS)

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
        self.began = time.perf_counter()

    def plan(self, kinds: tuple[FixKind, ...], progress: Progress) -> Plan:
        progress("predicting the step as it is", None)
        prediction = self.program.predict()
        self.base = base = self._trial((), prediction)
        model, conditions = "", dict[str, str]()
        chosen = base
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

    def _predict(self, sets: Sequence[Fixes], progress: Progress, what: str) -> None:
        """Fill `trials`. A set that its fixes refuse has no trial."""
        new = [fixes for fixes in sets if _key(fixes) not in self.trials]
        for done, (number, result) in enumerate(self.program.predict_with(new), 1):
            progress(what, done / len(new))
            if isinstance(result, Prediction):
                self._trial(new[number], result)
            elif not isinstance(result, OomphError):
                raise result  # a bug of ours

    def _trial(self, fixes: Fixes, prediction: Prediction) -> _Trial:
        seconds = prediction.step_seconds or math.nan
        slowdown = seconds / self.base.priced.step_seconds if fixes else 1.0
        host = sum(phase.to_host for phase in prediction.work.phases) if fixes else 0
        fits = bool(prediction.fits) and host <= self.host
        trial = _Trial(PricedFixes(fixes, prediction.peak, fits, seconds, slowdown, host), _parts(prediction))
        self.trials[_key(fixes)] = trial
        return trial

    # ----------------------------------------------------------------------------------------- search

    def _search(self, proposals: Sequence[Proposal], progress: Progress) -> _Trial:
        axes = self._axes(proposals, progress)
        closest, optimism = min(self.trials.values(), key=_closeness), 1.0
        tried = 0
        for estimated, fixes in self._sets(axes):
            if tried == _TRIES:
                break
            if estimated * optimism > self.limit and not closest.priced.fits:
                continue
            tried += 1
            self._predict([fixes], progress, f"predicting {', '.join(use.fix for use in fixes)}")
            trial = self.trials.get(_key(fixes))
            if trial is None:
                continue
            if trial.priced.fits:
                return self._without_needless(trial, axes, progress)
            optimism = max(optimism, trial.priced.peak.reserved / estimated)
            closest = min(closest, trial, key=_closeness)
        if closest.priced.fits:
            return closest
        smallest = self._smallest(axes)
        self._predict([smallest], progress, "predicting the smallest set")
        return min((closest, self.trials.get(_key(smallest), closest)), key=_closeness)

    def _axes(self, proposals: Sequence[Proposal], progress: Progress) -> list[list[_Option]]:
        """For each fix its options, predicted; options of one axis exclude each other."""
        where = {_key((proposal.use,)): proposal.where for proposal in proposals}
        singles: list[Fixes] = [(proposal.use,) for proposal in proposals]
        first = {proposal.fix: proposal.use for proposal in reversed(proposals)}
        if set(_OF_ACTIVATIONS) <= set(first):
            singles.append(tuple(first[name] for name in _OF_ACTIVATIONS))
        self._predict(singles, progress, "predicting each fix by itself")
        axes: dict[str, list[_Option]] = {}
        for fixes in singles:
            trial = self.trials.get(_key(fixes))
            if trial is None:
                continue
            axis = "activations" if fixes[0].fix in _OF_ACTIVATIONS else fixes[0].fix
            option = _Option(
                fixes,
                trial.parts,
                trial.priced.step_seconds - self.base.priced.step_seconds,
                trial.priced.host_bytes,
            )
            axes.setdefault(axis, []).append(option)
            if axis == "activations" and len(fixes) == 1 and "blocks" not in fixes[0].options:
                axes[axis] += self._counted(option, where[_key(fixes)])
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

    def _sets(self, axes: Sequence[Sequence[_Option]]) -> Iterator[tuple[float, Fixes]]:
        """(estimated peak, fixes), fastest first. What costs no time is in every set."""
        choices: list[list[_Option | None]] = []
        for axis in axes:
            useful = [option for option in axis if self._saves(option) or self._is_faster(option)]
            free = [option for option in useful if self._costs_nothing(option)]
            paid: list[_Option | None] = [option for option in useful if option not in free]
            choices.append([min(free, key=self._alone), *paid] if free else [None, *paid])
        found: list[tuple[int, int, int, float, list[_Option]]] = []
        for chosen in itertools.product(*choices):
            options = [option for option in chosen if option is not None]
            if sum(option.host_bytes for option in options) > self.host:
                continue
            peak = self._estimate(options)
            if peak <= _HIGHER * self.limit:
                seconds = sum(option.seconds for option in options)
                rank = round(seconds / self.base.priced.step_seconds / _SAME_TIME)
                found.append((rank, sum(len(option.fixes) for option in options), len(found), peak, options))
        for *_, peak, options in sorted(found):
            fixes = _in_order([use for option in options for use in option.fixes])
            if fixes and not any(conflict(a, b) for a, b in itertools.combinations(fixes, 2)):
                yield peak, fixes

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

    def _without_needless(
        self, trial: _Trial, axes: Sequence[Sequence[_Option]], progress: Progress
    ) -> _Trial:
        """The same without fixes that are estimated not to be needed and do not make the step faster."""
        known = {_key(option.fixes): option for axis in axes for option in axis}
        options = [known[_key((use,))] for use in trial.priced.fixes if _key((use,)) in known]
        if len(options) < len(trial.priced.fixes):
            return trial
        scale = trial.priced.peak.reserved / self._estimate(options)
        kept = list(options)
        for option in sorted(options, key=self._alone, reverse=True):
            rest = [each for each in kept if each is not option]
            if not self._is_faster(option) and scale * self._estimate(rest) <= self.limit:
                kept = rest
        fixes = _in_order([use for option in kept for use in option.fixes])
        if len(fixes) == len(trial.priced.fixes):
            return trial
        self._predict([fixes], progress, "predicting the plan without what it may not need")
        smaller = self.trials.get(_key(fixes))
        return smaller if smaller is not None and smaller.priced.fits else trial

    def _smallest(self, axes: Sequence[Sequence[_Option]]) -> Fixes:
        """Of each fix the option that leaves least."""
        fixes: list[FixUse] = []
        for option in sorted((min(axis, key=self._alone) for axis in axes), key=self._alone):
            if not any(conflict(a, b) for a in option.fixes for b in fixes):
                fixes += option.fixes
        return _in_order(fixes)

    def _estimate(self, options: Sequence[_Option]) -> float:
        """Bytes that the allocator reserves with all of them."""
        base, highest = self.base, 0.0
        for part, bytes_of in base.parts.items():
            total = 0.0
            for what, size in bytes_of.items():
                total += size * math.prod(_share(option.parts, part, what, size) for option in options)
            highest = max(highest, total)
        return highest * base.priced.peak.reserved / max(1, base.priced.peak.allocated)

    def _front(self, kinds: Collection[FixKind]) -> tuple[PricedFixes, ...]:
        """What was predicted and is neither slower nor larger than another, fastest first."""
        front: list[PricedFixes] = []
        allowed = [
            trial.priced
            for trial in self.trials.values()
            if all(find(use.fix).kind in kinds for use in trial.priced.fixes)
        ]
        for one in sorted(allowed, key=lambda one: (one.step_seconds, one.peak.reserved, len(one.fixes))):
            if not front or one.peak.reserved < front[-1].peak.reserved:
                front.append(one)
        return tuple(front)


_OF_ACTIVATIONS = ("activation_checkpointing", "activation_offloading")


def _key(fixes: Fixes) -> Any:
    return frozenset((use.fix, repr(sorted(use.options.items()))) for use in fixes)


def _in_order(fixes: Sequence[FixUse]) -> Fixes:
    return tuple(sorted(fixes, key=lambda use: position(use.fix)))


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


def _parts(prediction: Prediction) -> Parts:
    """What is allocated when each part of the step is at its highest."""
    held: dict[str, int] = {}
    highest: dict[str, tuple[int, dict[str, int]]] = {}
    total = 0
    for event in prediction.events:
        if event.action == "mark":
            continue
        made = prediction.allocations[event.id]
        size = made.bytes if event.action == "alloc" else -made.bytes
        total += size
        held[made.stage] = held.get(made.stage, 0) + size
        part = made.during or "setup"
        if size > 0 and made.step and total > highest.get(part, (0, {}))[0]:
            highest[part] = total, dict(held)
    return {part: {what: size for what, size in at.items() if size > 0} for part, (_, at) in highest.items()}
