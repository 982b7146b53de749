"""`oomph run` where memory runs out: with the snapshot of a GPU that this machine need not have."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.report.snapshots import snapshot

from oomph.cli.main import run
from oomph.measurement import oplog

MiB = 1 << 20
FAILS = "import torch\nraise torch.OutOfMemoryError('CUDA out of memory')\n"


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path):
    """Calls that start the recording."""
    started = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(oplog, "cuda_lazy_call", lambda call: call())
    monkeypatch.setattr(oplog, "record_memory_history", lambda *_, **options: started.append(options))
    monkeypatch.setattr(oplog, "memory_snapshot", snapshot)
    limit(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return started


def limit(monkeypatch, total=143156, free=100000, reserved=42300, fraction=1.0, name="NVIDIA H200"):
    """MiB of the GPU, when the process has run out of memory."""
    device = SimpleNamespace(name=name, total_memory=total * MiB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * MiB, total * MiB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved * MiB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: fraction)


@pytest.mark.parametrize(
    ("case", "options", "note"),
    [
        ({}, "--gpu h200", ""),
        (
            {"fraction": 24064 / 143156, "reserved": 24000},
            "--gpu h200 --max 24064MiB",
            "23.5 GiB of the H200's 139.8 GiB: per_process",
        ),
        ({"free": 100, "reserved": 24000}, "--gpu h200 --max 24100MiB", "in use outside of it"),
        (
            {"total": 16384, "free": 100, "reserved": 15800, "name": "NVIDIA H200 MIG 1g.18gb"},
            "--gpu 16384MiB",
            "",
        ),
    ],
)
def test_fixes_are_looked_for_that_fit_what_the_process_could_have_had(
    fake_gpu, monkeypatch, capsys, case, options, note
):
    limit(monkeypatch, **case)
    Path("train.py").write_text(FAILS)
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: commands.append(" ".join(words)))
    assert run(["run", "train.py"]) == 1
    assert f"oomph fit train.py {options} --plan" in commands[0]
    assert note in " ".join(capsys.readouterr().err.split())


def test_running_out_of_memory_is_explained(fake_gpu, capsys):
    Path("train.py").write_text(FAILS)
    # With a fix, no plan is looked for, which takes a while.
    assert run(["run", "--fix", "activation_checkpointing", "train.py"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.index("OutOfMemoryError: CUDA out of memory") < shown.err.index("ran out of memory with")
    assert "train.py:12: tried to allocate 48 MiB" in shown.err
    assert "ran out of memory" in Path("train-out-of-memory.html").read_text()
    assert [options["stacks"] for options in fake_gpu] == ["python"]


def test_the_status_is_that_of_the_script(fake_gpu, capsys):
    Path("train.py").write_text("import sys\nprint('mine')\nsys.exit(int(sys.argv[1]))\n")
    with pytest.raises(SystemExit) as ended:
        run(["run", "train.py", "7"])
    assert ended.value.code == 7
    assert capsys.readouterr().out == "mine\n"
    Path("train.py").write_text("print('mine')\n")
    assert run(["run", "train.py"]) == 0
    assert capsys.readouterr() == ("mine\n", "")


def test_a_report_that_fails_does_not_hide_the_failure(fake_gpu, monkeypatch, capsys):
    monkeypatch.setattr(oplog, "memory_snapshot", lambda: {"segments": 3})
    Path("train.py").write_text(FAILS)
    assert run(["run", "--fix", "activation_checkpointing", "train.py"]) == 1
    assert "OutOfMemoryError: CUDA out of memory" in (shown := capsys.readouterr().err)
    assert "no report of the failure could be made" in shown


def test_without_a_gpu_nothing_is_recorded_and_predict_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    Path("train.py").write_text("raise ValueError('bf16 needs a GPU')\n")
    assert run(["run", "--fix", "fused_optimizer", "train.py"]) == 1
    first, *traceback = capsys.readouterr().err.splitlines()
    assert "no GPU; `oomph predict train.py --fix fused_optimizer`" in first
    assert traceback[-1] == "ValueError: bf16 needs a GPU"
    made = "model = torch.nn.Linear(4, 4)\ntorch.optim.SGD(model.parameters())"
    Path("train.py").write_text(f"import torch\n{made}\n")
    assert run(["run", "--fix", "fused_optimizer", "train.py"]) == 0
    assert "no memory is recorded, because there is no GPU" in capsys.readouterr().err


def test_a_missing_script_is_not_answered_with_workloads(capsys):
    assert run(["run", "nowhere.py"]) == 2
    assert capsys.readouterr().err.endswith("does not exist; give a script, as train.py\n")
