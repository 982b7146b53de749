"""Are two revisions' predictions the same, event by event?

python -m benchmarks.accuracy.streams record F [--kind KIND ...] [--jobs N] [NAME ...]
python -m benchmarks.accuracy.streams compare OLD NEW [--csv F]

A change that only moves code must leave every allocation and free where it was. `record` predicts the
accuracy Workloads, the training scripts, the compiled steps and the ranks, and with `--programs FOLDER`
programs that you have downloaded (scripts.py), each in a fresh process. A row holds the revision, the number
of events and a digest of them: action, bytes, op and stream of each, in order. `compare` lists the rows that
differ, and fails where there are any; `--csv` writes all of them, as results/streams.csv. Both must have run
with the same packages.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.rows import in_process, revision, send, stored, write

KINDS = ("workloads", "scripts", "ranks", "compiled")
_SECONDS = 600  # that one process may take


def _names(kind: str) -> list[str]:
    if kind == "workloads":
        from benchmarks.accuracy.workloads import ALL

        return list(ALL)
    if kind == "scripts":
        from benchmarks.accuracy.scripts import FOLDER

        return sorted(path.stem for path in FOLDER.glob("*.py"))
    if kind == "ranks":
        from benchmarks.accuracy.ranks import RUNS

        return list(RUNS)
    from benchmarks.accuracy.compiled import _CASES

    return list(_CASES)


def _target(kind: str, name: str, programs: str) -> Any:
    if kind == "workloads":
        from benchmarks.accuracy.workloads import ALL

        return ALL[name].target
    if kind == "ranks":
        from benchmarks.accuracy.ranks import RUNS, workload

        return workload(RUNS[name])
    if kind == "compiled":
        from benchmarks.accuracy.compiled import workload_of

        return workload_of(name)
    from benchmarks.accuracy.scripts import Program
    from oomph.prediction import Script

    program = Program.own(name) if kind == "scripts" else Program.public(Path(programs) / name)
    os.environ.update(program.environment)
    if program.folder is not None:
        shutil.copytree(program.folder, ".", dirs_exist_ok=True)
    is_module, words = program.command[0] == "-m", program.command
    path, *arguments = words[1:] if is_module else words
    return Script(path, tuple(arguments), is_module, torchrun=program.torchrun)


def digest(prediction: Any) -> tuple[int, str]:
    """The number of events, and a digest of what each asks of the allocator.

    Which of several equal blocks is freed first is left out: autocast and libraries keep tensors in sets that
    are ordered by addresses, so that one revision differs from itself.
    """
    found = hashlib.sha256()
    for action, id, label in prediction.events:
        one = None if action == "mark" or id < 0 else prediction.allocations[id]
        asked = (label,) if one is None else (one.bytes, one.op, one.stream)
        found.update(repr((action, *asked)).encode())
    return len(prediction.events), found.hexdigest()[:24]


def _one(kind: str, name: str, gpu: str, programs: str) -> None:
    import torch

    import oomph

    began = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        prediction = oomph.predict(_target(kind, name, programs), gpu=gpu)
    events, text = digest(prediction)
    peaks = {"allocated": prediction.peak.allocated, "reserved": prediction.peak.reserved}
    seconds = round(time.perf_counter() - began, 1)
    send({"torch": torch.__version__, "events": events, "digest": text, **peaks, "seconds": seconds})
    os._exit(0)


def _row(kind: str, name: str, given: argparse.Namespace) -> dict[str, Any]:
    words = ["one", kind, name, "--gpu", given.gpu, "--programs", str(given.programs or "")]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            found = in_process(
                "benchmarks.accuracy.streams",
                *(*words, "--folder", folder),
                seconds=_SECONDS,
                OMP_NUM_THREADS="1",
                CUDA_VISIBLE_DEVICES="",
            )
        except RuntimeError as error:
            found = {"error": str(error)[:200]}
    return {"kind": kind, "name": name, **revision(), **found}


def record(given: argparse.Namespace) -> int:
    kinds = given.kind or KINDS
    wanted = [(kind, name) for kind in kinds if kind != "programs" for name in _names(kind)]
    if given.programs:
        wanted += [("programs", path.parent.name) for path in sorted(given.programs.glob("*/case.json"))]
    rows = {(row["kind"], row["name"]): row for row in stored(given.file)}
    wanted = [case for case in wanted if not given.names or case[1] in given.names]
    wanted = [case for case in wanted if given.again or case not in rows]
    with ThreadPoolExecutor(given.jobs) as pool:
        for job in as_completed([pool.submit(_row, *case, given) for case in wanted]):
            row = job.result()
            rows[row["kind"], row["name"]] = row
            write(given.file, rows.values(), _COLUMNS)
            print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    return 0


_COLUMNS = "kind name commit date torch events digest allocated reserved seconds error".split()
_COMPARED = "kind name before after date torch events allocated reserved same".split()


def compare(old: Path, new: Path, file: Path | None) -> int:
    before, after = ({(row["kind"], row["name"]): row for row in stored(path)} for path in (old, new))
    common = [case for case in before if case in after]
    differ = [case for case in common if before[case]["digest"] != after[case]["digest"]]
    for case in differ:
        columns = ("events", "digest", "allocated", "reserved", "error")
        print(*case, *(f"{name}: {before[case][name]} -> {after[case][name]}" for name in columns), sep="  ")
    for kind in dict.fromkeys(kind for kind, _ in common):
        cases = [case for case in common if case[0] == kind]
        failed = sum(bool(after[case]["error"]) for case in cases)
        same = len(cases) - sum(case in differ for case in cases)
        print(f"{kind}: {same} of {len(cases)} the same, {failed} of them failed in both")
    if file is not None:
        rows = [
            {**after[case], "before": before[case]["commit"], "after": after[case]["commit"]}
            | {"same": "no" if case in differ else "yes"}
            for case in common
            if not before[case]["error"]
        ]
        write(file, rows, _COMPARED)
    return 1 if differ else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorded = commands.add_parser("record")
    recorded.add_argument("file", type=Path)
    recorded.add_argument("names", nargs="*")
    recorded.add_argument("--kind", action="append", choices=(*KINDS, "programs"))
    recorded.add_argument("--programs", type=Path)
    recorded.add_argument("--gpu", default="h200")
    recorded.add_argument("--jobs", type=int, default=2)
    recorded.add_argument("--again", action="store_true", help="also those that the file has")
    compared = commands.add_parser("compare")
    compared.add_argument("old", type=Path)
    compared.add_argument("new", type=Path)
    compared.add_argument("--csv", type=Path)
    single = commands.add_parser("one")
    for name in ("kind", "name"):
        single.add_argument(name)
    for name in ("--gpu", "--programs", "--folder"):
        single.add_argument(name)
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.old, given.new, given.csv)
    if given.command == "one":
        sys.path[:0] = [os.getcwd()]
        os.chdir(given.folder)
        _one(given.kind, given.name, given.gpu, given.programs)
    return record(given)


if __name__ == "__main__":
    sys.exit(main())
