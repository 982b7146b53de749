"""The work of a step's ops on the GPU and on the host (flops, bytes, launches, copies), and its seconds.

Only the last step is counted. A product of an M x K with a K x N matrix takes 2 M N K flops; of ops other
than products, convolutions and attention only the bytes are counted.

A kernel takes as long as its arithmetic or its bytes take, whichever is longer, plus the launch (the
roofline model). The host starts kernels one after the other and runs ahead of the GPU where it can: the
host's clock and one of each stream are moved kernel by kernel. So a step of many small kernels takes the
host's time, a step of few large ones the GPU's, and a program that reads a result on the host waits for it. A
stream that waits for another, as computation does for copies, is moved to the other's clock.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from oomph.gpus import GPU
from oomph.prediction.ops import collectives
from oomph.prediction.ops.registry import FACTS, OpFacts
from oomph.prediction.ops.rules import Flops
from oomph.prediction.tracer.streams import current_streams
from oomph.records import PhaseWork, Work
from oomph.torch_internals import OpOverload
from oomph.units import MiB

aten = torch.ops.aten
Tensor = torch.Tensor
Rate = Literal["half", "tf32", "single", "double"]
Phase = Literal["forward", "backward", "optimizer"]

# Python around ops, in calls of a hook on a saved tensor. Those of functions and modes are ratios measured on
# a CPU with torch 2.11; the other three are fitted to steps on a GPU (CALIBRATED below).
CHECKPOINT_COST = 90.0  # torch.utils.checkpoint's own time for a block, most of it in forward
FUNCTION_COST = 2.7  # a torch.autograd.Function, in forward and backward together
OOMPH_OP_COST = 70.0  # the same of an op of oomph, which chooses its tiles and launches Triton kernels
OPTIMIZER_STEP_COST = 20.0  # Optimizer.step() around its ops: many calls where it runs in backward
MODE_COST = 2.4  # an op under a TorchDispatchMode, such as that of selective checkpointing

# Seconds to release one segment, or one page of an expandable one, and to reserve it again. From one run on
# an H200: bloom-alibi of benchmarks/fixes/plans.py with two checkpointed blocks released 40 pages a step.
RELEASE_SECONDS = 150e-6


class Kernel(NamedTuple):
    """One op as the GPU sees it, in program order; or arithmetic on the host, or a wait.

    Waits: "record event" records what its stream has been given so far; "wait event" lets a stream wait for
    an event; "synchronize" lets the host wait, for the event if there is one, else for the stream;
    "synchronize device" lets it wait for every stream.
    """

    phase: Phase
    engine: bool  # started by autograd's engine, not by Python
    host_ops: int  # ops that the host went through since the kernel before, this one and views included
    host_items: int  # tensors of the lists that they were given, which it goes through one by one
    kind: str  # as Flops have it; "even product", "memory", "strided", "scatter", "kernel", "to host", ...
    rate: Rate
    flops: float
    bytes: int
    launches: int
    tiles: int = 0
    depth: int = 0
    non_blocking: bool = False  # a copy that the host does not wait for
    efficiency: float = 0.0  # of its arithmetic, where the kernel's author has measured it
    stream: int = 0
    event: int = 0
    host_hooks: float = 0.0  # Python that torch calls on the way, in calls of a hook on a saved tensor


# torch's kernels over lists of tensors: elements and tensors that one launch takes at most.
_LIST_ELEMENTS = 320 * 65536
_LIST_TENSORS = 36
HOST_BYTES = MiB  # from here on, the bytes of an op on the host take longer than the op's own overhead


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among an op's arguments, in order; aten nests them at most one list deep."""
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                if isinstance(item, Tensor):
                    yield item


_HostCounts = tuple[int, int, float]  # ops, items and hooks, as Kernel has them
_NO_HOST_WORK: _HostCounts = (0, 0, 0.0)


class KernelCounter:
    """Counts every op that the dispatch mode reports while `counting`."""

    def __init__(self, gpu: GPU) -> None:
        self.counting = False
        self.in_function = False  # in the backward of an autograd function in Python
        self.kernels: list[Kernel] = []
        self._complete_steps = 0
        self._step: list[Kernel] = []
        self._step_order = (0, 0)
        self._gpu = gpu
        self.host = _NO_HOST_WORK
        self._phase = "forward"  # of the op before
        self._streams = current_streams()

    def begin(self, counting: bool) -> None:
        """Start a step: drop the counts of the one before."""
        self.counting = counting
        self.kernels.clear()
        self.host = _NO_HOST_WORK
        self._streams = current_streams()  # of the trace, which did not exist when the meter was made
        self._streams.listener = self._count_wait

    def end_step(self) -> None:
        """Called when a step of the program's own loop is complete. Some steps also evaluate or save, and
        some accumulate fewer batches: of those with the most backward passes, the one that moves the fewest
        bytes is remembered, with fixes and without, also where batches differ. The first one may lack work
        or have more of it, and counts only if it is the only one."""
        phases = itertools.groupby(kernel.phase for kernel in self.kernels)
        moved = sum(kernel.bytes for kernel in self.kernels)
        order = sum(phase == "backward" for phase, _ in phases), -moved
        self._complete_steps += 1
        if self._complete_steps <= 2 or order > self._step_order:
            self._step, self._step_order = list(self.kernels), order

    def keep_step(self) -> None:
        """Keep the kernels of the remembered step; if no step is complete, keep all."""
        self.counting = False
        if self._complete_steps:
            self.kernels[:] = self._step

    def mark(self) -> KernelsMark:
        return KernelsMark(self)

    def count_host_op(self, items: int = 0) -> None:
        """An op that takes the host's time and none of the GPU's: a view, an op on host tensors."""
        self._host_ops += 1
        self._host_items += items

    def count_hooks(self, calls: float = 1.0) -> None:
        """Calls of a hook on a saved tensor, or other Python that takes as long as so many."""
        self._host_hooks += calls

    @property
    def host(self) -> _HostCounts:
        """Since the kernel before."""
        return self._host_ops, self._host_items, self._host_hooks

    @host.setter
    def host(self, counts: _HostCounts) -> None:
        self._host_ops, self._host_items, self._host_hooks = counts

    def op(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
        out: Any,
        phase: str,
    ) -> None:
        """An op on the GPU, after it ran."""
        facts = FACTS[func]
        self._host_ops += 1
        if facts.is_collective:
            sent = collectives.sent(func, args, given)
            if sent is not None:
                self.collective(*sent, phase)
            return
        if facts.is_free:
            return
        results = _results(out)
        launches = facts.launches
        if facts.over_lists:
            written = _written_in_lists(func, args, results)
            self._host_items += len(given)
            elements = sum(tensor.numel() for tensor in written)
            launches = max(-(-len(given) // _LIST_TENSORS), -(-elements // _LIST_ELEMENTS))
        moved = _moved(facts, args, given, results)
        counted = None if facts.flops is None else facts.flops(func, args, kwargs, out)
        if (
            counted is not None
            and counted.kind == "unaligned product"
            and _rows_are_4_byte_aligned((*given, *results))
        ):
            counted = counted._replace(kind="even product")
        if counted is None:
            self._append(phase, _access_pattern(facts, given, results), moved, launches)
        else:
            rate, tiles, depth = self._rate(counted), counted.tiles, counted.depth
            self._append(phase, counted.kind, moved, launches, rate, counted.flops, tiles=tiles, depth=depth)
        if facts.waits:
            self.synchronize(phase)

    def collective(self, sent: int, ranks: int, phase: str) -> None:
        """What this rank sends to others of a group."""
        self._append(phase, "collective", sent, 1, tiles=ranks)

    def host_op(
        self, func: OpOverload, args: Sequence[Any], given: Sequence[torch.Tensor], out: Any, phase: str
    ) -> None:
        """An op on host tensors, after it ran: `count_host_op` counts its overhead, this the bytes."""
        facts = FACTS[func]
        if facts.is_free or not self.counting:
            return
        moved = _moved(facts, args, given, _results(out))
        if moved >= HOST_BYTES:
            self._append(phase, "host", moved)

    def kernel(
        self,
        tensors: Sequence[torch.Tensor],
        phase: str,
        flops: float = 0.0,
        passes: float = 1.0,
        efficiency: float = 0.0,
        kind: str = "kernel",
    ) -> None:
        """A kernel that no op of torch's stands for. `passes`: how often it goes over its tensors."""
        self._host_ops += 1
        moved = int(distinct_bytes(tensors) * passes)
        if flops and tensors:
            rate = self._rate(Flops(flops, tensors[0].dtype, kind))
            self._append(phase, kind, moved, 1, rate, flops, efficiency=efficiency)
        else:
            self._append(phase, kind, moved, 1)

    def copy(
        self, tensor: torch.Tensor, to: Literal["host", "device"], phase: str, non_blocking: bool
    ) -> None:
        """A copy between host and GPU; `non_blocking`: the host goes on while it runs."""
        self._host_ops += 1
        self._append(phase, f"to {to}", distinct_bytes((tensor,)), 1, non_blocking=non_blocking)

    def synchronize(self, phase: str) -> None:
        """The host waits for what it has given to the current stream."""
        self._append(phase, "synchronize")

    def _count_wait(self, kind: str, stream: int, event: int) -> None:
        self._append(self._phase, kind, stream=stream, event=event)

    def _append(
        self,
        phase: str,
        kind: str,
        moved: int = 0,
        launches: int = 0,
        rate: Rate = "single",
        flops: float = 0.0,
        **fields: Any,
    ) -> None:
        """`fields`: further ones of the Kernel."""
        (ops, items, hooks), self.host = self.host, _NO_HOST_WORK
        if not self.counting:
            return
        self._phase = phase
        # The engine runs without gradients of its own; what a checkpoint recomputes does not.
        engine = phase == "backward" and not self.in_function and not torch.is_grad_enabled()
        where: Any = "forward" if phase == "setup" else phase
        fields.setdefault("stream", self._streams.current.stream_id)
        self.kernels.append(
            Kernel(where, engine, ops, items, kind, rate, flops, moved, launches, host_hooks=hooks, **fields)
        )

    def _rate(self, counted: Flops) -> Rate:
        dtype = counted.dtype
        if dtype is torch.float64:
            return "double"
        if dtype is torch.bfloat16:
            return "half" if self._gpu.has_bf16 else "single"
        if dtype is not torch.float32:
            return "half"
        if counted.kind.endswith("convolution"):
            precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
        else:
            precision = torch.backends.cuda.matmul.fp32_precision if counted.kind.endswith("product") else ""
        return "tf32" if precision == "tf32" else "single"


class KernelsMark:
    """The kernels that are counted from here on, until `until_now`; `repeat` counts them once more."""

    def __init__(self, counter: KernelCounter) -> None:
        self._counter = counter
        self._first = len(counter.kernels)
        self._before = self._after = counter.host
        self._kernels: list[Kernel] = []

    def until_now(self) -> KernelsMark:
        self._kernels = self._counter.kernels[self._first :]
        self._after = self._counter.host
        return self

    def repeat(self) -> None:
        counter = self._counter
        if not counter.counting:
            return
        (ops, items, hooks), before = counter.host, self._before
        ops, items, hooks = ops - before[0], items - before[1], hooks - before[2]
        if not self._kernels:
            after = self._after
            counter.host = after[0] + ops, after[1] + items, after[2] + hooks
            return
        first = self._kernels[0]
        counter.kernels.append(
            first._replace(
                host_ops=first.host_ops + ops,
                host_items=first.host_items + items,
                host_hooks=first.host_hooks + hooks,
            )
        )
        counter.kernels += self._kernels[1:]
        counter.host = self._after


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements that the tensors have, each tensor once, what an expansion repeats once."""
    seen: set[int] = set()
    total = 0
    for tensor in tensors:
        if id(tensor) not in seen and tensor.layout is torch.strided:
            seen.add(id(tensor))
            elements = tensor.numel()
            strides = tensor.stride()
            if 0 in strides:
                for size, stride in zip(tensor.shape, strides, strict=True):
                    if stride == 0 and size:
                        elements //= size
            total += elements * tensor.element_size()
    return total


def _moved(
    facts: OpFacts,
    args: Sequence[Any],
    given: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> int:
    """Bytes that an op reads and writes."""
    if facts.over_lists:
        read = given if facts.reads_first else given[len(args[0]) :]
        return distinct_bytes(read) + distinct_bytes(_written_in_lists(facts.func, args, results))
    written = distinct_bytes(results)
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if first is None or (facts.reads_first and not facts.gathers and not facts.scatters):
        return distinct_bytes(given) * facts.passes + written
    if facts.only_writes:
        return written
    others = distinct_bytes(tensor for tensor in given if tensor is not first)
    if facts.gathers:
        return others + written + min(distinct_bytes((first,)), written)
    if facts.scatters:
        if any(result is first for result in results):
            return others + 2 * min(written, others)
        return others + distinct_bytes((first,)) + written
    return others + written


def _rows_are_4_byte_aligned(halves: Iterable[torch.Tensor]) -> bool:
    """Whether rows start at multiples of 4 bytes, the smallest unit that a kernel copies asynchronously."""
    return not any(
        step % 2
        for tensor in halves
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and step != 1
    )


def _results(out: Any) -> list[torch.Tensor]:
    return list(tensors_in(out if isinstance(out, (list, tuple)) else (out,), {}))


def _written_in_lists(
    func: OpOverload, args: Sequence[Any], results: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """What an op over lists writes: its results, else the first list, and the states of a fused optimizer."""
    written = results or [tensor for tensor in args[0] if isinstance(tensor, torch.Tensor)]
    if func.overloadpacket.__name__.startswith("_fused_"):
        return [*written, *(tensor for part in args[2:4] for tensor in part)]
    return written


def _access_pattern(facts: OpFacts, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> str:
    """How an op goes over memory: straight, by strides, or wherever an index points to."""
    if facts.scatters:
        return "scatter"
    if facts.elementwise and results:
        elements = results[0].numel()
        for tensor in given:
            count = tensor.numel()
            if count > 1 and (count != elements or not tensor.is_contiguous()):
                return "strided" if results[0].element_size() >= 4 else "strided half"
    return "memory"


# ---------------------------------------------------------------------------------------------------- seconds


@dataclass(frozen=True)
class Efficiency:
    """How far kernels come up to a card's nominal figures, and what the host takes."""

    compute: dict[str, dict[str, float]]  # kind of kernel -> rate -> share of the nominal rate
    before_hopper: dict[str, float]  # kind -> the same in half precision, on cards before Hopper
    bandwidth: dict[str, float]  # way of going over memory -> share of the nominal bandwidth
    ramp: dict[str, int]  # rate -> the length of sums with which a product reaches half of its efficiency
    split: int  # a sum of this length is worth a multiprocessor of its own, where the result has few tiles
    launch: float  # seconds a kernel takes in addition to its work
    forward_op: float  # seconds the host takes for an op of the program
    engine_op: float  # of autograd's engine
    optimizer_op: float
    convolution_op: float  # of cuDNN, in addition
    list_item: float  # for each tensor of an op over lists of them
    hook: float  # for a call of a hook on a saved tensor, and for other Python in units of it
    pageable: dict[str, float]  # direction -> share of the host link that a copy reaches that is waited for
    host_bandwidth: float  # bytes per second that ops on large host tensors go over
    link: float  # share of a link's nominal rate that a collective reaches


# Fitted to half of the rows of benchmarks/accuracy/step_time.py (training steps and single ops on an H200
# with torch 2.11) and to the cuBLAS products of benchmarks/results/matmul.csv. The other half validates
# the fit. What no row shows is marked. The host's seconds are that machine's, in the first steps; a fit
# that included later steps (benchmarks/results/fixes.csv) was no better on rows it had not seen. `hook` and
# the three constants above that are fitted give the least mean error of the slowdowns of 31 plans on two days
# (benchmarks/results/plans_h200.csv has the second); the host was up to 40 % slower at times.
CALIBRATED = Efficiency(
    compute={
        "product": {"half": 0.74, "tf32": 0.6, "single": 0.77, "double": 0.77},  # tf32: estimated
        "unaligned product": {"half": 0.11},
        "even product": {"half": 0.3},  # rows 4 bytes apart, not 16; by hand: one model's head in two ways
        "cudnn attention": {"half": 0.47},
        "flash attention": {"half": 0.24},
        "efficient attention": {"half": 0.1, "single": 0.42},
        "convolution": {"half": 0.4, "tf32": 0.18, "single": 0.4, "double": 0.4},  # tf32 alone was measured
        "depthwise convolution": {"half": 0.004, "tf32": 0.002, "single": 0.015, "double": 0.015},  # by hand
        "recurrent": {"half": 0.2, "single": 0.4, "double": 0.4},  # two networks
        "kernel": {"half": 0.23, "tf32": 0.2, "single": 0.14, "double": 0.14},  # attention in Triton
    },
    # Estimated: kernels that use nothing of Hopper's come closer to the rates of cards before it.
    before_hopper={
        "unaligned product": 0.3,
        "even product": 0.5,
        "flash attention": 0.5,
        "efficient attention": 0.25,
    },
    bandwidth={"memory": 0.62, "strided": 0.46, "strided half": 0.27, "scatter": 0.125, "kernel": 0.8},
    ramp={"half": 80, "tf32": 60, "single": 42, "double": 20},
    split=512,
    launch=2.5e-6,
    forward_op=19e-6,
    engine_op=13e-6,
    optimizer_op=10e-6,
    convolution_op=150e-6,
    list_item=0.9e-6,
    hook=7e-6,
    pageable={"to host": 0.035, "to device": 0.1},  # one step
    # Estimated. One idle core reached 14 GB/s with the fused kernel of AdamW and 25 to 37 with sums and
    # copies; sixteen, busy with other things, 6 GB/s with the former. Hosts differ more than cards.
    host_bandwidth=25e9,
    link=0.8,  # estimated: no run of several GPUs was measured
)


def step_work(kernels: Sequence[Kernel], gpu: GPU) -> tuple[float | None, Work]:
    """The seconds of the step (None where the card's rates are unknown), and what they are made of."""
    timer = _Timer(gpu) if _is_known(gpu) else None
    totals: dict[str, dict[str, Any]] = {phase: dict.fromkeys(_FIELDS, 0) for phase in _PHASES}
    for kernel in kernels:
        busy = timer.run(kernel) if timer is not None else 0.0
        total = totals[kernel.phase]
        if kernel.kind == "to host":
            total["to_host"] += kernel.bytes
        elif kernel.kind == "to device":
            total["to_device"] += kernel.bytes
        elif kernel.kind == "collective":
            total["sent"] += kernel.bytes
        elif kernel.kind != "host":
            total[f"{kernel.rate}_flops"] += kernel.flops
            total["bytes"] += kernel.bytes
            total["launches"] += kernel.launches
            total["seconds"] += busy
    forward, backward, optimizer = (PhaseWork(**totals[phase]) for phase in _PHASES)
    work = Work(forward, backward, optimizer, timer.host_busy if timer is not None else 0.0)
    return (timer.end if timer is not None else None), work


_WIDE_HEAD = 128  # from here on, attention reaches its efficiency in half precision
_PHASES = ("forward", "backward", "optimizer")
_FIELDS = tuple(PhaseWork.__dataclass_fields__)


def _is_known(gpu: GPU) -> bool:
    return None not in (gpu.bf16_tflops, gpu.fp32_tflops, gpu.bandwidth)


class _Timer:
    """The clocks of the host, of the GPU's streams and of its copies each way, in seconds.

    For a card whose rates are known. Kernels of two streams run side by side; but the step takes no less than
    all kernels one after the other, for there is one GPU to run them.
    """

    def __init__(self, gpu: GPU) -> None:
        self._gpu = gpu
        self._rates = {
            "half": (gpu.bf16_tflops or 0.0) * 1e12,
            "tf32": (gpu.tf32_tflops or 0.0) * 1e12,
            "single": (gpu.fp32_tflops or 0.0) * 1e12,
            "double": (gpu.fp64_tflops or 0.0) * 1e12,
        }
        self._bandwidth = gpu.bandwidth or 0
        self._link = gpu.host_link
        self._before_hopper = gpu.capability < (9, 0)
        self._multiprocessors = gpu.multiprocessors
        self._host = 0.0
        self._streams: defaultdict[int, float] = defaultdict(float)  # when each has done what it was given
        self._events: dict[int, float] = {}  # one of a step before has been
        self._copies = {"to host": 0.0, "to device": 0.0}
        self._all_busy = 0.0
        self.host_busy = 0.0

    @property
    def end(self) -> float:
        return max(self._host, self._all_busy, *self._streams.values(), *self._copies.values())

    def run(self, kernel: Kernel) -> float:
        """Move the clocks past the kernel; the seconds for which it keeps the GPU busy."""
        host = self._host_seconds(kernel)
        self._host += host
        self.host_busy += host
        stream, streams = kernel.stream, self._streams
        if kernel.kind == "host":
            return 0.0
        if kernel.kind == "record event":
            self._events[kernel.event] = streams[stream]
        elif kernel.kind == "wait event":
            streams[stream] = max(streams[stream], self._events.get(kernel.event, 0.0))
        elif kernel.kind == "synchronize":
            until = self._events.get(kernel.event, 0.0) if kernel.event else streams[stream]
            self._host = max(self._host, until)
        elif kernel.kind == "synchronize device":
            self._host = self.end
        elif kernel.kind in self._copies:
            self._copy(kernel)
        elif kernel.kind == "collective":  # beside the kernels of other streams
            link = self._gpu.link(kernel.tiles) * CALIBRATED.link
            streams[stream] = max(streams[stream], self._host) + kernel.bytes / link
        else:
            busy = self.busy_seconds(kernel)
            streams[stream] = max(streams[stream], self._host) + busy
            self._all_busy += busy
            return busy
        return 0.0

    def _host_seconds(self, kernel: Kernel) -> float:
        e = CALIBRATED
        if kernel.engine:
            an_op = e.engine_op
        else:
            an_op = e.optimizer_op if kernel.phase == "optimizer" else e.forward_op
        seconds = kernel.host_ops * an_op + kernel.host_items * e.list_item + kernel.host_hooks * e.hook
        if kernel.kind == "convolution":
            seconds += e.convolution_op
        elif kernel.kind == "host":
            seconds += kernel.bytes / e.host_bandwidth
        return seconds

    def busy_seconds(self, kernel: Kernel) -> float:
        e = CALIBRATED
        share = e.bandwidth.get(kernel.kind, e.bandwidth["memory"])
        seconds = kernel.bytes / (self._bandwidth * share)
        if kernel.flops:
            share = kernel.efficiency or self._efficiency_of(kernel) * self._shape_efficiency(kernel)
            seconds = max(seconds, kernel.flops / (self._rates[kernel.rate] * share))
        return seconds + kernel.launches * e.launch

    def _efficiency_of(self, kernel: Kernel) -> float:
        e = CALIBRATED
        if self._before_hopper and kernel.rate == "half" and kernel.kind in e.before_hopper:
            return e.before_hopper[kernel.kind]
        rates = e.compute[kernel.kind]
        return rates.get(kernel.rate, min(rates.values()))

    def _shape_efficiency(self, kernel: Kernel) -> float:
        """How well the shapes of a product, or the width of attention's heads, suit the GPU."""
        if kernel.kind.endswith("attention"):
            return min(1.0, kernel.depth / _WIDE_HEAD) ** 0.5 if kernel.rate == "half" else 1.0
        if not kernel.tiles:
            return 1.0
        parts = kernel.tiles * max(1, kernel.depth // CALIBRATED.split)
        filled = min(1.0, parts / self._multiprocessors)
        return filled * kernel.depth / (kernel.depth + CALIBRATED.ramp[kernel.rate])

    def _copy(self, kernel: Kernel) -> None:
        """In its stream's turn, and in that of its direction: a GPU copies one thing each way at a time."""
        stream, way = kernel.stream, kernel.kind
        share = 1.0 if kernel.non_blocking else CALIBRATED.pageable[way]
        began = max(self._host, self._streams[stream], self._copies[way])
        ended = began + kernel.bytes / (self._link * share)
        self._streams[stream] = self._copies[way] = ended
        if not kernel.non_blocking:
            self._host = ended
