"""`oomph fit` of scripts: against sets predicted one by one, with accumulated passes, beside a visible GPU.

python -m benchmarks.fixes.scripts best [KIND ...]      # results/fit_scripts.csv
python -m benchmarks.fixes.scripts passes               # results/fit_passes.csv
python -m benchmarks.fixes.scripts visible [COMMAND ...] # on a GPU: results/fit_visible.csv

best: a script and a limit. Every single exact fix, and the pairs of the five that save most, are predicted
with the whole script; the best is the fastest that fits.
passes: the step time with a fix over that without, of a script that accumulates, beside a Workload's.
visible: the answers of commands where a GPU is visible and where it is hidden, their durations aside.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import oomph
from benchmarks import RESULTS
from benchmarks.fixes import small_script
from benchmarks.rows import revision, write
from oomph import gpus
from oomph.fixes.registry import conflict
from oomph.fixes.scripts import ModelChange
from oomph.planning.programs import Fixes, ScriptProgram
from oomph.prediction import Script
from oomph.records import FixUse, Prediction
from oomph.report.fixes import short_fix_word

SCRIPT = small_script.__file__
SLOWER_BAR, RATIO_BAR = 2.0, 10.0  # percent
_CARD = gpus.find("h200")
_BEST = 5  # fixes whose pairs are predicted
CASES = {  # arguments of the script: limits, as shares of what it reserves
    ("mlp", "1"): (0.8, 0.5, 0.3),
    ("mlp", "8"): (0.6, 0.3),
    ("tanh", "1"): (0.7, 0.4, 0.25),
    ("wide", "1"): (0.95, 0.8),
    ("conv", "1"): (0.8, 0.5, 0.3),
    ("lm", "1"): (0.8, 0.5, 0.3),
    ("lm", "4"): (0.5, 0.3),
    ("gpt2", "1"): (0.7, 0.4),
}
PASSES = (1, 2, 4, 8, 16, 32)
FIXES = ("activation_checkpointing", "activation_offloading")


def _words(fixes: Fixes) -> str:
    return " + ".join(map(short_fix_word, fixes))


def _revision() -> tuple[str, str, str]:
    """Commit, date and torch, for every row."""
    found = revision()
    return found["commit"], found["date"], torch.__version__


# ------------------------------------------------------------------------------------------------------- best


@dataclass(frozen=True)
class BestRow:
    """Times are slowdowns by the roofline; sizes in MiB."""

    script: str
    limit: int
    reserved: int
    sets: int  # that were predicted
    best: str
    best_slowdown: float | None
    fit: str
    fits: bool
    fit_slowdown: float
    percent_slower: float | None  # fit than the best; negative: it knows a set that the comparison does not
    failed: int  # candidates of fit that could not be predicted
    cpu_seconds: float  # of fit
    commit: str
    date: str
    torch: str

    @property
    def holds(self) -> bool:
        if self.failed or not self.sets:
            return False
        return self.percent_slower is None or (self.fits and self.percent_slower <= SLOWER_BAR)


def one_by_one(script: Script) -> tuple[Prediction, dict[Fixes, Prediction]]:
    """As it is, and with each fix and the pairs of the best."""
    program = ScriptProgram(script, _CARD, None)
    plain = program.predict()

    def search(progress: object) -> dict[Fixes, Prediction]:
        uses = [one.use for one in program.proposals(plain).found if one.kind == "exact"]
        found = _predicted(program, [(use,) for use in uses])
        best = sorted(found, key=lambda fixes: found[fixes].peak.reserved)[:_BEST]
        pairs = [a + b for a, b in itertools.combinations(best, 2) if not conflict(a[0], b[0])]
        return found | _predicted(program, pairs)

    return plain, program.search(search, lambda text, fraction: None)


def _predicted(program: ScriptProgram, sets: Sequence[Fixes]) -> dict[Fixes, Prediction]:
    found = program.predict_with(sets)
    return {sets[number]: each for number, each in found if isinstance(each, Prediction)}


def best(kinds: Sequence[str], out: Path) -> int:
    rows: list[BestRow] = []
    for arguments, shares in CASES.items():
        if kinds and arguments[0] not in kinds:
            continue
        script = Script(SCRIPT, arguments)
        plain, found = one_by_one(script)
        for share in shares:
            rows.append(_compared(script, int(share * plain.peak.reserved), plain, found))
            print(rows[-1], flush=True)
            write(out, rows)
    held = sum(row.holds for row in rows)
    print(f"{held} of {len(rows)} fits are at most {SLOWER_BAR:g} % slower than the best")
    return 0 if held == len(rows) else 1


def _compared(script: Script, limit: int, plain: Prediction, found: dict[Fixes, Prediction]) -> BestRow:
    fitting = {fixes: each for fixes, each in found.items() if each.peak.reserved + each.margin <= limit}
    first = min(fitting, key=lambda fixes: fitting[fixes].step_seconds or 0.0, default=None)
    slowdown = None if first is None else (fitting[first].step_seconds or 0) / (plain.step_seconds or 1)
    began = _cpu_seconds()
    plan = oomph.fit(script, gpu=_CARD, max=limit)
    for one in plan.failed:
        print(f"{_words(one.fixes)}: {one.reason}")
    slower = None if slowdown is None else 100 * (plan.after.slowdown / slowdown - 1)
    return BestRow(
        " ".join(script.arguments),
        limit >> 20,
        plain.peak.reserved >> 20,
        len(found),
        "" if first is None else _words(first),
        slowdown and round(slowdown, 3),
        _words(plan.fixes),
        plan.fits,
        round(plan.after.slowdown, 3),
        slower and round(slower, 1),
        len(plan.failed),
        round(_cpu_seconds() - began, 1),
        *_revision(),
    )


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


# ----------------------------------------------------------------------------------------------------- passes


@dataclass(frozen=True)
class PassesRow:
    script: str
    fix: str
    passes: int
    script_ratio: float  # of the step time with the fix to that without
    workload_ratio: float
    percent_off: float
    commit: str
    date: str
    torch: str


def passes(kinds: Sequence[str], out: Path) -> int:
    rows: list[PassesRow] = []
    for kind, count, fix in itertools.product(kinds or ("tanh", "lm"), PASSES, FIXES):
        change = ModelChange([FixUse(fix)])
        plain, fixed = (
            oomph.predict(Script(SCRIPT, (kind, str(count)), on_optimizer=each), gpu=_CARD)
            for each in (None, change)
        )
        step = oomph.Workload(
            model=functools.partial(small_script.model_of, kind),
            batch=functools.partial(small_script.batch_of, kind),
            loss=functools.partial(small_script.loss_of, kind),
            optimizer=torch.optim.AdamW,
            accumulate=count,
        )
        of_workload = [oomph.predict(each, gpu=_CARD) for each in (step, oomph.apply([fix], step))]
        ratios = [
            after.step_seconds / before.step_seconds
            for before, after in ((plain, fixed), of_workload)
            if before.step_seconds and after.step_seconds
        ]
        off = 100 * (ratios[0] / ratios[1] - 1)
        row = PassesRow(kind, fix, count, *(round(each, 3) for each in ratios), round(off, 1), *_revision())
        rows.append(row)
        print(row, flush=True)
        write(out, rows)
    worst = max(abs(row.percent_off) for row in rows)
    print(f"worst: {worst} % off")
    return 0 if worst <= RATIO_BAR else 1


# ---------------------------------------------------------------------------------------------------- visible

_FOLDER = Path(__file__).parents[1]
SCRIPTS = [
    *((SCRIPT, "--", *arguments) for arguments in CASES),
    *(
        (str(_FOLDER / "accuracy" / "training_scripts" / f"{name}.py"), "--")
        for name in ("amp_bf16", "cnn_cifar", "checkpointed_vit", "ema")
    ),
]
WORKLOADS = [
    (f"{_FOLDER.parent}/examples/gpt2.py:workload",),
    *((f"{__file__}:{kind}_step",) for kind in ("mlp", "tanh", "wide", "conv", "lm")),
]
COMMANDS = {
    "predict": ("--json", "--gpu", "rtx3060"),
    "diagnose": ("--json", "--gpu", "rtx3060"),
    "fixes": ("--json", "--gpu", "rtx3060", "--only", FIXES[0], "--only", FIXES[1]),
    "fit": ("--json", "--gpu", "h200", "--max"),
}
_DURATIONS = ("seconds", "compile_seconds", "predict_seconds")


def __getattr__(name: str) -> oomph.Workload:
    """`mlp_step` and so on, as targets."""
    kind = name.removesuffix("_step")
    if kind == name or kind not in small_script.ROWS:
        raise AttributeError(name)
    return oomph.Workload(
        model=functools.partial(small_script.model_of, kind),
        batch=functools.partial(small_script.batch_of, kind),
        loss=functools.partial(small_script.loss_of, kind),
        optimizer=torch.optim.AdamW,
    )


@dataclass(frozen=True)
class VisibleRow:
    command: str
    target: str
    status: str
    equal: bool
    differs: str  # the first difference
    commit: str
    date: str
    torch: str


def visible(commands: Sequence[str], out: Path, jobs: int) -> int:
    revision = _revision()

    @functools.cache
    def run(command: str, target: tuple[str, ...], hidden: bool, *more: str) -> tuple[int | str, Any, str]:
        """Status, answer and the end of what it said."""
        name, *rest = target
        words = [sys.executable, "-m", "oomph", command, name, *COMMANDS[command], *more, *rest]
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})}
        try:
            done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=100)
            return (
                done.returncode,
                json.loads(done.stdout, object_hook=_without_durations),
                done.stderr[-300:],
            )
        except subprocess.TimeoutExpired:
            return "no answer", None, ""
        except json.JSONDecodeError:
            return done.returncode, None, done.stderr[-300:]

    def compared(command: str, target: tuple[str, ...]) -> VisibleRow:
        more = ()
        if command == "fit":
            _, found, _ = run("predict", target, True)
            reserved = found["peak"]["reserved"] if found else 1 << 30
            more = (f"{int(0.6 * reserved)}B",)
        shown, hidden = (run(command, target, each, *more) for each in (False, True))
        equal = shown[:2] == hidden[:2] and shown[1] is not None
        differs = "" if equal else f"{_difference(shown[1], hidden[1])} | {shown[2]} | {hidden[2]}"
        short = " ".join(Path(word).name for word in target)
        return VisibleRow(command, short, str(shown[0]), equal, differs, *revision)

    rows: list[VisibleRow] = []
    with ThreadPoolExecutor(jobs) as pool:
        asked = [
            pool.submit(compared, command, target)
            for command in commands or COMMANDS
            for target in (*SCRIPTS, *WORKLOADS)
        ]
        for row in as_completed(asked):
            rows.append(row.result())
            write(out, rows)  # as they come: the machine may be gone before the last
            if not rows[-1].equal:
                print(rows[-1], flush=True)
    equal = sum(row.equal for row in rows)
    print(f"{equal} of {len(rows)} answers are equal")
    return 0 if equal == len(rows) else 1


def _without_durations(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in _DURATIONS}


def _difference(a: Any, b: Any, at: str = "") -> str:
    """The first one, with its place."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((_difference(a[key], b[key], f"{at}.{key}") for key in a if a[key] != b[key]), "")
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next(
            (_difference(x, y, f"{at}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), ""
        )
    return f"{at}: {str(a)[:200]} | {str(b)[:200]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("best", "passes", "visible"))
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=4)
    given = parser.parse_args()
    if given.what == "best":
        return best(given.kinds, given.out or RESULTS / "fit_scripts.csv")
    if given.what == "passes":
        return passes(given.kinds, given.out or RESULTS / "fit_passes.csv")
    return visible(given.kinds, given.out or RESULTS / "fit_visible.csv", given.jobs)


if __name__ == "__main__":
    sys.exit(main())
