"""Configs as targets, with their overrides; and what is wrong with one."""

import json

import pytest

from oomph.cli.main import run
from oomph.cli.targets import open_target
from oomph.nn import NativeSparseAttention
from oomph.workload import Workload
from oomph_lab.training.config import CONFIGS

TINY = str(CONFIGS / "longctx_tiny.yaml")


def _error(capsys, *arguments):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_config_is_a_workload_with_its_overrides_in():
    with open_target(TINY, ["batch_size=3", "model.attention=nsa"]) as found:
        assert isinstance(found, Workload)
        assert found.sizes == {"B": 3, "T": 128}
        assert any(isinstance(module, NativeSparseAttention) for module in found.model().modules())


def test_no_more_batches_of_a_step_are_traced_than_its_memory_needs():
    with open_target(TINY, ["accumulation=16"]) as found:
        assert isinstance(found, Workload)
        assert found.accumulate == 2


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["seq_len=32", "batch_size=2", "fixes=activation_checkpointing"], {"B": 2, "T": 32}),
        (["--seq_len", "32", "--batch-size=3", "--shuffle"], {"B": 3, "T": 32}),  # as `train` takes them
        (["--data.source", "corpus.py", "seq_len=32", "batch_size=2"], {"B": 2, "T": 32}),  # no script
        (["data.source=corpus.py", "seq_len=32", "batch_size=2"], {"B": 2, "T": 32}),
    ],
)
def test_predict_takes_a_config_and_overrides(fake_predict, capsys, words, sizes):
    assert run(["predict", TINY, *words, "--gpu", "rtx3090", "--json"]) == 0
    traced = fake_predict.arguments(capsys.readouterr().out)
    assert (traced["sizes"], traced["gpu"]) == (sizes, "rtx3090")
    assert traced["fixes"] == ["activation_checkpointing"] * ("fixes=activation_checkpointing" in words)


def test_a_configs_own_limit_is_that_of_its_prediction(fake_predict, capsys):
    """The smaller of the two, as the run would have it."""
    for more, limit in (([], "3GiB"), (["--max", "2GiB"], "2GiB"), (["--max", "4GiB"], "3GiB")):
        assert run(["predict", TINY, "training.memory_limit=3GiB", "--json", *more]) == 0
        assert fake_predict.arguments(capsys.readouterr().out)["max"] == limit


def test_fixes_on_the_command_line_come_on_top(fake_predict, capsys):
    words = ["--fix", "fused_linear_cross_entropy", "fixes=activation_checkpointing"]
    assert run(["predict", TINY, *words]) == 2
    assert "has to be applied before 'activation_checkpointing'" in capsys.readouterr().err
    words = ["--fix", "activation_checkpointing", "fixes=fused_linear_cross_entropy"]
    assert run(["predict", TINY, *words, "--json"]) == 0
    assert fake_predict.arguments(capsys.readouterr().out)["fixes"] == [
        "fused_linear_cross_entropy",
        "activation_checkpointing",
    ]


@pytest.mark.usefixtures("in_process")
def test_fixes_and_verify_take_a_config_and_overrides(capsys):
    small = ["seq_len=16", "batch_size=2"]
    assert (
        run(["fixes", TINY, *small, "--only", "activation_checkpointing", "--gpu", "rtx3090", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    assert run(["verify", TINY, "activation_checkpointing:keep=matmuls", *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True


def test_several_problems_are_a_line_each(program, capsys):
    program("system: pythia\nmodel: {hiden_size: 3}\ntraining: {steps: many}\n", "x.yaml")
    assert _error(capsys, "predict", "x.yaml", "clip=0") == [
        "oomph: x.yaml has 3 problems:",
        "  model.hiden_size is not a key; did you mean 'model.hidden_size'?",
        "  training.steps = 'many' is not valid; it should be a valid integer",
        "  clip (which is training.clip) = 0 is not valid; it should be greater than 0",
    ]


def test_a_config_that_is_loaded_by_the_program_keeps_its_problems(program, capsys):
    program(
        "from oomph_lab.training.config import *\n\nload_dict({'system': 'pythia', 'epoch': 3}, 'mine')\n"
    )
    (line,) = _error(capsys, "predict", "train.py:x")
    assert line.startswith("oomph: train.py:3: mine: epoch is not a key; did you mean 'training.epochs'?")
