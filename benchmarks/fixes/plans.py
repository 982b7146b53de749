"""Plans of `oomph fit` on a real GPU: does the step stay within its budget, and is it as fast as predicted?

python -m benchmarks.fixes.plans [names...] --gpu h200 --jobs 14      # on a GPU; results/plans_<gpu>.csv
python -m benchmarks.fixes.plans --list | --dry-run       # anywhere: the cases; or their plans only

All plans are made first, several at a time. Then every step runs in a fresh process with its plan, under
torch.cuda.set_per_process_memory_fraction, and then as it is, without the limit. Processes build their models
side by side and have the GPU to themselves while they step. The file is written after every case; --missing
keeps the rows of it that were measured.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import RESULTS, ROOT
from benchmarks.tables import stored

SCRIPTS = ROOT / "benchmarks" / "accuracy" / "training_scripts"
STEPS = 6
_LONG_STEPS = 2
_SECONDS = 400  # that one process may take
_MOST = 130 * 2**30  # bytes that a step may need to be run as it is
_IMPORTED = ("transformers", "accelerate", "timm", "torchvision", "diffusers", "peft", "lightning")


@dataclass(frozen=True)
class Case:
    target: str  # a workload of the accuracy or speed benchmark, a config with overrides, or a script
    limit: float | str  # of what the allocator reserves as it is; or a budget, with the CUDA context
    allow: tuple[str, ...] = ("exact",)
    is_long: bool = False  # only if it is named: steps of a minute

    def name(self) -> str:
        kinds = "".join(f" {kind}" for kind in self.allow if kind != "exact")
        return f"{self.target} {self.limit if isinstance(self.limit, str) else f'{self.limit:.0%}'}{kinds}"


CASES = {
    case.name(): case
    for case in (
        Case("gpt2-fp32", 0.6),
        Case("gpt2-fp32", 0.4),
        Case("gpt2-fp32", 0.25, ("exact", "precision")),
        Case("gpt2-autocast", 0.5),
        Case("gpt2-clip-accumulate", 0.6),
        Case("pythia70m", 0.5),
        Case("speed:llama-1b", 0.7),
        Case("speed:llama-1b", 0.5),
        Case("llama-1b-8k", "24GiB"),
        Case("llama-1b-8k", "16GiB"),
        Case("llama-1b-8k", "12GiB"),
        Case("speed:qwen3-0.6b", 0.5),
        Case("speed:qwen3-0.6b", 0.3),
        Case("mistral-sliding", 0.6),
        Case("gemma3-text", 0.5),
        Case("phi-autocast", 0.5),
        Case("bloom-alibi", 0.6),
        Case("llama-eager-4096", 0.4),
        Case("bert-mlm-fp32", 0.5),
        Case("t5-small", 0.6),
        Case("vit-b16-autocast", 0.5),
        Case("nanogpt-autocast", 0.4),
        Case("transformer-encoder", 0.6),
        Case("char_gpt.py", 0.6),
        Case("char_gpt.py", 0.4),
        Case("bert_classifier.py", 0.6),
        Case("trainer_causal_lm.py", 0.7),
        Case("trainer_masked_lm.py", 0.7),
        Case("timm_classifier.py", 0.6),
        Case("accelerate_loop.py", 0.7),
        Case("translation.py", 0.75),
        *(
            Case(name, limit, ("exact", "compile"))
            for name, limit in (
                ("nanogpt-autocast", 0.4),
                ("gpt2-autocast", 0.5),
                ("bert-mlm-fp32", 0.5),
                ("vit-b16-autocast", 0.5),
                ("char_gpt.py", 0.4),
            )
        ),
        Case(
            "configs/longctx_4b_24gb.yaml training.memory_limit=null fixes=[]",
            "23GiB",
            ("exact", "precision"),
            True,
        ),
    )
}


@dataclass(frozen=True)
class Row:
    """One plan. Sizes in bytes; errors in percent of what was measured."""

    case: str
    gpu: str
    torch: str = ""
    limit: int = 0  # what the allocator may reserve
    fits: bool | None = None
    fixes: str = ""
    fit_seconds: float | None = None
    predictions: int | None = None
    reserved_before: int | None = None  # predicted
    predicted_allocated: int | None = None
    measured_allocated: int | None = None
    allocated_error_percent: float | None = None
    predicted_reserved: int | None = None
    measured_reserved: int | None = None
    reserved_error_percent: float | None = None
    ran: bool | None = None  # within the budget; None: not run
    retries: int | None = None  # times that the allocator released its cache to stay within it
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    measured_seconds_before: float | None = None
    predicted_ratio: float | None = None
    measured_ratio: float | None = None
    ratio_error_percent: float | None = None
    error: str = ""


# ---------------------------------------------------------------------------- in a process of its own


def target_of(name: str) -> Any:
    """A Workload, a function or a Script."""
    from benchmarks.accuracy import speed
    from benchmarks.accuracy.workloads import ALL
    from oomph.prediction import Script

    if name.endswith(".py"):
        return Script(str(SCRIPTS / name), ())
    if name.startswith("configs/"):
        file, *overrides = name.split()
        return speed._config(str(ROOT / file), *overrides)
    if name == "llama-1b-8k":
        return speed._transformer("Llama", 1, 8192, **speed.LLAMA_1B)
    if name.startswith("speed:"):
        return speed.CASES[name.removeprefix("speed:")][0]()
    return ALL[name].target


def plan_here(name: str, gpu: str, out: str) -> None:
    import oomph
    from oomph.planning import write_plan

    case = CASES[name]
    target = target_of(case.target)
    if isinstance(case.limit, str):
        plan = oomph.fit(target, gpu=gpu, budget=case.limit, allow=case.allow)
    else:
        as_it_is = oomph.predict(target, gpu=gpu)
        plan = oomph.fit(target, gpu=gpu, max=int(case.limit * as_it_is.peak.reserved), allow=case.allow)
    write_plan(plan, out)


def run_here(name: str, plan: str, lock: str, out: str, also_before: bool) -> None:
    """Steps on the GPU with a plan, within its limit; `also_before`: then as it is, except for scripts.

    `plan` may be "": a script as it is.
    """
    import torch

    import oomph
    from benchmarks.accuracy.gpu_runs import _take_turn
    from oomph.measurement.measure import CudaMeter, allocator_set_to, empty_caches, observe
    from oomph.planning import read_plan
    from oomph.prediction import Script
    from oomph.workload import Workload

    case, chosen = CASES[name], read_plan(plan) if plan else None
    target = target_of(case.target)
    torch.set_num_threads(2)
    device = torch.device("cuda", 0)
    targets = [target]
    if isinstance(target, Workload):
        fixed = [oomph.apply(chosen, target), *([target] if also_before else [])]
        with without_initial_values():
            targets = [_with_model(each) for each in fixed]
    elif isinstance(target, Script):
        source = Path(target.path).read_text()
        for module in _IMPORTED:
            if module in source:
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
    torch.cuda.init()
    _take_turn(Path(lock))
    if chosen is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (chosen.limit + 1) / total), device)
    if isinstance(target, Script):
        run_script(target.path, plan, out)
    for file in (out, f"{out}.before")[: len(targets)]:
        given = targets.pop(0)
        with allocator_set_to(given.allocator, device):
            readings = observe(given, device, _LONG_STEPS if case.is_long else STEPS, CudaMeter(device))
        ends = [reading.seconds for reading in readings if reading.moment == "end"]
        peaks = [(reading.peak, reading.reserved) for reading in readings if reading.step]
        _write(file, *map(max, zip(*peaks, strict=True)), ends[1:])
        del given
        empty_caches()
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _with_model(workload: Any) -> Any:
    model = workload.model()
    return replace(workload, model=lambda: model)


def _write(out: str, allocated: int, reserved: int, seconds: Sequence[float]) -> None:
    import torch

    found = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "allocated": allocated,
        "reserved": reserved,
        "seconds": statistics.median(seconds) if seconds else None,
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }
    Path(out).write_text(json.dumps(found))


def run_script(path: str, plan: str, out: str) -> NoReturn:
    """Until its optimizer has stepped six times, or to its end."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from oomph.fixes import uses_of
    from oomph.fixes.scripts import ModelChange, on_each_optimizer

    moments: list[float] = []

    def finish() -> NoReturn:
        seconds = [b - a for a, b in pairwise(moments[1:])]
        _write(out, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), seconds)
        os._exit(0)

    def stepped(*_: Any) -> None:
        torch.cuda.synchronize()
        moments.append(time.perf_counter())
        if len(moments) > STEPS:
            finish()

    register_optimizer_step_post_hook(stepped)
    sys.argv, sys.path[0] = [path], str(Path(path).parent)
    change: Any = ModelChange(uses_of(plan)) if plan else (lambda optimizer: None)
    with on_each_optimizer(change):
        runpy.run_path(path, run_name="__main__")
    finish()


@contextlib.contextmanager
def without_initial_values() -> Iterator[None]:
    """Random numbers for a billion parameters take half a minute; neither memory nor time depends on them."""
    import torch

    names = ("normal_", "uniform_", "erfinv_", "trunc_normal_")
    before = {name: getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)}
    for name in before:
        setattr(torch.Tensor, name, lambda tensor, *args, **kwargs: tensor)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)


# --------------------------------------------------------------------------------------- all of them


def _python(*arguments: str, **variables: str) -> str:
    """The error of `python -m benchmarks.fixes.plans arguments`, innermost places first; "" without one."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(paths), **variables}
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.fixes.plans", *arguments],
                cwd=folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=_SECONDS,
            )
    except subprocess.TimeoutExpired:
        return f"took more than {_SECONDS} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
    places = [" ".join(line.split()) for line in lines if line.lstrip().startswith('File "')]
    message = f"status {done.returncode}: {lines[-1]}; {'; '.join(places[:-5:-1])}"
    return "" if done.returncode == 0 else message[:1500]


def planned(name: str, gpu: str, folder: Path) -> Row:
    from oomph.planning import read_plan
    from oomph.report.fixes import fix_word

    row, out = Row(name, gpu), folder / f"{_file(name)}.plan.json"
    # Without a GPU, predictions may run in forks.
    error = _python("--plan-here", name, "--gpu", gpu, "--out", str(out), CUDA_VISIBLE_DEVICES="")
    if not out.exists():
        return replace(row, error=f"fit: {error}")
    plan = read_plan(out)
    return replace(
        row,
        limit=plan.limit,
        fits=plan.fits,
        fixes=" + ".join(map(fix_word, plan.fixes)),
        fit_seconds=round(plan.seconds, 1),
        predictions=plan.predictions,
        reserved_before=plan.before.peak.reserved,
        predicted_allocated=plan.after.peak.allocated,
        predicted_reserved=plan.after.peak.reserved,
        predicted_seconds=round(plan.after.step_seconds, 5),
        predicted_ratio=round(plan.after.slowdown, 4),
    )


def measured(row: Row, folder: Path) -> Row:
    if not row.fits or not row.fixes:
        return row
    found: list[dict[str, Any]]
    out, before_out = (folder / f"{_file(row.case)}.out{end}" for end in ("", ".before"))
    arguments = ["--run-here", row.case, "--lock", str(folder / "gpu.lock")]
    also_before = ["--also-before"] if (row.reserved_before or 0) < _MOST else []
    plan = str(folder / f"{_file(row.case)}.plan.json")
    error = _python(*arguments, *also_before, "--plan", plan, "--out", str(out))
    if not out.exists():
        ran = False if "OutOfMemory" in error or "out of memory" in error else None
        return replace(row, ran=ran, error=error)
    if CASES[row.case].target.endswith(".py"):
        _python(*arguments, "--plan", "", "--out", str(before_out))
    found = [json.loads(file.read_text()) if file.exists() else {} for file in (out, before_out)]
    after, before = found
    seconds, seconds_before = after["seconds"], before.get("seconds")
    ratio = seconds / seconds_before if seconds and seconds_before else None
    return replace(
        row,
        gpu=after["gpu"],
        torch=after["torch"],
        ran=True,
        retries=after["retries"],
        measured_allocated=after["allocated"],
        measured_reserved=after["reserved"],
        allocated_error_percent=_error(row.predicted_allocated, after["allocated"]),
        reserved_error_percent=_error(row.predicted_reserved, after["reserved"]),
        measured_seconds=seconds and round(seconds, 5),
        measured_seconds_before=seconds_before and round(seconds_before, 5),
        measured_ratio=ratio and round(ratio, 4),
        ratio_error_percent=_error(row.predicted_ratio, ratio),
    )


def _error(predicted: float | None, real: float | None) -> float | None:
    return round(100 * (predicted / real - 1), 3) if predicted and real else None


def _file(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _line(row: Row) -> str:
    def gib(size: int | None) -> str:
        return "-" if size is None else f"{size / 2**30:.2f}"

    def percent(error: float | None) -> str:
        return "-" if error is None else f"{error:+.1f}%"

    return (
        f"{row.case:44.44} {gib(row.reserved_before):>6} -> {gib(row.predicted_reserved):>6} of "
        f"{gib(row.limit)} GiB {'fits' if row.fits else 'DOES NOT FIT'} ran={row.ran} "
        f"{percent(row.allocated_error_percent)} time x{row.predicted_ratio} measured x{row.measured_ratio} "
        f"{percent(row.ratio_error_percent)}  fit {row.fit_seconds} s {row.fixes[:90]} {row.error}"
    )


def _summary(rows: Sequence[Row]) -> str:
    within, beyond = (sum(row.ran is ran for row in rows) for ran in (True, False))
    text = f"{len(rows)} plans, {within} ran within their budget, {beyond} ran out of memory, "
    text += f"{sum(bool(row.error) for row in rows)} failed"
    for name in ("allocated", "reserved", "ratio"):
        errors = [abs(e) for row in rows if (e := getattr(row, f"{name}_error_percent")) is not None]
        if errors:
            text += f"; {name}: median {statistics.median(errors):.2f} %, worst {max(errors):.2f} %"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases whose names begin so (default: all short ones)")
    parser.add_argument("--gpu", default="h200", help="the catalogue's name of this machine's GPU")
    parser.add_argument("--jobs", type=int, default=2, help="plans at a time")
    parser.add_argument("--builds", type=int, default=4, help="runs that are prepared at a time")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="make the plans only")
    parser.add_argument("--missing", action="store_true", help="keep measured rows of --out")
    parser.add_argument("--also-before", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    for option in ("--plan-here", "--run-here", "--plan", "--lock"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plan_here:
        plan_here(given.plan_here, given.gpu, str(given.out))
        return 0
    if given.run_here:
        run_here(given.run_here, given.plan, given.lock, str(given.out), given.also_before)
        return 0
    wanted = [
        name
        for name, case in CASES.items()
        if (name.startswith(tuple(given.names)) if given.names else not case.is_long)
    ]
    if given.list:
        print("\n".join(wanted))
        return 0
    out = given.out or RESULTS / f"plans_{given.gpu}.csv"
    rows: dict[str, Row] = {}
    kept = stored(out) if given.missing and out.exists() else []
    kept = [row for row in kept if row["case"] in wanted and row["ran"] == "True"]

    def each(jobs: int, function: Callable[[Any], Row], items: Sequence[Any]) -> None:
        with ThreadPoolExecutor(jobs) as pool:
            for done in as_completed([pool.submit(function, item) for item in items]):
                rows[done.result().case] = done.result()
                print(_line(done.result()), flush=True)
                with out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(kept)
                    writer.writerows(asdict(rows[name]) for name in wanted if name in rows)

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        left = [name for name in wanted if name not in [row["case"] for row in kept]]
        each(given.jobs, lambda name: planned(name, given.gpu, folder), left)
        if not given.dry_run:
            each(given.builds, lambda row: measured(row, folder), list(rows.values()))
    print(f"{_summary(list(rows.values()))}; {time.perf_counter() - began:.0f} s")
    return 1 if any(row.error or row.ran is False for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
