"""From the work of a step to its seconds on a card.

A kernel takes as long as its arithmetic or its bytes take, whichever is more, and a little besides. The host
starts kernels one after the other and runs ahead of the GPU where it can: the host's clock and one of each
stream are moved kernel by kernel. So a step of many small kernels takes the host's time, a step of few large
ones the GPU's, and a program that reads a result on the host waits for it. A stream that waits for another,
as computation does for copies, is moved to the other's clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oomph.gpus import GPU
from oomph.prediction.tracer.work import Kernel
from oomph.records import PhaseWork, Work


@dataclass(frozen=True)
class Efficiency:
    """How far kernels come up to a card's nominal figures, and what the host takes."""

    compute: dict[str, dict[str, float]]  # kind of kernel -> rate -> share of the nominal rate
    before_hopper: dict[str, float]  # kind -> the same in half precision, on cards before Hopper
    bandwidth: dict[str, float]  # way of going over memory -> share of the nominal bandwidth
    ramp: dict[str, int]  # rate -> the length of sums with which a product reaches half of its efficiency
    split: int  # a sum of this length is worth a multiprocessor of its own, where the result has few tiles
    launch: float  # seconds a kernel takes beside its work
    forward_op: float  # seconds the host takes for an op of the program
    engine_op: float  # of autograd's engine
    optimizer_op: float
    convolution_op: float  # of cuDNN, besides
    list_item: float  # for each tensor of an op over lists of them
    hook: float  # for a call of a hook on a saved tensor, and for other Python in units of it
    pageable: dict[str, float]  # direction -> share of the host link that a copy reaches that is waited for
    host_bandwidth: float  # bytes per second that ops on large host tensors go over
    link: float  # share of a link's nominal rate that a collective reaches


# Fitted to half of the rows of benchmarks/accuracy/step_time.py (training steps and single ops on an H200
# with torch 2.11) and to the cuBLAS products of benchmarks/results/matmul.csv. The other half validates
# the fit. What no row shows is marked. The host's seconds are that machine's, in the first steps; a fit
# to later steps besides (benchmarks/results/fixes.csv) was no better on rows it had not seen. `hook` and
# CHECKPOINT_HOOKS of tracer/work.py are fitted to every second workload of an earlier run of
# benchmarks/fixes/plans.py and to four rows of fixes.csv: the least mean error of the slowdown.
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
    hook=11e-6,
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

    def __init__(self, gpu: GPU, efficiency: Efficiency = CALIBRATED) -> None:
        self._efficiency, self._gpu = efficiency, gpu
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
            link = self._gpu.link(kernel.tiles) * self._efficiency.link
            streams[stream] = max(streams[stream], self._host) + kernel.bytes / link
        else:
            busy = self.busy_seconds(kernel)
            streams[stream] = max(streams[stream], self._host) + busy
            self._all_busy += busy
            return busy
        return 0.0

    def _host_seconds(self, kernel: Kernel) -> float:
        e = self._efficiency
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
        e = self._efficiency
        share = e.bandwidth.get(kernel.kind, e.bandwidth["memory"])
        seconds = kernel.bytes / (self._bandwidth * share)
        if kernel.flops:
            share = kernel.efficiency or self._efficiency_of(kernel) * self._shape_efficiency(kernel)
            seconds = max(seconds, kernel.flops / (self._rates[kernel.rate] * share))
        return seconds + kernel.launches * e.launch

    def _efficiency_of(self, kernel: Kernel) -> float:
        e = self._efficiency
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
        parts = kernel.tiles * max(1, kernel.depth // self._efficiency.split)
        filled = min(1.0, parts / self._multiprocessors)
        return filled * kernel.depth / (kernel.depth + self._efficiency.ramp[kernel.rate])

    def _copy(self, kernel: Kernel) -> None:
        """In its stream's turn, and in that of its direction: a GPU copies one thing each way at a time."""
        stream, way = kernel.stream, kernel.kind
        share = 1.0 if kernel.non_blocking else self._efficiency.pageable[way]
        began = max(self._host, self._streams[stream], self._copies[way])
        ended = began + kernel.bytes / (self._link * share)
        self._streams[stream] = self._copies[way] = ended
        if not kernel.non_blocking:
            self._host = ended
