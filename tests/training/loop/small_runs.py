"""Runs of seconds: every system made small, on a text of a few kilobytes or the two photographs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from oomph.training.checkpoints import find, load
from oomph.training.config import TrainConfig, load_dict
from oomph.training.loop.listener import Silent, StepReport
from oomph.training.loop.metrics import read_metrics
from oomph.training.loop.trainer import Outcome
from oomph.training.run import train

_TEXT = {"tokenizer": "bytes", "seq_len": 16, "batch_size": 2, "shuffle_window": 8, "validation": 0.1}
_RUN = {
    "steps": 6,
    "schedule": "cosine",
    "warmup": 2,
    "clip": 1.0,
    "eval_every": None,
    "eval_batches": 1,
    "save_every": None,
    "log_every": 1,
    "device": "cpu",
}
_PYTHIA = {
    "preset": "report",
    "vocab_size": 260,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "intermediate_size": 32,
    "block_size": 8,
    "dropout": 0.1,
}
_MODELS: dict[str, dict[str, Any]] = {
    "pythia": _PYTHIA,
    "hatchling": {"preset": "tiny", "vocab_size": 260},
    "longctx": {"preset": "tiny", "vocab_size": 260},
    "npt": {"preset": "tiny"},
    "ginr": {"preset": "tiny"},
}
# Of a machine's time, not of the training.
_NOT_COMPARED = ("tokens_per_second", "memory", "memory_peak")


def text(folder: Path) -> Path:
    path = folder / "text.txt"
    if not path.exists():
        lines = (f"line {number}: {number * number} and {number**3}\n" for number in range(400))
        path.write_text("".join(lines), encoding="utf-8")
    return path


def config_of(folder: Path, overrides: Iterable[str] = (), system: str = "pythia") -> TrainConfig:
    """`folder`: where the run writes; the text lies beside it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"batch_size": 2} if system == "ginr" else {"source": str(text(folder.parent))}
    if system != "ginr":
        data |= _TEXT
    if system == "npt":  # it knows 256 tokens
        data |= {"tokenizer": "words", "vocab_size": 64}
    if system == "hatchling":
        data.pop("seq_len")
        data.pop("batch_size")
        data["curriculum"] = [
            {"seq_len": 8, "batch_tokens": 16, "steps": 2},
            {"seq_len": 16, "batch_tokens": 32, "steps": 2, "accumulate": 2},
            {"seq_len": 24, "batch_tokens": 48},
        ]
    mapping = {
        "system": system,
        "model": _MODELS[system],
        "data": data,
        "optimizer": {"learning_rate": 1e-2},
        "training": _RUN,
        "output": {"dir": str(folder)},
    }
    return load_dict(deepcopy(mapping), "small", overrides)


class Notes(Silent):
    """A listener that writes down."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.messages: list[str] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.samples: list[tuple[int, str]] = []

    def stepped(self, report: StepReport) -> None:
        self.reports.append(report)

    def evaluated(self, step: int, found: dict[str, float]) -> None:
        self.evaluations.append((step, found))

    def sampled(self, step: int, sample: str) -> None:
        self.samples.append((step, sample))

    def said(self, message: str) -> None:
        self.messages.append(message)


def trained(
    folder: Path, overrides: Iterable[str] = (), system: str = "pythia", *, resume: bool = False, **more: Any
) -> Outcome:
    return train(config_of(folder, overrides, system), resume=resume, **more)


def state_of(folder: Path) -> dict[str, Any]:
    return load(find(folder / "checkpoints"))


def rows_of(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    rows = read_metrics(folder / "metrics.jsonl", kind)
    return [{key: row[key] for key in row if key not in _NOT_COMPARED} for row in rows]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Where two states are not equal, bit for bit."""
    left, right = (dict(_leaves(state)) for state in (one, other))
    found = [f"only one has {name}" for name in left.keys() ^ right.keys()]
    return found + [name for name in left.keys() & right.keys() if not _same(left[name], right[name])]


def assert_equal_runs(one: Path, other: Path) -> None:
    assert differences(state_of(one), state_of(other)) == []
    assert rows_of(one) == rows_of(other)
    assert rows_of(one, "evaluation") == rows_of(other, "evaluation")


def _leaves(state: Any) -> list[tuple[str, Any]]:
    return [(str(path), leaf) for path, leaf in tree_flatten_with_path(state)[0]]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and bool(one == other)
