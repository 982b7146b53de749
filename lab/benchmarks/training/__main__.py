"""Training on a real GPU: throughput, peak against prediction, loss curves; and what the loop itself costs.

python -m lab.benchmarks.training run [NAME ...]          # on a GPU, each in a process of its own
python -m lab.benchmarks.training overhead [NAME ...]     # on a GPU: the loop against the bare step, in turns
python -m lab.benchmarks.training judge                   # anywhere: predicts peaks, writes training.csv
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.rows import (
    error_percent,
    errors_of,
    in_process,
    read_json,
    send,
    short_name,
    stored,
    write,
)

from lab.benchmarks import CONFIGS, RESULTS
from lab.benchmarks.training.runs import OVERHEADS, RUNS, Run, copy_photographs, trained_tokenizer

PEAK_THRESHOLD = 2.0  # percent


@dataclass(frozen=True)
class Row:
    name: str
    changes: str
    gpu: str
    torch: str
    alone: bool  # whether it had the GPU for itself; if not, its speed is not its own
    steps: int
    tokens_per_step: int
    tokens_per_second: float  # the median of the reports after the first few
    measured_mib: float
    first_loss: float  # means of a tenth of the steps, at either end
    last_loss: float
    perplexity: float | None = None
    psnr: float | None = None
    matching: float | None = None
    predicted_mib: float | None = None
    error_percent: float | None = None
    recorded: bool | None = None  # whether its passes were
    matching_at_start: float | None = None  # on the same batches, before the first step
    reserved_mib: float | None = None  # by the whole process, what building the model needs too
    mfu: float | None = None  # as the progress bar tells it


def here(name: str, out: Path, alone: bool) -> int:
    """One run in this process."""
    import torch

    from oomph_lab.training.config import load
    from oomph_lab.training.metrics import read_metrics
    from oomph_lab.training.run import train

    run = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        changes = [*run.overrides, f"output.dir={folder}/run"]
        if run.eight_photographs:
            changes.append(f"data.source={copy_photographs(Path(folder, 'photographs'))}")
        config = load(CONFIGS / f"{run.config}.yaml", changes)
        with trained_tokenizer(config, Path(folder) / "run"):
            outcome = train(config)
        rows = read_metrics(Path(folder) / "run" / "metrics.jsonl")
        evaluations = read_metrics(Path(folder) / "run" / "metrics.jsonl", "evaluation")
        for sample in sorted((Path(folder) / "run" / "samples").glob("*.png")):
            shutil.copy(sample, out)  # the last one stays
    losses = [row["loss"] for row in rows]
    # Kernels are compiled in the first steps.
    speeds = [row["tokens_per_second"] for row in rows[min(5, len(rows) // 3) :]]
    tenth = max(1, len(losses) // 10)
    stage = config.largest_stage
    memory = max(row["memory_peak"] for row in rows)
    row = Row(
        name,
        " ".join(run.changes),
        torch.cuda.get_device_name(),
        torch.__version__,
        alone,
        outcome.step,
        stage.tokens * stage.accumulate,
        statistics.median(speeds),
        memory / 2**20,
        statistics.mean(losses[:tenth]),
        statistics.mean(losses[-tenth:]),
        **{key: outcome.evaluation.get(key) for key in ("perplexity", "psnr", "matching")},
        matching_at_start=next((each.get("matching") for each in evaluations if each["step"] == 0), None),
        reserved_mib=torch.cuda.max_memory_reserved() / 2**20,
    )
    curve = [(each["step"], each["loss"]) for each in rows]
    send({"row": asdict(row), "curve": curve})
    return 0


def run(names: Sequence[str], out: Path | None, jobs: int) -> int:
    failed = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, jobs)) as pool:
        samples = {name: _sample(Path(folder), name) for name in names}
        waiting = {name: pool.submit(_timed, RUNS[name], samples[name], jobs) for name in names}
        for name, future in waiting.items():
            try:
                found, took = future.result()
            except Exception as error:  # one run must not stop the others
                failed.append(name)
                print(f"{name}: FAILED {error}", flush=True)
                continue
            row = Row(**found["row"])
            out = out or RESULTS / f"training_{short_name(row.gpu)}.json"
            runs = {each["row"]["name"]: each for each in (*read_json(out), found)}
            out.write_text(json.dumps(list(runs.values())) + "\n")
            if (sample := samples[name]).exists():
                (out.parent / "samples").mkdir(exist_ok=True)
                shutil.copy(sample, out.parent / "samples" / sample.name)
            figures = {"perplexity": row.perplexity, "psnr": row.psnr, "matching": row.matching}
            told = ", ".join(f"{key} {value:.4g}" for key, value in figures.items() if value is not None)
            print(
                f"{name}: {row.steps} steps, {row.tokens_per_second:.0f} tokens/s, "
                f"{row.measured_mib:.0f} MiB, loss {row.first_loss:.4g} -> {row.last_loss:.4g}, "
                f"{told} ({took:.0f} s)",
                flush=True,
            )
    return 1 if failed else 0


def _timed(run: Run, out: Path, jobs: int) -> tuple[dict[str, Any], float]:
    began = time.perf_counter()
    words = ("here", run.name, "--out", str(out), "--jobs", str(jobs))
    return in_process("lab.benchmarks.training", *words, seconds=run.limit_s), time.perf_counter() - began


def _sample(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(', ', '_').replace(' ', '_')}.png"


def overhead(names: Sequence[str], out: Path | None) -> int:
    """Blocks of steps by the loop and by hand, in turns, from the same model and batches."""
    import torch

    from lab.benchmarks.training.overhead import measured

    rows = []
    for name in names:
        given = OVERHEADS[name]
        costs = measured(CONFIGS / f"{given.config}.yaml", given.changes)
        row = {"config": name, "gpu": torch.cuda.get_device_name(), **costs}
        rows.append(row)
        print(
            f"{name}: bare {row['bare_ms']:.2f} ms, loop {row['loop_ms']:.2f} ms, {row['percent']:+.2f} %",
            flush=True,
        )
    out = out or RESULTS / f"training_overhead_{short_name(rows[0]['gpu'])}.csv"
    write(out, rows)
    return 0


def judge(files: Sequence[Path], gpu: str, out: Path, new: bool = False) -> int:
    """new: keep the committed rows of runs that were not measured again."""
    import oomph
    from oomph import gpus
    from oomph_lab.cli.train import model_flops_utilization
    from oomph_lab.training.config import load
    from oomph_lab.training.step import predicted_workload

    before = {row["name"]: row for row in stored(out)} if new else {}
    measured = {found["row"]["name"]: found["row"] for file in files for found in read_json(file)}
    rows: list[dict[str, Any]] = []
    for name, row in measured.items():
        same = ("measured_mib", "tokens_per_second", "last_loss")
        if name in before and all(before[name][key] == str(_rounded(row[key])) for key in same):
            rows.append(before[name])
            continue
        given = RUNS[row["name"]]
        config = load(CONFIGS / f"{given.config}.yaml", given.overrides)
        prediction = oomph.predict(predicted_workload(config), gpu=gpu, max=config.training.memory_limit)
        predicted = prediction.peak.allocated / 2**20
        row["predicted_mib"] = round(predicted, 1)
        row["recorded"] = config.training.cuda_graph
        row["mfu"] = model_flops_utilization(config, prediction, gpus.find(gpu), row["tokens_per_second"])
        row["error_percent"] = error_percent(predicted, row["measured_mib"], 2)
        rows.append({key: _rounded(value) for key, value in row.items()})
        print(
            f"{row['name']:32} {row['measured_mib']:10.0f} MiB, predicted {row['error_percent']:+.2f} %",
            flush=True,
        )
    write(out, rows, [field.name for field in fields(Row)])
    near = sum(abs(error) <= PEAK_THRESHOLD for error in errors_of(rows, "error_percent"))
    print(f"{near} of {len(rows)} peaks within {PEAK_THRESHOLD:g} %; {out}")
    return 0


def _rounded(value: Any) -> Any:
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(value, 1) if abs(value) >= 100 else float(f"{value:.5g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("run", "here", "overhead", "judge"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; throughput is then not theirs")
    parser.add_argument("--new", action="store_true", help="judge only what was measured again")
    parser.add_argument("--gpu", default="h200", help="the GPU that the stored rows were measured on")
    given = parser.parse_args()
    if given.command == "judge":
        files = sorted(file for file in RESULTS.glob("training_*.json"))
        return judge(files, given.gpu, given.out or RESULTS / "training.csv", given.new)
    known = OVERHEADS if given.command == "overhead" else RUNS
    matched = [(name, fnmatch.filter(known, name)) for name in given.names]
    unknown = [name for name, found in matched if not found]
    if unknown:
        print(f"error: there is no run {unknown[0]!r}; valid: {'; '.join(known)}", file=sys.stderr)
        return 2
    names = [name for _, found in matched for name in found]
    if given.command == "overhead":
        return overhead(names or list(OVERHEADS), given.out)
    if given.command == "here":
        return here(given.names[0], given.out, given.jobs == 1)
    return run(names or list(RUNS), given.out, given.jobs)


if __name__ == "__main__":
    sys.exit(main())
