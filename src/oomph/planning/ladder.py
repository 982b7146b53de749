"""The ladder of a model: the methods with which it fits on a card, the largest sizes, and which cards do.

All predictions are forks of one isolated process, which has imported the libraries: that takes as long as the
prediction of a step.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from oomph import gpus
from oomph.errors import OomphError, UserError
from oomph.gpus import GPU
from oomph.models import configuration
from oomph.models.finetuning import FineTuning
from oomph.planning.largest import Size, largest_of
from oomph.planning.programs import ModelProgram, jobs
from oomph.planning.search import cheapest
from oomph.prediction import call_on_fake_gpu
from oomph.prediction.isolation import (
    cuda_has_started,
    run_forked,
    run_in_new_interpreter,
    run_isolated,
    show_progress,
)
from oomph.prediction.result import fits_on
from oomph.records import FIX_KINDS, CardCost, FixKind, Ladder, Prediction, Progress, Rung, Work

DEFAULT_METHODS = ("full", "lora", "qlora")
# Lengths from the first number on are multiples of the second.
_STEPS = ((4096, 256), (512, 64), (0, 8))
_MOST_RANKS = 64
_NO_LESS = 0.99  # x the peak of half as many ranks: more of them change nothing


def ladder(
    asked: Sequence[FineTuning],
    *,
    gpu: str | GPU | None = None,
    budget: str | int | None = None,
    max: str | int | None = None,
    allow: Collection[str] = ("exact",),
    prices: Mapping[str, float] | None = None,
    count_ranks: bool = False,
    progress: Progress | None = None,
) -> Ladder:
    """A rung for each of `asked`, which are of one model. Without a card: what it needs, and which cards do.

    `prices`: money per hour, by names of cards; then the cards are those, the cheapest first.
    `count_ranks`: how many cards are enough is also found where fixes are.
    """
    if cuda_has_started():
        given = {"gpu": gpu, "budget": budget, "max": max, "allow": allow, "prices": prices}
        given["count_ranks"] = count_ranks
        with show_progress(progress) as report:
            return run_in_new_interpreter(ladder, report, tuple(asked), **given)
    named = gpu if gpu is not None else budget
    card = gpu if isinstance(gpu, GPU) else gpus.find(str(named or gpus.RATES_OF))
    limit = None if named is None and max is None else card.limit(max, budget)
    if limit is not None and limit <= 0:
        raise UserError("the CUDA context alone takes more than the limit; give a larger card or limit")
    card = gpus.with_rates(card)  # for the time of a step, which is scaled to other cards
    kinds = tuple(kind for kind in FIX_KINDS if kind in allow)
    search = _Ladder(asked, card, limit, kinds, prices or {}, count_ranks)
    with show_progress(progress) as report:
        return run_isolated(search.find, report)


class _Ladder:
    """`find` runs in the isolated process, everything else in forks of it."""

    def __init__(
        self,
        asked: Sequence[FineTuning],
        card: GPU,
        limit: int | None,
        kinds: tuple[FixKind, ...],
        prices: Mapping[str, float],
        count_ranks: bool,
    ) -> None:
        self._asked, self._card, self._limit, self._kinds = tuple(asked), card, limit, kinds
        self._count_ranks = count_ranks
        self._prices = {gpus.find(name): price for name, price in prices.items()}

    def find(self, progress: Progress) -> Ladder:
        began, methods = time.perf_counter(), [each.method for each in self._asked]
        progress("importing transformers", None)
        call_on_fake_gpu(functools.partial(_import_libraries, self._asked[0].model))
        traced = self._all(
            {each.method: functools.partial(self._traced, each) for each in self._asked},
            f"predicting {', '.join(methods)}",
            progress,
        )
        rungs = {method: self._rung(method, traced[method]) for method in methods}
        if self._limit is not None:
            self._climb(rungs, traced, progress)
        first = self._asked[0]
        return Ladder(
            model=first.model,
            gpu=None if self._limit is None else self._card.name,
            gpu_title=self._card.title,
            limit=self._limit,
            context=self._card.context,
            batch=first.batch,
            tokens=first.length,
            rungs=tuple(rungs.values()),
            seconds=time.perf_counter() - began,
        )

    def _climb(self, rungs: dict[str, Rung], traced: Mapping[str, Any], progress: Progress) -> None:
        """Add plans, and then, of those that fit, the largest sizes; of others, the number of cards."""
        assert self._limit is not None
        asked = {each.method: each for each in self._asked if not rungs[each.method].failed}
        programs = {method: self._program(asked[method], traced[method][0]) for method in asked}
        ignore = functools.partial(lambda text, fraction: None)
        plans = self._all(
            {
                method: functools.partial(cheapest, program, self._card, self._limit, self._kinds, ignore)
                for method, program in programs.items()
            },
            "looking for fixes",
            progress,
        )
        work: dict[tuple[str, str], Callable[[], Any]] = {}
        for method, planned in plans.items():
            if isinstance(planned, Exception):
                reason = f"has no fixes, because the search for them failed: {_reason(planned)}"
                rungs[method] = replace(rungs[method], reason=reason)
                continue
            plan, held = planned
            rungs[method] = replace(rungs[method], plan=plan)
            if not plan.fits or (self._count_ranks and plan.fixes):
                work[method, "ranks"] = functools.partial(self._ranks, asked[method], programs[method], held)
            if not plan.fits:
                continue
            for name in ("batch", "length"):
                size, between = Size(name, getattr(asked[method], name)), _sizes_between(name, asked[method])
                work[method, name] = functools.partial(
                    largest_of, programs[method], plan, held, size, between, ignore
                )
        found = self._all(work, "finding the largest batch and length, and how many cards", progress)
        for (method, name), result in found.items():
            if name == "ranks":
                failed = {"no_ranks": _reason(result)} if isinstance(result, Exception) else result
                rungs[method] = replace(rungs[method], **failed)
            elif isinstance(result, Exception):
                reason = f"has no largest {name}, because the search for it failed: {_reason(result)}"
                rungs[method] = replace(rungs[method], reason=reason)
            else:
                rungs[method] = replace(rungs[method], **{name: result})

    def _all(self, work: Mapping[Any, Callable[[], Any]], what: str, progress: Progress) -> dict[Any, Any]:
        """The results, or errors, by their keys; as many forks at a time as there are cores."""
        keys, done = list(work), dict[Any, Any]()
        for place, result in run_forked(list(work.values()), jobs()):
            if isinstance(result, Exception) and not isinstance(result, OomphError):
                raise result  # a bug of ours
            done[keys[place]] = result
            progress(what, len(done) / len(keys))
        return {key: done[key] for key in keys}

    def _program(self, asked: FineTuning, found: Prediction | None = None) -> ModelProgram:
        return ModelProgram(asked, self._card, self._limit or self._card.limit(), found)

    def _traced(self, asked: FineTuning) -> tuple[Prediction, tuple[CardCost, ...]]:
        """Its prediction, and the cards on which the step fits."""
        asked.check()
        found = self._program(asked).predict()
        cards = list(self._prices) or sorted(gpus.catalogue(), key=lambda card: card.memory)
        fitting = [card for card, fits in zip(cards, fits_on(found, cards), strict=True) if fits]
        costs = [_cost(found, asked, self._card, card, self._prices.get(card)) for card in fitting]
        if self._prices:
            costs.sort(key=lambda one: one.per_million_tokens or math.inf)
        return found, tuple(costs)

    def _rung(self, method: str, traced: Any) -> Rung:
        if isinstance(traced, Exception):
            return Rung(method, failed=_reason(traced))
        found, cards = traced
        return Rung(method, "", found.needed, found.verdict if self._limit else None, cards=cards)

    def _ranks(self, asked: FineTuning, program: ModelProgram, held: int) -> dict[str, Any]:
        """Of a rung: how many of these cards are enough with FSDP2, without fixes. It divides what is held,
        so no fewer are enough than these bytes need."""
        asked.check_parallel()
        assert self._limit is not None
        ranks, before = max(2, 1 << (math.ceil(held / self._limit) - 1).bit_length()), math.inf
        while ranks <= _MOST_RANKS:
            found = program.predict_on(ranks)
            if found.fits:
                return {"ranks": ranks, "rank_peak": found.needed}
            if found.needed.device > _NO_LESS * before:
                return {"no_ranks": "no number of them is enough: FSDP2 does not divide activations"}
            before, ranks = found.needed.device, 2 * ranks
        return {"no_ranks": f"more than {_MOST_RANKS} would be needed"}


def _import_libraries(model: str) -> None:
    """What every one of the programs imports."""
    import transformers

    import_module("oomph.models.program")
    architectures = configuration.find(model, allow_network=False).get("architectures", ())
    for name in ("Trainer", *architectures):
        getattr(transformers, name, None)


def _sizes_between(name: str, asked: FineTuning) -> Callable[[int, int], Sequence[int]]:
    """Sizes that are larger than the first number, and smaller than the second; 0: there is none."""
    most = asked.positions() if name == "length" else None

    def between(low: int, high: int) -> Sequence[int]:
        end = min(high or 16 * low, most + 1 if most and not high else math.inf)
        step = next(step for begin, step in _STEPS if low >= begin) if name == "length" else 1
        return range(low - low % step + step, int(end), step)

    return between


def _cost(found: Prediction, asked: FineTuning, traced_for: GPU, card: GPU, price: float | None) -> CardCost:
    """The time on another card is scaled by what a roofline gives for the sums of each phase. It has room:
    no memory has to be released."""
    tokens = asked.batch * asked.length * asked.accumulate
    here, there = _roofline(found.work, traced_for), _roofline(found.work, card)
    if not found.step_seconds or not here or not there:
        return CardCost(card.name, card.title, None, None)
    per_second = tokens / ((found.step_seconds - found.release_seconds) * there / here)
    return CardCost(card.name, card.title, per_second, price and price / 3600 / per_second * 1e6)


def _roofline(work: Work, card: GPU) -> float | None:
    """Seconds; None where a rate of the card is not known."""
    rates = (card.bf16_tflops, card.tf32_tflops, card.fp32_tflops, card.fp64_tflops)
    seconds = 0.0
    for phase in work.phases:
        computing = 0.0
        products = (phase.half_flops, phase.tf32_flops, phase.single_flops, phase.double_flops)
        for flops, rate in zip(products, rates, strict=True):
            if flops and not rate:
                return None
            computing += flops / (1e12 * rate) if rate else 0.0
        if not card.bandwidth:
            return None
        seconds += max(computing, phase.bytes / card.bandwidth)
    return seconds


def _reason(error: Exception) -> str:
    return str(error).split("\n")[0]
