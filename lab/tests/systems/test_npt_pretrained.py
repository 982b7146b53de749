"""NPT on a small checkpoint that was trained before: tokenizer, perplexity, checkpoints, offloading."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from oomph.errors import UserError
from oomph_lab.systems.npt import NPComponent
from oomph_lab.training.config import load_dict
from oomph_lab.training.data.tokenizers import pretrained
from oomph_lab.training.run import train

pytest.importorskip("transformers")
from lab.benchmarks.training.held_out import MODEL, train_base

TEXT = str(Path(json.__file__).parents[1] / "asyncio" / "*.py")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Llama of 64 features after 40 steps on a few files."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    train_base(folder, steps=40, source=TEXT)
    return folder


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("npt") / "run"
    outcome = train(config(base, folder))
    return folder, outcome


def config(base, folder, **training):
    options = {"steps": 30, "eval_every": None, "eval_batches": 4, "eval_at_start": True, "save_every": 30}
    values = {
        "system": "npt",
        "model": {"preset": "tiny", "weights": str(base), **MODEL},
        "data": {"source": TEXT, "seq_len": 32, "batch_size": 8, "validation": 0.1},
        "optimizer": {"learning_rate": 1e-2},
        "training": {**options, "device": "cpu", **training},
        "output": {"dir": str(folder)},
    }
    return load_dict(values, "npt")


def evaluations(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "matching" in row]


def test_the_bases_own_tokenizer_is_the_default(base, tmp_path):
    assert config(base, tmp_path).data.tokenizer == "pretrained"
    tokenizer = pretrained(base)
    assert tokenizer.decode(tokenizer.encode("def forward(self):")) == "def forward(self):"
    assert tokenizer.eos == json.loads((base / "config.json").read_text())["eos_token_id"]
    with pytest.raises(UserError, match=r"names no folder with a tokenizer\.json"):
        load_dict({"system": "npt", "data": {"tokenizer": "pretrained"}}, "npt")


def test_matching_falls_on_held_out_text_and_perplexity_is_known_before_and_after(run):
    before, after = evaluations(run[0])[0], evaluations(run[0])[-1]
    assert after["matching"] < 0.9 * before["matching"]
    # The original model has learned something, and the converted one is compared with it.
    assert before["base_perplexity"] == after["base_perplexity"] < 250
    assert after["perplexity"] < before["perplexity"]


def test_checkpoints_hold_what_is_trained_and_not_the_base(run):
    folder = run[0] / "checkpoints"
    saved = json.loads((next(folder.glob("step-00000030*")) / "state.json").read_text())["model"]
    assert saved
    assert {name.rsplit(".", 1)[-1] for name in saved} == {"A", "B"}


def test_a_run_resumes_with_the_same_base_and_refuses_another(run, base, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    outcome = train(config(base, folder, steps=31), resume=True)
    assert outcome.step == 31
    other = tmp_path / "other"
    shutil.copytree(base, other)
    train_base(other, steps=1, source=TEXT)
    saved = (run[0] / "config.yaml").read_text()
    folder = tmp_path / "changed"
    shutil.copytree(run[0], folder)
    (folder / "config.yaml").write_text(
        saved.replace(str(base), str(other)).replace(str(run[0]), str(folder))
    )
    with pytest.raises(UserError, match="frozen weights differ from those"):
        train(config(other, folder, steps=31), resume=True)


def test_the_low_rank_product_on_the_cpu_has_the_same_outputs_and_gradients():
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, dtype=torch.float64)
    h, mod = (torch.randn(2, 5, n, dtype=torch.float64, requires_grad=True) for n in (24, 4))
    results = []
    for on_cpu in (False, True):
        component = NPComponent.replacing(linear, 4, on_cpu=on_cpu)
        nn.init.normal_(component.B, generator=torch.Generator().manual_seed(1))
        nn.init.normal_(component.A, generator=torch.Generator().manual_seed(2))
        y = component(h, mod)
        grads = torch.autograd.grad(y.square().mean(), (component.A, component.B, h, mod))
        results.append((y, *grads))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
