"""Launch lines on the command line: predicted as their launcher would start them."""

import json
import os
import sys
from pathlib import Path

import pytest

from oomph.cli.main import run

# Its first layer has as many columns as its variables and arguments say.
TRAIN = """
import os, sys, torch
width = 64 * int(os.environ.get("WORLD_SIZE", 1)) * int(os.environ.get("FACTOR", 1)) * int(sys.argv[-1])
model = torch.nn.Linear(1024, width, bias=False, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.ones(1, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""
COLUMN = 4096  # bytes


@pytest.fixture(autouse=True)
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)


def predicted(capfd, *words):
    status = run(["predict", "--json", *words])
    out, err = capfd.readouterr()
    assert status == 0, err
    return json.loads(out)


def columns(found):
    return next(one["bytes"] for one in found["stages"] if one["stage"] == "parameters") // COLUMN


def test_ranks_variables_and_arguments(capfd):
    line = ["FACTOR=3", "torchrun", "--nproc-per-node", "2", "train.py", "--gpu", "7", "2"]
    found = predicted(capfd, "--gpu", "rtx4090", *line)
    assert columns(found) == 64 * 2 * 3 * 2
    assert found["gpu"] == "rtx4090"
    assert found["launch"] == {"line": " ".join(line), "program": "train.py", "module": False, "ranks": 2}
    assert "FACTOR" not in os.environ


def test_after_dashes_and_other_ranks(capfd):
    found = predicted(capfd, "--ranks", "4", "--", "torchrun", "--nproc-per-node", "gpu", "train.py", "1")
    assert columns(found) == 64 * 4
    assert "each GPU" not in str(found["notes"])


def test_a_script_with_arguments_is_what_it_was(capfd):
    found = predicted(capfd, "train.py", "--gpu", "rtx4090", "--", "2")
    assert columns(found) == 64 * 2
    assert "launch" not in found


def test_console_script(capfd, monkeypatch):
    Path("bin").mkdir()
    Path("bin/fancy-train").write_text(
        f"#!{sys.executable}\nassert __file__ == __import__('sys').argv[0]{TRAIN}"
    )
    Path("bin/fancy-train").chmod(0o755)
    monkeypatch.setenv("PATH", str(Path("bin").absolute()), prepend=os.pathsep)
    assert columns(predicted(capfd, "fancy-train", "1")) == 64


def test_modules_of_pythonpath(capfd):
    Path("lib").mkdir()
    Path("lib/wide.py").write_text("FACTOR = 5\n")
    Path("train.py").write_text(f"import os, wide\nos.environ['FACTOR'] = str(wide.FACTOR)\n{TRAIN}")
    assert columns(predicted(capfd, "--", "PYTHONPATH=lib", "python", "train.py", "1")) == 64 * 5
    assert not any(each.endswith("/lib") and each.startswith(os.getcwd()) for each in sys.path)


ACCELERATED = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
print("precision", accelerator.mixed_precision, "ranks", accelerator.num_processes)
model = torch.nn.Linear(1024, 64)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
for _ in range(3):
    accelerator.backward(model(torch.ones(1, 1024, device="cuda")).sum())
    optimizer.step()
"""


def test_accelerate_with_its_config(capfd):
    pytest.importorskip("accelerate")
    Path("train.py").write_text(ACCELERATED)
    Path("config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n"
        "num_machines: 1\nnum_processes: 2\n"
    )
    assert run(["predict", "--", "accelerate", "launch", "--config_file", "config.yaml", "train.py"]) == 0
    out, err = capfd.readouterr()
    assert "precision bf16 ranks 2" in err
    assert "2 ranks" in out
    assert run(["predict", "accelerate", "launch", "--mixed_precision", "bf17", "train.py"]) == 2
    assert "bf17" in capfd.readouterr().err


def test_next_command_has_the_line(capfd):
    line = "torchrun --nproc-per-node 2 train.py 4096"
    assert run(["predict", "--gpu", "1500MiB", "--", *line.split()]) == 1
    assert f"`oomph fit --gpu 1500MiB -- {line}`" in capfd.readouterr().out


@pytest.mark.parametrize("command", ["run", "measure"])
def test_one_process_is_not_several_ranks(capfd, command):
    assert run([command, "--", "torchrun", "--nproc-per-node", "2", "train.py", "1"]) == 2
    assert "`torchrun --nproc-per-node 2 -m oomph run train.py 1`" in capfd.readouterr().err


ADAM = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, device="cuda") for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(1, 2048, device="cuda")).sum().backward()
    optimizer.step()
"""
APPLIED = {
    "torchrun --nproc-per-node 2 train.py": " 2 -m oomph run --plan plan.json train.py",
    "deepspeed --num_gpus 2 --no_local_rank train.py": 'oomph.apply("plan.json", ',
}


@pytest.mark.parametrize("line", APPLIED)
def test_fit_applies_fixes_to_each_rank(capfd, line):
    Path("train.py").write_text(ADAM)
    assert run(["fit", "--budget", "1600MiB", "--plan", "plan.json", "--", *line.split()]) == 0
    out = capfd.readouterr().out
    assert APPLIED[line] in out
    assert "--plan plan.json -- " not in out


def test_run_names_the_prediction(capfd):
    assert run(["run", "python", "train.py", "1"]) == 2
    assert "`oomph predict -- python train.py 1`" in capfd.readouterr().err


MISTAKES = {
    "torchrunn train.py": "torchrun",
    "--method lora -- python train.py": "--method is for a model's name",
    "srun python train.py": "`oomph predict -- python train.py`",
    "--gpuu a100 torchrun train.py": "--gpuu",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(capfd, words):
    assert run(["predict", *words.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert MISTAKES[words] in err
    assert len(err.splitlines()) == 1
