"""`oomph train`: from the command line to a trained model, and every ending as an exit status."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_prediction import GiB, make_prediction

from oomph import gpus
from oomph.cli import train_fit
from oomph.cli.main import run
from oomph.cli.train_display import TrainDisplay
from oomph.records import FixUse
from oomph.training import run as training_run
from oomph.training.checkpoints import find, load
from oomph.training.config import load as load_config
from oomph.training.config import load_dict
from oomph.training.loop.metrics import read_metrics
from oomph.training.loop.trainer import Outcome
from oomph.training.workloads import workload

CONFIG = """
system: pythia
model: {preset: report, vocab_size: 260, hidden_size: 16, num_layers: 2, num_heads: 2,
        intermediate_size: 32, block_size: 8}
data: {source: text.txt, tokenizer: bytes, seq_len: 16, batch_size: 2, validation: 0.1}
training: {steps: 4, save_every: 2, eval_every: 2, eval_batches: 1, log_every: 1, device: cpu}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """small.yaml in a fresh current directory, with its text beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oomph.training.loop.samples._NEW", 3)
    (tmp_path / "text.txt").write_text("".join(f"line {n}: {n * n}\n" for n in range(500)))
    file = tmp_path / "small.yaml"
    file.write_text(CONFIG)
    return file


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configs that would have been trained."""
    configs: list[Any] = []

    def train(config: Any, **_: Any) -> Outcome:
        configs.append(config)
        return Outcome(1, None, {})

    monkeypatch.setattr(training_run, "train", train)
    return configs


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "device_of", lambda config: torch.device("cuda", 0))
    monkeypatch.setattr(train_fit, "card_of", lambda device: gpus.find("rtx3090"))


def test_a_small_config_trains_end_to_end(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "small.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    for step in range(1, 5):
        assert f"step {step}/4  loss " in err
    assert " tok/s  lr 3.00e-04" in err
    assert "evaluation at step 2: loss " in err
    assert "evaluation at step 4: loss " in err
    assert "step 4 is saved in runs/small/checkpoints" in err
    assert find("runs/small/checkpoints").step == 4
    rows = read_metrics("runs/small/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_resume_goes_on_and_a_second_start_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "small.yaml", "steps=2"]) == 0
    assert run(["train", "small.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("oomph: runs/small holds a run already; go on with --resume")
    assert run(["train", "small.yaml", "--resume"]) == 0
    assert "resumed at step 2" in capsys.readouterr().err
    assert find("runs/small/checkpoints").step == 4


def test_resume_without_a_run_is_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "small.yaml", "--resume"]) == 2
    assert capsys.readouterr().err.startswith("oomph: runs/small holds no run to resume")


def test_the_reports_own_flags_have_their_place(
    config: Path, given: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def device_of(config: Any) -> torch.device:
        asked.append(config.training.device)
        return torch.device("cpu")

    monkeypatch.setattr(training_run, "device_of", device_of)
    flags = "--dataset wikitext-2 --vocab_size 10000 --batch_size 32 --seq_len 128 --epochs 10 --sparse"
    tail = "training.steps=null tokenizer=words --device cuda"
    assert run(["train", "small.yaml", *flags.split(), *tail.split()]) == 0
    (found,) = given
    assert found.data.source == "wikitext-2"
    assert (found.data.vocab_size, found.model_config.vocab_size) == (10000, 10000)
    assert (found.data.batch_size, found.data.seq_len, found.training.epochs) == (32, 128, 10)
    assert found.model_config.sparse == "local"
    assert asked == ["cuda"]


def test_flags_may_stand_between_the_commands_own(config: Path, given: list[Any]) -> None:
    words = ["--batch_size", "4", "--force", "lr=0.5", "--seq_len=8", "--export", "w.safetensors"]
    assert run(["train", "small.yaml", *words]) == 0
    (found,) = given
    assert (found.data.batch_size, found.data.seq_len, found.optimizer.learning_rate) == (4, 8, 0.5)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["batchsize=3"], "batch_size"),
        (["--batch_sise", "3"], "batch_size"),
        (["data.batch_size=none_of_it"], "data.batch_size"),
        (["stray"], "'stray' is not an override"),
        (["--device", "gpu"], "training.device='gpu' is not a device"),
        (["--dataset", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert run(["train", "small.yaml", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("oomph: ")
    assert err.count("\n") == 1
    assert named in err


def test_a_config_that_is_not_there_is_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "other.yaml"]) == 2
    err = capsys.readouterr().err
    assert "other.yaml" in err
    assert err.count("\n") == 1


# ---------------------------------------------------------------------------------------- fixes


def test_recorded_fixes_take_the_place_of_the_configs(config: Path, given: list[Any], tmp_path: Path) -> None:
    recorded = [{"fix": "recompute", "options": {}}, {"fix": "micro_batches", "options": {"parts": 2}}]
    (tmp_path / "fixes.json").write_text(json.dumps(recorded))
    assert run(["train", "small.yaml", "fixes=[fused_optimizer]", "--fixes", "fixes.json"]) == 0
    assert [(use.fix, dict(use.options)) for use in given[0].fixes] == [
        ("recompute", {}),
        ("micro_batches", {"parts": 2}),
    ]


def test_recorded_fixes_are_applied_and_are_part_of_the_run(config: Path, tmp_path: Path) -> None:
    (tmp_path / "fixes.json").write_text('[{"fix": "optimizer_8bit"}]')
    assert run(["train", "small.yaml", "--fixes", "fixes.json"]) == 0
    state = load(find("runs/small/checkpoints"))
    assert state["optimizer"]["state"][0]["exp_avg"].dtype == torch.uint8
    assert run(["train", "small.yaml", "--resume"]) == 2
    assert run(["train", "small.yaml", "--resume", "--fixes", "fixes.json"]) == 0


@pytest.mark.parametrize(
    ("content", "words", "named"),
    [
        ('[{"fix": "recompte"}]', [], "recompte"),
        ("{", [], "is not JSON"),
        ('[{"fix": "optimizer_in_backward"}]', ["clip=1.0"], "training.clip"),
    ],
)
def test_recorded_fixes_are_checked_like_those_of_a_config(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    words: list[str],
    named: str,
) -> None:
    (tmp_path / "fixes.json").write_text(content)
    assert run(["train", "small.yaml", *words, "--fixes", "fixes.json"]) == 2
    err = capsys.readouterr().err
    assert named in err
    assert err.count("\n") == 1


def test_a_fix_that_is_no_file_is_told_where_it_belongs(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "small.yaml", "--fixes", "recompute"]) == 2
    assert "single fixes are given as fixes=[name, ...]" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- export


def test_exported_weights_are_those_of_the_last_step(config: Path) -> None:
    assert run(["train", "small.yaml", "--export", "weights.safetensors"]) == 0
    weights = load_file("weights.safetensors")
    model = load_config("small.yaml").model_config.build()
    missing = model.load_state_dict(weights, strict=False)
    assert missing.unexpected_keys == []
    saved = load(find("runs/small/checkpoints"))["model"]
    assert all(torch.equal(weights[name], saved[name]) for name in weights)
    assert len(weights) > 5


@pytest.mark.parametrize(
    ("file", "told"), [("small.yaml", "exists already"), ("no/w.safetensors", "folder 'no' does not exist")]
)
def test_an_export_that_cannot_be_is_refused_before_the_training(
    config: Path, capsys: pytest.CaptureFixture[str], file: str, told: str
) -> None:
    assert run(["train", "small.yaml", "--export", file]) == 2
    assert told in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_resumed_run_with_nothing_left_says_so(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "small.yaml"]) == 0
    assert run(["train", "small.yaml", "--resume"]) == 0
    assert "the run is complete at step 4" in capsys.readouterr().err
    assert run(["train", "small.yaml", "steps=2", "--resume"]) == 2
    told = "is at step 4, and training.steps is 2 (the run's own was 4); give training.steps=N with more"
    assert told in capsys.readouterr().err
    assert load_config("runs/small/config.yaml").training.steps == 4


def test_an_override_without_a_value_is_a_mistake(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "small.yaml", "steps="]) == 2
    assert "override 'steps=' has no value; write steps=null if none is meant" in capsys.readouterr().err


# ---------------------------------------------------------------------------------- does it fit


def test_what_does_not_fit_is_refused_with_what_would(
    config: Path, given: list[Any], pretended_gpu: None, fake_predict: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def during(target: Any) -> None:
        fits = any(use.fix == "recompute" for use in target.fixes)
        fake_predict.result = make_prediction(fits)

    fake_predict.during = during
    assert run(["train", "small.yaml", "training.memory_limit=1GiB"]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "oomph: small does not fit: a step needs 2.00 GiB, and training.memory_limit is 1GiB" in err
    assert "What fits: 'fixes=[" in err
    assert "recompute]' (2.00 GiB)" in err
    assert "--force" in err
    assert given == []
    assert not Path("runs").exists()


def test_smaller_batches_are_tried_when_fixes_are_not_enough(
    config: Path, given: list[Any], pretended_gpu: None, fake_predict: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_predict.during = lambda target: setattr(
        fake_predict, "result", make_prediction(target.sizes["B"] == 1)
    )
    assert run(["train", "small.yaml", "training.memory_limit=1GiB"]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "data.batch_size=1 training.accumulate=2" in err


def test_when_nothing_fits_that_is_said(
    config: Path, pretended_gpu: None, fake_predict: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_predict.result = make_prediction(False)
    assert run(["train", "small.yaml", "training.memory_limit=1GiB"]) == 1
    assert "smaller batches are not enough" in " ".join(capsys.readouterr().err.split())


def test_force_goes_on_and_shows_what_was_predicted(
    config: Path, given: list[Any], pretended_gpu: None, fake_predict: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_predict.result = make_prediction(False)
    assert run(["train", "small.yaml", "--force"]) == 0
    assert len(given) == 1
    assert "predicted peak 2.00 GiB allocated, 30.0 GiB of the GPU" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- endings


def out_of_memory(model: Any, batch: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def test_running_out_of_memory_says_what_was_alive_and_what_to_change(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        training_run, "workload", lambda config: replace(workload(config), loss=out_of_memory)
    )
    assert run(["train", "small.yaml"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("oomph: out of memory (CUDA out of memory")
    assert "alive were parameters" in last
    assert "the state is saved at step 0" in last
    assert "see `oomph fixes small.yaml`" in last


def test_after_a_prediction_its_largest_lines_are_named(
    config: Path,
    pretended_gpu: None,
    fake_predict: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from oomph.training.loop.failures import OutOfMemory

    def train(*_: Any, **__: Any) -> None:
        raise OutOfMemory("CUDA out of memory.", [("parameters", 3 * GiB)], 7, "")

    fake_predict.result = make_prediction(True)
    monkeypatch.setattr(training_run, "train", train)
    assert run(["train", "small.yaml"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "alive were parameters 3.00 GiB; the state is saved at step 7" in last
    assert "predicted were 2.00 GiB, most of it of a.py:3 2.00 GiB" in last


def interrupting(monkeypatch: pytest.MonkeyPatch, step: int, times: int) -> None:
    real = TrainDisplay.stepped

    def stepped(self: TrainDisplay, report: Any) -> None:
        real(self, report)
        if report.step == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TrainDisplay, "stepped", stepped)


def test_control_c_saves_and_ends_with_130(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupting(monkeypatch, 3, 1)
    assert run(["train", "small.yaml"]) == 130
    told = "stopped by SIGINT after step 3; go on with: oomph train small.yaml --resume"
    assert told in capsys.readouterr().err
    assert find("runs/small/checkpoints").step == 3


def test_control_c_twice_ends_at_once_with_130_and_no_traceback(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupting(monkeypatch, 3, 2)
    assert run(["train", "small.yaml"]) == 130
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("ended at once; ")
    assert find("runs/small/checkpoints").step == 2


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_to_the_whole_group_reaches_the_worker_too_and_the_run_can_be_resumed(
    config: Path, name: str
) -> None:
    """The program itself; a terminal, or a scheduler, sends the signal to every process of the group."""
    words = ["small.yaml", "save_every=100000", "data.workers=1"]
    command = [sys.executable, "-m", "oomph", "train", *words, "steps=100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 3/"):
                break
        os.killpg(process.pid, getattr(signal, name))
        rest = process.stderr.read()
        assert process.wait(60) == 130, rest
    assert f"stopped by {name} after step" in rest
    assert "Traceback" not in rest
    step = find("runs/small/checkpoints").step
    assert step >= 3
    assert run(["train", *words, f"steps={step + 2}", "--resume"]) == 0
    assert [row["step"] for row in read_metrics("runs/small/metrics.jsonl")] == list(range(1, step + 3))


# --------------------------------------------------------------------------------------- cases


def test_cases_lists_the_five_systems(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cases", "--json"]) == 0
    names = {case["name"] for case in json.loads(capsys.readouterr().out)["cases"]}
    assert len(names) == 5
    assert run(["cases"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in names)


@pytest.mark.parametrize(
    "uses",
    [
        (FixUse("fused_loss"), FixUse("recompute", {"keep": "products", "blocks": ["layers.*.mlp"]})),
        (FixUse("offload_activations", {"ahead": False}), FixUse("allocator", {"expandable_segments": True})),
    ],
)
def test_fixes_that_are_proposed_can_be_copied_to_a_shell(uses: tuple[FixUse, ...]) -> None:
    (word,) = shlex.split(train_fit._override(uses))
    found = load_dict({"system": "longctx", "model": {"preset": "tiny", "vocab_size": 300}}, "x", [word])
    assert found.fixes == uses
