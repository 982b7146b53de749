"""Fixes for scripts: predicted and run without editing them."""

import json
import os
import runpy
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import oomph
from oomph.cli.main import run
from oomph.planning import read_plan
from oomph.prediction import program
from oomph.report.fixes import plan_text
from oomph.report.terminal import report_console

SCRIPT = """
    import sys, torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    torch.manual_seed(0)
    device, rows = sys.argv[1], int(sys.argv[2])
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.randn(rows, 64, device=device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    file = tmp_path_factory.mktemp("script") / "train.py"
    file.write_text(textwrap.dedent(SCRIPT))
    return str(file)


def test_the_script_runs_with_a_fix_and_computes_the_same(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "cpu", "64"])
    runpy.run_path(script, run_name="__main__")
    plain = capsys.readouterr().out
    assert run(["run", "--fix", "activation_checkpointing", script, "cpu", "64"]) == 0
    assert capsys.readouterr().out == plain != ""


def test_a_module_for_torchrun_is_fitted_and_run(tmp_path, monkeypatch, capsys):
    package = tmp_path / "package_of_script"
    package.mkdir()
    (package / "__init__.py").touch()
    first = "import os\nassert os.environ['WORLD_SIZE'] == '1'\n"
    (package / "train.py").write_text(first + textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    target = ["--torchrun", "-m", "package_of_script.train"]
    assert run(["fit", *target, "--max", "520MiB", "--plan", "plan.json", "--", "cuda", "65536"]) == 0
    plan = read_plan(Path("plan.json"))
    assert plan.fits
    fixes = ["activation_checkpointing", "fused_optimizer", "allocator"]
    assert [use.fix for use in plan.fixes] == fixes
    assert plan.model.startswith("Model, ")
    run_words = ["run", "--plan", "plan.json", *target, "--"]
    assert f"oomph {' '.join(run_words)} cuda 65536\n" in capsys.readouterr().out
    assert run([*run_words, "cpu", "64"]) == 0
    assert "fused_optimizer: AdamW" in capsys.readouterr().err
    assert run(["predict", *target, "--max", "100MiB", "--", "cuda", "65536"]) == 1
    command = f"oomph fit {' '.join(target)} --max 100MiB -- cuda 65536"
    assert f"Next: `{command}`" in capsys.readouterr().out


BUILT_BEFORE = nn.Sequential(
    *(nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)) for _ in range(3))
)


def train():
    model = BUILT_BEFORE.cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.randn(8192, 256, device="cuda")).square().mean().backward()
        optimizer.step()


ONLY = ["--gpu", "h200", "--only", "activation_checkpointing", "--only", "fused_optimizer"]


def test_each_fix_of_a_function_is_predicted(capsys):
    assert run(["fixes", f"{__file__}:train", "--json", *ONLY]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["fixes"][0]
    assert best["fix"] == "activation_checkpointing"
    assert best["saving"] == found["peak"]["reserved"] - best["peak"]["reserved"] > 0


def test_each_fix_of_a_script_that_does_not_fit_is_predicted(script, capsys):
    assert run(["fixes", script, *ONLY, "--max", "64MiB", "--", "cuda", "8192"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Does not fit")
    assert "activation_checkpointing" in shown
    assert f"oomph fit {script} --gpu h200 --max 64MiB" in shown


def test_its_own_failure_and_what_cannot_be_applied(tmp_path, script, capsys):
    failing = tmp_path / "failing.py"
    failing.write_text("raise ValueError('mine')\n")
    assert run(["run", "--fix", "activation_checkpointing", str(failing)]) == 1
    assert "ValueError: mine" in capsys.readouterr().err
    for command in (["run", "--fix", "micro_batches", script], ["predict", "--fix", "micro_batches", script]):
        assert run(command) == 2
        assert "changes the step" in capsys.readouterr().err
    assert run(["run", script]) == 2


HAND_WRITTEN = SCRIPT.replace("optimizer = torch.optim.AdamW(model.parameters())", "").replace(
    "optimizer.step()\n        optimizer.zero_grad()",
    "for p in model.parameters():\n            p.data.add_(p.grad, alpha=-0.1)\n            p.grad = None",
)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_script_without_an_optimizer_or_with_a_compiled_model_is_changed_too(
    tmp_path, compiled, monkeypatch, capsys
):
    text = HAND_WRITTEN
    if compiled:
        text = SCRIPT.replace("Model().to(device)", 'torch.compile(Model().to(device), backend="eager")')
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(text))
    monkeypatch.setattr(sys, "argv", [str(file), "cpu", "64"])
    runpy.run_path(str(file), run_name="__main__")
    plain = capsys.readouterr().out
    assert run(["run", "--fix", "activation_checkpointing", str(file), "cpu", "64"]) == 0
    shown = capsys.readouterr()
    assert "activation_checkpointing: 3 changes" in shown.err
    assert shown.out == plain != ""


def test_a_script_whose_model_cannot_be_found_gets_a_verdict(tmp_path):
    file = tmp_path / "no_model.py"
    file.write_text(
        "import torch\nw = torch.zeros(1 << 20, device='cuda', requires_grad=True)\n"
        "for _ in range(3):\n    w.tanh().sum().backward()\n    w.data.add_(w.grad)\n    w.grad = None\n"
    )
    plan = oomph.fit(oomph.Script(str(file)), gpu="h200", max="6MiB")
    assert not plan.fits
    assert "no optimizer" in plan.reason


def test_a_script_that_trains_nothing_and_has_no_end_gets_a_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "_ENDLESS_S", 0.5)
    file = tmp_path / "inference.py"
    file.write_text("import torch\nwhile True:\n    torch.zeros(1 << 20, device='cuda')\n")
    plan = oomph.fit(oomph.Script(str(file)), gpu="h200", max="3MiB")
    assert not plan.fits
    assert "no optimizer" in plan.reason


def test_a_later_step_counts_if_asked_for(tmp_path, capsys):
    file = tmp_path / "fifth_step.py"
    file.write_text("""
import torch
model = torch.nn.Linear(512, 512, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
for step in range(1, 9):
    if step == 5:
        torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    model(torch.randn(1024, 512, device="cuda")).sum().backward()
    optimizer.step()
""")
    fit = ["fit", str(file), "--gpu", "h200", "--max", "200MiB"]
    assert run(fit) == 0
    assert "stopped after 3 steps" in capsys.readouterr().out
    assert run([*fit, "--steps", "5"]) == 1


def test_a_plan_is_for_the_sizes_that_are_asked_for(tmp_path, capsys):
    file = tmp_path / "short_batches.py"
    file.write_text("""
import torch
model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 64)).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    model(torch.randint(100, (8, 100)).cuda()).sum().backward()
    optimizer.step()
""")
    fit = ["fit", str(file), "--gpu", "h200", "--max", "100MiB"]
    assert run(fit) == 0
    assert run([*fit, "--sizes", "T=20000"]) == 1
    assert "[8, 100] are traced as [8, 20000]" in capsys.readouterr().out
    assert run(["predict", *fit[1:], "--sizes", "T=20000"]) == 1
    assert "oomph fit" in (out := capsys.readouterr().out)
    assert "--sizes T=20000" in out


def test_a_plan_is_for_the_batches_that_are_predicted_with_it(tmp_path, capsys):
    file, plan = str(tmp_path / "drawn_batches.py"), str(tmp_path / "plan.json")
    Path(file).write_text("""
import random, torch
Linear, Sequential = torch.nn.Linear, torch.nn.Sequential
blocks = [Sequential(Linear(256, 1024), torch.nn.Tanh(), Linear(1024, 256)) for _ in range(4)]
model = Sequential(*blocks).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    rows = random.randrange(1 << 13, 1 << 14)
    model(torch.randn(rows, 256).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""")
    assert run(["fit", file, "--gpu", "h200", "--max", "400MiB", "--plan", plan]) == 0
    capsys.readouterr()
    assert run(["predict", file, "--plan", plan, "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert read_plan(plan).fixes
    assert read_plan(plan).after.peak.allocated == predicted["peak"]["allocated"]


def test_a_script_is_fitted_and_run_with_another_allocator(tmp_path, monkeypatch, capsys):
    file, plan = str(tmp_path / "fragmented.py"), str(tmp_path / "plan.json")
    Path(file).write_text("""
import os, sys, torch
device, unit = sys.argv[1], int(sys.argv[2])
if device == "cpu":
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:128"
def load(size):
    return torch.empty(size * unit, dtype=torch.uint8, device=device)
read = [load(100) for _ in range(10)]
del read
kept = [load(60) for _ in range(10)]  # leaves 40 of each segment
model = torch.nn.Linear(16, 16).to(device)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(load(150).view(-1, 16).float()[:16]).sum().backward()
    optimizer.step()
print(os.environ.get("PYTORCH_ALLOC_CONF"))
""")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert (
        run(["fit", file, "--gpu", "h200", "--max", "1.5GiB", "--plan", plan, "--", "cuda", "1048576"]) == 0
    )
    assert [use.fix for use in read_plan(plan).fixes] == ["allocator"]
    capsys.readouterr()
    assert run(["run", "--plan", plan, file, "cpu", "16"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "expandable_segments:True\n"
    assert "expandable_segments:True instead of PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128" in shown.err


def test_a_plan_says_that_memory_grows():
    kept = []

    def leaks():
        model = nn.Linear(512, 512).cuda()
        optimizer = torch.optim.SGD(model.parameters())

        def step():
            kept.append(model(torch.randn(1024, 512, device="cuda")))
            kept[-1].sum().backward()
            optimizer.step()

        return step

    plan = oomph.fit(leaks, gpu="h200")
    assert plan.growth == 2 << 20
    assert "grows by 2.0 MiB" in plan_text(plan, report_console(), "train.py:leaks", None)
