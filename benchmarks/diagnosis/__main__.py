"""`python -m benchmarks.diagnosis [NAME ...]`: is the planted cause named first, at the planted line?

Writes benchmarks/results/diagnosis.csv. The naive systems are run by `--systems`, which takes minutes.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import oomph
from benchmarks.rows import write
from oomph.records import Diagnosis
from oomph_lab.cli.targets import ConfigTarget

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "results" / "diagnosis.csv"
FILES = ("language_models", "training_loops", "unseen")
SYSTEMS = {
    "hn_xs": "state transitions",
    "pythia_70m": "broadcast product",
    "longctx_4b": "logits",
    "npt_default": "per-token weight deltas",
    "ginr": "attention matrices",
}


def planted(module: str) -> Iterator[tuple[str, str, range | None]]:
    """Program, pattern and the lines of its statement. A class belongs to the program that follows it."""
    text = (FOLDER / f"{module}.py").read_text()
    tree = ast.parse(text)
    marks = {
        number: (match[2].strip(), not match[1])
        for number, line in enumerate(text.splitlines(), 1)
        if (match := re.search(r"# cause(, on no single line)?: (.+)", line))
    }
    statements = [
        range(node.lineno, (node.end_lineno or 0) + 1)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Return))
    ]
    after = 0
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.args.args:
            for line in (line for line in marks if after < line <= (node.end_lineno or 0)):
                pattern, at_line = marks[line]
                lines = min((each for each in statements if line in each), key=len, default=range(line, line))
                yield node.name, pattern, lines if at_line else None
            after = node.end_lineno or 0


def row(name: str, pattern: str, lines: range | None, found: Diagnosis, seconds: float) -> dict[str, object]:
    first = found.findings[0]
    covered = sum(one.bytes for one in found.findings) / found.prediction.peak.reserved
    return {
        "program": name,
        "pattern": pattern,
        "line": lines[0] if lines else None,
        "first": first.pattern,
        "first_line": first.sites[0].line if first.sites else None,
        "right": first.pattern == pattern,
        "line_named": lines is None or any(site.line in lines for site in first.sites),
        "share_of_peak": round(first.bytes / found.prediction.peak.reserved, 3),
        "covered": round(covered, 3),
        "growth": first.growth,
        "formula": first.formula,
        "seconds": round(seconds, 1),
    }


def main(arguments: list[str]) -> None:
    rows = []
    for module in FILES:
        if not (FOLDER / f"{module}.py").exists():
            continue
        programs = importlib.import_module(f"benchmarks.diagnosis.{module}")
        for name, pattern, lines in planted(module):
            if [word for word in arguments if not word.startswith("-")] and name not in arguments:
                continue
            began = time.perf_counter()
            found = oomph.diagnose(getattr(programs, name))
            rows.append({"file": module, **row(name, pattern, lines, found, time.perf_counter() - began)})
            _print(rows[-1])
    for name, pattern in SYSTEMS.items() if "--systems" in arguments else ():
        began = time.perf_counter()
        config = ConfigTarget(f"{name}.yaml", ("form=naive", "data.source=stdlib"))
        found = oomph.diagnose(config.workload())
        rows.append({"file": "systems", **row(name, pattern, None, found, time.perf_counter() - began)})
        _print(rows[-1])
    right = sum(bool(each["right"]) for each in rows)
    named = sum(bool(each["line_named"]) for each in rows)
    print(f"{right} of {len(rows)} causes named first; the line named for {named}")
    if not [word for word in arguments if not word.startswith("-")]:
        write(RESULTS, rows)


def _print(one: dict[str, object]) -> None:
    mark = "ok  " if one["right"] and one["line_named"] else "LINE" if one["right"] else "MISS"
    columns = ("program", "pattern", "line", "first", "first_line", "growth", "formula", "seconds")
    print(mark, *(one[column] for column in columns), sep=" | ", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
