"""The same bits at every run: what training.deterministic asks of torch, and gives."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from small_runs import assert_equal_runs, shared_folder, trained

from oomph.errors import UserError
from oomph_lab.training.trainer import Trainer

DETERMINISTIC = "training.deterministic=true"


def test_torch_is_asked_for_the_length_of_the_run_only(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []
    begin = Trainer.start_measuring

    def asked():
        fills = torch.utils.deterministic.fill_uninitialized_memory
        on = torch.are_deterministic_algorithms_enabled()
        return on, fills, os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    def watched(trainer):
        seen.append(asked())
        begin(trainer)

    monkeypatch.setattr(Trainer, "start_measuring", watched)
    before = asked()
    trained(tmp_path / "exact", ["training.steps=1", DETERMINISTIC])
    assert seen == [(True, False, ":4096:8")]
    assert asked() == before == (False, True, None)


REFUSED = "median CUDA with indices output does not have a deterministic implementation, but you set"
TOO_LATE = "... this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2. ..."


@pytest.mark.parametrize(
    ("of_torch", "told"),
    [
        (REFUSED, r"torch has none for median CUDA with indices output$"),
        (TOO_LATE, r"start the process with CUBLAS_WORKSPACE_CONFIG=:4096:8$"),
    ],
)
def test_what_torch_refuses_is_told_in_one_line(tmp_path, monkeypatch, of_torch, told):
    def fails(trainer, batches):
        raise RuntimeError(of_torch)

    monkeypatch.setattr(Trainer, "_loss_and_gradients", fails)
    with pytest.raises(UserError, match=told):
        trained(tmp_path / "run", [DETERMINISTIC])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "overrides",
    [
        ("longctx_tiny", "data.seq_len=2048", "data.batch_size=2", "training.autocast=bfloat16"),
        ("pythia_tiny", "training.cuda_graph=true", "training.autocast=bfloat16", "training.accumulate=2"),
    ],
    ids=lambda value: value[0],
)
def test_a_resumed_run_on_a_gpu_is_the_run_that_was_never_interrupted(tmp_path, overrides):
    """In processes of their own: once cuBLAS has been used, torch no longer asks how it is to work."""
    config, *changes = overrides
    changes += [f"data.source={shared_folder() / 'text.txt'}", "data.tokenizer=bytes", "data.vocab_size=null"]
    changes += ["training.steps=6", "training.save_every=3", "training.log_every=1", DETERMINISTIC]

    def run(folder, *more):
        command = [sys.executable, "-m", "oomph_lab", "train", config, *changes]
        done = subprocess.run(
            [*command, f"output.dir={folder}", *more], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    run(tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000006")
    run(tmp_path / "resumed", "--resume")
    assert_equal_runs(tmp_path / "straight", tmp_path / "resumed")
