"""A run that was interrupted and resumed is the run that was not: weights, optimizer, losses, metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import out_of_memory, with_fault
from small_runs import (
    Notes,
    assert_equal_runs,
    config_of,
    differences,
    rows_of,
    state_of,
    trained,
)

from oomph.training.checkpoints import find
from oomph.training.loop.failures import OutOfMemory
from oomph.training.run import train
from oomph.training.workloads import AdamW

STEPS, FIRST = 6, 3
IN_BACKWARD = "fixes=[optimizer_in_backward, stochastic_rounding, optimizer_8bit]"


def in_two_parts(
    folder: Path, overrides: tuple[str, ...] = (), system: str = "pythia", first: int = FIRST
) -> None:
    """The first part ends where a signal would have ended it: the schedule is that of the whole."""
    config = config_of(folder, overrides, system)
    stopped = train(config, listener=_StopsAfter(first))
    assert (stopped.step, stopped.stopped) == (first, "SIGTERM")
    assert train(config, resume=True).step == STEPS


class _StopsAfter(Notes):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def stepped(self, report) -> None:
        import os
        import signal

        if report.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("system", "overrides"),
    [
        ("pythia", ()),
        ("hatchling", ()),
        ("longctx", ()),
        ("ginr", ()),
        ("npt", ()),
        ("pythia", ("fixes=[fused_optimizer]",)),
        ("pythia", ("fixes=[optimizer_8bit]",)),
        ("pythia", ("fixes=[optimizer_8bit]", "training.dtype=bfloat16")),
        ("pythia", ("training.dtype=bfloat16",)),
        ("ginr", ("training.dtype=bfloat16",)),
        ("pythia", ("fixes=[stochastic_rounding]", "training.dtype=bfloat16")),
        ("pythia", ("fixes=[optimizer_in_backward]", "training.clip=null")),
        ("pythia", (IN_BACKWARD, "training.dtype=bfloat16", "training.clip=null")),
        ("pythia", ("fixes=[optimizer_cpu_offload]",)),
        ("pythia", ("fixes=[activation_checkpointing]", "model.num_layers=2")),
        ("pythia", ("fixes=['micro_batches:parts=2']",)),
        ("pythia", ("training.autocast=bfloat16",)),
        ("pythia", ("training.autocast=float16",)),
        ("pythia", ("training.accumulate=3",)),
        ("pythia", ("data.workers=1",)),
        ("pythia", ("data.shuffle=false", "training.schedule=linear")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain",
)
def test_a_resumed_run_is_the_run_that_was_never_interrupted(
    tmp_path: Path, system: str, overrides: tuple[str, ...]
) -> None:
    trained(tmp_path / "straight", overrides, system)
    in_two_parts(tmp_path / "parts", overrides, system)
    assert_equal_runs(tmp_path / "straight", tmp_path / "parts")
    steps = [row["step"] for row in rows_of(tmp_path / "parts")]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.parametrize("system", ["pythia", "hatchling", "ginr", "npt"])
def test_two_seeds_differ_so_equality_means_something(tmp_path: Path, system: str) -> None:
    trained(tmp_path / "a", ["training.steps=1"], system)
    trained(tmp_path / "b", ["training.steps=1", "training.seed=1"], system)
    assert any("'model'" in name for name in differences(state_of(tmp_path / "a"), state_of(tmp_path / "b")))


def test_dropout_draws_other_numbers_after_a_resume_that_forgets_the_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "straight")
    monkeypatch.setattr("oomph.training.loop.trainer.set_rng_state", lambda state: None)
    in_two_parts(tmp_path / "parts")
    assert differences(state_of(tmp_path / "straight"), state_of(tmp_path / "parts"))


def test_a_run_resumed_at_every_step_is_the_same(tmp_path: Path) -> None:
    trained(tmp_path / "straight")
    config = config_of(tmp_path / "parts")
    for step in range(1, STEPS + 1):
        train(config, resume=step > 1, listener=_StopsAfter(step))
    assert train(config, resume=True).stopped is None
    assert differences(state_of(tmp_path / "straight"), state_of(tmp_path / "parts")) == []
    assert rows_of(tmp_path / "straight") == rows_of(tmp_path / "parts")


def test_a_finished_run_that_is_resumed_changes_nothing(tmp_path: Path) -> None:
    first = trained(tmp_path / "run")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "checkpoints").rglob("*")}
    again = trained(tmp_path / "run", resume=True)
    assert again == first
    assert [row["step"] for row in rows_of(tmp_path / "run", "evaluation")] == [STEPS]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "checkpoints").rglob("*")} == files


def test_a_finished_run_goes_on_when_it_is_given_more_steps(tmp_path: Path) -> None:
    constant = ["training.schedule=constant", "training.warmup=0"]
    trained(tmp_path / "straight", constant)
    trained(tmp_path / "parts", [*constant, "training.steps=4"])
    trained(tmp_path / "parts", constant, resume=True)
    assert differences(state_of(tmp_path / "straight"), state_of(tmp_path / "parts")) == []
    assert [row["step"] for row in rows_of(tmp_path / "parts", "evaluation")] == [4, STEPS]


def test_epochs_end_where_they_end_without_interruption(tmp_path: Path) -> None:
    lines = "".join(f"{number}\n" for number in range(30))
    (tmp_path / "text.txt").write_text(lines)
    epochs = ["training.steps=null", "training.epochs=2", "data.validation=0", "training.eval_every=1"]
    config = config_of(tmp_path / "straight", epochs)
    straight = train(config)
    assert straight.step > 3
    parts = replace(config, output=config.output.model_copy(update={"dir": str(tmp_path / "parts")}))
    train(parts, listener=_StopsAfter(2))
    assert train(parts, resume=True).step == straight.step
    assert_equal_runs(tmp_path / "straight", tmp_path / "parts")


def test_a_run_goes_on_with_a_worker_where_it_had_none(tmp_path: Path) -> None:
    trained(tmp_path / "straight")
    train(config_of(tmp_path / "parts"), listener=_StopsAfter(2))
    trained(tmp_path / "parts", ["data.workers=1"], resume=True)
    assert_equal_runs(tmp_path / "straight", tmp_path / "parts")


def test_the_scaler_of_float16_is_part_of_the_state(tmp_path: Path) -> None:
    trained(tmp_path / "run", ["training.autocast=float16"])
    assert state_of(tmp_path / "run")["scaler"]["scale"] > 0


def test_optimizer_state_of_8_bits_stays_so_in_a_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path / "run", ["fixes=[optimizer_8bit]", "training.dtype=bfloat16"])
    kept = state_of(tmp_path / "run")["optimizer"]["state"][0]
    assert kept["exp_avg"].dtype == torch.uint8
    assert kept["exp_avg_scale"].dtype == torch.float32


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    trained(tmp_path / "run", ["training.save_every=1", "training.keep=2"])
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000005", "step-00000006"]
    assert find(tmp_path / "run" / "checkpoints").step == STEPS


def test_a_run_without_checkpoints_writes_none(tmp_path: Path) -> None:
    trained(tmp_path / "run", ["training.save=false", "training.save_every=1"])
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_that_was_not_fused_goes_on_with_an_optimizer_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it was begun on a CPU and goes on on a GPU."""
    trained(tmp_path / "run", ["training.steps=3"])
    plain = AdamW.__call__

    def fused(self: AdamW, params: Any) -> torch.optim.Optimizer:
        made = plain(self, params)
        (group,) = made.param_groups
        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        return torch.optim.AdamW(group["params"], **options, fused=True)

    monkeypatch.setattr(AdamW, "__call__", fused)
    trained(tmp_path / "run", ["training.steps=6"], resume=True)
    losses = [row["loss"] for row in rows_of(tmp_path / "run")]
    monkeypatch.undo()
    trained(tmp_path / "straight", ["training.steps=3"])
    trained(tmp_path / "straight", ["training.steps=6"], resume=True)
    assert losses == pytest.approx([row["loss"] for row in rows_of(tmp_path / "straight")])


def test_an_evaluation_at_the_start_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the run goes on from a checkpoint of its very start."""
    overrides = ["training.eval_at_start=true"]
    with_fault(monkeypatch, out_of_memory, 1)
    with pytest.raises(OutOfMemory):
        trained(tmp_path / "run", overrides)
    monkeypatch.undo()
    trained(tmp_path / "run", overrides, resume=True)
    assert [row["step"] for row in rows_of(tmp_path / "run", "evaluation")] == [0, 6]
