"""What a run on a real GPU records: a log of its ops, and the allocator's history.

Ops with their allocations are what a prediction is compared with: a real GPU run and a prediction give the
same rows. The history is recorded at low cost, and read where memory runs out.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from oomph.records import OpDifference, OpRow
from oomph.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    cuda_lazy_call,
    dispatch_has_kernel_for_dispatch_key,
    dtype_abbrs,
    is_composite,
    memory_snapshot,
    out_of_memory_observer,
    record_memory_history,
)

_SHOWN_OUTPUTS = 4  # a foreach op returns one tensor per parameter; the first few name it well enough


# One op, two names: what a CPU trace calls an op that CUDA dispatches under another name.
_SAME = {
    "cudnn_convolution": "convolution",
    "_convolution": "convolution",
    "mkldnn_convolution": "convolution",
    "_cudnn_rnn_flatten_weight": "cudnn_rnn_flatten_weight",
    "cudnn_batch_norm": "native_batch_norm",
    "_native_batch_norm_legit": "native_batch_norm",
    "cudnn_batch_norm_backward": "native_batch_norm_backward",
    "lift_fresh_copy": "lift_fresh",
    "new_empty": "empty",
    "new_zeros": "zeros",
    "copy": "copy_",
}


def short_name(op: str) -> str:
    """The op's name without namespace and overload: "aten.mm.default" -> "mm"."""
    parts = op.replace("::", ".").split(".")
    if parts[0] != "aten" and len(parts) > 1:
        return ".".join(parts[:2])  # another library's op keeps its namespace: "mylib.scan"
    name = parts[1] if parts[0] == "aten" else parts[0]
    return _SAME.get(name, name)


def describe(value: Any) -> str:
    """Shapes and dtypes of an op's result: "f32[8,512]", "(f32[8], f32[8])"; "" without a tensor."""
    if isinstance(value, torch.Tensor):
        dtype = dtype_abbrs.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{','.join(str(int(size)) for size in value.shape)}]"
    if isinstance(value, list | tuple):
        shown = [describe(item) for item in value[:_SHOWN_OUTPUTS]]
        if len(value) > _SHOWN_OUTPUTS:
            shown.append(f"+{len(value) - _SHOWN_OUTPUTS}")
        return f"({', '.join(shown)})"
    return ""


class Counters(NamedTuple):
    """The allocator's counters at one moment."""

    allocated: int
    high: int  # since the last reset
    n_allocs: int  # requests since the process began
    requested: int  # bytes requested since the process began


class CudaCounters:
    """Reads the caching allocator's counters.

    They are zero before the program uses CUDA, and in processes that it forks."""

    def reset_high(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> Counters:
        if not torch.cuda.is_initialized():
            return Counters(0, 0, 0, 0)
        # The nested form: flattening it as memory_stats() does costs more than most ops.
        stats = torch.cuda.memory_stats_as_nested_dict()
        allocated = stats["allocated_bytes"]["all"]
        return Counters(
            allocated["current"],
            allocated["peak"],
            stats["allocation"]["all"]["allocated"],
            stats["requested_bytes"]["all"]["allocated"],
        )


@dataclass
class MeasuredOps:
    """The rows recorded so far; set `phase` as the run goes on."""

    phase: str = ""
    rows: list[OpRow] = field(default_factory=list)


@functools.cache
def _runs_others(func: OpOverload) -> bool:
    """Whether the op has no kernel of its own. Autograd runs the others in its place, unless it is off."""
    has_kernel = any(dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in ("CPU", "CUDA"))
    return is_composite(func) and not has_kernel


class _Recorder(TorchDispatchMode):
    """Logs every op. Autograd's thread inherits the mode, and runs while the calling thread waits,
    so that one list keeps the order of the program."""

    def __init__(self, log: MeasuredOps, counters: Any) -> None:
        super().__init__()
        self.log = log
        self.counters = counters

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        counters, kwargs = self.counters, kwargs or {}
        if _runs_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        counters.reset_high()
        before = counters.read()
        result = func(*args, **kwargs)
        after = counters.read()
        self.log.rows.append(
            OpRow(
                op=str(func),
                outputs=describe(result),
                before=before.allocated,
                after=after.allocated,
                high=after.high,
                phase=self.log.phase,
                n_allocs=after.n_allocs - before.n_allocs,
                requested=after.requested - before.requested,
            )
        )
        return result


@contextlib.contextmanager
def record_ops(counters: Any = None) -> Iterator[MeasuredOps]:
    """Log every op run inside on the GPU.

    It resets the allocator's peak statistics at every op: measure peaks in another run.
    """
    log = MeasuredOps()
    with _Recorder(log, counters or CudaCounters()):
        yield log


# --------------------------------------------------------------------- where it differs from a prediction

_Kind = tuple[str, str, str]


def op_differences(
    measured: Sequence[OpRow], predicted: Sequence[OpRow], most: int = 6
) -> tuple[OpDifference, ...]:
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
    totals: dict[tuple[str, str], OpDifference] = {}
    for kind, size in difference.items():
        aspect = "only measured" if extra[kind] > 0 else "only predicted" if extra[kind] < 0 else "high"
        same = totals.get((kind[1], aspect), OpDifference(kind[1], aspect, 0, 0))
        times = same.times + (abs(extra[kind]) or runs[kind])
        if size:
            totals[kind[1], aspect] = OpDifference(kind[1], aspect, times, same.bytes + size)
    by_op = sorted(totals.values(), key=lambda each: -abs(each.bytes))[:most]
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


def _kind(row: OpRow) -> _Kind:
    """Step, op and first output: cuDNN's batch norm has one output more than the native one."""
    return " ".join(row.phase.split()[:2]), short_name(row.op), row.outputs.partition("]")[0]


# ------------------------------------------------------------------------------------ the allocator's history

_MOST_ENTRIES = 200_000  # the newest are kept


def record_history(on_out_of_memory: Callable[[Any], None] | None = None) -> None:
    """Record from the moment on at which the program first uses CUDA: before it, it may choose its devices.

    `on_out_of_memory` is called with the snapshot of the first request that fails, when its tensors are still
    alive, also where the program catches the error.
    """
    called = False

    def failed(*_: Any) -> None:
        nonlocal called
        if not called and on_out_of_memory is not None:
            called = True
            with contextlib.suppress(Exception):  # a report is not worth a run
                on_out_of_memory(snapshot())

    def start() -> None:
        with contextlib.suppress(Exception):
            record_memory_history("all", context="alloc", stacks="python", max_entries=_MOST_ENTRIES)
            if on_out_of_memory is not None and out_of_memory_observer is not None:
                out_of_memory_observer(failed)

    cuda_lazy_call(start)


def snapshot() -> Any:
    return memory_snapshot()
