"""oomph.fit: the cheapest set of fixes with which a training step fits.

1. Every fix that applies is predicted by itself. Where the model has many identical blocks, a model with two
   of them is predicted instead, and its events are scaled to the whole one (reduced.py). The result is an
   estimate: the step time and, at the highest moment of each part of the step (forward, loss, backward,
   optimizer), the bytes of parameters, gradients, activations and so on.
2. A set of fixes is estimated from those of its fixes: the shares of memory that each leaves are multiplied,
   the times that each adds are summed. A set that comes close to the limit gets a joint estimate: two blocks
   are predicted with all its fixes. How many blocks are checkpointed is interpolated between none and all.
3. Sets are predicted in full in the order of their estimated times, first without the fixes that they are
   estimated not to need, until no other set is estimated to fit and to be faster.

torch.compile decides for the whole graph what it saves: it is predicted with all blocks, and only if it is
allowed, because its prediction takes as long as the compiler.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from oomph import gpus
from oomph.errors import OomphError, UserError
from oomph.fixes.modules import model_in_words
from oomph.fixes.registry import conflict, find, position
from oomph.gpus import GPU
from oomph.planning.largest import LARGEST, size_of, with_largest
from oomph.planning.programs import Fixes, FunctionProgram, Program, Proposals, ScriptProgram, WorkloadProgram
from oomph.planning.reduced import UNKNOWN_SECONDS, Costs, Reduction, costs, joint_costs, step_seconds
from oomph.prediction import Script, call_on_fake_gpu
from oomph.prediction.api import with_sizes
from oomph.prediction.compat.registry import as_program
from oomph.prediction.isolation import (
    cuda_has_started,
    run_in_new_interpreter,
    run_isolated,
    show_progress,
)
from oomph.prediction.result import nccl_buffers
from oomph.prediction.tracer.batch_sizes import Sizes
from oomph.records import (
    FIX_KINDS,
    Allocation,
    Event,
    FailedFixes,
    FixKind,
    FixUse,
    Peak,
    Plan,
    PredictedFixes,
    Prediction,
    Progress,
    Proposal,
)
from oomph.units import format_bytes, parse_bytes
from oomph.workload import Workload

# Bytes at the highest moment of a part of the step, by what they are: {"backward": {"gradients": 123, ...}}
PhaseMemory = Mapping[str, Mapping[str, int]]
# Fixes that are used together; those of one group belong together.
Groups = tuple[tuple[Proposal, ...], ...]

# Limits of the search. They are guesses, checked together by benchmarks/fixes/quality.py, which compares the
# plans of `fit` with the best of all sets, and by fit_time.py.
# "x ...": what the number is a factor of.
_MAX_PREDICTED_SETS = 6  # After so many full predictions the search ends with the best set.
_MAX_JOINT_ESTIMATES = 10  # After so many joint estimates, sets are estimated from their single fixes only.
_MAX_SMALLEST_SETS = 4  # So many of the sets with the smallest estimates are predicted before it gives up.
_NEAR = 2.0  # x limit: if the smallest of them needs more, single fixes are not predicted for it.
_JOINT_ESTIMATE_BELOW = 1.1  # x limit: a set that needs more by its single fixes gets no joint estimate.
_JOINT_ESTIMATE_ABOVE = 0.8  # x limit: a set that needs less is predicted in full without a joint estimate.
_MAX_BLOCK_COUNTS = 8  # At most so many different numbers of checkpointed blocks are considered.
_PREDICT_BELOW_TIME = 0.99  # x time of the best set so far: a set estimated to be slower is not predicted.
_DROP_FIXES_BELOW = 0.99  # x limit: fixes are dropped from a set while its estimate stays below this.
_MAX_REDUCED_ERROR = 0.02  # x peak: if two blocks give a peak that is farther off, all blocks are predicted.
_MIN_SAVING = 0.005  # x peak: a fix that saves less in every part of the step is left out.
_SAME_TIME = 0.005  # x step time: sets whose times differ by less are ordered by the number of fixes.
_TIME_ERROR = 0.02  # x step time: the median error of predicted times in benchmarks/results/fixes.csv.
_SHOW_BELOW_MEMORY = 0.85  # x memory of a faster set: an estimated set is listed only if it needs less.

_ACTIVATION_FIXES = ("activation_checkpointing", "activation_offloading")


@dataclass(frozen=True, eq=False)
class _Estimate:
    """The memory and time of a step with some fixes, predicted or estimated."""

    parts: PhaseMemory
    costs: Costs
    host_bytes: int = 0
    reduced: Costs = ()  # of the reduced model
    reserve: float = math.inf  # bytes reserved per byte allocated, at least; inf: not predicted

    @cached_property
    def most(self) -> dict[str, int]:
        """The most that there is of each kind, in any part."""
        largest: dict[str, int] = {}
        for held in self.parts.values():
            for what, size in held.items():
                largest[what] = max(size, largest.get(what, 0))
        return largest


@dataclass(eq=False)
class _Option:
    """One way to use a fix, or a few that belong together."""

    group: tuple[Proposal, ...]
    fixes: Fixes
    estimate: _Estimate
    share: float = 1.0  # of the blocks that `group` changes

    @property
    def seconds(self) -> float:
        return step_seconds(self.estimate.costs)


@dataclass(eq=False)
class _FixSet:
    """Options that can be combined, with their estimated peak and time."""

    options: tuple[_Option, ...]
    peak: float  # bytes that the allocator reserves
    seconds: float
    is_joint: bool  # from a prediction with all options, not from each by itself
    reserve: float = 1.0  # bytes reserved per byte allocated

    @property
    def allocated(self) -> float:
        return self.peak / self.reserve

    @property
    def fixes(self) -> Fixes:
        return _fixes(self.options)

    @property
    def host_bytes(self) -> int:
        return sum(option.estimate.host_bytes for option in self.options)

    @property
    def is_compiled(self) -> bool:
        return any(option.group[0].fix == "compile" for option in self.options)

    @property
    def groups(self) -> Groups:
        return tuple(option.group for option in self.options)

    def rank(self, base: float) -> tuple[int, int, int, float]:
        """The fastest, of equals that which pins the least host memory, then that with the fewest fixes, then
        the smallest."""
        return round(self.seconds / base / _SAME_TIME), self.host_bytes, len(self.fixes), self.peak


@dataclass(frozen=True)
class _PredictedSet:
    """A set of fixes that was predicted with the whole model."""

    result: PredictedFixes
    estimate: _Estimate


def fit(
    target: Workload | Script | Callable[[], Any],
    *,
    gpu: str | GPU | None = None,
    budget: str | int | None = None,
    max: str | int | None = None,
    allow: Collection[str] = ("exact",),
    host_memory: str | int | None = None,
    sizes: Sizes | None = None,
    largest: str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The cheapest set of fixes with which the step fits `gpu`, a name or a size.

    `budget` is what the process may take of the card, with the CUDA context; `max` limits the allocator.

    To a function that sets up and returns the step, and to a Script, fixes of the model alone are applied,
    where the program makes its optimizer.

    `allow` names the kinds of fixes that may be used: "exact", "precision", "training", "compile".
    `host_memory` limits what fixes may pin on the host; by default what this machine has. `sizes` are those
    of the batch, as `oomph.predict` takes them: a plan for the longest batch. `largest`, "batch" or
    "sequence", finds the largest that fits, too. If nothing fits,
    the plan is the closest set that was found, and `needs` names the kinds that would have to be allowed;
    "compile" is not tried for that, because it takes minutes. `rows_that_fit` is the batch that would.
    """
    target = as_program(target)
    if not isinstance(target, Workload | Script) and not callable(target):
        raise UserError(f"fit takes a Workload, a function or a Script; {type(target).__name__} was given")
    if gpu is None and budget is None and max is None:
        raise UserError("fit needs a card or a budget: gpu='rtx4090', or budget='20GiB'")
    if largest is not None and largest not in LARGEST:
        raise UserError(f"largest={largest!r} is not valid; valid: {', '.join(LARGEST)}")
    for kind in allow:
        if kind not in FIX_KINDS:
            raise UserError(f"{kind!r} is not a kind of fix; valid: {', '.join(FIX_KINDS)}")
    kinds = tuple(kind for kind in FIX_KINDS if kind in allow)
    card = gpu if isinstance(gpu, GPU) else gpus.find(str(gpu or budget or gpus.RATES_OF))
    limit = card.limit(max, budget, nccl_buffers(target))
    if limit <= 0:
        context = format_bytes(card.context)
        of_another = "; it is that of an H200: name the card (--gpu)" if card.bandwidth is None else ""
        raise UserError(f"the CUDA context alone takes {context}, which is more than the limit{of_another}")
    is_max = max is not None and limit == parse_bytes(max)
    host = _host_memory() if host_memory is None else parse_bytes(host_memory)
    card = gpus.with_rates(card)
    if isinstance(target, Script) and cuda_has_started():
        options = {
            "gpu": gpu,
            "budget": budget,
            "max": max,
            "allow": kinds,
            "host_memory": host,
            "sizes": sizes,
            "largest": largest,
        }
        with show_progress(progress) as report:
            return run_in_new_interpreter(fit, report, target, **options)
    if isinstance(target, Script):
        with show_progress(progress) as report:
            program: Program = ScriptProgram(target, card, limit, sizes)
            return _Search(program, card, limit, host, is_max, largest).plan(kinds, report)

    def search(report: Progress) -> Plan:
        step = target if isinstance(target, Workload) else call_on_fake_gpu(target)
        if isinstance(step, Workload):
            step = step if sizes is None else with_sizes(step, sizes)
            program: Program = WorkloadProgram(step, card, limit)
        else:
            program = FunctionProgram(target, card, limit, sizes)  # type: ignore[arg-type]
        return _Search(program, card, limit, host, is_max, largest).plan(kinds, report)

    with show_progress(progress) as report:
        return run_isolated(search, report)


def cheapest(
    program: Program, card: GPU, limit: int, kinds: tuple[FixKind, ...], progress: Progress
) -> tuple[Plan, int]:
    """In an isolated process: the cheapest set of fixes with which a program fits, and the bytes of its
    parameters, gradients and optimizer state."""
    search = _Search(program, gpus.with_rates(card), limit, _host_memory(), False, None)
    prediction = search.start(progress)
    return search.plan_for(prediction, kinds, progress), search.held()


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # Windows
        return 1 << 62


class _Search:
    def __init__(
        self, program: Program, card: GPU, limit: int, host: int, is_max: bool, largest: str | None
    ) -> None:
        self.program, self.card, self.limit, self.host, self.is_max = program, card, limit, host, is_max
        self.largest = largest
        self.predicted: dict[Any, _PredictedSet] = {}
        self.estimates: dict[Any, _Estimate] = {}
        self.reduced: _Estimate | None = None  # the reduced model without fixes, if it gives the same peak
        self.sets: list[_FixSet] = []  # not predicted
        self.failed: dict[Any, FailedFixes] = {}
        self.began = time.perf_counter()
        self.first = 0.0  # seconds that the first prediction took
        self.each: dict[bool, float] = {}  # that one of several takes, of the whole model or of two blocks

    def plan(self, kinds: tuple[FixKind, ...], progress: Progress) -> Plan:
        prediction = self.start(progress)
        if self.largest is not None:  # a mistake is reported before the search
            size_of(self.program, prediction, self.largest)
        plan = self.plan_for(prediction, kinds, progress)
        plan = with_largest(self.program, prediction, plan, self.held(), self.largest, progress)
        return replace(plan, seconds=time.perf_counter() - self.began)

    def start(self, progress: Progress) -> Prediction:
        progress("predicting the step without fixes", None)
        prediction = self.program.predict()
        self.first = time.perf_counter() - self.began
        self.base = self._add_prediction((), prediction)
        self.seconds, self.margin = self.base.result.step_seconds, prediction.margin
        self.nccl = prediction.nccl
        self.notes = (*prediction.assumptions, *prediction.notes)
        self.pinned = prediction.pinned
        self.growth = prediction.growth.bytes if prediction.growth is not None else 0
        return prediction

    def held(self) -> int:
        """Bytes of parameters, gradients and optimizer state."""
        held = self.base.estimate.parts.get("optimizer step", {})
        return sum(held.get(stage, 0) for stage in ("parameters", "gradients", "optimizer state"))

    def plan_for(self, prediction: Prediction, kinds: tuple[FixKind, ...], progress: Progress) -> Plan:
        base = self.base
        least, reason = self._least(prediction, kinds)
        if base.result.fits or self._least(prediction, FIX_KINDS)[0]:
            return self._plan(kinds, base, Proposals(reason=reason), least=least)
        first = f"needs {format_bytes(prediction.peak.device)} without fixes: {prediction.verdict}"

        def search(progress: Progress) -> Plan:
            proposals, chosen = self.program.proposals(prediction), base
            self.failed = {_key(one.fixes): one for one in proposals.failed}
            if least:
                proposals = proposals._replace(reason=reason)
            else:
                chosen = self._search([one for one in proposals.found if one.kind in kinds], progress)
            needs = () if chosen.result.fits else self._needs(proposals.found, kinds, progress)
            return self._plan(kinds, chosen, proposals, needs, least)

        return self.program.search(search, lambda text, fraction: progress(f"{first}; {text}", fraction))

    def _plan(
        self,
        kinds: tuple[FixKind, ...],
        chosen: _PredictedSet,
        proposals: Proposals,
        needs: tuple[FixKind, ...] = (),
        least: int = 0,
    ) -> Plan:
        conditions = {one.fix: one.condition for one in proposals.found if one.condition}
        return Plan(
            fixes=chosen.result.fixes,
            fits=chosen.result.fits,
            gpu=self.card.name,
            gpu_title=self.card.title,
            limit=self.limit,
            is_budget=self.limit < self.card.limit(nccl=self.nccl),
            is_max=self.is_max,
            before=self.base.result,
            after=chosen.result,
            allowed=kinds,
            model=model_in_words(proposals.model_id),
            front=self._front(kinds),
            conditions=tuple(
                f"{use.fix}: {conditions[use.fix]}" for use in chosen.result.fixes if use.fix in conditions
            ),
            remarks=tuple(_remarks(chosen.result.fixes, proposals.found)),
            needs=needs,
            model_id=proposals.model_id,
            reason=proposals.reason,
            growth=self.growth,
            notes=self.notes,
            least=least,
            failed=tuple(self.failed.values()),
            predictions=len(self.predicted),
            seconds=time.perf_counter() - self.began,
        )

    def _least(self, prediction: Prediction, kinds: Collection[FixKind]) -> tuple[int, str]:
        """Bytes that no fix of these kinds saves, and what they are; 0 if they do not exceed the limit."""
        if isinstance(self.program, WorkloadProgram):
            parameters = [made for made in prediction.allocations if made.kind == "parameter"]
            what, least = "parameters alone", sum(_smallest_bytes(made, kinds) for made in parameters)
            if least < sum(made.bytes for made in parameters):
                what += ", as small as fixes make them,"
        else:
            what = "parameters, gradients and optimizer state alone"
            least = self.held() - sum(made.bytes for made in prediction.allocations if made.kind == "buffer")
        if least <= self.limit:
            return 0, ""
        return least, f"the {what} take {format_bytes(least)}"

    def _needs(
        self, proposals: Sequence[Proposal], kinds: tuple[FixKind, ...], progress: Progress
    ) -> tuple[FixKind, ...]:
        """The kinds that would have to be allowed for a set that fits."""
        for kind in FIX_KINDS:
            if kind not in kinds and kind != "compile":
                kinds = (*kinds, kind)
                chosen = self._search([one for one in proposals if one.kind in kinds], progress)
                if chosen.result.fits:
                    used = {find(use.fix).kind for use in chosen.result.fixes}
                    return tuple(each for each in FIX_KINDS if each in used)
        return ()

    # ------------------------------------------------------------------------------------ predictions

    def _results(
        self,
        results: Iterable[tuple[int, Prediction | Exception]],
        sets: Sequence[Fixes],
        progress: Progress,
        what: str,
        whole: bool = True,
    ) -> Iterator[tuple[int, Prediction]]:
        """Those of `sets` that could be predicted, in their order, so that a plan does not depend on which
        ends first; the others are remembered in `failed`. `whole`: of the whole model, as the last prediction
        will be."""
        began, count = time.perf_counter(), len(sets)

        def report(done: int) -> None:
            if done:
                self.each[whole] = (time.perf_counter() - began) / done
            left = (count - done) * self.each.get(whole, self.first / (1 if whole else 4))
            left += 0.0 if whole else self.each.get(True, self.first)
            progress(f"{what}, about {max(1.0, left):.0f} s left", done / count)

        if count:
            report(0)
        ended: dict[int, Prediction | Exception] = {}
        following = 0
        for done, (place, found) in enumerate(results, 1):
            report(done)
            ended[place] = found
            while following in ended:
                number, result, following = following, ended.pop(following), following + 1
                if isinstance(result, Prediction):
                    yield number, result
                elif not isinstance(result, OomphError):
                    raise result  # a bug of ours
                elif whole and (len(sets[number]) == 1 or not isinstance(result, UserError)):
                    # Of several fixes, one may refuse what another has changed.
                    self.failed[_key(sets[number])] = FailedFixes(sets[number], str(result))

    def _pinned(self, prediction: Prediction) -> int:
        """Bytes of host memory that fixes pin, beside what the program does."""
        return max(0, prediction.pinned - self.pinned)

    def _predict(self, sets: Sequence[Fixes], progress: Progress, what: str) -> list[_PredictedSet]:
        """Those of the sets that their fixes do not refuse."""
        new = list({_key(fixes): fixes for fixes in sets if _key(fixes) not in self.predicted}.values())
        results = self._results(self.program.predict_with(new), new, progress, what)
        for number, prediction in results:
            self._add_prediction(new[number], prediction)
        return [self.predicted[_key(fixes)] for fixes in sets if _key(fixes) in self.predicted]

    def _add_prediction(self, fixes: Fixes, prediction: Prediction) -> _PredictedSet:
        seconds = prediction.step_seconds or UNKNOWN_SECONDS
        slowdown = seconds / self.seconds if fixes else 1.0
        host = self._pinned(prediction) if fixes else 0
        fits = bool(prediction.fits) and host <= self.host
        parts = _parts(prediction.events, prediction.allocations)
        predicted = _PredictedSet(
            PredictedFixes(
                fixes,
                prediction.peak,
                fits,
                seconds,
                slowdown,
                host,
                margin=prediction.margin,
                too_close=prediction.verdict == "too close to call" and host <= self.host,
            ),
            _Estimate(
                parts,
                costs(prediction, self.card.host_link),
                host,
                reserve=prediction.peak.reserved / max(1, prediction.peak.allocated),
            ),
        )
        self.predicted[_key(fixes)] = predicted
        return predicted

    # ---------------------------------------------------------------------------------------- estimates

    def _estimate_fixes(self, candidates: Sequence[Groups], progress: Progress, what: str) -> None:
        """Fill `estimates` for the candidates. Fixes that refuse each other get none, and those of which
        there is no prediction."""
        new = [each for each in candidates if _key(_uses(each)) not in self.estimates]
        if self.program.reduction is not None:
            compiled = [each for each in new if _flat(each)[0].fix == "compile"]
            self._estimate_reduced([each for each in new if each not in compiled], progress, what)
            if self.reduced is not None:
                # What two of the blocks do not take, the whole model may.
                alone = [each for each in new if len(each) == 1]
                new = [each for each in alone if _key(_uses(each)) not in self.estimates]
                what = f"predicting {', '.join(one.fix for each in new for one in _flat(each))}"
        if new:
            for predicted in self._predict([_uses(each) for each in new], progress, what):
                self.estimates[_key(predicted.result.fixes)] = predicted.estimate

    def _estimate_reduced(self, new: Sequence[Groups], progress: Progress, what: str) -> None:
        """Fill `estimates` from predictions of the reduced model, if it gives the whole one's peak."""
        reduction, link = self.program.reduction, self.card.host_link
        assert reduction is not None
        if self.reduced is None:
            self._check_reduced(reduction, progress)
        if self.reduced is None:
            self.program.reduction = None
            return
        base = self.base.estimate
        sets = [tuple(map(reduction.use, _flat(each))) for each in new]
        reduced = self.program.predict_reduced(sets)
        predictions = dict(self._results(reduced, sets, progress, what, whole=False))
        for number, prediction in predictions.items():
            each, now = new[number], costs(prediction, link)
            if len(each) == 1:
                whole = reduction.costs(each[0][-1], now, self.reduced.costs, base.costs)
            else:
                alone = [self.estimates[_key(_uses([group]))] for group in each]
                pairs = [(one.reduced, one.costs) for one in alone]
                whole = joint_costs(now, self.reduced.costs, base.costs, pairs)
            left = _parts(prediction.events, reduction.allocations(prediction))
            host = max(reduction.host_bytes(one, self._pinned(prediction)) for one in _flat(each))
            self.estimates[_key(_uses(each))] = _Estimate(left, whole, host, now)

    def _check_reduced(self, reduction: Reduction, progress: Progress) -> None:
        """Set `reduced` if the events of the reduced model, edited, give the peak of the whole one."""
        reduced = self.program.predict_reduced([()])
        for _, without in self._results(reduced, [()], progress, "predicting two of the blocks", whole=False):
            parts = _parts(without.events, reduction.allocations(without))
            if _has_same_peak(parts, self.base.estimate.parts):
                self.reduced = _Estimate(parts, costs(without, self.card.host_link))
                # What fixes leave is compared with this: its highest moments are those of the same blocks.
                self.base = replace(self.base, estimate=replace(self.base.estimate, parts=parts))

    def _alternatives(self, proposals: Sequence[Proposal], progress: Progress) -> list[list[_Option]]:
        """For each fix, or those of activations together, its options: a set has one of them at most."""
        names = {one.fix for one in proposals}
        groups: list[tuple[Proposal, ...]] = [
            (one,)
            for one in proposals
            if (one.fix not in _ACTIVATION_FIXES or "blocks" not in one.options)  # counts are interpolated
            and (one.fix != "no_foreach" or "fused_optimizer" not in names)  # which is better at all it does
        ]
        groups += [
            (one, offloading)
            for one in proposals
            for offloading in proposals
            if one.fix == "activation_checkpointing" and offloading.fix == "activation_offloading"
            if "blocks" not in one.options and one.options.get("keep") != "matmuls"
        ]
        predicted = [(group,) for group in groups if group[0].fix != "allocator"]
        self._estimate_fixes(predicted, progress, "estimating each fix by itself")
        for one in proposals:
            if one.fix == "allocator":  # the events are the same; what is reserved for them is known
                share = 1 - (one.saving or 0) / self.base.result.peak.reserved
                self.estimates[_key((one.use,))] = replace(
                    self.base.estimate, reserve=share * self.base.estimate.reserve
                )
        options: dict[str, list[_Option]] = {}
        for group in groups:
            estimate = self.estimates.get(_key(_uses([group])))
            if estimate is None:
                continue
            changed = "activations" if group[0].fix in _ACTIVATION_FIXES else group[0].fix
            options.setdefault(changed, []).append(_Option(group, _uses([group]), estimate))
            if changed == "activations" and len(group) == 1:
                options[changed] += self._for_fewer_blocks(group[0], estimate)
        return list(options.values())

    def _for_fewer_blocks(self, proposal: Proposal, estimate: _Estimate) -> Iterator[_Option]:
        """The same fix in fewer of the blocks, interpolated."""
        names = proposal.where
        for step in range(1, _MAX_BLOCK_COUNTS):
            count = round(len(names) * step / _MAX_BLOCK_COUNTS)
            if 0 < count < len(names):
                options = {**proposal.options, "blocks": list(names[:count])}
                use, share = replace(proposal.use, options=options), count / len(names)
                yield _Option((proposal,), (use,), _interpolated(self.base.estimate, estimate, share), share)

    # ----------------------------------------------------------------------------------------- search

    def _search(self, proposals: Sequence[Proposal], progress: Progress) -> _PredictedSet:
        """The cheapest set that fits, or the smallest. Before it gives up, each fix is predicted by itself
        with the whole model: estimates from two blocks may be too high."""
        found = self._search_sets(proposals, progress)
        is_near = found.result.peak.reserved <= _NEAR * self.limit
        if not found.result.fits and is_near and self.reduced is not None:
            self.reduced = self.program.reduction = None
            self.base = self.predicted[_key(())]
            self.estimates = {key: predicted.estimate for key, predicted in self.predicted.items()}
            found = self._search_sets(proposals, progress)
        return found

    def _search_sets(self, proposals: Sequence[Proposal], progress: Progress) -> _PredictedSet:
        """Predict sets in the order of their estimated times, while one may be faster than the best found.

        What a prediction shows of a set corrects the estimates of those with other numbers of blocks.
        """
        self.sets = sets = self._sets(self._alternatives(proposals, progress))
        closest = min(self.predicted.values(), key=_closeness)
        joint_estimates, tries, most_allocated = 0, 0, float(self.limit)
        underestimate = 1.0  # the largest ratio of a predicted to an estimated peak so far
        margin = 1 + self.margin / self.base.result.peak.reserved
        while tries < _MAX_PREDICTED_SETS:
            most = _PREDICT_BELOW_TIME * closest.result.step_seconds if closest.result.fits else math.inf
            may_estimate_jointly = self.reduced is not None and joint_estimates < _MAX_JOINT_ESTIMATES
            by_single_fixes = 1 / _JOINT_ESTIMATE_BELOW if may_estimate_jointly else underestimate
            faster = [one for one in sets if one.seconds < most]
            fitting = []
            for one in faster:
                error = 1.0 if one.is_joint else underestimate if one.is_compiled else by_single_fixes
                if one.peak * margin * error <= self.limit:
                    fitting.append(one)
            may_release = not fitting
            if may_release:  # the allocator releases cached memory: only what is allocated has to fit
                fitting = [one for one in faster if one.allocated * margin < most_allocated]
            if not fitting:
                break
            chosen = min(fitting, key=lambda one: one.rank(self.seconds))
            text = f"predicting {', '.join(use.fix for use in chosen.fixes)}"
            may_estimate_jointly &= not chosen.is_joint and not chosen.is_compiled
            if may_estimate_jointly and chosen.peak > _JOINT_ESTIMATE_ABOVE * self.limit:
                joint_estimates += 1
                ends = {_key(_uses(each)): each for each in self._interpolation_ends(chosen.options) if each}
                self._estimate_fixes(list(ends.values()), progress, text.replace("predicting", "estimating"))
                for one in sets:
                    if one.groups == chosen.groups:
                        self._estimate_set(one)
                chosen.is_joint = True  # also where they refuse each other
                continue
            tries += 1
            sets.remove(chosen)
            for tried in {one.fixes: one for one in (self._without_needless(chosen), chosen)}.values():
                predicted = self._predict([tried.fixes], progress, text)
                if not predicted:
                    continue
                result = predicted[0].result
                closest = min(closest, predicted[0], key=_closeness)
                error = result.peak.reserved / tried.peak
                underestimate = max(underestimate, error if not chosen.is_joint else 1.0)
                self._correct_estimates((*sets, chosen), chosen, tried, result)
                if result.fits:
                    break
            else:
                if may_release:
                    most_allocated = min(most_allocated, chosen.allocated * margin)
        return closest if closest.result.fits else self._smallest(closest, progress)

    def _smallest(self, closest: _PredictedSet, progress: Progress) -> _PredictedSet:
        """Of the sets with the smallest estimates, each of other fixes, the first that fits when predicted in
        full; else the smallest, which may be `closest`."""
        refused: set[Any] = set()
        tried: set[Any] = set()
        for one in sorted(self.sets, key=lambda one: one.peak):
            of_batch = _key(_uses(group for group in one.groups if group[0].where == ("batch",)))
            if of_batch in refused:  # a batch of fewer rows cannot be cut into as many parts
                continue
            if _key(_uses(one.groups)) in tried:  # in more of the blocks
                continue
            predicted = self._predict([one.fixes], progress, "predicting the smallest sets")
            if not predicted:
                refused.add(of_batch)
                continue
            closest = min(closest, predicted[0], key=_closeness)
            tried.add(_key(_uses(one.groups)))
            if closest.result.fits or len(tried) == _MAX_SMALLEST_SETS:
                break
        return closest

    def _correct_estimates(
        self, sets: Iterable[_FixSet], chosen: _FixSet, tried: _FixSet, result: PredictedFixes
    ) -> None:
        """Of sets with the same fixes in any number of blocks: by as much as the estimate of `tried`, which
        is `chosen` without what it may not need, was off."""
        allocated, late = result.peak.allocated / tried.allocated, result.step_seconds - tried.seconds
        same = [self._interpolation_ends(each.options) for each in (chosen, tried)]
        for one in sets:
            if self._interpolation_ends(one.options) in same:  # with any setting of the allocator
                peak = one.allocated * allocated
                if one.groups == tried.groups:
                    one.reserve = result.peak.reserved / result.peak.allocated
                one.peak, one.seconds = peak * one.reserve, one.seconds + late

    def _sets(self, alternatives: Sequence[Sequence[_Option]]) -> list[_FixSet]:
        """Every combination of options that save memory or time. Those that cost no time are in all."""
        choices: list[list[_Option | None]] = []
        for options_of_fix in alternatives:
            useful = [option for option in options_of_fix if self._saves(option) or self._is_faster(option)]
            free = [option for option in useful if self._is_free(option)]
            paid: list[_Option | None] = [option for option in useful if option not in free]
            smallest = min(free, key=lambda option: self._reserved(option.estimate), default=None)
            choices.append([smallest, *paid])
            if smallest is not None:
                least = (1 - _SAME_TIME) * smallest.seconds
                choices[-1] += [option for option in free if option.seconds < least]
        uses = [
            [use for option in choice if option is not None for use in option.fixes] for choice in choices
        ]
        for choice, own in zip(choices, uses, strict=True):
            others = [use for each in uses if each is not own for use in each]
            if None not in choice and any(conflict(a, b) for a in own for b in others):
                choice.append(None)
        sets: list[_FixSet] = []

        def excludes(options: Sequence[_Option], other: _Option) -> bool:
            return any(conflict(a, b) for each in options for a in each.fixes for b in other.fixes)

        def lacks_free_option(options: Sequence[_Option]) -> bool:
            return any(
                choice[0] is not None
                and not any(option in choice for option in options)
                and not excludes(options, choice[0])
                for choice in choices
            )

        def extend(position: int, options: tuple[_Option, ...]) -> None:
            if position == len(choices):
                one = _FixSet(options, 0.0, 0.0, is_joint=False)
                if options and one.host_bytes <= self.host and not lacks_free_option(options):
                    self._estimate_set(one)
                    sets.append(one)
                return
            for option in choices[position]:
                if option is None:
                    extend(position + 1, options)
                elif not excludes(options, option):
                    extend(position + 1, (*options, option))

        extend(0, ())
        return sets

    def _estimate_set(self, one: _FixSet) -> None:
        """Set its peak and time, from a joint estimate where there is one."""
        estimate = self._joint_estimate(one.options)
        one.is_joint = estimate is not None
        if estimate is None:
            estimate = _combined(self.base.estimate, [option.estimate for option in one.options])
        one.peak, one.seconds = self._reserved(estimate), step_seconds(estimate.costs)
        one.reserve = min(estimate.reserve, self.base.estimate.reserve)

    def _interpolation_ends(self, options: Sequence[_Option]) -> tuple[Groups, Groups]:
        """The options without the fixes of activations, and with these in all blocks. The estimates for other
        numbers of blocks are interpolated between the two."""
        own = [option.group for option in options if option.group[0].fix != "allocator"]
        return tuple(group for group in own if group[0].fix not in _ACTIVATION_FIXES), tuple(own)

    def _joint_estimate(self, options: Sequence[_Option]) -> _Estimate | None:
        without, whole = self._interpolation_ends(options)
        estimate = self.estimates.get(_key(_uses(whole)))
        share = math.prod(option.share for option in options)
        if estimate is not None and share < 1:
            rest = self.estimates.get(_key(_uses(without))) if without else self.base.estimate
            estimate = None if rest is None else _interpolated(rest, estimate, share)
        if estimate is None:
            return None
        settings = [option.estimate for option in options if option.group[0].fix == "allocator"]
        return _combined(self.base.estimate, [estimate, *settings])

    def _reserved(self, estimate: _Estimate) -> float:
        """Bytes that the allocator reserves: as much more than is allocated as without fixes, or as with one
        of them where that is less."""
        highest = max((sum(held.values()) for held in estimate.parts.values()), default=0)
        return highest * min(estimate.reserve, self.base.estimate.reserve)

    def _saves(self, option: _Option) -> bool:
        """Whether it saves anything at the highest moment of some part of the step. This may be the peak once
        other fixes have lowered it elsewhere."""
        least = _MIN_SAVING * self.base.result.peak.allocated
        return option.estimate.reserve < (1 - _MIN_SAVING) * self.base.estimate.reserve or any(
            size - option.estimate.parts.get(part, {}).get(what, 0) > least
            for part, held in self.base.estimate.parts.items()
            for what, size in held.items()
        )

    def _is_free(self, option: _Option) -> bool:
        return option.seconds <= (1 + _SAME_TIME) * self.seconds

    def _is_faster(self, option: _Option, by: float = _SAME_TIME) -> bool:
        return option.seconds < (1 - by) * self.seconds

    def _without_needless(self, one: _FixSet) -> _FixSet:
        """Without fixes that are estimated not to be needed and make the step faster by no more than times
        are off; first without those that pin host memory, then without those that save least."""

        def estimate(options: Sequence[_Option]) -> _Estimate:
            return _combined(self.base.estimate, [option.estimate for option in options])

        needed, whole = list(one.options), estimate(one.options)
        scale = one.peak / self._reserved(whole)

        def order(option: _Option) -> tuple[int, float]:
            return option.estimate.host_bytes, self._reserved(option.estimate)

        for option in sorted(one.options, key=order, reverse=True):
            rest = [each for each in needed if each is not option]
            if not rest or self._is_faster(option, by=_TIME_ERROR):
                continue
            if scale * self._reserved(estimate(rest)) <= _DROP_FIXES_BELOW * self.limit:
                needed = rest
        left = estimate(needed)
        seconds = one.seconds + step_seconds(left.costs) - step_seconds(whole.costs)
        before, after = (min(each.reserve, self.base.estimate.reserve) for each in (whole, left))
        return replace(
            one,
            options=tuple(needed),
            peak=scale * self._reserved(left),
            seconds=seconds,
            reserve=one.reserve * after / before,
        )

    def _front(self, kinds: Collection[FixKind]) -> tuple[PredictedFixes, ...]:
        """What was predicted and is neither slower nor larger than another, fastest first; then sets that are
        estimated to need much less and take longer."""
        front: list[PredictedFixes] = []
        allowed = [
            predicted.result
            for predicted in self.predicted.values()
            if all(find(use.fix).kind in kinds for use in predicted.result.fixes)
        ]
        for one in sorted(allowed, key=lambda one: (one.step_seconds, one.peak.reserved, len(one.fixes))):
            if not front or one.peak.reserved < front[-1].peak.reserved:
                front.append(one)
        base = self.base.result.peak
        for estimated in sorted(self.sets, key=lambda one: (one.seconds, one.peak)):
            fixes, reserved = estimated.fixes, round(estimated.peak)
            is_allowed = all(find(use.fix).kind in kinds for use in fixes)
            is_slower = estimated.seconds > front[-1].step_seconds
            if is_allowed and is_slower and reserved < _SHOW_BELOW_MEMORY * front[-1].peak.reserved:
                allocated = round(reserved * base.allocated / base.reserved)
                peak = Peak(allocated, reserved, reserved + base.device - base.reserved)
                slowdown, fits = estimated.seconds / self.seconds, reserved <= self.limit
                seconds, host = estimated.seconds, estimated.host_bytes
                front.append(PredictedFixes(fixes, peak, fits, seconds, slowdown, host, True))
        return tuple(front)


def _remarks(fixes: Sequence[FixUse], proposals: Sequence[Proposal]) -> Iterator[str]:
    """Notes of the fixes; of options that were not proposed, what all proposals of the fix share."""
    for use in fixes:
        exact = {one.note for one in proposals if one.use == use}
        notes = exact or {one.note for one in proposals if one.fix == use.fix}
        if len(notes) == 1 and (note := notes.pop()):
            yield f"{use.fix}: {note}"


def _smallest_bytes(parameter: Allocation, kinds: Collection[FixKind]) -> int:
    """No more than fixes leave of it: bf16_parameters, and smaller_vocabulary, which halves its rows."""
    rounded = 2 * math.prod(parameter.shape) if "precision" in kinds else parameter.bytes
    may_be_halved = "training" in kinds and len(parameter.shape) == 2
    return min(parameter.bytes, rounded) // (2 if may_be_halved else 1)


def _key(fixes: Fixes) -> Any:
    return frozenset((use.fix, repr(sorted(use.options.items()))) for use in fixes)


def _flat(groups: Groups) -> list[Proposal]:
    return [proposal for group in groups for proposal in group]


def _uses(groups: Iterable[tuple[Proposal, ...]]) -> Fixes:
    return tuple(proposal.use for group in groups for proposal in group)


def _fixes(options: Iterable[_Option]) -> Fixes:
    uses = [use for option in options for use in option.fixes]
    return tuple(sorted(uses, key=lambda use: position(use.fix)))


def _closeness(predicted: _PredictedSet) -> tuple[float, float]:
    """Sorts those that fit first, the fastest before the others; then the rest by their peak."""
    result = predicted.result
    return (0.0, result.step_seconds) if result.fits else (float(result.peak.reserved), 0.0)


# ----------------------------------------------------------------------------------- arithmetic of estimates


def _combined(base: _Estimate, estimates: Sequence[_Estimate]) -> _Estimate:
    """For several fixes together: the shares that they leave are multiplied, the added costs summed. Where
    fixes need more than there was, the largest need counts, times the shares that the others leave."""

    def left(part: str, what: str) -> int:
        size = base.parts.get(part, {}).get(what, 0)
        sizes = [one.parts.get(part, {}).get(what, 0) for one in estimates]
        if size and max(sizes) <= size:
            return round(size * math.prod(each / size for each in sizes))
        # One adds to it; of what is there then, the others leave the share that they leave elsewhere.
        brought = max(range(len(sizes)), key=sizes.__getitem__)
        others = [one for index, one in enumerate(estimates) if index != brought]
        most = base.most.get(what, 0)
        shares = [min(1.0, one.most.get(what, 0) / most) for one in others] if most else []
        if size:
            here = [each / size for index, each in enumerate(sizes) if index != brought]
            shares = list(map(min, shares, here))
        return round(sizes[brought] * math.prod(shares))

    total = tuple(
        cost + sum(one.costs[index] - cost for one in estimates) for index, cost in enumerate(base.costs)
    )
    host, reserve = sum(one.host_bytes for one in estimates), min(one.reserve for one in estimates)
    return _Estimate(_for_all(left, base, *estimates), total, host, reserve=reserve)


def _interpolated(base: _Estimate, other: _Estimate, share: float) -> _Estimate:
    def left(part: str, what: str) -> int:
        size = base.parts.get(part, {}).get(what, 0)
        return max(0, round(size + share * (other.parts.get(part, {}).get(what, 0) - size)))

    total = tuple(a + share * (b - a) for a, b in zip(base.costs, other.costs, strict=True))
    host = round(base.host_bytes + share * (other.host_bytes - base.host_bytes))
    return _Estimate(_for_all(left, base, other), total, host, reserve=min(base.reserve, other.reserve))


def _for_all(left: Callable[[str, str], int], *estimates: _Estimate) -> PhaseMemory:
    keys = dict.fromkeys(
        (part, what) for one in estimates for part, held in one.parts.items() for what in held
    )
    parts: dict[str, dict[str, int]] = {}
    for part, what in keys:
        parts.setdefault(part, {})[what] = left(part, what)
    return parts


def _has_same_peak(parts: PhaseMemory, base: PhaseMemory) -> bool:
    """Whether the events of the reduced model give the whole one's peak."""
    reduced, highest = (
        max((sum(held.values()) for held in each.values()), default=0) for each in (parts, base)
    )
    return abs(reduced - highest) <= _MAX_REDUCED_ERROR * highest


def _parts(events: Sequence[Event], allocations: Sequence[Allocation]) -> PhaseMemory:
    """What is allocated when each part of the step is at its highest.

    Backward is two parts, before and after half of the gradients are there: activations make the peak of one,
    gradients that of the other.
    """
    sizes = [allocations[event.id].bytes * (1 if event.action == "alloc" else -1) for event in events]
    gradients = most = 0
    for event, size in zip(events, sizes, strict=True):
        if event.action != "mark" and allocations[event.id].stage == "gradients":
            gradients += size
            most = max(most, gradients)
    held: dict[str, int] = {}
    highest: dict[str, tuple[int, dict[str, int]]] = {}
    total = 0
    has_steps = any(made.step for made in allocations)  # a function's own loop has none
    for event, size in zip(events, sizes, strict=True):
        if event.action == "mark":
            continue
        made = allocations[event.id]
        total += size
        held[made.stage] = held.get(made.stage, 0) + size
        part: str = made.during or "setup"
        if part == "backward" and 2 * held.get("gradients", 0) > most:
            part = "end of backward"
        if size > 0 and (made.step or not has_steps) and total > highest.get(part, (0, {}))[0]:
            highest[part] = total, dict(held)
    return {part: {what: size for what, size in at.items() if size > 0} for part, (_, at) in highest.items()}
