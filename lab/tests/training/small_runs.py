"""Runs of seconds: every system made small, on a text of a few kilobytes or the two photographs; and runs
whose loss fails at a chosen pass."""

import shutil
import tempfile
from atexit import register
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from oomph_lab.training import run
from oomph_lab.training.checkpoint import find, load
from oomph_lab.training.config import load_dict
from oomph_lab.training.metrics import Callbacks, read_metrics
from oomph_lab.training.run import train
from oomph_lab.training.step import workload

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
_MODELS = {
    "pythia": _PYTHIA,
    "hatchling": {
        "preset": "tiny",
        "vocab_size": 260,
        "n_layers": 2,
        "attention_every": 2,
        "token_drop_layers": [0, 0],
    },
    "longctx": {"preset": "tiny", "vocab_size": 260},
    "npt": {"preset": "tiny"},
    "ginr": {"preset": "tiny"},
}
# Of a machine's time, not of the training.
_NOT_COMPARED = ("tokens_per_second", "memory", "memory_peak")


@cache
def shared_folder():
    """One text for all runs, since its path is part of a data position; and runs that tests compare with."""
    folder = Path(tempfile.mkdtemp(prefix="oomph_runs_"))
    register(shutil.rmtree, folder, ignore_errors=True)
    lines = (f"line {number}: {number * number} and {number**3}\n" for number in range(400))
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def config_of(folder, overrides=(), system="pythia"):
    """folder: where the run writes."""
    source = str(shared_folder() / "text.txt")
    data = {"batch_size": 2} if system == "ginr" else {"source": source}
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


class Recorder(Callbacks):
    """Keeps what it is called with."""

    def __init__(self):
        self.reports = []
        self.messages = []
        self.evaluations = []
        self.samples = []

    def on_step(self, report):
        self.reports.append(report)

    def on_evaluation(self, step, found):
        self.evaluations.append((step, found))

    def on_sample(self, step, sample):
        self.samples.append((step, sample))

    def on_message(self, message):
        self.messages.append(message)


def trained(folder, overrides=(), system="pythia", *, resume=False, **more):
    return train(config_of(folder, overrides, system), resume=resume, **more)


def uninterrupted(overrides=(), system="pythia"):
    """The folder of a run from start to end, shared by tests."""
    folder = shared_folder() / f"run_{abs(hash((tuple(overrides), system)))}"
    if not folder.exists():
        trained(folder, overrides, system)
    return folder


def state_of(folder):
    return load(find(folder / "checkpoints"))


def rows_of(folder, kind="train"):
    rows = read_metrics(folder / "metrics.jsonl", kind)
    return [{key: row[key] for key in row if key not in _NOT_COMPARED} for row in rows]


def differences(one, other):
    """Where two states are not equal, bit for bit."""
    left, right = (dict(_leaves(state)) for state in (one, other))
    found = [f"only one has {name}" for name in left.keys() ^ right.keys()]
    return found + [name for name in left.keys() & right.keys() if not _same(left[name], right[name])]


def assert_equal_runs(one, other):
    assert differences(state_of(one), state_of(other)) == []
    assert rows_of(one) == rows_of(other)
    assert rows_of(one, "evaluation") == rows_of(other, "evaluation")


def _leaves(state):
    return [(str(path), leaf) for path, leaf in tree_flatten_with_path(state)[0]]


def _same(one, other):
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and bool(one == other)


# ------------------------------------------------------------------------------------------ faults


def nan_loss(model, loss):
    return loss * float("nan")


def nan_gradients(model, loss):
    """A finite loss; the square root has no finite gradient at 0."""
    first = next(each for each in model.parameters() if each.requires_grad)
    return loss + (first * 0).sum().sqrt()


def out_of_memory(model, loss):
    torch.rand(3)  # a pass that fails half way has advanced the generator
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1 GiB free.")


def with_fault(monkeypatch, fault, *passes):
    """Training passes of these numbers (1 is the first) fail; evaluation does not."""
    count = 0

    def faulty(config, **options):
        plain = workload(config, **options)

        def loss(model, batch):
            nonlocal count
            count += 1
            found = plain.loss(model, batch)
            return fault(model, found) if count in passes else found

        return replace(plain, loss=loss)

    monkeypatch.setattr(run, "workload", faulty)
