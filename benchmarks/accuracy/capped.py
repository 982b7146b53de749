"""Run training steps in processes that may reserve no more than was predicted, plus the margin.

python -m benchmarks.accuracy.capped [names...]            # on a GPU; results/capped_<gpu>.csv
python -m benchmarks.accuracy.capped --list | --dry-run    # anywhere: the cases; or their predictions only

A case is a workload of the accuracy benchmark, one with half of its batch, or one with a fix. Every case is
predicted and then run in a fresh process under torch.cuda.set_per_process_memory_fraction; the processes use
the GPU in turn. One that fails, or that had to release cached memory, runs again without the cap.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.rows import error_percent, in_process, send, write

_TOO_SLOW_TO_BUILD = (
    "llama1b-bf16",
    "llama1b-bf16-ckpt",
    "llama1b-sgd",
)  # a billion random numbers on the host
_FIXED = (
    "gpt2-fp32",
    "gpt2-autocast",
    "gpt2-clip-accumulate",
    "pythia70m",
    "llama-padded",
    "llama-eager-4096",
    "mistral-sliding",
    "gemma3-text",
    "phi-autocast",
    "nanogpt-autocast",
    "bert-mlm-fp32",
    "vit-b16-autocast",
)
_FIXES = (
    "activation_checkpointing",
    "activation_offloading",
    "fused_linear_cross_entropy",
    "tiled_mlp",
    "micro_batches:parts=2",
    "optimizer_in_backward",
    "optimizer_8bit",
    "bf16_parameters",
    "activation_checkpointing + fused_linear_cross_entropy",
)
_HALF = "half batch"


@dataclass(frozen=True)
class Row:
    """One case. Sizes in bytes."""

    workload: str
    change: str  # "", "half batch" or fixes
    gpu: str
    torch: str
    classes: str  # that the margin follows from
    predicted_allocated: int
    predicted_reserved: int
    margin: int
    margin_percent: float
    ran: bool | None = None  # within the cap; None: not run, or failed for another reason
    retries: int = 0  # times that the allocator released its cache to stay within the cap
    measured_allocated: int | None = None
    measured_reserved: int | None = None  # without the cap, if the cap was reached
    reserved_error_percent: float | None = None
    error: str = ""


def cases() -> list[tuple[str, str]]:
    """(workload, change), the unchanged ones first."""
    from benchmarks.accuracy.workloads import ALL
    from oomph.workload import Workload

    usable = [name for name in ALL if name not in _TOO_SLOW_TO_BUILD]
    halved = [name for name in usable if isinstance(ALL[name].target, Workload)][::2]
    return [
        *((name, "") for name in usable),
        *((name, fix) for fix in _FIXES for name in _FIXED),
        *((name, _HALF) for name in halved),
    ]


def target_of(workload: str, change: str) -> Any:
    from benchmarks.accuracy.workloads import ALL

    target: Any = ALL[workload].target
    if change == _HALF:
        return replace(target, batch=_half(target.batch))
    if change:
        from oomph.fixes import apply

        return apply(change.split(" + "), target)
    return target


def _half(batch: Callable[..., Any]) -> Callable[..., Any]:
    """The first half of every tensor that has as many rows as the first one."""

    def make(device: Any, **sizes: int) -> Any:
        whole = batch(device, **sizes)
        rows = len(next(iter(whole.values())))
        if rows < 2:
            return whole
        halves = {
            key: value[: rows // 2].clone() if len(value) == rows else value for key, value in whole.items()
        }
        return halves

    return make


# ---------------------------------------------------------------------------- in a process of its own


def run_here(workload: str, change: str, gpu: str, lock: Path | None, cap: bool) -> dict[str, Any]:
    """The case's row: predicted, and with `lock`, a file, run on the GPU when it is this process's turn."""
    import torch

    import oomph
    from benchmarks.accuracy.gpu_runs import prepared, take_turn
    from oomph import gpus
    from oomph.measurement.measure import CudaMeter, allocator_set_to, observe
    from oomph.prediction.allocator import classes
    from oomph.workload import Workload

    torch.set_num_threads(1)
    target = target_of(workload, change)
    found = oomph.predict(target, gpu=gpu)  # before the GPU is used here: the prediction forks
    compiled, version = found.compile_seconds > 0, torch.__version__
    kinds = classes(found.allocations, found.interval is not None, compiled, gpus.find(gpu), version)
    peak, margin = found.peak, found.margin
    row = Row(workload, change, gpu, version, ", ".join(kinds), peak.allocated, peak.reserved, margin,
              round(100 * margin / peak.reserved, 3))  # fmt: skip
    if lock is None:
        return asdict(row)
    target = prepared(target)
    take_turn(lock)
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    most = peak.reserved + margin + 1 if cap else total
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)
    try:
        with allocator_set_to(target.allocator if isinstance(target, Workload) else None, device):
            readings = observe(target, device, 3, CudaMeter(device))
    except torch.cuda.OutOfMemoryError as error:
        return asdict(replace(row, ran=False, error=str(error).split(". ")[0]))
    return asdict(
        replace(
            row,
            gpu=torch.cuda.get_device_name(device),
            ran=True,
            retries=torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
            measured_allocated=max(reading.peak for reading in readings if reading.step),
            measured_reserved=max(reading.reserved for reading in readings if reading.step),
        )
    )


# ---------------------------------------------------------------------------------------- all of them


def run_all(wanted: Sequence[tuple[str, str]], gpu: str, jobs: int, dry: bool) -> Iterator[Row]:
    def run(case: tuple[str, str], *words: str) -> Row:
        found = in_process("benchmarks.accuracy.capped", "--one", *case, "--gpu", gpu, *words, seconds=3600)
        return Row(**found)

    def one(case: tuple[str, str]) -> Row:
        turns = () if dry else ("--lock", f"{folder}/gpu.lock")
        try:
            row = run(case, *turns)
            if row.ran is False or row.retries:  # how much did it want?
                free = run(case, *turns, "--no-cap")
                sizes = {"measured_allocated": free.measured_allocated}
                row = replace(row, measured_reserved=free.measured_reserved, **sizes)
        except RuntimeError as error:
            return Row(*case, gpu, "", "", 0, 0, 0, 0.0, error=str(error))
        off = error_percent(row.predicted_reserved, row.measured_reserved)
        return replace(row, reserved_error_percent=off)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(one, case) for case in wanted]):
            yield done.result()


def summary(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if row.ran is not None]
    failed = [f"{row.workload} {row.change}".strip() for row in judged if not row.ran]
    margins = sorted(row.margin_percent for row in rows if row.margin)
    text = f"{len(judged)} capped runs, {len(failed)} failed {failed}"
    if margins:
        text += f"; margins median {margins[len(margins) // 2]:.2f} %, worst {margins[-1]:.2f} %"
    text += f"; {sum(bool(row.retries) for row in judged)} released cached memory"
    from oomph import gpus

    cards = {card.memory - card.context for card in gpus.catalogue()}
    close = [abs(limit - row.predicted_reserved) <= row.margin for row in rows for limit in cards]
    percent = 100 * sum(close) / max(1, len(close))
    return f"{text}; on the catalogue's cards {percent:.1f} % are too close to call"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="workloads (default: all)")
    parser.add_argument("--gpu", default="h200", help="the catalogue's name of this machine's GPU")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="predict and run nothing")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--no-cap", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        send(run_here(*given.one, given.gpu, given.lock, not given.no_cap))
        return 0
    wanted = [case for case in cases() if not given.names or case[0] in given.names]
    if given.list:
        print("\n".join(f"{name:28} {change}".rstrip() for name, change in wanted))
        return 0
    began = time.perf_counter()
    out = given.out or RESULTS / f"capped_{given.gpu}.csv"
    rows: list[Row] = []
    for row in run_all(wanted, given.gpu, given.jobs, given.dry_run):
        rows.append(row)
        if row.error and row.ran is None:
            print(f"{row.workload} {row.change}: {row.error}", flush=True)
            continue
        write(out, [row for row in rows if row.ran is not None or not row.error])
        off = "" if row.reserved_error_percent is None else f"{row.reserved_error_percent:+.2f} %"
        state = {True: "ran", False: "FAILED", None: ""}[row.ran]
        print(
            f"{row.workload} {row.change}: {row.predicted_reserved >> 20} MiB, margin "
            f"{row.margin_percent:.2f} %, {state} {off} {row.retries or ''}",
            flush=True,
        )
    print(f"{summary(rows)}; {time.perf_counter() - began:.0f} s")
    return 0 if all(row.ran is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
