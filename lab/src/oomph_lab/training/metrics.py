"""What a run reports: callbacks for each event, and metrics on disk as JSON lines and for TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class StepReport:
    """A logged step.

    grad_norm: of all gradients, before clipping. memory, memory_peak: bytes of the CUDA caching allocator,
    with those of captured CUDA graphs; None on the CPU.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    tokens_per_second: float
    memory: int | None
    memory_peak: int | None

    def numbers(self) -> dict[str, float | None]:
        return {name: value for name, value in vars(self).items() if name != "step"}


class Callbacks:
    """What happens during a run. Subclasses override what they need."""

    def on_step(self, report: StepReport) -> None:
        """A step that is logged."""

    def on_progress(self, step: int, loss: float) -> None:
        """A step that is not logged."""

    def on_evaluation(self, step: int, metrics: dict[str, float]) -> None: ...
    def on_sample(self, step: int, sample: str) -> None:
        """Generated text, or the file that an image was written to."""

    def on_message(self, message: str) -> None: ...


class MetricsWriter:
    """`metrics.jsonl` and, where it is installed, `tensorboard/` in the run's folder.

    A resumed run writes again from the checkpoint's step on. Rows of later steps, written before the run was
    stopped, are removed first, so that each step has one row.
    """

    def __init__(self, folder: Path, resumed_at: int | None, writes: bool = True) -> None:
        """writes: False on all ranks but the first, which read only."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        if not writes:
            pass
        elif resumed_at is None:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            kept = [row for row in _rows(self.path) if row["step"] <= resumed_at]
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            partial.replace(self.path)
        self._file = (self.path if writes else Path(os.devnull)).open("a", encoding="utf-8")
        self._tensorboard = _tensorboard(folder / "tensorboard", resumed_at) if writes else None

    def write(self, kind: str, step: int, numbers: Mapping[str, float | None]) -> None:
        known = {name: value for name, value in numbers.items() if value is not None}
        # JSON has no NaN or infinity.
        finite = {name: value if math.isfinite(value) else str(value) for name, value in known.items()}
        self._append({"kind": kind, "step": step, **finite})
        if self._tensorboard is not None:
            for name, value in known.items():
                self._tensorboard.add_scalar(f"{kind}/{name}", value, step)

    def write_text(self, step: int, text: str) -> None:
        self._append({"kind": "sample", "step": step, "text": text})
        if self._tensorboard is not None:
            self._tensorboard.add_text("sample", text, step)

    def find(self, kind: str, step: int) -> dict[str, float] | None:
        """The numbers of that step that are already on disk."""
        rows = [row for row in read_metrics(self.path, kind) if row["step"] == step]
        with suppress(IndexError, TypeError, ValueError):  # none, or one that was edited
            return {name: float(value) for name, value in rows[-1].items() if name not in ("kind", "step")}
        return None

    def close(self) -> None:
        # Every row is flushed when written; an error of a full disk was raised then.
        for file in (self._file, self._tensorboard):
            if file is not None:
                with suppress(OSError):
                    file.close()

    def _append(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def read_metrics(path: str | Path, kind: str = "train") -> list[dict[str, Any]]:
    """The rows of one kind. Lines that are not rows, such as an incomplete last one, are left out."""
    return [row for row in _rows(Path(path)) if row.get("kind") == kind]


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def _tensorboard(folder: Path, resumed_at: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # an extra; the JSON lines hold the same
        return None
    if resumed_at is None:  # killed before its first checkpoint, and started again
        for events in folder.glob("events.out.tfevents.*"):
            events.unlink()
    purge = None if resumed_at is None else resumed_at + 1
    return SummaryWriter(str(folder), purge_step=purge)  # type: ignore[no-untyped-call]
