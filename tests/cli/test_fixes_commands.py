"""`oomph fixes`, `oomph verify` and `oomph predict --fix`, as they are typed."""

import json

import pytest

from oomph.cli.main import run

pytestmark = pytest.mark.usefixtures("in_process")

PROGRAM = """
import torch, torch.nn.functional as F
from torch import nn
import oomph

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 10)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])

def batch(device, B):
    return {"x": torch.randn(B, 64, device=device), "y": torch.zeros(B, dtype=torch.long, device=device)}

work = oomph.Workload(lambda: Model(64), batch, loss, sizes={"B": 20000})

def make():
    print("making")
    return work

def step():
    model = Model(64).cuda()
    return lambda: loss(model, batch(torch.device("cuda"), 8)).backward()
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


def test_without_a_target_all_fixes_are_listed(capsys):
    assert run(["fixes"]) == 0
    out = capsys.readouterr().out
    assert "activation_checkpointing" in out
    assert "optimizer_8bit" in out
    assert run(["fixes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["fixes"]
    assert {"fix", "kind", "changes"} == set(listed[0])


def test_what_applies_is_listed_with_saving_and_cost(program, capsys):
    assert run(["fixes", f"{program}:make", "--gpu", "h200", "--only", "activation_checkpointing"]) == 0
    captured = capsys.readouterr()
    assert "making" not in captured.out
    assert "Each fix by itself, predicted:" in captured.out
    assert "activation_checkpointing:keep=nothing" in captured.out
    assert "Not shown: fixes that change the numbers (--allow precision,training)." in captured.out
    only = ["--gpu", "h200", "--only", "activation_checkpointing", "--json"]
    assert run(["fixes", f"{program}:work", *only]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["fixes"][0]
    assert (best["fix"], best["kind"]) == ("activation_checkpointing", "exact")
    assert best["saving"] == found["peak"]["reserved"] - best["peak"]["reserved"] > 0
    assert best["slowdown"] > 1
    assert best["where"] == [f"blocks.{index}" for index in range(3)]
    assert (found["fits"], best["fits"], best["condition"]) == (True, True, "")


def test_which_fix_makes_it_fit(program, capsys):
    only = ["--only", "activation_checkpointing", "--only", "set_to_none"]
    assert run(["fixes", f"{program}:work", *only, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["fits"] for each in (found, *found["fixes"])} == {None}
    needs = {each["peak"]["device"] for each in found["fixes"]}
    assert max(needs) - min(needs) > 2**20
    size = f"{(max(needs) + min(needs)) // 2**21}MiB"  # between the best and the worst
    assert run(["fixes", f"{program}:work", *only, "--gpu", size, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert {each["fits"] for each in found["fixes"]} == {True, False}


def test_a_prediction_with_a_fix_in_and_one_recorded_in_a_file(program, tmp_path, capsys):
    def peak(*more):
        assert run(["predict", f"{program}:work", "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        named = [note["text"] for note in found["notes"] if note["text"].startswith("with")]
        assert named == (["with the fixes activation_checkpointing"] if more else [])
        return found["peak"]["allocated"]

    plain, whole = peak(), peak("--fix", "activation_checkpointing")
    assert whole < plain
    some = '[{"fix": "activation_checkpointing", "options": {"blocks": ["blocks.0"]}}]'
    (tmp_path / "fixes.json").write_text(some)
    typed = 'activation_checkpointing:blocks=["blocks.0"]'
    assert whole < peak("--fix", typed) == peak("--fix", str(tmp_path / "fixes.json")) < plain
    (tmp_path / "words.json").write_text('["activation_checkpointing"]')
    assert peak("--fix", str(tmp_path / "words.json")) == whole


def test_verify_says_that_it_holds(program, capsys):
    assert run(["verify", f"{program}:work", "activation_checkpointing", "--sizes", "B=3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("activation_checkpointing: the same loss, gradients and parameters, within 0.0001")
    use = "activation_checkpointing:keep=matmuls"
    assert run(["verify", f"{program}:work", use, "--sizes", "B=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True
