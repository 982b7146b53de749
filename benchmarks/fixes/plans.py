"""Plans of `oomph fit` on a real GPU: does the step stay within its budget, and is it as fast as predicted?

python -m benchmarks.fixes.plans [names...] --gpu h200 --jobs 14      # on a GPU; results/plans_<gpu>.csv
python -m benchmarks.fixes.plans --list | --dry-run       # anywhere: the cases; or their plans only
python -m benchmarks.fixes.plans --predict                # anywhere: predict the fixes of stored rows again

All plans are made first, several at a time. Then every step runs in two fresh processes: with its plan, under
torch.cuda.set_per_process_memory_fraction, and as it is. The processes of a few cases build their models side
by side. Then the two of a case step in turns, a few steps each, with the machine to themselves. Steps of many
small kernels take the host's time, which differs by up to 40 % from minute to minute: of each process the
fastest turn counts. Sessions differ, too: where the file has a row with the same fixes, times are the mean of
all its sessions. The file is written after every case; --missing keeps its measured rows; --folder keeps the
plans and the seconds of every step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import RESULTS, ROOT, SOURCES
from benchmarks.rows import error_percent, in_process, send, stored, summary, write

SCRIPTS = ROOT / "benchmarks" / "accuracy" / "training_scripts"
_TURNS, _STEPS = 5, 4  # of each process, and in each turn: the first step of a turn is not timed
_LONG_TURNS, _LONG_STEPS = 1, 2
_SECONDS = 400  # that one process may take
_MOST = 130 * 2**30  # bytes that a step may need to be run as it is
_IMPORTED = ("transformers", "accelerate", "timm", "torchvision", "diffusers", "peft", "lightning")


@dataclass(frozen=True)
class Case:
    target: str  # a workload of the accuracy or speed benchmark, a config with overrides, or a script
    limit: float | str  # of what the allocator reserves as it is; or a budget, with the CUDA context
    allow: tuple[str, ...] = ("exact",)
    is_long: bool = False  # only if its whole name is given: a minute to step or to compile

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
            Case(name, limit, ("exact", "compile"), True)
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
    sessions: int = 1  # whose mean the measured times are
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
        return speed.of_config(file, *overrides)
    if name == "llama-1b-8k":
        return speed.transformer("Llama", 1, 8192, **speed.LLAMA_1B)
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


def predict_here(name: str, fixes: str, limit: int, gpu: str) -> dict[str, Any]:
    import oomph
    from oomph.fixes import uses_of
    from oomph.fixes.scripts import ModelChange
    from oomph.prediction import Script

    target, uses = target_of(CASES[name].target), uses_of(fixes.split(" + "))
    if isinstance(target, Script):
        fixed: Any = replace(target, on_optimizer=ModelChange(uses))
    else:
        fixed = oomph.apply(uses, target)
    before = oomph.predict(target, gpu=gpu)
    after = oomph.predict(fixed, gpu=gpu, max=limit)
    assert before.step_seconds
    assert after.step_seconds
    return {
        "reserved_before": before.peak.reserved,
        "predicted_allocated": after.peak.allocated,
        "predicted_reserved": after.peak.reserved,
        "predicted_seconds": round(after.step_seconds, 5),
        "predicted_ratio": round(after.step_seconds / before.step_seconds, 4),
    }


class Turns:
    """Whose turn it is to step: the parent process writes a line for each, and is answered after it."""

    def __init__(self, case: Case) -> None:
        self.turns, self.steps = (_LONG_TURNS, _LONG_STEPS) if case.is_long else (_TURNS, _STEPS)
        self.all_steps = self.turns * self.steps
        self._answers = os.dup(1)
        os.dup2(2, 1)  # what a script prints

    def before_step(self, step: int) -> None:
        """Wait for the turn that begins with the step, counted from 1."""
        if (step - 1) % self.steps == 0:
            os.write(self._answers, b"done\n")  # for the first time: built
            sys.stdin.readline()

    def fastest(self, seconds: Sequence[float]) -> float | None:
        """Of the seconds of all steps: the median of the fastest turn."""
        turns = [seconds[first + 1 : first + self.steps] for first in range(0, len(seconds), self.steps)]
        return min((statistics.median(turn) for turn in turns if turn), default=None)


def run_here(name: str, plan: str, out: str) -> None:
    """Steps on the GPU with a plan, within its limit; `plan` may be "": as it is."""
    import torch

    import oomph
    from oomph.measurement.measure import CudaMeter, allocator_set_to, observe
    from oomph.planning import read_plan
    from oomph.prediction import Script

    case, chosen = CASES[name], read_plan(plan) if plan else None
    turns = Turns(case)
    target = target_of(case.target)
    torch.set_num_threads(2)
    device = torch.device("cuda", 0)
    torch.cuda.init()
    if chosen is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (chosen.limit + 1) / total), device)
    if isinstance(target, Script):
        source = Path(target.path).read_text()
        for module in _IMPORTED:
            if module in source:
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
        run_script(target.path, plan, turns, out)
    given = oomph.apply(chosen, target) if chosen is not None else target
    with without_initial_values():
        given = _with_model(given)

    def listener(step: int, moment: str) -> None:
        if moment == "begin":
            turns.before_step(step)

    with allocator_set_to(given.allocator, device):
        readings = observe(given, device, turns.all_steps, CudaMeter(device), listener)
    peaks = [(reading.peak, reading.reserved) for reading in readings if reading.step]
    by_moment: dict[str, list[float]] = {}  # seconds since the step began; only "end" waits for the GPU
    for reading in readings:
        if reading.step:
            by_moment.setdefault(reading.moment, []).append(reading.seconds)
    _write(out, *map(max, zip(*peaks, strict=True)), turns, by_moment)


def _with_model(workload: Any) -> Any:
    model = workload.model()
    return replace(workload, model=lambda: model)


def _write(
    out: str, allocated: int, reserved: int, turns: Turns, by_moment: Mapping[str, Sequence[float]]
) -> None:
    import torch

    found = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "allocated": allocated,
        "reserved": reserved,
        "seconds": turns.fastest(by_moment["end"]),
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "by_moment": by_moment,
    }
    Path(out).write_text(json.dumps(found))


def run_script(path: str, plan: str, turns: Turns, out: str) -> NoReturn:
    """Until its optimizer has stepped often enough, or to its end."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from oomph.fixes import uses_of
    from oomph.fixes.scripts import ModelChange, on_each_optimizer, set_allocator_for

    seconds: list[float] = []
    began = 0.0

    def finish() -> NoReturn:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        _write(out, *peaks, turns, {"end": seconds})
        os._exit(0)

    def stepped(*_: Any) -> None:
        nonlocal began
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if len(seconds) == turns.all_steps:
            finish()
        turns.before_step(len(seconds) + 1)
        began = time.perf_counter()

    register_optimizer_step_post_hook(stepped)
    sys.argv, sys.path[0] = [path], str(Path(path).parent)
    uses = uses_of(plan) if plan else []
    set_allocator_for(uses)
    change: Any = ModelChange(uses) if uses else (lambda optimizer: None)
    turns.before_step(1)
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


class Child:
    """`python -m benchmarks.fixes.plans arguments`, in a folder of its own."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        paths = [*SOURCES, os.environ.get("PYTHONPATH", "")]
        settings = {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(paths), **variables}
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._errors = Path(self._folder.name) / "stderr"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fixes.plans", *arguments],
                cwd=self._folder.name,
                env={**os.environ, **settings},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._limit = threading.Timer(_SECONDS, self._process.kill)
        self._limit.start()

    def wait(self) -> None:
        """Until it is built, or has made its turn, or has ended."""
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def take_turn(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        self.wait()

    def end(self) -> str:
        """Wait for its end. Its error, innermost places first; "" without one."""
        self._process.communicate()
        self._limit.cancel()
        printed = self._errors.read_text(errors="replace").splitlines()
        self._folder.cleanup()
        lines = [line for line in printed if line.strip()] or ["no message"]
        places = [" ".join(line.split()) for line in lines if line.lstrip().startswith('File "')]
        message = f"status {self._process.returncode}: {lines[-1]}; {'; '.join(places[:-5:-1])}"
        return "" if self._process.returncode == 0 else message[:1500]


def planned(name: str, gpu: str, folder: Path) -> Row:
    from oomph.planning import read_plan
    from oomph.report.fixes import fix_word

    row, out = Row(name, gpu), folder / f"{_file(name)}.plan.json"
    if not out.exists():
        # Without a GPU, predictions may run in forks.
        fit = Child("--plan-here", name, "--gpu", gpu, "--out", str(out), CUDA_VISIBLE_DEVICES="")
        if error := fit.end():
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


def predicted_again(row: dict[str, str], gpu: str) -> dict[str, Any]:
    """The row with what is predicted now of its fixes."""
    words = ("--predict-here", row["case"], "--fixes", row["fixes"], "--limit", row["limit"], "--gpu", gpu)
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    found = {**row, **in_process("benchmarks.fixes.plans", *words, seconds=_SECONDS, **variables)}
    for name in ("allocated", "reserved", "ratio"):
        real = row[f"measured_{name}"]
        found[f"{name}_error_percent"] = error_percent(
            found[f"predicted_{name}"], float(real) if real else None
        )
    return found


def started(row: Row, folder: Path) -> list[Child]:
    """With its plan, and as it is, if that fits this GPU."""
    name = _file(row.case)
    plans = {"out": str(folder / f"{name}.plan.json"), "before": ""}
    if (row.reserved_before or 0) + row.limit >= _MOST:
        del plans["before"]
    for end in plans:
        (folder / f"{name}.{end}").unlink(missing_ok=True)
    return [
        Child("--run-here", row.case, "--out", str(folder / f"{name}.{end}"), "--plan", plan)
        for end, plan in plans.items()
    ]


def measured(row: Row, children: Sequence[Child], folder: Path, earlier: Mapping[str, str]) -> Row:
    """Let the processes, which are built, step in turns. `earlier`: the row of other sessions."""
    for _ in range(_LONG_TURNS if CASES[row.case].is_long else _TURNS):
        for child in children:
            child.take_turn()
    error, *others = [child.end() for child in children]
    out, before_out = (folder / f"{_file(row.case)}.{end}" for end in ("out", "before"))
    if not out.exists():
        ran = False if "OutOfMemory" in error or "out of memory" in error else None
        return replace(row, ran=ran, error=error)
    after, before = (json.loads(file.read_text()) if file.exists() else {} for file in (out, before_out))
    seconds, seconds_before, sessions = after["seconds"], before.get("seconds"), 1
    if (
        seconds
        and seconds_before
        and earlier.get("fixes") == row.fixes
        and earlier["measured_seconds_before"]
    ):
        sessions += int(earlier["sessions"])
        seconds += (float(earlier["measured_seconds"]) - seconds) * (1 - 1 / sessions)
        seconds_before += (float(earlier["measured_seconds_before"]) - seconds_before) * (1 - 1 / sessions)
    ratio = seconds / seconds_before if seconds and seconds_before else None
    return replace(
        row,
        gpu=after["gpu"],
        torch=after["torch"],
        ran=True,
        retries=after["retries"],
        measured_allocated=after["allocated"],
        measured_reserved=after["reserved"],
        allocated_error_percent=error_percent(row.predicted_allocated, after["allocated"]),
        reserved_error_percent=error_percent(row.predicted_reserved, after["reserved"]),
        sessions=sessions,
        measured_seconds=seconds and round(seconds, 5),
        measured_seconds_before=seconds_before and round(seconds_before, 5),
        measured_ratio=ratio and round(ratio, 4),
        ratio_error_percent=error_percent(row.predicted_ratio, ratio),
        error="".join(others),
    )


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
    failed = sum(bool(row.error) for row in rows)
    text = f"{len(rows)} plans, {within} ran within their budget, {beyond} ran out of memory, {failed} failed"
    return f"{text}; {summary(rows, 'allocated', 'reserved', 'ratio')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases whose names begin so (default: all short ones)")
    parser.add_argument("--gpu", default="h200", help="the catalogue's name of this machine's GPU")
    parser.add_argument("--jobs", type=int, default=2, help="plans at a time")
    parser.add_argument("--builds", type=int, default=8, help="cases that are built at a time")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="make the plans only")
    parser.add_argument("--predict", action="store_true", help="predict the fixes of the rows of --out again")
    parser.add_argument("--missing", action="store_true", help="keep measured rows of --out")
    parser.add_argument("--folder", type=Path, help="keep plans and readings here; plans in it are used")
    parser.add_argument("--out", type=Path)
    for option in ("--plan-here", "--run-here", "--predict-here", "--plan", "--fixes", "--limit"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plan_here:
        plan_here(given.plan_here, given.gpu, str(given.out))
        return 0
    if given.run_here:
        run_here(given.run_here, given.plan, str(given.out))
        return 0
    if given.predict_here:
        send(predict_here(given.predict_here, given.fixes, int(given.limit), given.gpu))
        return 0
    wanted = [
        name
        for name, case in CASES.items()
        if name in given.names or (not case.is_long and name.startswith(tuple(given.names) or ""))
    ]
    if given.list:
        print("\n".join(wanted))
        return 0
    out = given.out or RESULTS / f"plans_{given.gpu}.csv"
    if given.predict:
        with ThreadPoolExecutor(given.jobs) as pool:
            write(out, list(pool.map(lambda row: predicted_again(row, given.gpu), stored(out))))
        return 0
    rows: dict[str, Row] = {}
    earlier = {row["case"]: row for row in stored(out) if row["ran"] == "True"}
    kept = [row for name, row in earlier.items() if given.missing and name in wanted]

    def finished(row: Row) -> None:
        rows[row.case] = row
        print(_line(row), flush=True)
        write(out, [*kept, *(rows[name] for name in wanted if name in rows)])

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(given.jobs) as pool:
        folder = given.folder.absolute() if given.folder else Path(temporary)
        folder.mkdir(exist_ok=True)
        left = [name for name in wanted if name not in [row["case"] for row in kept]]
        for done in as_completed([pool.submit(planned, name, given.gpu, folder) for name in left]):
            finished(done.result())
        runnable = [row for row in rows.values() if row.fits and row.fixes and not given.dry_run]
        for first in range(0, len(runnable), given.builds):
            some = [(row, started(row, folder)) for row in runnable[first : first + given.builds]]
            for _, children in some:
                for child in children:
                    child.wait()
            for row, children in some:
                finished(measured(row, children, folder, earlier.get(row.case, {})))
    print(f"{_summary(list(rows.values()))}; {time.perf_counter() - began:.0f} s")
    return 1 if any(row.error or row.ran is False for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
