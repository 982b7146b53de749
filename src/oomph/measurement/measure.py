"""Run a Workload's steps on a real GPU and read the allocator's own counters.

The figures are honest in a fresh process only: what else lives in this one is counted too.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from oomph.errors import UserError
from oomph.measurement.oplog import record_ops
from oomph.records import Measurement, OpRow, Peak, StepPeak
from oomph.torch_internals import clear_cublas_workspaces, deterministic_algorithms, init_fake_process_group
from oomph.units import counted
from oomph.workload import Workload, allocator_of_environment, set_allocator

Target = Workload | Callable[[], Any]
Moment = Literal["setup", "begin", "forward", "backward", "optimizer", "end"]
Listener = Callable[[int, Moment], None]


class Reading(NamedTuple):
    """The counters when a moment is over; the peaks are those since the step began."""

    step: int  # 0: the set-up
    moment: Moment
    allocated: int
    peak: int
    reserved: int
    seconds: float  # since the step began


class CudaMeter:
    """Reads torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self, step: int, moment: Moment, seconds: float) -> Reading:
        # torch.cuda.memory_allocated() and its like make a flat dictionary each: a millisecond of the step.
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        allocated, reserved = (stats[f"{which}_bytes"]["all"] for which in ("allocated", "reserved"))
        return Reading(step, moment, allocated["current"], allocated["peak"], reserved["peak"], seconds)

    def device_used(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def measure(workload: Target, *, device: str | torch.device = "cuda", steps: int = 3) -> Measurement:
    """Run `steps` steps on `device`; the reported peak is the largest within them.

    `workload` may also be a function, as for `predict`: called once, and if it returns a callable,
    that is the step.
    """
    where = cuda_device(device)
    empty_caches()
    meter = CudaMeter(where)
    at_start = meter.device_used()
    with allocator_set_to(workload.allocator if isinstance(workload, Workload) else None, where):
        readings = observe(workload, where, steps, meter)
    stats = torch.cuda.memory_stats(where)
    extra = {
        "device used at start": str(at_start),
        "segments": str(stats.get("segment.all.peak", 0)),
        "allocation retries": str(stats.get("num_alloc_retries", 0)),
    }
    return summarise(readings, meter.device_used(), torch.cuda.get_device_name(where), extra)


def cuda_device(device: str | torch.device) -> torch.device:
    """`device` with its index, or one clear line that says why it cannot be measured on."""
    try:
        where = torch.device(device)
    except RuntimeError:
        raise UserError(f"device={device!r} is not a device; valid: cuda, cuda:0, cuda:1, ...") from None
    if where.type != "cuda":
        raise UserError(f"device={str(device)!r} cannot be measured on; valid: cuda, cuda:0, cuda:1, ...")
    if not torch.cuda.is_available():
        raise UserError(
            f"measure needs a CUDA GPU and torch {torch.__version__} sees none; predict works without one"
        )
    if where.index is not None and where.index >= torch.cuda.device_count():
        seen = counted(torch.cuda.device_count(), "GPU")
        raise UserError(f"device={str(device)!r} does not exist; torch sees {seen}")
    if where.index is not None:
        torch.cuda.set_device(where)
    return torch.device("cuda", torch.cuda.current_device())


def empty_caches() -> None:
    """Free what earlier work in this process left in the allocator."""
    gc.collect()
    clear_cublas_workspaces()  # left over, they would be counted before the first step
    torch.cuda.empty_cache()


def observe(
    target: Target,
    device: torch.device,
    steps: int,
    meter: CudaMeter,
    listener: Listener = lambda step, moment: None,
) -> list[Reading]:
    """Run the target and read the meter after every moment. `listener` is called as each moment begins."""
    if steps < 1:
        raise UserError(f"steps={steps!r} is not valid; give a whole number >= 1")
    readings: list[Reading] = []
    current: list[tuple[int, Moment]] = []
    started = time.perf_counter()

    def on_moment(step: int, moment: Moment) -> None:
        nonlocal started
        if moment == "end":
            meter.synchronize()
        seconds = time.perf_counter() - started
        if current:
            readings.append(meter.read(*current.pop(), seconds))
        listener(step, moment)
        if moment == "end":
            readings.append(meter.read(step, "end", seconds))
            return
        current.append((step, moment))
        if moment in ("setup", "begin"):
            meter.reset_peak()
            started = time.perf_counter()

    run_steps(target, device, steps, on_moment)
    return readings


def measured_ops(target: Target, steps: int) -> list[OpRow]:
    """The log of every op of the steps, each with the step and moment as its phase."""
    device = cuda_device("cuda")
    empty_caches()
    with record_ops() as log:

        def listen(step: int, moment: Moment) -> None:
            log.phase = "setup" if step == 0 else f"step {step} {moment}".removesuffix(" begin")

        observe(target, device, steps, CudaMeter(device), listen)
    return log.rows


def run_steps(target: Target, device: torch.device, steps: int, on_moment: Listener) -> None:
    """The steps that a Workload (or a function) stands for, announcing each moment before it begins."""
    torch.manual_seed(0)  # routing and dropout in mixture-of-experts models decide shapes
    on_moment(0, "setup")
    step = target if isinstance(target, Workload) else target()
    if isinstance(step, Workload):
        _run_workload(step, device, steps, on_moment)
    elif not callable(step) or isinstance(step, torch.nn.Module):
        on_moment(1, "end")  # the call itself was the whole run
    else:
        for number in range(1, steps + 1):
            on_moment(number, "begin")
            step()
            on_moment(number, "end")


def _run_workload(workload: Workload, device: torch.device, steps: int, on_moment: Listener) -> None:
    if workload.parallel is not None and not torch.distributed.is_initialized():
        init_fake_process_group(workload.parallel.ranks)  # the memory of one rank is real, its traffic is not
    with deterministic_algorithms(workload.deterministic):
        model, optimizer = workload.build(device)
        batch = workload.make_batch(device)
        for step in range(1, steps + 1):
            on_moment(step, "begin")
            for part, factor in workload.passes(batch):
                on_moment(step, "forward")
                with workload.autocast_context(device):
                    # `loss` outlives its step, as it does in a plain training loop.
                    loss = workload.loss(model, part)
                on_moment(step, "backward")
                workload.scaled(loss, factor).backward()
            if optimizer is not None:
                on_moment(step, "optimizer")
                optimizer.step()
                optimizer.zero_grad()
            on_moment(step, "end")


def summarise(
    readings: list[Reading], device_used: int, gpu_title: str, extra: dict[str, str] | None = None
) -> Measurement:
    """The readings as a Measurement."""
    before = next(reading.allocated for reading in readings if reading.moment == "setup")
    ends = [reading for reading in readings if reading.moment == "end"]
    steps = tuple(StepPeak(end.step, end.peak, end.reserved, end.allocated) for end in ends)
    highest = max(steps, key=lambda step: step.allocated)
    # The first step also loads kernels and tunes convolutions; it says little about the others.
    usual = [end.seconds for end in ends[1:]] or [ends[0].seconds]
    return Measurement(
        gpu_title=gpu_title,
        torch=torch.__version__,
        peak=Peak(
            allocated=highest.allocated,
            reserved=max(step.reserved for step in steps),
            device=device_used,
            step=highest.step,
        ),
        steps=steps,
        before=before,
        seconds_per_step=statistics.median(usual),
        extra=extra or {},
    )


# ---------------------------------------------------------------------------------------- allocator settings

# As good as torch's own default, which cannot be given: no block is as large as this.
_NO_MAX_SPLIT = 2**43 - 1  # MiB
_DEFAULTS = f"expandable_segments:False,max_split_size_mb:{_NO_MAX_SPLIT}"


@contextlib.contextmanager
def allocator_set_to(settings: str | None, device: torch.device) -> Iterator[None]:
    """Change the caching allocator's settings for the duration.

    Memory that is reserved already keeps its segments, so there must be none: a UserError otherwise.
    """
    _, at_start = allocator_of_environment() or ("", "")
    if not settings or settings == at_start:
        yield
        return
    if torch.cuda.memory_reserved(device):
        raise UserError(
            f"allocator={settings!r} cannot be set any more: this process holds CUDA memory already; "
            f"start it with PYTORCH_CUDA_ALLOC_CONF={settings}, or measure in a fresh process"
        )
    set_allocator(settings)
    try:
        yield
    finally:
        set_allocator(_DEFAULTS)
        if at_start:
            set_allocator(at_start)
