"""How `oomph train` ends when it is stopped or cannot go on."""

import io
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from small_prediction import GiB, make_prediction

from oomph.cli.main import run
from oomph_lab.cli.train import TrainDisplay
from oomph_lab.training import run as training_run
from oomph_lab.training.checkpoint import find
from oomph_lab.training.config import load
from oomph_lab.training.metrics import read_metrics
from oomph_lab.training.step import workload


def out_of_memory(model, batch):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def test_running_out_of_memory_says_what_was_in_use_and_what_to_change(config, monkeypatch, capsys):
    monkeypatch.setattr(
        training_run, "workload", lambda config: replace(workload(config), loss=out_of_memory)
    )
    assert run(["train", "small.yaml"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("oomph: out of memory (CUDA out of memory")
    assert "in use: parameters" in last
    assert "the state is saved at step 0" in last
    assert "see `oomph fixes small.yaml`" in last


def test_after_a_prediction_its_largest_lines_are_named(
    config, pretended_gpu, fake_predict, monkeypatch, capsys
):
    from oomph_lab.training.failures import OutOfMemory

    def train(*_, **__):
        raise OutOfMemory("CUDA out of memory.", [("parameters", 3 * GiB)], 7, "")

    fake_predict.result = make_prediction(True)
    monkeypatch.setattr(training_run, "train", train)
    assert run(["train", "small.yaml"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "in use: parameters 3.00 GiB; the state is saved at step 7" in last
    assert "predicted: 2.00 GiB, most of it from a.py:3 2.00 GiB" in last


def interrupting(monkeypatch, step, times, number=signal.SIGINT):
    real = TrainDisplay.on_step

    def on_step(self, report):
        real(self, report)
        if report.step == step:
            for _ in range(times):
                os.kill(os.getpid(), number)

    monkeypatch.setattr(TrainDisplay, "on_step", on_step)


def test_control_c_twice_ends_at_once_with_130_and_no_traceback(config, monkeypatch, capsys):
    interrupting(monkeypatch, 3, 2)
    assert run(["train", "small.yaml"]) == 130
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("stopped at once; ")
    assert find("runs/small/checkpoints").step == 2


def test_a_closed_terminal_s_signal_may_come_twice(config, monkeypatch, capsys):
    interrupting(monkeypatch, 3, 2, signal.SIGHUP)
    assert run(["train", "small.yaml"]) == 130
    assert "stopped by SIGHUP after step 3" in capsys.readouterr().err
    assert find("runs/small/checkpoints").step == 3


def test_control_c_saves_and_gives_the_command_to_resume_with(config, monkeypatch, capsys):
    Path("mine.json").write_text('[{"fix": "activation_checkpointing"}]')
    interrupting(monkeypatch, 3, 1)
    words = ["small.yaml", "output.dir=runs/my run", "--fixes", "mine.json", "--export", "w.safetensors"]
    assert run(["train", *words, "--force"]) == 130
    assert find("runs/my run/checkpoints").step == 3
    (line,) = (each for each in capsys.readouterr().err.splitlines() if each.startswith("stopped by"))
    program, *again = shlex.split(line.partition("continue with: ")[2])
    assert program == "oomph"
    assert run(again) == 0
    assert Path("w.safetensors").exists()


def test_without_checkpoints_there_is_nothing_to_resume(config, monkeypatch, capsys):
    interrupting(monkeypatch, 3, 1)
    assert run(["train", "small.yaml", "training.save=false"]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "stopped by SIGINT after step 3; nothing is saved, as training.save=false says"


def test_a_closed_terminal_ends_the_whole_group_and_the_run_can_be_resumed(config, on_terminal):
    """A terminal, or a scheduler, sends the signal to every process of the group."""
    words = ["train", "small.yaml", "save_every=null", "data.workers=1"]
    process, terminal = on_terminal([*words, "steps=100000"])
    metrics = Path("runs/small/metrics.jsonl")
    until = time.monotonic() + 120
    while not (metrics.exists() and len(read_metrics(metrics)) > 3):
        assert time.monotonic() < until
        os.read(terminal, 65536)  # a terminal that nobody reads would block it; fails where the process ended
    os.close(terminal)  # what is written from now on fails
    os.killpg(process, signal.SIGHUP)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    step = find("runs/small/checkpoints").step
    assert step >= 3
    assert run([*words, f"steps={step + 2}", "--resume"]) == 0
    assert [row["step"] for row in read_metrics(metrics)] == list(range(1, step + 3))


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_was_left_to_write_to_a_closed_terminal_does_not_change_the_status(stream):
    program = f"""
import contextlib, sys
import oomph.cli.main as cli

def run(words):
    print("ready", flush=True)
    sys.stdin.readline()
    with contextlib.suppress(OSError):
        sys.{stream}.write("half a line")
    return 130

cli.run = run
cli.main()
"""
    ours, its = os.openpty()
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=its,
        stderr=its,
        env=buffered,
        start_new_session=True,
    )
    os.close(its)
    while b"\n" not in os.read(ours, 100):
        pass
    os.close(ours)
    process.communicate(b"go on\n", timeout=60)
    assert process.returncode == 130


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text):
        raise OSError(5, "Input/output error")


def test_the_display_shortens_samples_and_survives_a_terminal_that_is_gone(config):
    screen = io.StringIO()
    named = replace(load("small.yaml"), name="my{1}")  # rich would read braces
    with TrainDisplay(Console(file=screen, force_terminal=True, width=40), named, None, None) as display:
        display.on_progress(1, 2.0)
        display.on_sample(3, "given " * 40 + "end | made " + "up " * 100)
    assert "my{1}" in screen.getvalue()
    assert "given end | made up up" in screen.getvalue().replace("\n", "")
    assert "given " * 20 not in screen.getvalue()
    with TrainDisplay(Console(file=Gone()), load("small.yaml"), None, None) as display:
        display.on_message("resumed at step 3")
        display.on_evaluation(3, {"perplexity": 2.0})
