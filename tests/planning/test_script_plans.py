"""Fixes for scripts: predicted and run without editing them."""

import json
import os
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import oomph
from oomph.cli.main import run
from oomph.fixes.scripts import ModelChange
from oomph.planning import read_plan, write_plan
from oomph.prediction import program
from oomph.report.fixes import plan_text
from oomph.report.html import Page, write_html
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


FROM_THE_HOST = SCRIPT.replace("torch.randn(rows, 64, device=device)", "torch.randn(rows, 64).to(device)")


def test_the_largest_batch_of_a_script_that_moves_it_to_the_gpu(tmp_path, script, capsys):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(FROM_THE_HOST))
    command = ["--max", "2GiB", "--largest", "batch", "--json"]
    assert run(["fit", str(file), *command, "--", "cuda", "65536"]) == 0
    found = json.loads(capsys.readouterr().out)["largest"]["batch"]["without"]
    given = ["predict", str(file), "--max", "2GiB"]
    sizes = [found["size"], round(1.005 * found["size"])]
    fits = [run([*given, "--", "cuda", str(rows)]) for rows in sizes]
    assert fits == [0, 1]
    assert run(["fit", script, *command, "--", "cuda", "64"]) == 2
    assert "makes its batch on the GPU" in capsys.readouterr().err


NO_FIX = """
    import torch
    model = torch.nn.Linear(64, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), fused=True)
    for _ in range(3):
        model(torch.randn(65536, 64).cuda()).sum().backward()
        optimizer.step()
"""


def test_the_batch_that_would_fit_where_no_fix_is_enough(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(NO_FIX))
    plan = oomph.fit(oomph.Script(str(file)), gpu="h200", max="100MiB")
    assert not plan.fits
    assert plan.rows == 65536
    peaks = [
        oomph.predict(oomph.Script(str(file)), sizes={"B": rows}, gpu="h200", max="100MiB").fits
        for rows in (plan.rows_that_fit, 2 * plan.rows_that_fit)
    ]
    assert peaks == [True, False]
    shown = plan_text(plan, report_console(), "train.py", None)
    assert f"A batch of {plan.rows_that_fit:,} instead of 65,536 would fit" in shown


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
    assert run(["run", "--fix", "optimizer_8bit", script]) == 2
    assert "changes the step" in capsys.readouterr().err
    for command in (["run"], ["predict"]):
        assert run([*command, "--fix", "micro_batches", script, "--", "cpu", "64"]) == 2
        assert "no Trainer" in capsys.readouterr().err
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


def test_fixes_are_predicted_where_cuda_sees_a_gpu(script):
    """Forks of a process that has run a backward pass beside a GPU can run none."""
    words = ["fixes", script, "--only", "activation_checkpointing", "--json", "--", "cuda", "8192"]
    imitated = Path(__file__).with_name("imitated_gpu.py")
    shown = subprocess.run([sys.executable, imitated, *words], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    best = json.loads(shown.stdout)["fixes"][0]
    assert best["saving"] > 0


AFTER_BACKWARD = """
import imitated_gpu, oomph, torch
from torch import nn

imitated_gpu.imitate()
imitated_gpu.count()
torch.zeros((), requires_grad=True).backward()

def train():
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
    model = nn.Sequential(*blocks).cuda()
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        model(torch.randn(32768, 64, device="cuda")).sum().backward()
        optimizer.step()

    return step

plan = oomph.fit(train, gpu="h200", max="300MiB")
print(plan.before.fits, plan.fits, plan.failed)
"""


def test_a_plan_is_found_in_a_process_that_has_run_a_backward_pass_beside_a_gpu():
    """Then no fork can, and the function is predicted in the process itself."""
    command = [sys.executable, "-c", AFTER_BACKWARD]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert shown.stdout == "False True ()\n", shown.stderr
    assert "predicted in this process" in shown.stderr


CALLED_ONCE = SCRIPT.replace(
    "return x + self.down",
    "self.calls = getattr(self, 'calls', 0) + 1\n"
    "            if self.calls > round + 1: raise ValueError('called a second time')\n"
    "            return x + self.down",
).replace("for _ in range(3):\n", "for round in range(3):\n")


def test_a_fix_that_could_not_be_predicted_is_listed_with_the_reason(tmp_path, monkeypatch):
    """`no fix` is not said while one of them may be enough."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(textwrap.dedent(CALLED_ONCE))
    plan = oomph.fit(oomph.Script("train.py", ("cuda", "65536")), max="220MiB")
    assert not plan.fits
    write_plan(plan, "plan.json")
    for failed in (plan.failed, read_plan("plan.json").failed):
        reasons = {one.reason for one in failed if one.fixes[0].fix == "activation_checkpointing"}
        assert reasons == {"ValueError: called a second time"}
    text = " ".join(plan_text(plan, report_console(), "train.py", None).split())
    assert "activation_checkpointing:keep=nothing: ValueError: called a second time" in text
    assert "No fix is" not in text
    assert "no fix lowers" not in text
    write_html("page.html", Page("train.py", [], plan=plan))
    assert "called a second time" in Path("page.html").read_text()


ACCUMULATES = SCRIPT.replace(
    "        loss = model(torch.randn(rows, 64, device=device))\n        loss.backward()",
    "        for _ in range(int(sys.argv[3])):\n"
    "            loss = model(torch.randn(rows, 64, device=device))\n            loss.backward()",
)


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory):
    """Predictions with a fix, by fix and accumulated passes."""
    file = tmp_path_factory.mktemp("script") / "train.py"
    file.write_text(textwrap.dedent(ACCUMULATES))

    def predicted(fix, passes):
        change = ModelChange([oomph.FixUse(fix)]) if fix else None
        script = oomph.Script(str(file), ("cuda", "65536", str(passes)), on_optimizer=change)
        return oomph.predict(script, gpu="h200")

    return predicted


def test_what_is_pinned_at_once_does_not_grow_with_accumulated_passes(accumulated):
    one, many = (accumulated("activation_offloading", passes) for passes in (1, 6))
    assert many.pinned == one.pinned > 0


def test_replayed_passes_count_what_checkpoints_recompute(accumulated):
    def slowdown(passes):
        plain, fixed = (accumulated(fix, passes) for fix in ("", "activation_checkpointing"))
        return fixed.work.gpu_seconds / plain.work.gpu_seconds

    assert slowdown(8) == pytest.approx(slowdown(1), rel=0.05)


OF_TRANSFORMERS = """
    import sys, torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    device, rows = sys.argv[1], int(sys.argv[2])

    def sample(i):
        ids = torch.arange(64) * (i + 1) % 99
        return {"input_ids": ids, "labels": ids.masked_fill(ids < i % 7, -100)}

    torch.manual_seed(0)
    sizes = dict(vocab_size=100, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    ends = dict(bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))
    arguments = TrainingArguments(
        sys.argv[3], per_device_train_batch_size=rows, max_steps=3, use_cpu=device == "cpu",
        report_to=[], save_strategy="no", disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=[sample(i) for i in range(40)]).train()
    print("weights", sum(each.double().abs().sum().item() for each in model.parameters()))
"""


def test_the_batch_of_a_trainer_is_divided_by_its_own_arguments(tmp_path, capfd):
    pytest.importorskip("accelerate")
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(OF_TRANSFORMERS))
    weights = []
    for fixes in ("no_foreach", "micro_batches:parts=4"):
        assert run(["run", "--fix", fixes, str(file), "cpu", "8", str(tmp_path)]) == 0
        found = capfd.readouterr()
        weights.append(float(found.out.split("weights")[1]))
    assert weights[1] == pytest.approx(weights[0], rel=1e-9)
    assert "per_device_train_batch_size=2, gradient_accumulation_steps=4" in found.err
    peaks = []
    for fixes in ([], ["--fix", "micro_batches:parts=4", "--fix", "trainer_optim:optim=adafactor"]):
        assert run(["predict", str(file), *fixes, "--json", "--", "cuda", "40", str(tmp_path)]) == 0
        peaks.append(json.loads(capfd.readouterr().out)["peak"]["allocated"])
    assert peaks[1] < 0.9 * peaks[0]
