"""A run that was interrupted and resumed is the run that was not: weights, optimizer, losses, metrics."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from lab.benchmarks.training import kills
from small_runs import (
    Recorder,
    assert_equal_runs,
    config_of,
    differences,
    out_of_memory,
    rows_of,
    state_of,
    trained,
    uninterrupted,
    with_fault,
)

from oomph_lab.training.checkpoint import Checkpoints
from oomph_lab.training.failures import OutOfMemory
from oomph_lab.training.run import train
from oomph_lab.training.step import AdamW

STEPS, FIRST = 6, 3
IN_BACKWARD = "fixes=[optimizer_in_backward, stochastic_rounding, optimizer_8bit]"


class SendsSignals(Recorder):
    """Sends signals to its own process when a step is logged."""

    def __init__(self, step, *signals):
        super().__init__()
        self.step, self.signals = step, signals or (signal.SIGTERM,)

    def on_step(self, report):
        super().on_step(report)
        if report.step == self.step:
            for number in self.signals:
                os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("system", "overrides"),
    [
        ("pythia", ()),
        ("hatchling", ()),
        ("longctx", ()),
        ("ginr", ()),
        ("npt", ()),
        ("pythia", (IN_BACKWARD, "training.dtype=bfloat16", "training.clip=null")),
        ("pythia", ("fixes=[activation_checkpointing, optimizer_cpu_offload]", "model.num_layers=2")),
        ("pythia", ("training.autocast=float16",)),
        (
            "pythia",
            ("fixes=[fused_optimizer]", "training.accumulate=3", "data.shuffle=false", "data.workers=1"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain",
)
def test_a_resumed_run_is_the_run_that_was_never_interrupted(tmp_path, system, overrides):
    """The first part ends by a signal, so the schedule is that of the whole."""
    config = config_of(tmp_path / "parts", overrides, system)
    stopped = train(config, callbacks=SendsSignals(FIRST))
    assert (stopped.step, stopped.stopped) == (FIRST, "SIGTERM")
    assert train(config, resume=True).step == STEPS
    assert_equal_runs(uninterrupted(overrides, system), tmp_path / "parts")
    assert [row["step"] for row in rows_of(tmp_path / "parts")] == list(range(1, STEPS + 1))


def test_a_run_resumed_at_every_step_is_the_same_and_with_nothing_left_it_changes_nothing(tmp_path):
    config = config_of(tmp_path / "parts")
    for step in range(1, STEPS + 1):
        train(config, resume=step > 1, callbacks=SendsSignals(step))
    outcome = train(config, resume=True)
    assert outcome.stopped is None
    assert differences(state_of(uninterrupted()), state_of(tmp_path / "parts")) == []
    assert rows_of(uninterrupted()) == rows_of(tmp_path / "parts")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts" / "checkpoints").rglob("*")}
    assert train(config, resume=True) == outcome
    assert [row["step"] for row in rows_of(tmp_path / "parts", "evaluation")] == [STEPS]
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts" / "checkpoints").rglob("*")}
    assert again == files


def test_a_finished_run_continues_with_more_steps_and_with_a_worker(tmp_path):
    constant = ("training.schedule=constant", "training.warmup=0")
    trained(tmp_path / "parts", [*constant, "training.steps=4"])
    trained(tmp_path / "parts", [*constant, "data.workers=1"], resume=True)
    assert differences(state_of(uninterrupted(constant)), state_of(tmp_path / "parts")) == []
    assert [row["step"] for row in rows_of(tmp_path / "parts", "evaluation")] == [4, STEPS]


def test_epochs_end_where_they_end_without_interruption(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("".join(f"{number}\n" for number in range(30)))
    epochs = [f"data.source={text}", "training.steps=null", "training.epochs=2", "data.validation=0"]
    config = config_of(tmp_path / "straight", epochs)
    straight = train(config)
    assert straight.step > 3
    parts = replace(config, output=config.output.model_copy(update={"dir": str(tmp_path / "parts")}))
    train(parts, callbacks=SendsSignals(2))
    assert train(parts, resume=True).step == straight.step
    assert_equal_runs(tmp_path / "straight", tmp_path / "parts")


def test_how_many_checkpoints_are_written(tmp_path, monkeypatch):
    trained(tmp_path / "run", ["training.save_every=1", "training.keep=2"])
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000005", "step-00000006"]
    trained(tmp_path / "none", ["training.save=false", "training.save_every=1", "training.steps=2"])
    assert not (tmp_path / "none" / "checkpoints").exists()
    saves = []
    real = Checkpoints.save
    monkeypatch.setattr(
        Checkpoints, "save", lambda self, step, state: (saves.append(step), real(self, step, state))[1]
    )
    train(config_of(tmp_path / "stopped", ["training.save_every=2"]), callbacks=SendsSignals(4))
    assert saves == [2, 4]  # stopped where it saves anyway, it saves once


def test_a_run_that_was_not_fused_continues_with_an_optimizer_that_is(tmp_path, monkeypatch):
    """As a run that was started on a CPU and continues on a GPU."""
    constant = ("training.schedule=constant", "training.warmup=0")
    trained(tmp_path / "run", [*constant, "training.steps=3"])
    plain = AdamW.__call__

    def fused(self, params):
        (group,) = plain(self, params).param_groups
        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        return torch.optim.AdamW(group["params"], **options, fused=True)

    monkeypatch.setattr(AdamW, "__call__", fused)
    trained(tmp_path / "run", constant, resume=True)
    losses = [row["loss"] for row in rows_of(tmp_path / "run")]
    assert losses == pytest.approx([row["loss"] for row in rows_of(uninterrupted(constant))])


def test_an_evaluation_at_the_start_is_made_once(tmp_path, monkeypatch):
    """Also if the run continues from a checkpoint of its very start."""
    with_fault(monkeypatch, out_of_memory, 1)
    with pytest.raises(OutOfMemory):
        trained(tmp_path / "run", ["training.eval_at_start=true"])
    monkeypatch.undo()
    trained(tmp_path / "run", ["training.eval_at_start=true"], resume=True)
    assert [row["step"] for row in rows_of(tmp_path / "run", "evaluation")] == [0, 6]


# ------------------------------------------------------------------------------------------- signals


def test_a_signal_finishes_the_step_and_saves_and_weights_are_not_exported(tmp_path):
    """Also with a worker process, which gets the signal too."""
    config = config_of(tmp_path / "run", ["data.workers=1"])
    events, file = SendsSignals(3, signal.SIGHUP), tmp_path / "weights.safetensors"
    before = signal.getsignal(signal.SIGHUP)
    stopped = train(config, callbacks=events, export_to=str(file))
    assert (stopped.step, stopped.stopped) == (3, "SIGHUP")
    assert signal.getsignal(signal.SIGHUP) is before
    assert events.reports[-1].step == 3
    assert any("step 3 is saved in" in message for message in events.messages)
    assert "no weights are written" in events.messages[-1]
    assert not file.exists()
    assert state_of(tmp_path / "run")["step"] == 3
    train(config, resume=True, export_to=str(file))
    assert file.exists()


def test_a_second_signal_ends_at_once_and_leaves_complete_checkpoints(tmp_path):
    config = config_of(tmp_path / "run", ["training.save_every=2"])
    with pytest.raises(KeyboardInterrupt):
        train(config, callbacks=SendsSignals(5, signal.SIGINT, signal.SIGINT))
    newest = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert newest.step == 4
    assert not newest.skipped
    train(config, resume=True)
    assert_equal_runs(uninterrupted(), tmp_path / "run")


def test_a_signal_that_was_ignored_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert train(config_of(tmp_path / "run"), callbacks=SendsSignals(2, signal.SIGHUP)).stopped is None
    finally:
        signal.signal(signal.SIGHUP, before)


class SendsSignalAtEvaluation(Recorder):
    def on_evaluation(self, step, metrics):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_in_the_last_evaluation_has_nothing_left_to_stop(tmp_path):
    outcome = trained(tmp_path / "run", callbacks=SendsSignalAtEvaluation())
    assert (outcome.step, outcome.stopped) == (6, None)
    assert outcome.evaluation


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch refuses backward in forks there")
def test_kill_9_at_a_random_moment_changes_nothing_of_a_run(tmp_path, monkeypatch):
    """Also while a checkpoint is being written."""
    monkeypatch.setattr(kills, "STEPS", 12)
    (row,) = kills.one_run(tmp_path / "run", 0, 1, kills.Shared())
    assert row.equal
    # Saved at every step or every other: only the steps since, and what was being written, are lost.
    assert 0 <= row.killed_at - row.resumed_at <= 4
