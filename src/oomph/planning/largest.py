"""The largest batch or the longest sequence with which a step fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from oomph import gpus
from oomph.errors import UserError
from oomph.fixes.application import apply
from oomph.prediction import predict
from oomph.records import Plan, Prediction
from oomph.workload import Workload

_NAMES = {
    "batch": ("b", "batch", "batch_size", "bs", "n", "rows"),
    "sequence": ("t", "s", "l", "seq", "seq_len", "sequence", "sequence_length", "length", "context_length"),
}
_MOST_PREDICTIONS = 12


def largest_size(
    workload: Workload, plan: Plan, what: str, progress: Callable[[str, float | None], None]
) -> tuple[int, int]:
    """The largest `what` ("batch" or "sequence") that fits the plan's card, without its fixes and with."""
    name = _size_name(workload, what)

    def report(text: str) -> None:
        progress(text, None)

    return _largest(workload, name, plan, report), _largest(apply(plan, workload), name, plan, report)


def _size_name(workload: Workload, what: str) -> str:
    for name in workload.sizes or {}:
        if name.lower() in _NAMES[what]:
            return name
    has = ", ".join(workload.sizes or {}) or "none"
    raise UserError(
        f"the Workload names no size of its {what}; its sizes are {has}. Name them, as "
        'Workload(batch=lambda device, B, T: ..., sizes={"B": 8, "T": 1024})'
    )


def _largest(workload: Workload, name: str, plan: Plan, progress: Callable[[str], None]) -> int:
    """By the secant through the sizes tried last, which is exact where memory grows linearly."""
    known: dict[int, Prediction] = {}

    def at(size: int) -> Prediction:
        if size not in known:
            progress(f"predicting {name}={size:,}")
            sizes = {**(workload.sizes or {}), name: size}
            known[size] = predict(replace(workload, sizes=sizes), gpu=gpus.find(plan.gpu), max=plan.limit)
        return known[size]

    size = (workload.sizes or {})[name]
    low, high = 0, 0  # fits; does not
    while len(known) < _MOST_PREDICTIONS and (not high or high - low > 1):
        if at(size).fits:
            low = max(low, size)
        else:
            high = min(high or size, size)
        if not high:
            size = 2 * low
        elif not low:
            size = high // 2
            if size == 0:
                return 0
        else:
            below, above = at(low).peak.reserved, at(high).peak.reserved
            share = (plan.limit - below) / max(1, above - below)
            size = min(max(low + 1, low + int(share * (high - low))), high - 1)
    return low
