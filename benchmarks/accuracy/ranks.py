"""Predict one of several ranks, and measure the same rank on one real GPU.

python -m benchmarks.accuracy.ranks --gpu h200 --out ranks.csv [names...]    # about 4 minutes on a GPU
python -m benchmarks.accuracy.ranks --predict-only --gpu h200                # anywhere
python -m benchmarks.accuracy.ranks --simulate --out results/ranks_simulated.csv   # 2 to 1024 ranks, anywhere

Over torch's fake process group the memory of one rank is real and only its traffic is not; NCCL's own buffers
are not in it. DDP does not run over that group: it runs over NCCL with one rank, which has all its buckets.
Every run is a process of its own; measurements run one after the other.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.rows import error_percent, in_process, send, summary, write

_SECONDS = 240  # that one process may take


@dataclass(frozen=True)
class Run:
    """One rank of `ranks`. layers, width, T, B: of a longctx decoder; B is the batch of the rank."""

    parallel: str
    ranks: int
    B: int = 2
    T: int = 2048
    layers: int = 12
    width: int = 1024
    vocabulary: int = 32000
    checkpointing: bool = False
    dtype: str | None = None
    accumulate: int = 1
    fused: bool = True


RUNS = {
    **{f"fsdp2 {ranks}": Run("fsdp2", ranks) for ranks in (2, 8, 64)},
    **{f"fsdp2 {ranks} whole": Run("fsdp2:reshard_after_forward=false", ranks) for ranks in (4, 32)},
    "fsdp2 8 mixed": Run("fsdp2:param_dtype=bfloat16,reduce_dtype=float32", 8),
    "fsdp2 64 mixed whole": Run(
        "fsdp2:param_dtype=bfloat16,reduce_dtype=float32,reshard_after_forward=false", 64
    ),
    "fsdp2 8 checkpointing": Run("fsdp2", 8, B=4, checkpointing=True),
    "fsdp2 32 mixed checkpointing": Run("fsdp2:param_dtype=bfloat16", 32, B=8, checkpointing=True),
    "fsdp2 8 offload": Run("fsdp2:cpu_offload=true", 8),
    "fsdp2 16 offload mixed checkpointing": Run(
        "fsdp2:cpu_offload=true,param_dtype=bfloat16", 16, B=4, checkpointing=True
    ),
    "fsdp2 8 bf16": Run("fsdp2", 8, dtype="bfloat16"),
    "fsdp2 8 bf16 accumulate": Run("fsdp2", 8, dtype="bfloat16", accumulate=2),
    "fsdp2 8 foreach": Run("fsdp2", 8, fused=False),
    "fsdp2 7 uneven": Run("fsdp2", 7, width=1072, vocabulary=31999),
    "fsdp2 16 cp 4": Run("fsdp2:cp=4", 16, dtype="bfloat16", T=8192),
    "fsdp2 8 tp 2": Run("fsdp2:tp=2", 8, dtype="bfloat16"),
    "tp 4": Run("tp", 4, dtype="bfloat16"),
    "ddp 1": Run("ddp", 1),
    "ddp 1 bf16 checkpointing": Run("ddp", 1, B=4, dtype="bfloat16", checkpointing=True),
    "ddp 1 accumulate": Run("ddp", 1, accumulate=2),
}
_4B: dict[str, Any] = {"layers": 36, "width": 2560, "vocabulary": 151_936, "dtype": "bfloat16"}
SIMULATED = {
    **{
        f"4B, 1 x 131,072, {name} over 2": Run(parallel, 2, 1, 131_072, checkpointing=True, **_4B)
        for name, parallel in (("ddp", "ddp"), ("fsdp2", "fsdp2"), ("fsdp2 x cp 2", "fsdp2:cp=2"))
    },
    **{
        f"4B, 1 x 131,072, fsdp2 over {ranks}": Run("fsdp2", ranks, 1, 131_072, checkpointing=True, **_4B)
        for ranks in (8, 64, 1024)
    },
    **{
        f"4B, 1 x 131,072, fsdp2 x cp 8 over {ranks}": Run(
            "fsdp2:cp=8", ranks, 1, 131_072, checkpointing=True, **_4B
        )
        for ranks in (8, 64, 1024)
    },
    **{
        f"0.15B, 2 x 2,048, {name} over {ranks}": Run(name, ranks)
        for name in ("fsdp2", "ddp")
        for ranks in (8, 64, 1024)
    },
}


@dataclass(frozen=True)
class Row:
    """Sizes in bytes, errors in percent of the measured size."""

    run: str
    gpu: str
    torch: str = ""
    predicted_allocated: int | None = None
    measured_allocated: int | None = None
    allocated_error_percent: float | None = None
    predicted_reserved: int | None = None
    measured_reserved: int | None = None
    reserved_error_percent: float | None = None
    nccl: int | None = None  # estimated, beside the allocator
    sent: int | None = None  # by a rank in a step
    step_seconds: float | None = None  # predicted
    predict_seconds: float | None = None
    predict_host_bytes: int | None = None
    error: str = ""


# --------------------------------------------------------------------------- in the process of a run


def workload(run: Run) -> Any:
    import torch

    import oomph
    from oomph.parallel import parse_parallel
    from oomph_lab.systems.longctx import LongContextConfig

    heads, hidden = (32, 9216) if run.width == 2560 else (8, 3 * run.width)  # report 002's, or a small one
    shape = (run.width, run.layers, heads, 8, run.width // heads, hidden)
    config = LongContextConfig(*shape, vocab_size=run.vocabulary)

    def batch(device: torch.device) -> dict[str, torch.Tensor]:
        ids = torch.randint(run.vocabulary, (run.B, run.T), device=device)
        return {"input_ids": ids, "labels": ids}

    plain = oomph.Workload(
        model=config.build,
        batch=batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=run.fused or None),
        dtype=run.dtype,
        accumulate=run.accumulate,
        parallel=parse_parallel(run.parallel, run.ranks),
    )
    return oomph.apply("activation_checkpointing", plain) if run.checkpointing else plain


def one(name: str, action: str, gpu: str) -> None:
    """Predict or measure in this process, and print the result as JSON."""
    import resource

    import torch

    import oomph

    run = {**RUNS, **SIMULATED}[name]
    found: dict[str, Any] = {"torch": torch.__version__}
    if action == "predict":
        prediction = oomph.predict(workload(run), gpu=gpu)
        host = max(
            resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        found |= {
            "predicted_allocated": prediction.peak.allocated,
            "predicted_reserved": prediction.peak.reserved,
            "nccl": prediction.nccl,
            "sent": prediction.work.sent,
            "step_seconds": round(prediction.step_seconds or 0, 4),
            "predict_seconds": round(prediction.seconds, 1),
            "predict_host_bytes": host * 1024,
        }
    else:
        if run.parallel == "ddp":
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        measured = oomph.measure(workload(run))
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "measured_allocated": measured.peak.allocated,
            "measured_reserved": measured.peak.reserved,
        }
    send(found)
    os._exit(0)  # NCCL's threads may take their time


# ------------------------------------------------------------------------------------- all of them


def run_in_process(row: Row, action: str, gpu: str) -> Row:
    words = ("--one", row.run, "--action", action, "--gpu", gpu)
    try:
        found = in_process("benchmarks.accuracy.ranks", *words, seconds=_SECONDS, OMP_NUM_THREADS="1")
    except RuntimeError as error:
        return replace(row, error=f"{action}: {error}"[:300])
    return replace(row, **found)


def with_errors(row: Row) -> Row:
    return replace(
        row,
        allocated_error_percent=error_percent(row.predicted_allocated, row.measured_allocated),
        reserved_error_percent=error_percent(row.predicted_reserved, row.measured_reserved),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--gpu", default="h200", help="what is predicted for")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="predictions side by side")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--simulate", action="store_true", help="predict 2 to 1024 ranks")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--action", default="predict", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.one, given.action, given.gpu)
    runs = SIMULATED if given.simulate else RUNS
    names = [name for name in runs if not given.names or name in given.names]
    measures = not given.predict_only and not given.simulate
    rows = {name: Row(name, given.gpu) for name in names}
    began = time.perf_counter()
    with ThreadPoolExecutor(given.jobs) as pool:
        predicted = pool.map(lambda row: run_in_process(row, "predict", given.gpu), list(rows.values()))
        for name, row in zip(names, predicted, strict=True):
            rows[name] = with_errors(run_in_process(row, "measure", given.gpu) if measures else row)
            if given.out is not None:
                write(given.out, rows.values())
            shown = rows[name]
            print(
                f"{name}: {shown.error or shown.allocated_error_percent or shown.predicted_allocated}",
                flush=True,
            )
    found = summary(list(rows.values()), "allocated", digits=3)
    print(f"{found}; {time.perf_counter() - began:.0f} s; {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
