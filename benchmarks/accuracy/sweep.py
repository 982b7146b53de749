"""Which models of public libraries can be predicted: every architecture of transformers, and many others.

python -m benchmarks.accuracy.sweep [--jobs N] [names...]   # anywhere; results/sweep.csv
python -m benchmarks.accuracy.sweep --measure               # on a GPU: also run each model there
python -m benchmarks.accuracy.sweep --list

Each model is built from a small config and trained as a new user would: forward, backward, AdamW. It runs on
the CPU first, which says whether the program works; then its step is predicted. A program that works and
cannot be predicted fails through our fault. Packages that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from benchmarks.accuracy import architectures
from benchmarks.accuracy.architectures import Case, TooLarge, Variant
from benchmarks.rows import error_percent, errors_of, median, stored, worst, write

TRACED, PROGRAM_FAILS, OUR_FAULT = "traced", "program fails", "our fault"
_CPU_SECONDS = 40  # of processor time that a run or a prediction may take
_WALL_SECONDS = 900
_FAILED_RULE = "oomph's estimate of"


@dataclass(frozen=True)
class Row:
    library: str
    name: str
    model: str
    sizes: str
    inputs: str
    outcome: str
    allocated: int | None  # predicted, in bytes
    seconds: float  # of the prediction
    failed_rules: int  # of ours, each with an estimate and a note in its place
    guesses: str  # notes on values that the trace cannot know
    error: str
    measured: int | None = None  # allocated on the GPU, in bytes
    error_percent: float | None = None
    gpu: str = ""


# ---------------------------------------------------------------------------- in a process of their own


def run_on_cpu(case: Case) -> tuple[str, Variant]:
    """The class of the model, and the first variant of the case that trains on the CPU."""
    first: Exception | None = None
    for sizes in architectures.sizes_of(case):
        try:
            model = architectures.build(case, sizes).train()
        except Exception as error:
            first = first or error
            continue
        tried = list(architectures.variants(case, model, sizes))
        while tried:
            variant = tried.pop(0)
            try:
                given = architectures.batch(case, model, variant)
                architectures.loss_of(case, model, given, variant).backward()
                return type(model).__name__, variant
            except Exception as error:
                first = first or error
                changed = architectures.after_failure(variant, str(error))
                if changed is not None:
                    tried.insert(0, changed)
    raise first or TooLarge("no variant")


def predict(case: Case, variant: Variant) -> tuple[int, float, list[str]]:
    """Allocated bytes, seconds and notes of the predicted step."""
    import oomph

    found = oomph.predict(lambda: training_step(case, variant))
    return found.peak.allocated, found.seconds, [note.text for note in found.notes]


def measure(case: Case, variant: Variant) -> tuple[int, str]:
    """Allocated bytes of three steps on the GPU, and its name."""
    step = training_step(case, variant)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.get_device_name()


def training_step(case: Case, variant: Variant) -> Callable[[], None]:
    model = architectures.build(case, variant.sizes).train()
    given = architectures.batch(case, model, variant)
    model.to("cuda")
    given = _to_gpu(given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        architectures.loss_of(case, model, given, variant).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _to_gpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_gpu(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_gpu(part) for part in value)
    return value.to("cuda") if isinstance(value, torch.Tensor) else value


def _child(connection: Any, function: Callable[..., Any], arguments: tuple[Any, ...], verbose: bool) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 5))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not verbose:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        connection.send(("done", function(*arguments)))
    except BaseException as error:
        if verbose:
            print(getattr(error, "traceback", "") or traceback.format_exc(), file=sys.stderr)
        cause = error
        while cause.__cause__ is not None:  # libraries that import on demand wrap what went wrong
            cause = cause.__cause__
        lines = str(cause).strip().splitlines()
        name = "" if type(error).__module__.startswith("oomph") else f"{type(cause).__name__}: "
        where = f" ({Path(error.file).name}:{error.line})" if getattr(error, "file", None) else ""
        connection.send(("failed", f"{name}{lines[0] if lines else ''}{where}"[:300]))


def in_child(
    function: Callable[..., Any], *arguments: Any, verbose: bool = False, start: str = "fork"
) -> tuple[str, Any]:
    """("done", result) or ("failed", message), from a process of its own with a limit on its time."""
    context: Any = multiprocessing.get_context(start)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, function, arguments, verbose))
    process.start()
    sender.close()
    try:
        if receiver.poll(_WALL_SECONDS):
            return receiver.recv()
    except EOFError:
        process.join(10)
        return "failed", f"the process ended with status {process.exitcode} (or {_CPU_SECONDS} s were over)"
    finally:
        process.kill()
        process.join()
    return "failed", f"not done after {_WALL_SECONDS} s"


# ------------------------------------------------------------------------------------------------ rows


def row_of(case: Case, verbose: bool = False) -> tuple[Row, Variant]:
    how, found = in_child(run_on_cpu, case)
    if how == "failed":
        return Row(case.library, case.name, "", "", "", PROGRAM_FAILS, None, 0.0, 0, "", found), Variant()
    model, variant = found
    inputs = " + ".join((*variant.inputs, "labels") if variant.labels else variant.inputs)
    began = time.perf_counter()
    how, found = in_child(predict, case, variant, verbose=verbose)
    seconds = round(time.perf_counter() - began, 1)
    described = (case.library, case.name, model, variant.sizes, inputs)
    if how == "failed":
        return Row(*described, OUR_FAULT, None, seconds, 0, "", found), variant
    allocated, seconds, notes = found
    failed = [note for note in notes if _FAILED_RULE in note]
    guesses = "; ".join(sorted({note for note in notes if note not in failed and "taken as" in note}))
    error = failed[0] if failed else ""
    seconds = round(seconds, 1)
    row = Row(*described, TRACED, allocated, seconds, len(failed), guesses[:300], error[:300])
    return row, variant


def work(cases: list[Case], rows: Any, verbose: bool, measuring: bool) -> None:
    """A worker process."""
    _silence()
    for case in cases:
        row, variant = row_of(case, verbose)
        if measuring and row.outcome == TRACED:
            how, found = in_child(measure, case, variant, start="spawn")  # CUDA does not start in forks
            if how == "failed":
                row = replace(row, error=f"measurement: {found}")
            else:
                off = error_percent(row.allocated, found[0])
                row = replace(row, measured=found[0], error_percent=off, gpu=found[1])
        rows.put(row)
    rows.put(None)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    counts = collections.Counter((row["library"], row["outcome"]) for row in rows)
    libraries = sorted({library for library, _ in counts})
    outcomes = (TRACED, PROGRAM_FAILS, OUR_FAULT)
    lines = [
        f"{library}: " + ", ".join(f"{counts[library, each]} {each}" for each in outcomes)
        for library in libraries
    ]
    if errors := errors_of(rows, "error_percent"):
        near = sum(abs(error) <= 1 for error in errors)
        text = f"{len(errors)} measured: allocated median {median(errors):.3f} %"
        lines.append(f"{text}, worst {worst(errors):+.2f} %, {near} within 1 %")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="model types and names; all without any")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--library", help="only its models")
    parser.add_argument("--measure", action="store_true", help="also run the models on this machine's GPU")
    parser.add_argument("--failed", action="store_true", help="only those that failed through our fault")
    parser.add_argument("--out", type=Path, default=RESULTS / "sweep.csv")
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    options = parser.parse_args(arguments)
    _silence()
    chosen = [
        case
        for case in architectures.cases()
        if options.library in (None, case.library) and (not options.names or case.name in options.names)
    ]
    rows: dict[Any, Any] = {(row["library"], row["name"]): row for row in stored(options.out)}
    if options.failed:
        again = {key for key, row in rows.items() if row["outcome"] == OUR_FAULT}
        chosen = [case for case in chosen if (case.library, case.name) in again]
    if options.list:
        print("\n".join(f"{case.library} {case.name}" for case in chosen))
        return 0
    verbose = len(chosen) == 1
    done: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")  # a fork of this process might not be able to use CUDA
    results = context.Queue()
    jobs = min(options.jobs, len(chosen))
    for worker in range(jobs):
        share = chosen[worker::jobs]
        context.Process(target=work, args=(share, results, verbose, options.measure)).start()
    while jobs:
        row = results.get()
        if row is None:
            jobs -= 1
            continue
        done.append(asdict(row))
        rows[row.library, row.name] = done[-1]
        off = "" if row.error_percent is None else f"{row.error_percent:+.2f} %"
        print(
            f"{len(done)}/{len(chosen)} {row.library} {row.name}: {row.outcome} {off} {row.error}", flush=True
        )
        write(options.out, [rows[key] for key in sorted(rows)])
    print(summary(done))
    return int(any(row["outcome"] == OUR_FAULT for row in done))


def _silence() -> None:
    """Import what children need once, before they are forked."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    import oomph.prediction.api  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
