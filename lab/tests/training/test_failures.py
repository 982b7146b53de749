"""A run that cannot continue: a loss or gradients that are not finite, and out of memory."""

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

from oomph_lab.training import trainer
from oomph_lab.training.checkpoint import Checkpoints, load
from oomph_lab.training.failures import NotFinite, OutOfMemory

FUSED = ("fixes=[fused_optimizer]",)


def state_after(folder, step):
    checkpoints = Checkpoints(folder / "checkpoints")
    (saved,) = [each for each in checkpoints.all() if each.step == step]
    return load(saved)


@pytest.mark.parametrize(("fixes", "fault"), [((), nan_loss), (FUSED, nan_gradients)], ids=["plain", "fused"])
def test_a_run_stopped_by_nan_is_saved_with_its_batches_and_goes_on_with_the_next(
    tmp_path, monkeypatch, fixes, fault
):
    overrides = [*fixes, "training.accumulate=3"]
    with monkeypatch.context() as patches:
        with_fault(patches, fault, 8)
        with pytest.raises(NotFinite) as caught:
            trained(tmp_path / "stopped", overrides)
    file = tmp_path / "stopped" / "batch_of_step_00000003.safetensors"
    message = str(caught.value)
    said = "the loss of step 3 was nan" if fault is nan_loss else "the gradients of step 3 were not finite"
    assert message.startswith(f"{said}")
    assert f"its update was not made, its batch is in {file}, the state is saved at step 3" in message
    assert "\n" not in message
    batches = load_file(file)
    assert sorted(batches) == [f"{n}.{name}" for n in range(3) for name in ("input_ids", "labels")]
    assert batches["0.input_ids"].shape == (2, 16)
    trained(tmp_path / "stopped", overrides, resume=True)
    with_fault(monkeypatch, fault, 8)
    trained(tmp_path / "skipped", [*overrides, "training.on_nan=skip"])
    assert differences(state_of(tmp_path / "stopped"), state_of(tmp_path / "skipped")) == []
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "skipped")
    if fault is nan_loss:
        assert rows_of(tmp_path / "skipped")[2]["loss"] == "nan"


@pytest.mark.parametrize(
    ("fixes", "fault"), [((), nan_gradients), (FUSED, nan_loss)], ids=["gradients", "loss, fused"]
)
def test_skip_goes_on_and_leaves_the_weights_of_that_step_alone(tmp_path, monkeypatch, fixes, fault):
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
    assert events.messages[-1] == "1 step skipped (training.on_nan=skip)"


def test_float16_goes_on_after_a_step_that_was_skipped(tmp_path, monkeypatch):
    with_fault(monkeypatch, nan_gradients, 3)
    overrides = ["training.autocast=float16", "training.on_nan=skip"]
    assert trained(tmp_path / "run", overrides).step == 6
    assert state_of(tmp_path / "run")["scaler"]["scale"] == 65536 / 2  # as after an overflow


@pytest.mark.parametrize("save_every", ["1", "null"])
def test_updates_in_backward_cannot_be_taken_back_and_are_not_saved(tmp_path, monkeypatch, save_every):
    with_fault(monkeypatch, nan_loss, 3)
    overrides = ["fixes=[optimizer_in_backward]", "training.clip=null", f"training.save_every={save_every}"]
    with pytest.raises(NotFinite) as caught:
        trained(tmp_path / "run", [*overrides, "training.on_nan=skip"])
    assert "its updates were made in backward; its batch is in" in str(caught.value)
    assert "resume from the checkpoint before it" in str(caught.value)
    steps = [saved.step for saved in Checkpoints(tmp_path / "run" / "checkpoints").all()]
    assert steps == ([1, 2] if save_every == "1" else [])


@pytest.mark.parametrize("save_every", ["1", "null"])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch, save_every):
    """Without clipping, gradients that are not finite are in the weights before the next loss shows it."""
    with_fault(monkeypatch, nan_gradients, 3)
    overrides = ["training.clip=null", "training.on_nan=skip", f"training.save_every={save_every}"]
    rest = "--resume continues at step 2" if save_every == "1" else "there is no checkpoint"
    message = rf"the weights of step \d are not finite, and are not saved; {rest}; training.clip=1.0"
    with pytest.raises(NotFinite, match=message):
        trained(tmp_path / "run", overrides)
    saved = [each.step for each in Checkpoints(tmp_path / "run" / "checkpoints").all()]
    assert saved == ([1, 2] if save_every == "1" else [])


# ------------------------------------------------------------------------------------- out of memory


def fails(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def library_fails(*_, **__):
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")


@pytest.mark.parametrize("overrides", [("training.accumulate=3",), ("data.workers=1",)])
def test_the_state_before_the_failed_step_is_saved_and_resumed_exactly(tmp_path, monkeypatch, overrides):
    with monkeypatch.context() as patches:
        # With accumulation in the middle of a step, when gradients are there already.
        with_fault(patches, out_of_memory, 11 if "accumulate" in overrides[0] else 4)
        with pytest.raises(OutOfMemory) as caught:
            trained(tmp_path / "run", overrides)
    assert caught.value.saved == 3
    message = str(caught.value)
    assert "Tried to allocate 20.00 GiB" in message
    assert "in use: parameters" in message
    assert message.endswith("the state is saved at step 3")
    assert "\n" not in message
    held = dict(caught.value.held)
    assert held["optimizer state"] > 2 * held["parameters"] * 0.9
    trained(tmp_path / "run", overrides, resume=True)
    assert_equal_runs(uninterrupted(overrides), tmp_path / "run")


def test_updates_in_backward_are_not_saved_half_made(tmp_path, monkeypatch):
    with_fault(monkeypatch, out_of_memory, 4)
    overrides = ["fixes=[optimizer_in_backward]", "training.clip=null", "training.save_every=2"]
    with pytest.raises(OutOfMemory) as caught:
        trained(tmp_path / "run", overrides)
    assert caught.value.saved is None
    assert "not saved: updates are made in backward, so some weights are a step ahead" in str(caught.value)
    assert "resume from the newest checkpoint" in str(caught.value)
    assert [saved.step for saved in Checkpoints(tmp_path / "run" / "checkpoints").all()] == [2]


def test_an_optimizer_that_fails_half_way_is_not_saved(tmp_path, monkeypatch):
    trained(tmp_path / "run", ["training.steps=2", "training.schedule=constant"])
    monkeypatch.setattr(torch.optim.AdamW, "step", library_fails)
    with pytest.raises(OutOfMemory, match="not saved: the update was incomplete"):
        trained(tmp_path / "run", ["training.schedule=constant"], resume=True)
    assert state_of(tmp_path / "run")["step"] == 2


def test_evaluation_that_runs_out_loses_no_step(tmp_path, monkeypatch):
    with monkeypatch.context() as patches:
        patches.setattr(trainer, "evaluate", fails)
        with pytest.raises(OutOfMemory, match="the state is saved at step 3"):
            trained(tmp_path / "run", ["training.eval_every=3"])
    trained(tmp_path / "run", ["training.eval_every=3"], resume=True)
    assert rows_of(uninterrupted()) == rows_of(tmp_path / "run")
