"""A real out-of-memory error, in spite of the prediction: nothing is lost, and what was alive is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from faults import out_of_memory, with_fault
from small_runs import assert_equal_runs, rows_of, state_of, trained

from oomph.training.checkpoints import Checkpoints
from oomph.training.loop import trainer
from oomph.training.loop.failures import OutOfMemory, ran_out_of_memory


def fails(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@pytest.mark.parametrize("overrides", [(), ("training.accumulate=3",), ("data.workers=1",)])
def test_the_state_before_the_failed_step_is_saved_and_resumed_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    trained(tmp_path / "straight", overrides)
    with monkeypatch.context() as patches:
        # With accumulation in the middle of a step, when gradients are there already.
        with_fault(patches, out_of_memory, 11 if "accumulate" in "".join(overrides) else 4)
        with pytest.raises(OutOfMemory) as caught:
            trained(tmp_path / "run", overrides)
    assert caught.value.saved == 3
    assert state_of(tmp_path / "run")["step"] == 3
    trained(tmp_path / "run", overrides, resume=True)
    assert_equal_runs(tmp_path / "straight", tmp_path / "run")


def test_the_message_lists_what_was_alive_and_where_the_state_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, out_of_memory, 4)
    with pytest.raises(OutOfMemory) as caught:
        trained(tmp_path / "run")
    message = str(caught.value)
    assert "Tried to allocate 20.00 GiB" in message
    assert "alive were parameters" in message
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
    assert "not saved: its updates are made in backward, so some weights are a step ahead" in str(
        caught.value
    )
    assert "resume from the newest checkpoint" in str(caught.value)
    assert [saved.step for saved in Checkpoints(tmp_path / "run" / "checkpoints").all()] == [2]


def test_an_optimizer_that_fails_half_way_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "run", ["training.steps=2", "training.schedule=constant"])
    monkeypatch.setattr(torch.optim.AdamW, "step", fails)
    with pytest.raises(OutOfMemory, match="not saved: the update was under way"):
        trained(tmp_path / "run", ["training.schedule=constant"], resume=True)
    assert state_of(tmp_path / "run")["step"] == 2


def test_evaluation_that_runs_out_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "straight", ["training.eval_every=3"])
    with monkeypatch.context() as patches:
        patches.setattr(trainer, "evaluate", fails)
        with pytest.raises(OutOfMemory, match="the state is saved at step 3"):
            trained(tmp_path / "run", ["training.eval_every=3"])
    trained(tmp_path / "run", ["training.eval_every=3"], resume=True)
    assert rows_of(tmp_path / "straight") == rows_of(tmp_path / "run")


def test_without_checkpoints_the_message_says_that_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(monkeypatch, out_of_memory, 2)
    with pytest.raises(OutOfMemory, match=r"not saved: training\.save is false"):
        trained(tmp_path / "run", ["training.save=false"])


def test_a_model_that_has_no_room_at_all_is_no_bug_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "built", fails)
    with pytest.raises(OutOfMemory, match="not saved: there is no room for the model") as caught:
        trained(tmp_path / "run")
    assert "alive were" not in str(caught.value)


def test_a_library_that_cannot_allocate_is_out_of_memory_and_another_error_is_not() -> None:
    assert ran_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    )
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not ran_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"))
