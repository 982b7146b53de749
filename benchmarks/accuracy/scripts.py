"""Predict training scripts as they are, and measure the same scripts on the GPU.

python -m benchmarks.accuracy.scripts [names...]        # on a GPU; results/scripts_<gpu>.csv
python -m benchmarks.accuracy.scripts --predict-only    # anywhere
python -m benchmarks.accuracy.scripts --programs FOLDER --out F     # programs that you have downloaded

The scripts are those of training_scripts/, or programs of others; each runs in a temporary folder. A
prediction is `python -m oomph predict script.py --json`. A measurement is a fresh process that runs the
script until every optimizer has stepped three times, or until the script ends. Only memory is measured, so
several scripts share the GPU.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import runpy
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from benchmarks import RESULTS, ROOT

FOLDER = Path(__file__).parent / "training_scripts"
_TORCHRUN = ("ddp",)
_STEPS = 3
_MOST_STEPS = 30  # of one optimizer, while another has not stepped three times
_SECONDS = 240  # that one process may take
_MEASURED = "oomph-benchmark-measured "  # the line of the measuring process that holds its result


@dataclass(frozen=True)
class Program:
    name: str
    command: tuple[str, ...]  # script.py --flags, or -m package.module --flags
    folder: Path | None = None  # where it runs: in a copy
    environment: dict[str, str] = field(default_factory=dict)
    torchrun: bool = False

    @classmethod
    def own(cls, name: str) -> Program:
        return cls(name, (str(FOLDER / f"{name}.py"),), torchrun=name in _TORCHRUN)

    @classmethod
    def public(cls, folder: Path) -> Program:
        """A folder with a program that anyone can download, and case.json: {"command": [...]}, and perhaps
        "environment": {...} and "torchrun": true."""
        case = json.loads((folder / "case.json").read_text())
        environment = case.get("environment", {})
        return cls(folder.name, tuple(case["command"]), folder, environment, case.get("torchrun", False))


@dataclass(frozen=True)
class Row:
    """One script. Sizes in bytes, errors in percent of the measured size."""

    script: str
    gpu: str
    torch: str = ""
    predicted_allocated: int | None = None
    lowest_allocated: int | None = None  # where it depends on values
    highest_allocated: int | None = None
    measured_allocated: int | None = None
    allocated_error_percent: float | None = None
    predicted_reserved: int | None = None
    measured_reserved: int | None = None
    reserved_error_percent: float | None = None
    steps: int | None = None  # of the optimizer that stepped most, in the measured run
    predict_seconds: float | None = None
    error: str = ""


# ------------------------------------------------------------------------- in the measuring process


def run_script(command: Sequence[str]) -> NoReturn:
    """Run `script.py --flags` or `-m package.module --flags` as __main__ until its optimizers have stepped
    three times, then print the peaks."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
    make = torch.optim.Optimizer.__init__

    def counted(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        steps[self] = 0
        make(self, *args, **kwargs)

    def finish() -> NoReturn:
        torch.cuda.synchronize()
        found = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "measured_allocated": torch.cuda.max_memory_allocated(),
            "measured_reserved": torch.cuda.max_memory_reserved(),
            "steps": max(steps.values(), default=0),
        }
        os.write(1, f"\n{_MEASURED}{json.dumps(found)}\n".encode())
        os._exit(0)

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps[optimizer] = steps.get(optimizer, 0) + 1
        if min(steps.values()) >= _STEPS or max(steps.values()) >= _MOST_STEPS:
            finish()

    torch.optim.Optimizer.__init__ = counted  # type: ignore[method-assign]
    register_optimizer_step_post_hook(stepped)
    if command[0] == "-m":
        sys.argv, sys.path[0] = list(command[1:]), os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(command), str(Path(command[0]).absolute().parent)
        runpy.run_path(command[0], run_name="__main__")
    finish()


# --------------------------------------------------------------------------------------- all of them


def _python(arguments: Sequence[str], program: Program, environment: dict[str, str]) -> tuple[str, str]:
    """stdout of `python arguments`, run in a copy of the program's folder, and if it failed the last line of
    its stderr."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {"OMP_NUM_THREADS": "2", **os.environ, **program.environment, **environment}
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if program.folder is not None:
            shutil.copytree(program.folder, folder, dirs_exist_ok=True)
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=folder,
                env=variables,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return "", f"took more than {_SECONDS} s"
    last = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
    return done.stdout, "" if done.returncode == 0 else f"status {done.returncode}: {last[-1]}"[:300]


def predict(program: Program, gpu: str) -> Row:
    target = 2 if program.command[0] == "-m" else 1
    options = ["--gpu", gpu, "--json", *(["--torchrun"] if program.torchrun else [])]
    command = [*program.command[:target], *options, "--", *program.command[target:]]
    began = time.perf_counter()
    output, error = _python(["-m", "oomph", "predict", *command], program, {})
    row = Row(program.name, gpu, predict_seconds=round(time.perf_counter() - began, 1))
    try:
        found = json.loads(output)  # also of a script that does not fit
        peak, interval = found["peak"], found["interval"]
    except (ValueError, KeyError):
        return replace(row, error=f"prediction: {error or 'no JSON'}")
    return replace(
        row,
        predicted_allocated=peak["allocated"],
        lowest_allocated=interval["low"]["allocated"] if interval else None,
        highest_allocated=interval["high"]["allocated"] if interval else None,
        predicted_reserved=peak["reserved"],
    )


def measure(program: Program, row: Row) -> Row:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if program.torchrun else {}
    code = "import sys; from benchmarks.accuracy.scripts import run_script; run_script(sys.argv[1:])"
    output, error = _python(["-c", code, *program.command], program, environment)
    found = [line.removeprefix(_MEASURED) for line in output.splitlines() if line.startswith(_MEASURED)]
    if not found:
        return replace(row, error=f"{row.error} measurement: {error or 'no result'}".strip())
    row = replace(row, **json.loads(found[0]))
    return replace(
        row,
        allocated_error_percent=_error(row.predicted_allocated, row.measured_allocated),
        reserved_error_percent=_error(row.predicted_reserved, row.measured_reserved),
    )


def _error(predicted: int | None, measured: int | None) -> float | None:
    return round(100 * (predicted / measured - 1), 3) if predicted and measured else None


def _line(row: Row) -> str:
    def mib(size: int | None) -> str:
        return "-" if size is None else f"{size / 2**20:.1f}"

    def percent(error: float | None) -> str:
        return "-" if error is None else f"{error:+.2f}%"

    return (
        f"{row.script:24} allocated {mib(row.predicted_allocated):>8} {mib(row.measured_allocated):>8} "
        f"{percent(row.allocated_error_percent):>8}  reserved {mib(row.predicted_reserved):>8} "
        f"{mib(row.measured_reserved):>8} {percent(row.reserved_error_percent):>8}  "
        f"predicted in {row.predict_seconds or 0:.0f} s  {row.error}"
    ).rstrip()


def _summary(rows: Sequence[Row]) -> str:
    text = f"{len(rows)} scripts, {sum(bool(row.error) for row in rows)} failed"
    for name in ("allocated", "reserved"):
        errors = [abs(e) for row in rows if (e := getattr(row, f"{name}_error_percent")) is not None]
        if errors:
            text += f"; {name}: median {statistics.median(errors):.2f} %, worst {max(errors):.2f} %"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="scripts (default: all)")
    parser.add_argument("--programs", type=Path, help="a folder of programs, each a folder with case.json")
    parser.add_argument("--gpu", default="h200", help="the catalogue's name of this machine's GPU")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--measure-only", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.programs is not None:
        names = given.names or sorted(path.parent.name for path in given.programs.glob("*/case.json"))
        programs = [Program.public(given.programs.absolute() / name) for name in names]
    else:
        names = given.names or sorted(path.stem for path in FOLDER.glob("*.py"))
        programs = [Program.own(name) for name in names]
    stored = not given.predict_only and not given.measure_only and given.programs is None
    out = given.out or (RESULTS / f"scripts_{given.gpu}.csv" if stored else None)
    began, rows = time.perf_counter(), []

    def one(program: Program) -> Row:
        row = Row(program.name, given.gpu) if given.measure_only else predict(program, given.gpu)
        return row if given.predict_only else measure(program, row)

    with ThreadPoolExecutor(given.jobs) as pool:
        for done in as_completed([pool.submit(one, program) for program in programs]):
            rows.append(done.result())
            print(_line(rows[-1]), flush=True)
            if out is not None:  # after every script: a time limit keeps what is done
                with out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(asdict(row) for row in sorted(rows, key=lambda row: row.script))
    print(f"{_summary(rows)}; {time.perf_counter() - began:.0f} s")
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
