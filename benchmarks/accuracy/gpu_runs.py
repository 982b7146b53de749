"""The half of the accuracy benchmark that needs a GPU."""

from __future__ import annotations

import dataclasses
import fcntl
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from benchmarks import RESULTS
from benchmarks.accuracy.rows import measured_rows
from benchmarks.rows import in_process, need_gpu, read_json, send, short_name, store_json

if TYPE_CHECKING:
    from benchmarks.accuracy.workloads import Entry

_PREPARATION_S = 300  # to import and to build a model on the host
_CONTEXT_AT_MOST = 2 * 2**30  # more than any CUDA context takes before the first kernel


def measure_all(names: list[str], out: Path | None, jobs: int, limit: int, missing: bool) -> int:
    """One fresh process per workload. They build their models side by side and use the GPU in turn.

    Rows are written as they come, so that an interrupted run keeps what it has.
    """
    need_gpu()
    known = {*measured_rows(), *(row["name"] for row in (read_json(out) if out is not None else ()))}
    wanted = [name for name in names if not (missing and name in known)]
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, jobs)) as pool:
        # The process limits its own time on the GPU; the hour covers all the waiting before it.
        options = ("--lock", f"{folder}/gpu.lock", "--limit", str(limit))
        one = partial(in_process, "benchmarks.accuracy", "measure-here", seconds=3600)
        waiting = {pool.submit(one, name, *options): name for name in wanted}
        for future in as_completed(waiting):
            name = waiting[future]
            try:
                row = future.result()
            except Exception as error:  # one workload must not stop the others
                failed.append(name)
                print(f"{name}: FAILED {error}", flush=True)
                continue
            out = out or RESULTS / file_name(row)
            store_json(out, row, "name")
            print(
                f"{name}: allocated {row['peak']['allocated'] / 2**30:.3f} GiB, reserved "
                f"{row['peak']['reserved'] / 2**30:.3f} GiB, {row['seconds_per_step']:.3f} s a step",
                flush=True,
            )
    print(f"{len(wanted) - len(failed)} measured, {len(failed)} failed {' '.join(failed)}; {out}")
    return 1 if failed else 0


def file_name(row: dict[str, Any]) -> str:
    """`measured_h200_torch2.11.json`: the GPU's short name and torch's version."""
    major, minor = row["torch"].split(".")[:2]
    return f"measured_{short_name(row['gpu'])}_torch{major}.{minor}.json"


def measure_here(name: str, entry: Entry, lock: Path | None, limit: int) -> int:
    """Measure one workload in this process and send its row."""
    import torch
    import transformers

    from oomph.measurement.measure import CudaMeter, cuda_device, empty_caches, observe, summarise

    signal.alarm(_PREPARATION_S)
    target = prepared(entry.target)
    signal.alarm(0)
    if lock is not None:
        take_turn(lock)
    signal.alarm(limit)  # ends the process, and with it its hold on the GPU
    device = cuda_device("cuda")
    empty_caches()
    meter = CudaMeter(device)
    at_start = _settled(meter)
    readings = observe(target, device, 3, meter)
    stats = torch.cuda.memory_stats(device)
    measured = summarise(readings, meter.device_used(), torch.cuda.get_device_name(device))
    row = {
        "name": name,
        "gpu": measured.gpu_title,
        "torch": measured.torch,
        "transformers": transformers.__version__,
        "peak": {key: getattr(measured.peak, key) for key in ("allocated", "reserved", "device", "step")},
        "before": measured.before,
        "seconds_per_step": measured.seconds_per_step,
        "segments": stats.get("segment.all.peak", 0),
        "allocation_retries": stats.get("num_alloc_retries", 0),
        "device_used_at_start": at_start,
        "steps": [dataclasses.asdict(step) for step in measured.steps],
        "readings": [reading._asdict() for reading in readings],
    }
    send(row)
    return 0


def oplog_here(entry: Entry, out: Path, steps: int) -> int:
    """Write the op log of the workload's first steps on the GPU."""
    from benchmarks.accuracy.divergence import write_rows
    from oomph.measurement.measure import measured_ops

    rows = measured_ops(prepared(entry.target), steps)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_rows(out, rows)
    print(f"{len(rows)} ops: {out}")
    return 0


def prepared(target: Any) -> Any:
    """The target with its model built already, on the host: that part needs no turn on the GPU."""
    import torch

    from oomph.workload import Workload

    torch.manual_seed(0)
    if not isinstance(target, Workload):
        return target
    model = target.model()
    return dataclasses.replace(target, model=lambda: model)


_held: list[IO[str]] = []


def take_turn(lock: Path) -> None:
    """Wait until no other process measures: the device's used memory is everybody's.

    The lock is kept until the process ends, since its memory on the GPU goes only then.
    """
    file = lock.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    _held.append(file)


def _settled(meter: Any, patience_s: float = 5.0) -> int:
    """The device's used memory, once what the process before us held is gone."""
    until = time.monotonic() + patience_s
    while (used := meter.device_used()) > _CONTEXT_AT_MOST and time.monotonic() < until:
        time.sleep(0.1)
    return used
