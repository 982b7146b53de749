"""What the benchmarks share: rows in files, errors, processes of their own. No torch here."""

from __future__ import annotations

import csv
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import ROOT, SOURCES

R = TypeVar("R")
Row = Any  # a dataclass, or a mapping of its columns
_RESULT = "oomph-benchmark-result "  # the line of a process that holds its result

# --------------------------------------------------------------------------------------------- files


def stored(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file as text; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read(path: Path, kind: type[R]) -> list[R]:
    """The rows of a CSV file as a dataclass. An empty cell is None where its field may be."""
    kinds = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    return [
        kind(**{name: _value(kinds[name], cell) for name, cell in row.items() if name in kinds})
        for row in stored(path)
    ]


def _value(kind: str, text: str) -> Any:
    if text == "" and kind.endswith("| None"):
        return None
    make: dict[str, Any] = {"int": int, "float": float, "bool": lambda word: word == "True"}
    return make.get(kind.removesuffix(" | None"), str)(text)


def write(path: Path, rows: Iterable[Row], columns: Iterable[str] = ()) -> None:
    """Through a second file, so that an interruption leaves the old rows whole. `columns`: in place of those
    that the rows have; other cells are left out."""
    cells = [asdict(row) if is_dataclass(row) else row for row in rows]  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    partly = path.with_suffix(".partial")
    with partly.open("w", newline="", encoding="utf-8") as file:
        names = list(columns) or list(dict.fromkeys(name for row in cells for name in row))
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)
    partly.replace(path)


Threshold = tuple[str, str, float, float]  # what, unit, measured, and its threshold: at most that


def revision() -> dict[str, str]:
    """Of what is measured: columns for every row."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {"commit": asked.stdout.strip() or "?", "date": date.today().isoformat()}


def write_thresholds(
    path: Path, thresholds: Iterable[Threshold], kept: Sequence[dict[str, str]] = ()
) -> bool:
    """Print and write each as it comes, after those that are kept; whether all hold."""
    rows = list(kept)
    for what, unit, measured, threshold in thresholds:
        holds = "yes" if abs(measured) <= threshold else "no"
        values = (what, unit, f"{measured:.3g}", f"{threshold:g}", holds)
        rows.append(dict(zip(("what", "measure", "measured", "threshold", "holds"), values, strict=True)))
        print(*values, sep="  ", flush=True)
        write(path, rows)
    return all(row["holds"] == "yes" for row in rows)


def read_json(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def store_json(path: Path, row: Mapping[str, Any], *keys: str) -> None:
    """Put the row into the file, in place of an older one with the same `keys`."""
    rows = {tuple(each[key] for key in keys): each for each in (*read_json(path), row)}
    partly = path.with_suffix(".partial")
    partly.write_text(json.dumps(list(rows.values()), indent=1) + "\n", encoding="utf-8")
    partly.replace(path)


def short_name(gpu: str) -> str:
    """`h200` for "NVIDIA H200": what files of rows are called after."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-")


# --------------------------------------------------------------------------------------------- errors


def error_percent(predicted: float | None, measured: float | None, digits: int = 3) -> float | None:
    """Positive when the prediction is too high; None where one of the two is not known."""
    return round(100 * (predicted / measured - 1), digits) if predicted and measured else None


def errors_of(rows: Iterable[Row], name: str) -> list[float]:
    """The known values of a column of errors."""
    values = (row.get(name) if isinstance(row, Mapping) else getattr(row, name) for row in rows)
    return [float(value) for value in values if value not in (None, "")]


def median(errors: Iterable[float]) -> float:
    """Of their absolute values."""
    return statistics.median(map(abs, errors))


def worst(errors: Iterable[float]) -> float:
    return max(errors, key=abs)


def summary(rows: Sequence[Row], *kinds: str, digits: int = 2) -> str:
    """`allocated: median 0.01 %, worst -0.84 %` for each kind of error that some rows have."""
    found = {kind: errors_of(rows, f"{kind}_error_percent") for kind in kinds}
    return "; ".join(
        f"{kind}: median {median(errors):.{digits}f} %, worst {worst(errors):+.2f} %"
        for kind, errors in found.items()
        if errors
    )


# --------------------------------------------------------------------------------------------- processes


def in_process(module: str, *words: str, seconds: float | None = None, **variables: str) -> Any:
    """What `python -m module words`, a process of its own, passes to `send`.

    Raises RuntimeError with the last lines of its stderr where it ends without a result.
    """
    paths = [*SOURCES, os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    command = [sys.executable, "-m", module, *words]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took more than {seconds:g} s") from None
    results = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if not results:
        last = [line for line in done.stderr.splitlines() if line.strip()][-3:] or ["no message"]
        raise RuntimeError(f"exit status {done.returncode}: {' | '.join(last)}"[:600])
    return json.loads(results[-1].removeprefix(_RESULT))


def send(result: Any) -> None:
    """Hand a result, as JSON, to the process that called `in_process`."""
    sys.stdout.flush()
    os.write(1, f"\n{_RESULT}{json.dumps(result)}\n".encode())


def chosen(names: Sequence[str], known: Iterable[str], what: str = "case") -> list[str]:
    """`names`, or all that are known; ends the process with one line where a name is not known."""
    valid = list(known)
    for name in names:
        if name not in valid:
            print(f"error: there is no {what} {name!r}; valid: {', '.join(valid)}", file=sys.stderr)
            sys.exit(2)
    return list(names) or valid


def need_gpu() -> None:
    """End the process with one line where torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        print("error: this needs a CUDA GPU and torch sees none", file=sys.stderr)
        sys.exit(2)
