"""Small corpora for the tests, and how a run over them is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oomph.training.config import Curriculum, Stage
from oomph.training.data import Data, DataOptions, open_data
from oomph.training.data.loader import Batch

CURRICULUM = Curriculum((Stage(8, 3, steps=7), Stage(32, 2, steps=5), Stage(16, 4)))


def numbered_lines(path: Path, lines: int) -> Path:
    """Every line is different, so that a token that is lost or seen twice shows."""
    path.write_text("".join(f"line {number} of {path.stem}\n" for number in range(lines)), encoding="utf-8")
    return path


def opened(source: Path | str, folder: Path, **changes: Any) -> Data:
    options: dict[str, Any] = {
        "curriculum": Curriculum((Stage(16, 4),)),
        "tokenizer": "bytes",
        "vocab_size": None,
        "shuffle_window": 12,
    }
    return open_data(DataOptions(source=str(source), **(options | changes)), folder)


def drawn(data: Data, number: int) -> list[list[list[int]]]:
    """The next batches, as lists that compare."""
    return [listed(next(data.train)) for _ in range(number)]


def listed(batch: Batch) -> list[list[int]]:
    (first, *_) = batch.values()
    return first.tolist()
