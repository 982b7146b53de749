"""oomph.diagnose: the planted cause comes first, with its line, bytes and growth."""

import copy
import json
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from benchmarks.diagnosis import training_loops, unseen
from benchmarks.diagnosis.__main__ import planted
from rich.console import Console
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import oomph
from oomph.cli.main import run
from oomph.diagnosis.findings import find, scaled_sizes
from oomph.diagnosis.patterns import FRAGMENTATION, PATTERNS
from oomph.fixes import all_fixes
from oomph.records import Alive, Allocation, Peak, Prediction, Site
from oomph.report.diagnosis import diagnosis_text
from oomph.report.terminal import report_console, verdict

PLANTED = {
    name: (getattr(module, name), pattern, lines)
    for module in (training_loops, unseen)
    for name, pattern, lines in planted(module.__name__.rpartition(".")[2])
}
MiB = 2**20
in_process = pytest.mark.usefixtures("in_process")


@pytest.mark.parametrize(
    "name",
    [
        "pairwise_distances",
        "meter_that_keeps_features",
        "running_loss_with_retain_graph",
        "evaluation_with_gradients",
        "gradients_accumulated_by_hand",
        "gradients_cloned",
    ],
)
@in_process
def test_planted_cause_is_first(name):
    program, pattern, lines = PLANTED[name]
    diagnosis = oomph.diagnose(program)
    cause = diagnosis.findings[0]
    assert cause.pattern == pattern
    assert cause.sites[0].line in lines
    peak = diagnosis.prediction.peak
    assert peak.allocated * 0.9 <= sum(one.bytes for one in diagnosis.findings) <= peak.reserved
    assert all(one.bytes > 0 for one in diagnosis.findings)


def attention(model, x):
    q, k, v = model(x).chunk(3, -1)
    return ((q @ k.transpose(1, 2)).softmax(-1) @ v).square().mean()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        return attention(self.qkv, x)


WORKLOAD = oomph.Workload(
    model=Attention,
    batch=lambda device, B, T: torch.randn(B, T, 32, device=device),
    loss=lambda model, x: model(x),
    sizes={"B": 4, "T": 2048},
)


def test_command_prints_findings_of_a_workload_as_json(capsys):
    assert run(["diagnose", f"{__file__}:WORKLOAD", "--gpu", "8GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cause = found["findings"][0]
    assert cause["pattern"] == "attention matrices"
    assert cause["growth"] == "x4 when T doubles, x2 when B doubles"
    assert "B*T^2 float32" in cause["formula"]
    assert cause["sites"][0]["function"] == "attention"
    assert "fused_attention" in cause["fixes"]
    assert "attn_implementation" not in cause["fixes"]  # of Hugging Face's models


@pytest.mark.parametrize("target", ["train.py", "train.py:training"])
def test_command_names_the_fixes_that_apply_to_the_model_of_a_program(target, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("""
import torch
from rich.console import Console
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v

def training():
    model = Attention().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        model(torch.randn(4, 1024, 32, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

if __name__ == "__main__":
    step = training()
    for _ in range(3):
        step()
""")
    assert run(["diagnose", target, "--json"]) == 0
    cause = json.loads(capsys.readouterr().out)["findings"][0]
    assert (cause["pattern"], cause["fixes"]) == ("attention matrices", ["fused_attention"])


def test_command_takes_a_script_that_may_start_a_program(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("""
import subprocess, torch
subprocess.run(["true"], check=True)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
model(torch.randn(64, 64, device="cuda")).sum().backward()
optimizer.step()
""")
    assert run(["diagnose", "train.py", "--allow-subprocesses"]) == 0
    assert "which fixes apply to the model is not known" in capsys.readouterr().out.replace("\n", " ")


@in_process
def test_softmax_over_classes_of_pixels_is_no_attention():
    workload = oomph.Workload(
        model=lambda: nn.Conv2d(3, 21, 1),
        batch=lambda device: torch.randn(4, 3, 64, 64, device=device),
        loss=lambda model, x: model(x).softmax(1).square().mean(),
    )
    assert "attention matrices" not in {one.pattern for one in oomph.diagnose(workload).findings}


def test_gradients_of_gathered_classes_are_no_one_hot_vectors():
    def setup():
        x = torch.randn(4096, 64, device="cuda")
        classes = torch.nn.Linear(64, 4000, device="cuda")

        def step():
            labels = torch.randint(0, 4000, (4096, 1), device="cuda")
            classes(x).log_softmax(-1).gather(-1, labels).mean().backward()

        return step

    found = [one.pattern for one in oomph.diagnose(oomph.predict(setup)).findings]
    assert "logits" in found
    assert "one-hot" not in found


def test_volumes_are_no_state_transitions():
    layers = [layer for _ in range(3) for layer in (nn.Conv3d(8, 8, 3, padding=1), nn.ReLU())]
    workload = oomph.Workload(
        model=lambda: nn.Sequential(*layers),
        batch=lambda device: torch.randn(2, 8, 32, 32, 32, device=device),
        loss=lambda model, x: model(x).mean(),
    )
    found = [one.pattern for one in oomph.diagnose(workload).findings]
    assert "activations across layers" in found
    assert "state transitions" not in found


def test_fixes_of_patterns_exist():
    known = {fix.name for fix in all_fixes()}
    assert {name for pattern in (*PATTERNS, FRAGMENTATION) for name in pattern.fixes} <= known


def test_ordinary_parts_come_after_an_avoidable_one():
    """Logits of a quarter of the peak, beside a large model."""
    parameter = {"op": "parameter", "kind": "parameter", "stage": "parameters", "module": "layers.0"}
    found = find(
        _prediction(
            _allocation(0, 300 * MiB, (1024, 76800), **parameter),
            _allocation(1, 100 * MiB, (1024, 25600), op="aten._log_softmax", stage="loss"),
        )
    )
    assert [one.pattern for one in found] == ["logits", "parameters"]


def test_fragmentation_is_the_cause_where_the_tensors_alone_would_fit():
    tensors = _allocation(0, 600 * MiB, (1024, 25600), op="aten._log_softmax", stage="loss")
    prediction = _prediction(tensors, reserved=800 * MiB, limit=700 * MiB, verdict="does not fit")
    found = find(prediction)
    assert (found[0].pattern, found[0].bytes) == ("fragmentation", 200 * MiB)


def test_scaled_sizes_shorten_sequences():
    assert scaled_sizes({"B": 2, "T": 1024}) == {"B": 6, "T": 512}
    assert scaled_sizes({"B": 1, "T": 7}) == {"B": 3, "T": 14}


@in_process
def test_scaled_prediction_that_fails_leaves_a_note():
    def batch(device, B, T):
        if T < 2048:
            raise ValueError("too short")
        return torch.randn(B, T, 32, device=device)

    workload = oomph.Workload(
        model=lambda: nn.Linear(32, 96),
        batch=batch,
        loss=lambda model, x: F.silu(model(x)).mean(),
        sizes={"B": 4, "T": 2048},
    )
    diagnosis = oomph.diagnose(workload)
    assert diagnosis.findings
    assert "too short" in diagnosis.notes[0].text


def _allocation(id, size, shape, **changes):
    values = {"module": "", "site": None, "kind": "activation", "step": 1, "stage": "forward activations"}
    return Allocation(id=id, bytes=size, shape=shape, dtype="float32", **{**values, **changes})


def _prediction(*tensors, reserved=0, **changes):
    allocated = sum(one.bytes for one in tensors)
    reserved = reserved or allocated
    values = {"limit": None, "verdict": None, **changes}
    return Prediction(
        gpu=None,
        gpu_title="",
        capacity=None,
        refused=None,
        peak=Peak(allocated, reserved, reserved),
        steps=(),
        at_peak=tuple(Alive(one.bytes, one) for one in tensors),
        timeline=(),
        events=(),
        allocations=tensors,
        **values,
    )


@in_process
def test_pictures_of_two_sizes_are_two_terms():
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1))
    workload = oomph.Workload(
        model=lambda: nn.Sequential(*layers, nn.ReLU()),
        batch=lambda device: torch.randn(16, 3, 64, 64, device=device),
        loss=lambda model, x: model(x).square().mean(),
    )
    (found,) = (
        one for one in oomph.diagnose(workload).findings if one.pattern == "activations across layers"
    )
    terms = found.formula.split(" + ")
    assert "B*N^2*8 float32" in terms  # not 2 x: the second convolution's are 32 wide
    assert "N=64" in found.formula


@in_process
def test_growth_is_that_of_most_bytes_and_contradicts_no_formula():
    def training():
        layers = [weight_norm(nn.Conv1d(256, 256, 9, padding=4)) for _ in range(6)]
        model = nn.Sequential(nn.Conv1d(1, 256, 1), *layers).cuda()
        optimizer = torch.optim.SGD(model.parameters())

        def step():
            model(torch.randn(12, 1, 160).cuda()).square().mean().backward()
            optimizer.step()

        return step

    diagnosis = oomph.diagnose(training)
    (found,) = (one for one in diagnosis.findings if one.pattern == "activations across layers")
    assert "B*" in found.formula
    assert "does not depend" not in found.growth
    assert all("T" not in one.growth for one in diagnosis.findings)


@in_process
def test_penalties_on_gradients_retain_no_graph():
    def training():
        critic = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.SiLU()) for _ in range(4))).cuda()
        optimizer = torch.optim.SGD(critic.parameters())

        def penalty(x):
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            return grad.square().sum()

        def step():
            real, fake = (torch.randn(1024, 1024, device="cuda") for _ in "rf")
            loss = critic(fake).mean() - critic(real).mean()
            loss = loss + penalty(real)
            loss = loss + penalty(fake)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = {one.pattern for one in oomph.diagnose(training).findings}
    assert "activations across layers" in found
    assert not found & {"retained graph", "loop kept by autograd"}


@pytest.mark.parametrize("grad", [True, False])
def test_a_script_that_only_infers_is_diagnosed_as_that(grad, tmp_path, capsys):
    (tmp_path / "infer.py").write_text(f"""
import torch
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.SiLU()) for _ in range(6))).cuda().eval()
with torch.set_grad_enabled({grad}):
    for _ in range(2):
        print(model(torch.randn(8192, 512).cuda()).argmax(-1).shape)
""")
    assert run(["diagnose", str(tmp_path / "infer.py"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("no backward pass ran" in note["text"] for note in found["assumptions"])
    assert (found["findings"][0]["pattern"] == "evaluation without no_grad") == grad
    assert "activations across layers" not in {one["pattern"] for one in found["findings"]}
    assert "parameters" in {one["stage"] for one in found["stages"]}


@in_process
def test_fragmentation_is_a_share_of_what_is_reserved():
    prediction = oomph.predict(WORKLOAD)
    peak = replace(prediction.peak, reserved=3 * prediction.peak.allocated)
    shown = diagnosis_text(oomph.diagnose(replace(prediction, peak=peak)), report_console())
    assert "67 %  fragmentation" in shown or "(67 % of the" in shown


@in_process
def test_a_peak_in_evaluation_is_named_and_has_the_sizes_of_its_batch():
    def training():
        model = nn.Sequential(nn.Embedding(3000, 64), nn.Linear(64, 3000)).cuda()
        optimizer = torch.optim.SGD(model.parameters())

        def loss(rows):
            ids = torch.randint(3000, (rows, 64), device="cuda")
            return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

        def step():
            loss(4).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                loss(48)
            model.train()

        return step

    prediction = oomph.predict(training, gpu="h200")
    assert prediction.peak.stage == "evaluation"
    assert "peak in evaluation after step" in verdict(prediction).line
    logits = next(one for one in oomph.diagnose(prediction).findings if one.pattern == "logits")
    assert "(B=48, T=64, V=3000)" in logits.formula


@in_process
@pytest.mark.parametrize("averaged", [False, True])
def test_activations_of_an_evaluation_are_not_said_to_be_saved_for_backward(averaged):
    def training():
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
        average = copy.deepcopy(model) if averaged else model
        optimizer = torch.optim.SGD(model.parameters())

        def step():
            model(torch.randn(16, 256, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.eval()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
                average(torch.randn(65536, 256, device="cuda"))
            model.train()

        return step

    cause, *others = oomph.diagnose(training).findings
    assert (cause.pattern, cause.fixes) == ("evaluation", ())
    assert "smaller batch" in cause.advice
    assert "activations across layers" not in {one.pattern for one in others}


@in_process
def test_weights_that_autocast_keeps_cast_are_no_second_copy_of_them():
    def training():
        generator, critic = (nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).cuda() for _ in "gc")
        optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()])

        def step():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                for _ in range(4):
                    critic(generator(torch.randn(64, 1024, device="cuda"))).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = {one.pattern: one.bytes for one in oomph.diagnose(oomph.predict(training)).findings}
    assert "second copy of the weights" not in found
    assert found["casts of the weights"] >= 4 * 1024 * 1024 * 2


@in_process
def test_long_paths_lose_their_first_folders_before_their_names_are_broken():
    site = Site("/x/site-packages/transformers/models/gpt2/modeling_gpt2.py", 619, "forward")
    found = oomph.diagnose(oomph.predict(WORKLOAD))
    findings = tuple(replace(one, sites=(site,)) for one in found.findings)
    text = diagnosis_text(replace(found, findings=findings), Console(width=80))
    text = text[text.index("Also at the peak") :]
    assert "modeling_gpt2.py:619" in text
    assert ".../" in text


def test_a_script_runs_once_and_gets_the_fixes_that_apply_to_its_model(tmp_path, capsys):
    read, write = os.pipe()
    script = f"""
import os, torch
os.write({write}, b"!")
layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(6)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters())
while True:
    model(torch.randn(8192, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    (tmp_path / "train.py").write_text(script)
    assert run(["diagnose", str(tmp_path / "train.py"), "--json"]) == 0
    os.close(write)
    with open(read, "rb") as runs:
        assert runs.read() == b"!"
    found = json.loads(capsys.readouterr().out)["findings"]
    fixes = {name for one in found for name in one["fixes"]}
    assert "activation_checkpointing" in fixes
    assert "micro_batches" not in fixes  # changes the step, which a script computes
