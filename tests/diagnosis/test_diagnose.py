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
from torch import nn

import oomph
from oomph.cli.main import run
from oomph.diagnosis import patterns
from oomph.diagnosis.findings import scaled_sizes
from oomph.diagnosis.patterns import FRAGMENTATION, PATTERNS
from oomph.fixes import all_fixes
from oomph.prediction.tracer import holders
from oomph.records import Alive, Allocation, Peak, Prediction
from oomph.report.terminal import verdict

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


@pytest.mark.parametrize("rows", [4, 2])
def test_command_prints_findings_of_a_workload_as_json(capsys, rows):
    sizes = [] if rows == 4 else ["--sizes", f"B={rows}"]
    assert run(["diagnose", f"{__file__}:WORKLOAD", "--gpu", "8GiB", "--json", *sizes]) == 0
    found = json.loads(capsys.readouterr().out)
    cause = found["findings"][0]
    assert cause["pattern"] == "attention matrices"
    assert cause["growth"] == "x4 when T doubles, x2 when B doubles"
    assert "B*T^2 float32" in cause["formula"]
    assert f"B={rows}" in cause["formula"]
    assert cause["sites"][0]["function"] == "attention"
    assert "fused_attention" in cause["fixes"]
    assert "attn_implementation" not in cause["fixes"]  # of Hugging Face's models


@pytest.mark.parametrize(("target", "most_runs"), [("train.py", 1), ("train.py:training", 3)])
def test_command_names_the_fixes_that_apply_to_the_model_of_a_program(
    target, most_runs, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    read, write = os.pipe()
    (tmp_path / "train.py").write_text(f"""
import os, torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(1, 2)).softmax(-1) @ v

def training():
    os.write({write}, b"!")
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
    os.close(write)
    with open(read, "rb") as runs:
        assert len(runs.read()) <= most_runs
    cause = json.loads(capsys.readouterr().out)["findings"][0]
    assert (cause["pattern"], cause["fixes"]) == ("attention matrices", ["fused_attention"])


def test_fixes_of_patterns_exist():
    known = {fix.name for fix in all_fixes()}
    assert {name for pattern in (*PATTERNS, FRAGMENTATION) for name in pattern.fixes} <= known


def test_ordinary_parts_come_after_an_avoidable_one():
    """Logits of a quarter of the peak, beside a large model."""
    parameter = {"op": "parameter", "kind": "parameter", "stage": "parameters", "module": "layers.0"}
    prediction = _prediction(
        _allocation(0, 300 * MiB, (1024, 76800), **parameter),
        _allocation(1, 100 * MiB, (1024, 25600), op="aten._log_softmax", stage="loss"),
    )
    found = oomph.diagnose(prediction).findings
    assert [one.pattern for one in found] == ["logits", "parameters"]


def test_fragmentation_is_the_cause_where_the_tensors_alone_would_fit():
    tensors = _allocation(0, 600 * MiB, (1024, 25600), op="aten._log_softmax", stage="loss")
    prediction = _prediction(tensors, reserved=800 * MiB, limit=700 * MiB, verdict="does not fit")
    found = oomph.diagnose(prediction).findings
    assert (found[0].pattern, found[0].bytes) == ("fragmentation", 200 * MiB)


def test_a_rule_that_fails_does_not_apply_and_leaves_a_note(monkeypatch):
    def applies(facts, one):
        raise IndexError("none")

    monkeypatch.setattr(patterns, "PATTERNS", (replace(PATTERNS[0], name="mine", applies=applies), *PATTERNS))
    logits = _allocation(0, 100 * MiB, (1024, 25600), op="aten._log_softmax", stage="loss")
    diagnosis = oomph.diagnose(_prediction(logits))
    assert [one.pattern for one in diagnosis.findings] == ["logits"]
    assert [note.text for note in diagnosis.notes] == ["the rule for mine failed: IndexError('none')"]


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


class Pool:
    def __init__(self):
        self.kept = []

    def push(self, sample):
        self.kept.append({"sample": sample})


class Generator:
    def __init__(self):
        self.net, self.pool = nn.Linear(1024, 1024).cuda(), Pool()

    def train(self, leaf):
        optimizer = torch.optim.SGD(self.net.parameters())
        for _ in range(4):
            noise = leaf(torch.randn(512, 1024, device="cuda"))
            self.net(noise).sum().backward()
            optimizer.step()
            self.pool.push(noise)


@pytest.mark.parametrize("leaf", [nn.Parameter, lambda noise: noise.requires_grad_(True)])
@in_process
def test_the_line_that_keeps_leaves_is_named(leaf):
    cause = oomph.diagnose(lambda: Generator().train(leaf)).findings[0]
    assert cause.pattern == "growing list"
    assert cause.sites[0].function == "push"


CATALOG = [[{"name": index, "labels": [index]} for index in range(100)] for _ in range(100)]


@in_process
def test_what_a_function_has_is_searched_before_large_globals(monkeypatch):
    monkeypatch.setattr(holders, "_MOST_VISITED", 20_000)
    cause = oomph.diagnose(lambda: Generator().train(nn.Parameter)).findings[0]
    assert cause.sites[0].function == "push"


class Numbers(list):
    read = 0

    def __iter__(self):
        for each in super().__iter__():
            Numbers.read += 1
            yield each


class Part:
    def __init__(self):
        self.ids, self.others = Numbers(range(1000)), []


@in_process
def test_a_search_for_the_line_reads_an_object_once_and_few_numbers():
    def program():
        parts = [Part() for _ in range(20)]
        for part in parts:
            part.others += parts
        model, kept = nn.Linear(1024, 1024).cuda(), []
        for _ in range(3):
            kept.append(model(torch.randn(1024, 1024, device="cuda")))
            kept[-1].sum().backward()

    cause = oomph.diagnose(program).findings[0]
    assert (cause.pattern, cause.sites[0].function) == ("growing list", "program")
    assert 0 < Numbers.read < 10_000


def pixel_classes():
    return oomph.Workload(
        model=lambda: nn.Conv2d(3, 21, 1),
        batch=lambda device: torch.randn(4, 3, 64, 64, device=device),
        loss=lambda model, x: model(x).softmax(1).square().mean(),
    )


def volumes():
    layers = [layer for _ in range(3) for layer in (nn.Conv3d(8, 8, 3, padding=1), nn.ReLU())]
    return oomph.Workload(
        model=lambda: nn.Sequential(*layers),
        batch=lambda device: torch.randn(2, 8, 32, 32, 32, device=device),
        loss=lambda model, x: model(x).mean(),
    )


def gathered_classes():
    x, classes = torch.randn(4096, 64, device="cuda"), nn.Linear(64, 4000, device="cuda")

    def step():
        labels = torch.randint(0, 4000, (4096, 1), device="cuda")
        classes(x).log_softmax(-1).gather(-1, labels).mean().backward()

    return step


def penalties_on_gradients():
    critic = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.SiLU()) for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(critic.parameters())

    def penalty(x):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return grad.square().sum()

    def step():
        real, fake = (torch.randn(1024, 1024, device="cuda") for _ in "rf")
        (critic(fake).mean() - critic(real).mean() + penalty(real) + penalty(fake)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@in_process
def test_dropout_of_attention_matrices_belongs_to_them():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head, self.dropout = nn.Embedding(500, 64), nn.Linear(64, 500), nn.Dropout(0.1)

        def forward(self, ids):
            q = self.table(ids).unflatten(-1, (4, 16)).transpose(1, 2)
            x = self.dropout((q @ q.transpose(2, 3)).softmax(-1)) @ q
            return self.head(x.transpose(1, 2).flatten(2))

    def training():
        model = Attention().cuda()

        def step():
            ids = torch.randint(500, (8, 256)).cuda()
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()

        return step

    found = {one.pattern: one.formula for one in oomph.diagnose(training).findings}
    # Of softmax, the product's gradient, and what dropout makes of it.
    assert "3 x B*T^2*4 float32" in found["attention matrices"]


def weights_cast_for_two_models():
    generator, critic = (nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).cuda() for _ in "gc")
    optimizer = torch.optim.SGD([*generator.parameters(), *critic.parameters()])

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for _ in range(4):
                critic(generator(torch.randn(64, 1024, device="cuda"))).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@in_process
@pytest.mark.parametrize(
    ("program", "wrong", "right"),
    [
        (
            pixel_classes,
            {"attention matrices", "second copy of the weights", "data set on the GPU"},
            "other activations",
        ),
        (volumes, {"state transitions"}, "activations across layers"),
        (gathered_classes, {"one-hot"}, "logits"),
        (penalties_on_gradients, {"retained graph", "loop kept by autograd"}, "activations across layers"),
        (weights_cast_for_two_models, {"second copy of the weights"}, "casts of the weights"),
    ],
)
def test_what_looks_like_another_pattern_is_none(program, wrong, right):
    target = program() if program in (pixel_classes, volumes) else program
    found = {one.pattern for one in oomph.diagnose(target).findings}
    assert right in found
    assert not found & wrong


@in_process
@pytest.mark.parametrize("views", [1, 2])
def test_scores_of_a_contrastive_loss_have_no_vocabulary(views):
    def training():
        towers = [nn.Sequential(nn.Embedding(5000, 32), nn.Linear(32, 48)).cuda() for _ in "ab"]

        def step():
            a, b = (tower(torch.randint(5000, (2048,)).cuda()).repeat(views, 1) for tower in towers)
            F.cross_entropy(a @ b.t() / 0.1, torch.arange(2048 * views, device="cuda")).backward()

        return step

    cause = oomph.diagnose(training).findings[0]
    assert (cause.pattern, cause.growth) == ("scores of all pairs", "x4 when B doubles")
    assert "B^2" in cause.formula
    assert "V" not in cause.formula


@in_process
def test_attention_normalised_by_logsumexp_is_no_contrastive_loss():
    def training():
        layer, head = nn.Linear(64, 64, device="cuda"), nn.Linear(64, 10, device="cuda")

        def step():
            q = layer(torch.randn(16, 400, 64, device="cuda"))
            scores = q @ q.transpose(-1, -2)
            x = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ q
            F.cross_entropy(head(x.mean(1)), torch.zeros(16, dtype=torch.long, device="cuda")).backward()

        return step

    cause = oomph.diagnose(training).findings[0]
    assert cause.pattern == "attention matrices"
    assert "B*T^2 float32" in cause.formula


@in_process
def test_a_number_of_heads_times_samples_is_not_called_a_vocabulary():
    def training():
        table, head = nn.Embedding(500, 64, device="cuda"), nn.Linear(64, 32, device="cuda")

        def step():
            ids = torch.randint(500, (8, 256)).cuda()
            q = table(ids).unflatten(-1, (4, 16)).transpose(1, 2).flatten(0, 1)  # [B*heads = 32, T, 16]
            x = ((q @ q.transpose(1, 2)).softmax(-1) @ q).unflatten(0, (8, 4)).transpose(1, 2).flatten(2)
            F.cross_entropy(head(x).flatten(0, 1), ids.flatten() % 32).backward()

        return step

    cause = oomph.diagnose(training).findings[0]
    assert (cause.pattern, cause.growth) == ("attention matrices", "x4 when T doubles, x2 when B doubles")
    assert "B*T^2*4" in cause.formula
    assert "V" not in cause.formula


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
def test_activations_of_an_evaluation_are_not_said_to_be_saved_for_backward():
    def training():
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
        average = copy.deepcopy(model)
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
