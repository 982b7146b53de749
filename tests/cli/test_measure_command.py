"""`oomph measure`: predicted beside measured. There is no GPU here: measurements are made up."""

import json
import pickle

import pytest
import torch
from benchmarks.report.traces import data_of
from torch import nn

import oomph
from oomph.cli import measure
from oomph.cli.main import run
from oomph.prediction import isolation
from oomph.records import Measurement, OpRow, Peak

STEP = oomph.Workload(
    model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))),
    batch=lambda device: torch.zeros(64, 64, device=device),
    loss=lambda model, batch: model(batch).sum(),
)
TARGET = f"{__file__}:STEP"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert run(["measure", TARGET]) == 2
    shown = capsys.readouterr().err
    assert "CUDA GPU" in shown
    assert shown.count("\n") == 1


def test_a_gpu_that_cannot_be_used_is_no_mistake_of_oomph(monkeypatch, tmp_path, capsys):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho CUDA error: device busy >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(measure.sys, "executable", str(python))
    assert run(["measure", TARGET]) == 2
    assert "device busy" in capsys.readouterr().err


@pytest.mark.usefixtures("in_process")
def test_measured_stands_beside_predicted(monkeypatch, capsys, tmp_path):
    def measured(options, ops):
        if ops:
            return [OpRow("aten.mm.default", "f32[64,64]", 0, 1 << 20, 1 << 20, "step 1 forward", 1, 1 << 20)]
        return Measurement("H200", torch.__version__, Peak(1 << 20, 2 << 20, 0), (), 0, 0.001)

    monkeypatch.setattr(measure, "_this_gpu", lambda: "h200")
    monkeypatch.setattr(measure, "_in_fresh_process", measured)
    arguments = ["measure", TARGET, "--fix", "activation_checkpointing"]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("as it is", "with the fixes", "1.0 MiB", "mm", "step time: x"))
    assert run([*arguments, "--json", "--html", str(tmp_path / "measured.html")]) == 0
    page = data_of((tmp_path / "measured.html").read_text())
    assert [one["title"] for one in page["measured"]] == ["as it is", "with the fixes"]
    found = json.loads(capsys.readouterr().out)
    assert [row["measured"] for row in found["runs"][0]["rows"]] == [1 << 20, 2 << 20, 0.001]
    assert found["runs"][1]["residuals"]


SCRIPT = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
for name in ("synchronize", "memory_allocated", "max_memory_allocated", "max_memory_reserved"):
    setattr(torch.cuda, name, lambda: 1 << 20)  # there is no GPU here
torch.cuda.get_device_name = lambda: "none"
model = torch.nn.Linear(256, 256, device=device)
optimizer = torch.optim.SGD(model.parameters(), foreach=False)
while True:
    model(torch.ones(4, 256, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_is_measured_in_a_process_of_its_own_and_its_residual_explained_by_op(
    monkeypatch, capsys, tmp_path
):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def in_fork(function, progress, *given):  # a new interpreter takes seconds to import torch
        function, given = pickle.loads(pickle.dumps((function, given)))
        return isolation.run_isolated(lambda report: function(*given, report), progress)

    monkeypatch.setattr(isolation, "run_in_new_interpreter", in_fork)
    monkeypatch.setattr(measure, "_this_gpu", lambda: "h200")
    assert run(["measure", str(script), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["gpu"] == "none"
    assert [row["measured"] for row in found["rows"]][:2] == [1 << 20, 1 << 20]
    # Run without a GPU, the ops need no bytes of it; each is found in the prediction.
    assert {each["aspect"] for each in found["residuals"]} == {"at the peak", "high"}
    residuals = {each["op"]: each for each in found["residuals"] if each["aspect"] == "high"}
    gradients, workspace = 2 * 4 * 256 * 256, 32 << 20  # cuBLAS's, made once
    copies = 2 * 4 * 4 * 256  # of the gradient of sum(), one number for all
    assert (residuals["mm"]["bytes"], residuals["mm"]["times"]) == (-gradients - copies - workspace, 2)
    script.write_text("raise ValueError('its own mistake')")
    assert run(["measure", str(script)]) == 3
    assert "train.py:1: ValueError: its own mistake" in capsys.readouterr().err
