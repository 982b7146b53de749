"""A run that cannot continue: a loss or gradients that are not finite, and out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import (
    Recorder,
    assert_equal_runs,
    differences,
    nan_gradients,
    nan_loss,
    out_of_memory,
    rows_of,
    state_of,
    trained,
    uninterrupted,
    with_fault,
)

from oomph.errors import UserError
from oomph.training import trainer
from oomph.training.checkpoint import Checkpoints, load
from oomph.training.failures import NotFinite, OutOfMemory, is_out_of_memory
from oomph.training.step import StepResults

FUSED = ("fixes=[fused_optimizer]",)


def state_after(folder: Path, step: int) -> dict[str, Any]:
    checkpoints = Checkpoints(folder / "checkpoints")
    (saved,) = [each for each in checkpoints.all() if each.step == step]
    return load(saved)


@pytest.mark.parametrize("fixes", [(), FUSED], ids=["plain", "fused"])
def test_stop_saves_a_sound_state_and_the_batch_and_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixes: tuple[str, ...]
) -> None:
    trained(tmp_path / "good", [*fixes, "training.steps=2", "training.schedule=constant"])
    with_fault(monkeypatch, nan_loss, 3)
    with pytest.raises(NotFinite) as caught:
        trained(tmp_path / "run", [*fixes, "training.schedule=constant"])
    file = tmp_path / "run" / "batch_of_step_00000003.safetensors"
    message = str(caught.value)
    assert message.startswith(f"the loss of step 3 was nan; its update was not made, its batch is in {file}")
    assert "the state is saved at step 3; lower the learning rate" in message
    assert "\n" not in message
    batch = load_file(file)
    assert batch["0.input_ids"].shape == (2, 16)
    assert torch.equal(batch["0.labels"], batch["0.input_ids"])
    good, stopped = state_of(tmp_path / "good"), state_of(tmp_path / "run")
    assert differences(good["model"], stopped["model"]) == []
    assert differences(good["optimizer"], stopped["optimizer"]) == []
    assert stopped["step"] == 3
    assert rows_of(tmp_path / "run")[-1]["loss"] == "nan"


def test_a_run_stopped_by_nan_goes_on_with_the_next_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patches:
        with_fault(patches, nan_loss, 3)
        with pytest.raises(NotFinite):
            trained(tmp_path / "stopped")
    trained(tmp_path / "stopped", resume=True)
    with_fault(monkeypatch, nan_loss, 3)
    trained(tmp_path / "skipped", ["training.on_nan=skip"])
    assert differences(state_of(tmp_path / "stopped"), state_of(tmp_path / "skipped")) == []
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "skipped")


@pytest.mark.parametrize(
    ("fixes", "fault"),
    [((), nan_loss), ((), nan_gradients), (FUSED, nan_loss), (FUSED, nan_gradients)],
    ids=["loss", "gradients", "loss, fused", "gradients, fused"],
)
def test_skip_goes_on_and_leaves_the_weights_of_that_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixes: tuple[str, ...], fault
) -> None:
    with_fault(monkeypatch, fault, 3, 6 + 3)
    events = Recorder()
    every = [*fixes, "training.save_every=1", "training.keep=9", "training.on_nan=skip"]
    every.append("training.schedule=constant")
    assert trained(tmp_path / "run", every, callbacks=events).step == 6
    trained(tmp_path / "ends there", [*every, "training.steps=3"])
    second, fourth = (state_after(tmp_path / "run", step) for step in (2, 4))
    third = state_after(tmp_path / "ends there", 3)
    assert differences(second["model"], third["model"]) == []
    assert differences(second["optimizer"]["state"], third["optimizer"]["state"]) == []
    assert differences(third["model"], fourth["model"])
    assert [message for message in events.messages if "step 3 was" in message or "of step 3 were" in message]
    assert (tmp_path / "run" / "batch_of_step_00000003.safetensors").exists()
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert events.messages[-1] == "1 step skipped (training.on_nan=skip)"


def test_steps_that_are_left_out_push_no_good_checkpoint_out_and_do_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oomph.training.failures._MOST_SAVED_BATCHES", 2)
    with_fault(monkeypatch, nan_loss, 3, 4, 5, 6)
    events = Recorder()
    overrides = ["training.save_every=1", "training.keep=3", "training.on_nan=skip"]
    trained(tmp_path / "run", overrides, callbacks=events)
    assert [saved.step for saved in Checkpoints(tmp_path / "run" / "checkpoints").all()] == [1, 2, 6]
    assert len(list((tmp_path / "run").glob("batch_of_step_*"))) == 2
    assert any("step 6 was nan; skipped, its batch is not saved" in message for message in events.messages)
    assert events.messages[-1] == "4 steps skipped (training.on_nan=skip)"


def test_gradients_that_are_not_finite_are_told_from_a_loss_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, nan_gradients, 2)
    with pytest.raises(NotFinite, match=r"the gradients of step 2 were not finite \(norm nan\)"):
        trained(tmp_path / "run")


def test_float16_goes_on_after_a_step_that_was_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, nan_loss, 3)
    outcome = trained(tmp_path / "run", ["training.autocast=float16", "training.on_nan=skip"])
    assert outcome.step == 6
    # The scaler takes it for an overflow.
    assert state_of(tmp_path / "run")["scaler"]["scale"] == 65536 / 2


def test_gradients_that_overflow_in_float16_are_the_scalers_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, nan_gradients, 2)
    every = ["training.autocast=float16", "training.save_every=1", "training.keep=9"]
    assert trained(tmp_path / "run", every).step == 6
    first, second = (state_after(tmp_path / "run", step) for step in (1, 2))
    assert differences(first["model"], second["model"]) == []


def test_one_bad_batch_of_several_spoils_the_step_and_all_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, nan_loss, 5)
    with pytest.raises(NotFinite, match="the loss of step 2 was nan"):
        trained(tmp_path / "run", ["training.accumulate=3"])
    kept = load_file(tmp_path / "run" / "batch_of_step_00000002.safetensors")
    assert sorted(kept) == [f"{number}.{name}" for number in range(3) for name in ("input_ids", "labels")]


@pytest.mark.parametrize("save_every", ["1", "null"])
def test_updates_in_backward_cannot_be_taken_back_and_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every: str
) -> None:
    with_fault(monkeypatch, nan_loss, 3)
    overrides = ["fixes=[optimizer_in_backward]", "training.clip=null", f"training.save_every={save_every}"]
    with pytest.raises(NotFinite) as caught:
        trained(tmp_path / "run", [*overrides, "training.on_nan=skip"])
    assert "its updates were made in backward; its batch is in" in str(caught.value)
    assert "resume from the checkpoint before it" in str(caught.value)
    steps = [saved.step for saved in Checkpoints(tmp_path / "run" / "checkpoints").all()]
    assert steps == ([1, 2] if save_every == "1" else [])


@pytest.mark.parametrize(
    "fixes", [(), ("fixes=[optimizer_in_backward]",)], ids=["after backward", "in backward"]
)
@pytest.mark.parametrize("save_every", ["1", "null"])
def test_weights_that_are_not_finite_are_never_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every: str, fixes: tuple[str, ...]
) -> None:
    """Without clipping nobody looks at the gradients: they are in the weights before the next loss tells."""
    with_fault(monkeypatch, nan_gradients, 3)
    overrides = [*fixes, "training.clip=null", f"training.save_every={save_every}", "training.on_nan=skip"]
    with pytest.raises(NotFinite):
        trained(tmp_path / "run", overrides)
    for saved in Checkpoints(tmp_path / "run" / "checkpoints").all():
        assert saved.step < 3


def test_weights_that_are_not_finite_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_fault(monkeypatch, nan_gradients, 3)
    message = "weights of step 4 are not finite, and are not saved; there is no checkpoint; training.clip=1.0"
    with pytest.raises(NotFinite, match=message):
        trained(tmp_path / "run", ["training.clip=null", "training.on_nan=skip"])


def test_a_step_whose_updates_are_in_the_weights_is_not_saved_before_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its loss comes from the device only when it is asked for."""
    take = StepResults.take
    monkeypatch.setattr(StepResults, "take", lambda self, wait=False: take(self) if wait else [])
    with_fault(monkeypatch, nan_loss, 4)
    overrides = ["fixes=[optimizer_in_backward]", "training.clip=null", "training.eval_every=4"]
    with pytest.raises(NotFinite, match="resume from the checkpoint before it"):
        trained(tmp_path / "run", overrides)
    assert not Checkpoints(tmp_path / "run" / "checkpoints").all()


@pytest.mark.parametrize("option", ["training.autocast=float16", "training.clip=1.0"])
def test_updates_in_backward_refuse_what_needs_the_gradients(tmp_path: Path, option: str) -> None:
    with pytest.raises(UserError, match=r"in_backward|in backward"):
        trained(tmp_path / "run", ["fixes=[optimizer_in_backward]", "training.clip=null", option])


def test_a_run_that_skips_again_and_again_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomph.training.trainer._MOST_SKIPPED", 1)
    with_fault(monkeypatch, nan_loss, 3)
    with pytest.raises(NotFinite, match=r"step 3 was nan.*1 in a row: lower the learning rate") as caught:
        trained(tmp_path / "run", ["training.on_nan=skip"])
    assert "on_nan=skip" not in str(caught.value)


# ------------------------------------------------------------------------------------- out of memory


def fails(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@pytest.mark.parametrize("overrides", [(), ("training.accumulate=3",), ("data.workers=1",)])
def test_the_state_before_the_failed_step_is_saved_and_resumed_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    with monkeypatch.context() as patches:
        # With accumulation in the middle of a step, when gradients are there already.
        with_fault(patches, out_of_memory, 11 if "accumulate" in "".join(overrides) else 4)
        with pytest.raises(OutOfMemory) as caught:
            trained(tmp_path / "run", overrides)
    assert caught.value.saved == 3
    assert state_of(tmp_path / "run")["step"] == 3
    trained(tmp_path / "run", overrides, resume=True)
    assert_equal_runs(uninterrupted(overrides), tmp_path / "run")


def test_the_message_lists_what_was_alive_and_where_the_state_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, out_of_memory, 4)
    with pytest.raises(OutOfMemory) as caught:
        trained(tmp_path / "run")
    message = str(caught.value)
    assert "Tried to allocate 20.00 GiB" in message
    assert "in use: parameters" in message
    assert "optimizer state" in message
    assert message.endswith("the state is saved at step 3")
    assert "\n" not in message
    held = dict(caught.value.held)
    weights = state_of(tmp_path / "run")["model"]
    assert held["optimizer state"] > 2 * held["parameters"] * 0.9
    assert held["parameters"] <= sum(each.numel() * each.element_size() for each in weights.values())


def test_running_out_again_while_saving_saves_nothing_of_the_failed_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, out_of_memory, 4)
    monkeypatch.setattr(trainer.Trainer, "_check_weights", fails)
    with pytest.raises(OutOfMemory, match=r"not saved: .*Tried to allocate 1\.00 GiB") as caught:
        trained(tmp_path / "run")
    assert caught.value.saved is None
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_updates_in_backward_are_not_saved_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_fault(monkeypatch, out_of_memory, 4)
    overrides = ["fixes=[optimizer_in_backward]", "training.clip=null", "training.save_every=2"]
    with pytest.raises(OutOfMemory) as caught:
        trained(tmp_path / "run", overrides)
    assert caught.value.saved is None
    assert "not saved: updates are made in backward, so some weights are a step ahead" in str(caught.value)
    assert "resume from the newest checkpoint" in str(caught.value)
    assert [saved.step for saved in Checkpoints(tmp_path / "run" / "checkpoints").all()] == [2]


def test_an_optimizer_that_fails_half_way_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "run", ["training.steps=2", "training.schedule=constant"])
    monkeypatch.setattr(torch.optim.AdamW, "step", fails)
    with pytest.raises(OutOfMemory, match="not saved: the update was incomplete"):
        trained(tmp_path / "run", ["training.schedule=constant"], resume=True)
    assert state_of(tmp_path / "run")["step"] == 2


def test_evaluation_that_runs_out_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patches:
        patches.setattr(trainer, "evaluate", fails)
        with pytest.raises(OutOfMemory, match="the state is saved at step 3"):
            trained(tmp_path / "run", ["training.eval_every=3"])
    trained(tmp_path / "run", ["training.eval_every=3"], resume=True)
    assert rows_of(uninterrupted()) == rows_of(tmp_path / "run")


def test_without_checkpoints_the_message_says_that_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, out_of_memory, 2)
    with pytest.raises(OutOfMemory, match=r"not saved: training\.save is false"):
        trained(tmp_path / "run", ["training.save=false"])


def test_a_model_that_has_no_room_at_all_is_no_bug_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "build_model", fails)
    with pytest.raises(OutOfMemory, match="not saved: there is no room for the model") as caught:
        trained(tmp_path / "run")
    assert "in use" not in str(caught.value)


def test_a_library_that_cannot_allocate_is_out_of_memory_and_another_error_is_not() -> None:
    assert is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    )
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"))
