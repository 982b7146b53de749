import sys
from pathlib import Path

import pytest
import torch

from oomph import gpus
from oomph_lab.cli import train as train_command
from oomph_lab.training import run as training_run
from oomph_lab.training.trainer import Outcome

sys.path.insert(0, str(Path(__file__).parents[3] / "tests/cli"))
from command_fixtures import fake_predict, on_terminal, program  # noqa: F401

SMALL_CONFIG = """
system: pythia
model: {preset: report, vocab_size: 260, hidden_size: 16, num_layers: 2, num_heads: 2,
        intermediate_size: 32, block_size: 8}
data: {source: text.txt, tokenizer: bytes, seq_len: 16, batch_size: 2, validation: 0.1}
training: {steps: 4, save_every: 2, eval_every: 2, eval_batches: 1, log_every: 1, device: cpu}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """small.yaml in a fresh current directory, with its text beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oomph_lab.training.evaluation.NEW_TOKENS", 3)
    (tmp_path / "text.txt").write_text("".join(f"line {n}: {n * n}\n" for n in range(500)))
    file = tmp_path / "small.yaml"
    file.write_text(SMALL_CONFIG)
    return file


@pytest.fixture
def given(monkeypatch):
    """Configs that would have been trained."""
    configs = []

    def train(config, **_):
        configs.append(config)
        return Outcome(1, None, {})

    monkeypatch.setattr(training_run, "train", train)
    return configs


@pytest.fixture
def pretended_gpu(monkeypatch):
    monkeypatch.setattr(training_run, "device_of", lambda config: torch.device("cuda", 0))
    monkeypatch.setattr(train_command, "gpu_of", lambda device: gpus.find("rtx3090"))
