"""Predict compiled training steps without a GPU, and measure them on one, with the same torch.

python -m benchmarks.accuracy.compiled --out rows.csv            # on a GPU: predicts and measures every case
python -m benchmarks.accuracy.compiled --out rows.csv --predict  # anywhere: predictions only
python -m benchmarks.accuracy.compiled --list

A case is a workload of the accuracy benchmark and how it is compiled. Each is predicted and measured in fresh
processes, predictions with the GPU hidden. The first step compiles and times kernels, for which Inductor
allocates memory of its own; the measured peak is that of the later steps, and the first one's is stored too.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.rows import error_percent, in_process, send, stored, summary, write

_CASES = """
    nanogpt-autocast nanogpt-autocast:blocks nanogpt-autocast:reduce-overhead nanogpt-autocast:budget
    gpt2-fp32 gpt2-autocast pythia70m qwen3-0.6b-ckpt mistral-sliding llama-padded opt-fp16 lora
    bert-mlm-fp32 bert-mlm-fp16-autocast t5-small transformer-encoder-autocast
    vit-b16-autocast swin-tiny convnext-tiny resnet50 batchnorm-convnet
    unet unet-channels-last diffusion-autocast diffusion
    checkpoint-selective:blocks
""".split()
_BUDGET = 0.5
_SECONDS = 420  # that one process may take


def workload_of(case: str) -> Any:
    """The Workload of a case, compiled as its name says."""
    import torch

    from benchmarks.accuracy.workloads import ALL
    from oomph.workload import Workload

    name, *hows = case.split(":")
    how = hows[-1] if hows else ""
    target = _diffusion("autocast" in name) if name.startswith("diffusion") else ALL[name].target
    assert isinstance(target, Workload)
    build = target.model

    def model() -> Any:
        built = build()
        if how == "eager":
            return built
        if how == "blocks":
            lists = [each for each in built.modules() if isinstance(each, torch.nn.ModuleList)]
            for block in max(lists, key=len):
                block.compile()
            return built
        if how == "budget":
            torch._functorch.config.activation_memory_budget = _BUDGET
        return torch.compile(built, mode="reduce-overhead" if how == "reduce-overhead" else None)

    return dataclasses.replace(target, model=model)


def _diffusion(autocast: bool) -> Any:
    """The U-Net of the workload held-diffusion-average, as a Workload."""
    import torch

    from benchmarks.accuracy.workloads.held_out_steps import TimedUNet
    from oomph.workload import Workload

    def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(24, 4, 64, 64, device=device), torch.randint(0, 1000, (24,), device=device)

    def loss(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (model(*batch) - batch[0]).square().mean()

    return Workload(TimedUNet, batch, loss, autocast="bfloat16" if autocast else None)


def _run_one(case: str, measures: bool) -> dict[str, Any]:
    import torch

    import oomph

    workload = workload_of(case)
    if measures:
        found = oomph.measure(workload)
        later = found.steps[1:]
        return {
            "gpu": found.gpu_title,
            "measured_allocated": max(step.allocated for step in later),
            "measured_reserved": max(step.reserved for step in found.steps),
            "measured_first_step": found.steps[0].allocated,
        }
    prediction = oomph.predict(workload, gpu="h200")
    return {
        "torch": torch.__version__,
        "predicted_allocated": max(step.allocated for step in prediction.steps[1:]),
        "predicted_reserved": prediction.peak.reserved,
        "seconds": round(prediction.seconds, 1),
        "compile_seconds": round(prediction.compile_seconds, 1),
        "eager_seconds": round(oomph.predict(workload_of(f"{case}:eager"), gpu="h200").seconds, 1),
        "notes": "; ".join(note.text for note in prediction.notes if "torch.compile" in note.text),
    }


def _in_fresh_process(case: str, measures: bool) -> dict[str, Any]:
    words, variables = ("--measure",) if measures else (), {} if measures else {"CUDA_VISIBLE_DEVICES": ""}
    return in_process("benchmarks.accuracy.compiled", "--one", case, *words, seconds=_SECONDS, **variables)


_COLUMNS = (
    "case gpu torch measured_allocated predicted_allocated allocated_error_percent measured_reserved "
    "predicted_reserved reserved_error_percent measured_first_step seconds compile_seconds "
    "eager_seconds notes"
).split()


def _write(out: Path, rows: dict[str, dict[str, Any]]) -> None:
    for row in rows.values():
        for kind in ("allocated", "reserved"):
            sizes = (row.get(f"{side}_{kind}") for side in ("predicted", "measured"))
            row[f"{kind}_error_percent"] = error_percent(*(int(size) if size else None for size in sizes), 2)
    write(out, [{"case": case, **row} for case, row in rows.items()], _COLUMNS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", help="all by default")
    parser.add_argument("--out", type=Path, default=RESULTS / "compiled.csv")
    parser.add_argument("--predict", action="store_true", help="predictions only")
    parser.add_argument("--jobs", type=int, default=5, help="processes at a time")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(_CASES))
        return 0
    if options.one:
        send(_run_one(options.one, options.measure))
        return 0
    unknown = [case for case in options.cases if case.partition(":")[0] not in " ".join(_CASES)]
    if unknown:
        print(f"no case {unknown[0]!r}; --list prints them", file=sys.stderr)
        return 2
    rows: dict[str, dict[str, Any]] = {row.pop("case"): dict(row) for row in stored(options.out)}
    cases, failed = options.cases or _CASES, 0
    kinds = (False,) if options.predict else (True, False)
    with ThreadPoolExecutor(options.jobs) as pool:
        # Measurements first: they use the GPU, of which there is less time.
        jobs = {pool.submit(_in_fresh_process, case, kind): (case, kind) for kind in kinds for case in cases}
        for job in as_completed(jobs):
            case, kind = jobs[job]
            try:
                rows.setdefault(case, {}).update(job.result())
            except Exception as error:  # one case must not stop the others
                failed += 1
                print(f"{case}: {'measurement' if kind else 'prediction'} failed: {error}", flush=True)
                continue
            _write(options.out, rows)
            print(case, *(f"{key}={value}" for key, value in rows[case].items() if value), flush=True)
    print(f"{len(rows)} cases: {summary(list(rows.values()), 'allocated')}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
