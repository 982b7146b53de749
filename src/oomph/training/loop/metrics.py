"""Numbers of a run on disk: one JSON object a line, and TensorBoard where it is installed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from oomph.training.run_folder import METRICS


class Metrics:
    """`metrics.jsonl` and `tensorboard/` in the run's folder.

    A run that is resumed writes again from the checkpoint's step on; lines of later steps, which were written
    before it was stopped, are taken out first, so that every step is there once.
    """

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        if resumed_at is None:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            _keep_until(self.path, resumed_at)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", resumed_at)

    def write(self, kind: str, step: int, numbers: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in numbers.items() if value is not None}
        plain = {name: value if math.isfinite(value) else str(value) for name, value in known.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, **plain}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in known.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def text(self, step: int, text: str) -> None:
        self._file.write(json.dumps({"kind": "sample", "step": step, "text": text}) + "\n")
        self._file.flush()
        if self._board is not None:
            self._board.add_text("sample", text, step)

    def found(self, kind: str, step: int) -> dict[str, float] | None:
        """The numbers of that step that are there already; None where there are none."""
        rows = [row for row in read_metrics(self.path, kind) if row["step"] == step]
        if not rows:
            return None
        # What is not finite is written as a word.
        return {name: float(value) for name, value in rows[-1].items() if name not in ("kind", "step")}

    def close(self) -> None:
        # All lines are written. What a full disk refused is told already, and would be raised here once more.
        with suppress(OSError):
            self._file.close()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()


def read_metrics(path: str | Path, kind: str = "train") -> list[dict[str, Any]]:
    """The rows of one kind. A last line that was cut off by a kill is left out."""
    found = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = _row(line)
        if row is not None and row.get("kind") == kind:
            found.append(row)
    return found


def _keep_until(path: Path, step: int) -> None:
    rows = [_row(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kept = [json.dumps(row) + "\n" for row in rows if row is not None and row.get("step", 0) <= step]
    partly = path.with_suffix(".partial")
    partly.write_text("".join(kept), encoding="utf-8")
    partly.replace(path)


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def _tensorboard(folder: Path, resumed_at: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # an extra; the lines of JSON hold the same
        return None
    if resumed_at is None:  # killed before its first checkpoint, and begun again
        for events in folder.glob("events.out.tfevents.*"):
            events.unlink()
    purge = None if resumed_at is None else resumed_at + 1
    return SummaryWriter(str(folder), purge_step=purge)  # type: ignore[no-untyped-call]
