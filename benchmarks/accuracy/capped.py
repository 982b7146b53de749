"""Run training steps in processes that may reserve no more than was predicted, plus the margin.

python -m benchmarks.accuracy.capped [names...]            # on a GPU; results/capped_<gpu>.csv
python -m benchmarks.accuracy.capped --list | --dry-run    # anywhere: the cases; or their predictions only

A case is a workload of the accuracy benchmark, one with half of its batch, or one with a fix. Every case is
predicted and then run in a fresh process under torch.cuda.set_per_process_memory_fraction, several at a time.
One that fails, or that had to release cached memory, runs again without the cap: how much did it want?
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks import RESULTS

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
_SECONDS = 180  # that one process may take
_CONTEXT = 2**30  # bytes that a process takes beside the allocator, at most
_RECORDED = 4 * 2**20  # bytes above the prediction from which a run's trace is kept
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


def predict_here(workload: str, change: str, gpu: str) -> Row:
    import torch

    import oomph
    from oomph import gpus
    from oomph.prediction.replay import classes

    torch.set_num_threads(1)
    found = oomph.predict(target_of(workload, change), gpu=gpu)
    return Row(
        workload,
        change,
        gpu,
        torch.__version__,
        ", ".join(
            classes(
                found.allocations,
                found.interval is not None,
                found.compile_seconds > 0,
                gpus.find(gpu),
                torch.__version__,
            )
        ),
        found.peak.allocated,
        found.peak.reserved,
        found.margin,
        round(100 * found.margin / found.peak.reserved, 3),
    )


def run_here(workload: str, change: str, cap: int | None, history: bool) -> dict[str, Any]:
    """Three steps on the GPU; `cap`: what the allocator may reserve; `history`: return its trace."""
    import torch

    from benchmarks.accuracy.gpu_runs import _prepared
    from oomph.measurement.measure import CudaMeter, allocator_set_to, observe
    from oomph.torch_internals import CUDA_RECORD_MEMORY_HISTORY
    from oomph.workload import Workload

    torch.set_num_threads(2)
    target = _prepared(target_of(workload, change))
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    if cap is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, (cap + 1) / total), device)
    if history:
        getattr(*CUDA_RECORD_MEMORY_HISTORY)(context=None, max_entries=10**6)
    settings = target.allocator if isinstance(target, Workload) else None
    with allocator_set_to(settings, device):
        readings = observe(target, device, 3, CudaMeter(device))
    acts = torch.cuda.memory._snapshot()["device_traces"][0] if history else []
    return {
        "gpu": torch.cuda.get_device_name(device),
        "measured_allocated": max(reading.peak for reading in readings if reading.step),
        "measured_reserved": max(reading.reserved for reading in readings if reading.step),
        "retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
        "history": [(act["action"], act["addr"], act["size"], act["stream"]) for act in acts],
    }


def _child(pipe: Any, case: tuple[str, str], gpu: str, cap: bool, history: bool) -> None:
    """Send the prediction; run the case when told to."""
    import torch

    try:
        row = predict_here(*case, gpu)  # before the GPU is used here: the prediction forks
        pipe.send(row)
        if pipe.recv() == "run":
            pipe.send(run_here(*case, row.predicted_reserved + row.margin if cap else None, history))
    except torch.cuda.OutOfMemoryError as error:
        pipe.send({"oom": str(error).split(". ")[0]})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]})
    pipe.close()
    os._exit(0)  # nothing of torch's needs to be taken down


# ---------------------------------------------------------------------------------------- all of them


class _Memory:
    """Bytes of the GPU that the running processes share."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size

    def give_back(self, size: int) -> None:
        with self._changed:
            self._free += size
            self._changed.notify_all()


def run_all(
    wanted: Sequence[tuple[str, str]], gpu: str, jobs: int, dry: bool, histories: Path | None
) -> Iterator[Row]:
    from oomph import gpus

    context = multiprocessing.get_context("spawn")
    memory = _Memory(gpus.find(gpu).memory - 2 * 2**30)
    lock = threading.Lock()

    def run(case: tuple[str, str], cap: bool = True, history: bool = False) -> tuple[Row, dict[str, Any]]:
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs, case, gpu, cap, history))
        process.start()
        theirs.close()
        row = Row(*case, gpu, "", "", 0, 0, 0, 0.0)
        try:
            row = _received(ours)
            if dry or not isinstance(row, Row):
                return row, {}
            size = int(1.1 * row.predicted_reserved) + _CONTEXT
            memory.take(size)
            try:
                ours.send("run")
                return row, _received(ours)
            finally:
                memory.give_back(size)
        except (EOFError, TimeoutError) as error:
            return row, {"error": repr(error)}
        finally:
            process.kill()
            process.join()

    def one(case: tuple[str, str]) -> Row:
        row, measured = run(case)
        if not isinstance(row, Row):
            return Row(*case, gpu, "", "", 0, 0, 0, 0.0, error=row["error"])
        if dry or "error" in measured:
            return replace(row, error=measured.get("error", ""))
        row = _measured(replace(row, ran="oom" not in measured, error=measured.get("oom", "")), measured)
        above = (row.measured_reserved or 0) - row.predicted_reserved
        if not row.ran or row.retries or (histories and above >= _RECORDED):
            again = run(case, cap=False, history=histories is not None)[1]
            if histories is not None and again.get("history"):
                with lock, zipfile.ZipFile(histories, "a", zipfile.ZIP_DEFLATED) as file:
                    file.writestr(f"{row.workload}/{row.change}.json", json.dumps(again["history"]))
            row = _measured(row, {**again, "retries": row.retries})
        off = 100 * (row.predicted_reserved / row.measured_reserved - 1) if row.measured_reserved else None
        return replace(row, reserved_error_percent=None if off is None else round(off, 3))

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(one, case) for case in wanted]):
            yield done.result()


def _received(pipe: Any) -> Any:
    if not pipe.poll(_SECONDS):
        raise TimeoutError(f"took more than {_SECONDS} s")
    return pipe.recv()


def _measured(row: Row, found: dict[str, Any]) -> Row:
    return replace(
        row, **{key: value for key, value in found.items() if hasattr(row, key) and key != "error"}
    )


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
    parser.add_argument(
        "--history",
        type=Path,
        help="ZIP file for the allocator's traces of runs that needed more than predicted",
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="predict and run nothing")
    given = parser.parse_args()
    wanted = [case for case in cases() if not given.names or case[0] in given.names]
    if given.list:
        print("\n".join(f"{name:28} {change}".rstrip() for name, change in wanted))
        return 0
    began = time.perf_counter()
    out = given.out or RESULTS / f"capped_{given.gpu}.csv"
    rows: list[Row] = []
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in run_all(wanted, given.gpu, given.jobs, given.dry_run, given.history):
            rows.append(row)
            if row.error and row.ran is None:
                print(f"{row.workload} {row.change}: {row.error}", flush=True)
                continue
            writer.writerow(asdict(row))
            file.flush()
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
