"""Ctrl-C and SIGTERM finish the step and save; a second one ends at once."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from small_runs import Notes, assert_equal_runs, config_of, state_of, trained

from oomph.training.checkpoints import Checkpoints
from oomph.training.loop.listener import StepReport
from oomph.training.loop.stopping import Stopping
from oomph.training.run import train


class Sends(Notes):
    """Sends itself signals when a step is done."""

    def __init__(self, step: int, *signals: signal.Signals) -> None:
        super().__init__()
        self.step, self.signals = step, signals

    def stepped(self, report: StepReport) -> None:
        super().stepped(report)
        if report.step == self.step:
            for number in self.signals:
                os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_ends_the_run_after_its_step_and_the_rest_is_resumed_exactly(
    tmp_path: Path, number: signal.Signals, workers: int
) -> None:
    overrides = [f"data.workers={workers}", "training.save_every=2"]
    trained(tmp_path / "straight", overrides)
    config = config_of(tmp_path / "run", overrides)
    notes = Sends(3, number)
    stopped = train(config, listener=notes)
    assert (stopped.step, stopped.stopped) == (3, number.name)
    assert notes.reports[-1].step == 3
    assert "step 3 is saved in" in notes.messages[-1]
    assert state_of(tmp_path / "run")["step"] == 3
    assert train(config, resume=True).stopped is None
    assert_equal_runs(tmp_path / "straight", tmp_path / "run")


def test_a_second_signal_ends_at_once_and_leaves_sound_checkpoints(tmp_path: Path) -> None:
    overrides = ["training.save_every=2"]
    config = config_of(tmp_path / "run", overrides)
    with pytest.raises(KeyboardInterrupt):
        train(config, listener=Sends(5, signal.SIGINT, signal.SIGINT))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    newest = checkpoints.latest()
    assert newest is not None
    assert newest.step == 4
    assert newest.warnings == ()
    trained(tmp_path / "straight", overrides)
    train(config, resume=True)
    assert_equal_runs(tmp_path / "straight", tmp_path / "run")


def test_a_run_stopped_where_it_saves_anyway_saves_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves: list[int] = []
    real = Checkpoints.save
    monkeypatch.setattr(
        Checkpoints, "save", lambda self, step, state: (saves.append(step), real(self, step, state))[1]
    )
    train(config_of(tmp_path / "run", ["training.save_every=2"]), listener=Sends(4, signal.SIGINT))
    assert saves == [2, 4]


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    trained(tmp_path / "run", ["training.steps=1"])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_in_another_thread_signals_are_left_alone() -> None:
    found = []

    def work() -> None:
        with Stopping() as stopping:
            found.append(stopping.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None]


def test_a_terminal_that_is_closed_is_no_matter_to_a_run_that_was_told_to_ignore_it(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert train(config_of(tmp_path / "run"), listener=Sends(2, signal.SIGHUP)).stopped is None
    finally:
        signal.signal(signal.SIGHUP, before)


class SendsWhenEvaluated(Notes):
    def evaluated(self, step: int, found: dict[str, float]) -> None:
        super().evaluated(step, found)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_in_the_last_evaluation_finds_nothing_left_to_stop(tmp_path: Path) -> None:
    outcome = trained(tmp_path / "run", listener=SendsWhenEvaluated())
    assert (outcome.step, outcome.stopped) == (6, None)
    assert outcome.evaluation


def test_half_trained_weights_are_not_exported(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    notes = Sends(2, signal.SIGINT)
    trained(tmp_path / "run", listener=notes, export_to=str(file))
    assert not file.exists()
    assert any("no weights are written" in message for message in notes.messages)
    trained(tmp_path / "run", resume=True, export_to=str(file))
    assert file.exists()
