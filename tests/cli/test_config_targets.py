"""Configs as targets: `oomph predict configs/x.yaml key=value`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from oomph.cli.main import run
from oomph.cli.targets import open_target
from oomph.errors import UserError
from oomph.workload import Workload

TINY = str(Path(__file__).parents[2] / "configs" / "longctx_tiny.yaml")


def _error(capsys, *arguments: str) -> list[str]:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_config_is_a_workload_with_its_overrides_in():
    with open_target(TINY, ["batch_size=3", "model.attention=nsa"]) as found:
        assert isinstance(found, Workload)
        assert found.sizes == {"B": 3, "T": 128}
        assert found.model.config.attention == "nsa"  # type: ignore[attr-defined]


def test_no_more_batches_of_a_step_are_traced_than_its_memory_needs():
    with open_target(TINY, ["accumulation=16"]) as found:
        assert isinstance(found, Workload)
        assert found.accumulate == 2


def test_predict_takes_a_config_and_overrides(fake_predict, capsys):
    assert run(["predict", TINY, "seq_len=32", "--gpu", "rtx3090", "fixes=activation_checkpointing"]) == 0
    ((target, options),) = fake_predict.calls
    assert target.sizes["T"] == 32
    assert [use.fix for use in target.fixes] == ["activation_checkpointing"]
    assert options["gpu"] == "rtx3090"


def test_a_configs_own_limit_is_that_of_its_prediction(fake_predict, capsys):
    """The smaller of the two, as the run would have it."""
    for more, limit in (([], "3GiB"), (["--max", "2GiB"], "2GiB"), (["--max", "4GiB"], "3GiB")):
        fake_predict.calls.clear()
        run(["predict", TINY, "training.memory_limit=3GiB", *more])
        ((_, options),) = fake_predict.calls
        assert options["max"] == limit


def test_predict_takes_the_flags_that_train_takes(fake_predict, capsys):
    assert run(["predict", TINY, "--seq_len", "32", "--batch-size=3", "--gpu", "rtx3090", "--shuffle"]) == 0
    ((target, options),) = fake_predict.calls
    assert target.sizes == {"B": 3, "T": 32}
    assert options["gpu"] == "rtx3090"
    capsys.readouterr()
    assert _error(capsys, "predict", TINY, "--gup", "rtx3090")[0].endswith(
        "gup is not a key; the sections are model, data, optimizer, training, output; "
        "besides them there are system, form, fixes (the nearest option to --gup is --gpu)"
    )


def test_fixes_on_the_command_line_come_on_top(fake_predict, capsys):
    assert (
        run(
            [
                "predict",
                TINY,
                "--fix",
                "fused_linear_cross_entropy",
                "fixes=activation_checkpointing",
                "--json",
            ]
        )
        == 2
    )
    assert "has to be applied before 'activation_checkpointing'" in capsys.readouterr().err
    assert (
        run(["predict", TINY, "--fix", "activation_checkpointing", "fixes=fused_linear_cross_entropy"]) == 0
    )
    assert [use.fix for use in fake_predict.calls[-1][0].fixes] == [
        "fused_linear_cross_entropy",
        "activation_checkpointing",
    ]


def test_fixes_and_verify_take_a_config_and_overrides(capsys):
    small = ["seq_len=16", "batch_size=2"]
    assert (
        run(["fixes", TINY, *small, "--only", "activation_checkpointing", "--gpu", "rtx3090", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    assert run(["verify", TINY, "activation_checkpointing:keep=products", *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True
    assert _error(capsys, "verify", TINY, *small) == [
        "oomph: verify needs a fix: oomph verify TARGET FIX ...; `oomph fixes` lists them"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config 'x.yaml' does not exist; give a .yaml file, e.g. in configs/"),
        ("", "config 'x.yaml' is empty; it should say at least: system: pythia"),
        ("[1]", "config 'x.yaml' holds a list; it should be a mapping, like `system: pythia`"),
        ("a: 1\nb: [", "config 'x.yaml', line 2 is not valid YAML: expected the node content"),
        ("system: mamba", "x.yaml: system = 'mamba' is not valid; Choose from hatchling, pythia, longctx"),
        ("system: pythia\nepoch: 3", "x.yaml: epoch is not a key; did you mean 'training.epochs'?"),
    ],
)
def test_a_wrong_config_is_one_line(program, capsys, text, message):
    program("")
    if text is not None:
        program(text, "x.yaml")
    (line,) = _error(capsys, "predict", "x.yaml")
    assert line.startswith(f"oomph: {message}")


def test_several_problems_are_a_line_each(program, capsys):
    program("system: pythia\nmodel: {hiden_size: 3}\ntraining: {steps: many}\n", "x.yaml")
    assert _error(capsys, "predict", "x.yaml", "clip=0") == [
        "oomph: x.yaml has 3 problems:",
        "  model.hiden_size is not a key; did you mean 'model.hidden_size'?",
        "  training.steps = 'many' is not valid; give a whole number",
        "  clip (which is training.clip) = 0 is not valid; give a number > 0",
    ]


def test_a_word_that_is_no_override_is_one_line(capsys):
    assert _error(capsys, "predict", TINY, "nsa") == [
        "oomph: 'nsa' is not an override; give key=value, --key value, or --flag"
    ]


@pytest.mark.parametrize("command", ["predict", "fixes", "verify"])
def test_a_program_takes_no_overrides(program, capsys, command):
    program("def step(): ...\n")
    words = ["activation_checkpointing"] if command == "verify" else []
    (line,) = _error(capsys, command, "train.py:step", *words, "a.b=1")
    assert line == (
        "oomph: target 'train.py:step' is a program, and 'a.b=1' is not a size of its Workload, such as B=4: "
        "change the program, or give a .yaml file, whose keys can be overridden"
    )


SIZED = """
import torch, oomph
def batch(device, B, T): return torch.zeros(B, T, device=device)
w = oomph.Workload(lambda: torch.nn.Linear(1, 1), batch, lambda m, b: m(b).sum(), sizes={"B": 8, "T": 64})
def made(): return w
unsized = oomph.Workload(lambda: torch.nn.Linear(1, 1), lambda device: None, lambda m, b: m(b).sum())
def step(): return lambda: None
"""


@pytest.mark.parametrize("name", ["w", "made"])
def test_sizes_of_a_workload_can_be_given(program, fake_predict, name):
    program(SIZED)
    assert run(["predict", f"train.py:{name}", "B=3"]) == 0
    ((target, _),) = fake_predict.calls
    assert target.sizes == {"B": 3, "T": 64}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["w", "C=3"], "the Workload has no size 'C'; its sizes are B=8, T=64"),
        (["unsized", "B=3"], "the Workload has no size 'B'; its sizes are none; name them, as Workload("),
        (["step", "B=3"], "target 'train.py:step' returned a function; fixes and sizes need a Workload"),
        (["w", "B=0"], "target 'train.py:w' is a program, and 'B=0' is not a size of its Workload"),
    ],
)
def test_sizes_that_a_program_does_not_have_are_refused(program, capsys, words, message):
    program(SIZED)
    name, *sizes = words
    (line,) = _error(capsys, "predict", f"train.py:{name}", *sizes)
    assert line.startswith(f"oomph: {message}")


def test_a_config_that_is_not_there_does_not_wait_for_torch(tmp_path):
    script = (
        "import sys; from oomph.cli.main import run; run(sys.argv[1:]); "
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    command = [sys.executable, "-c", script, "predict", "nothing.yaml", "a=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "does not exist" in done.stderr


def test_a_config_opens_without_the_command_line():
    message = r"longctx_tiny\.yaml: zzz is not a key"
    with pytest.raises(UserError, match=message), open_target(TINY, ["zzz=1"]):
        pass
