"""Compare a measured op log with a prediction: the ops whose bytes differ, those with the most first.

python -m benchmarks.accuracy diverge NAME measured.jsonl.gz
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oomph import gpus
from oomph.measurement.oplog import describe, op_differences
from oomph.prediction.child import predict_ops
from oomph.records import OpRow


def write_rows(path: Path, rows: Iterable[OpRow]) -> None:
    """Gzipped JSON lines, one row each."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row._asdict(), separators=(",", ":")) + "\n")


def divergence_text(target: Any, measured: Path, gpu: str, limit: int) -> str:
    """The differences between a measured op log and the prediction of the same steps."""
    with gzip.open(measured, "rt", encoding="utf-8") as file:
        rows = [OpRow(*(row[name] for name in OpRow._fields)) for row in map(json.loads, file)]
    predicted = predict_ops(target, gpus.find(gpu), rows, describe, lambda text, fraction: None)
    differences = op_differences(rows, predicted, limit)
    lines = [f"{each.bytes:+16,} B  {each.op}, {each.aspect}, {each.times} x" for each in differences]
    return "\n".join(lines) or "no differences"
