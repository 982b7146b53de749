"""Which checkpoints stay, which is the newest, and what happens to leftovers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from oomph.errors import ArgumentError, UserError
from oomph.training.checkpoints import Checkpoints, Unsound, find


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, {"x": torch.full((3,), float(step))})
    checkpoints.wait()


def spoil(folder: Path, step: int) -> Path:
    file = folder / f"step-{step:08d}" / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def steps(checkpoints: Checkpoints) -> list[int]:
    return [saved.step for saved in checkpoints.all()]


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 10, 9, 20, 100_000_000)
    assert steps(checkpoints) == [20, 100_000_000]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-100000000"]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 100_000_000
    assert latest.warnings == ()


def test_the_one_just_saved_is_never_the_one_that_goes(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, keep=3), 10, 20, 30)
    going_back = Checkpoints(tmp_path, keep=1)
    save(going_back, 5)
    assert steps(going_back) == [5]


def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    save(checkpoints, 1, 2)
    for number in (7.0, 8.0):
        checkpoints.save(2, {"x": torch.tensor(number)})
    checkpoints.wait()
    assert steps(checkpoints) == [1, 2]
    latest = checkpoints.latest()
    assert latest is not None
    assert checkpoints.load(latest)["x"] == 8.0


def test_a_corrupt_newest_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, 2, 3)
    file = spoil(tmp_path, 3)
    (tmp_path / "step-00000002" / "manifest.json").write_text("{")
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 1
    assert len(latest.warnings) == 2
    assert latest.warnings[0] == f"{file} is corrupt: its contents do not match their checksum"
    assert "manifest.json is corrupt" in latest.warnings[1]


def test_only_corrupt_ones_are_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, 2)
    spoil(tmp_path, 1)
    spoil(tmp_path, 2)
    with pytest.raises(
        Unsound, match=r"no checkpoint in .* can be used: .*step-00000002.*\(and 1 older\); to start"
    ):
        checkpoints.latest()


def test_rotation_does_not_count_what_cannot_be_used(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, 2)
    (tmp_path / "step-00000002" / "state.json").unlink()
    save(checkpoints, 3)
    assert steps(checkpoints) == [1, 3]
    assert (tmp_path / "step-00000002").is_dir()


def test_rotation_does_not_count_what_was_found_corrupt(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path), 10, 20)
    spoil(tmp_path, 20)
    checkpoints = Checkpoints(tmp_path, keep=2)
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 10
    save(checkpoints, 15, 16)
    assert steps(checkpoints) == [15, 16, 20]
    save(checkpoints, 20)  # in its place, at last
    assert checkpoints.latest().step == 20  # type: ignore[union-attr]


def test_leftovers_of_the_dead_are_cleaned_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    dead = _number_of_no_process()
    (tmp_path / f".saving-step-00000001.{dead}").mkdir()
    (tmp_path / f".deleting-step-00000001.{dead}").mkdir()
    # A number used again: older than the process that has it now.
    reused = tmp_path / f".saving-step-00000002.{os.getpid()}"
    reused.mkdir()
    os.utime(reused, (1, 1))
    alive = tmp_path / f".saving-step-00000003.{os.getppid()}"
    alive.mkdir()
    mine = tmp_path / "notes.1"
    mine.mkdir()
    Checkpoints(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, mine])


def test_a_half_deleted_one_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def fails(path: Any, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("oomph.training.checkpoints.folders.shutil.rmtree", fails)
    checkpoints.save(2, {})
    with pytest.raises(UserError, match=r"step 2 is saved, but an older checkpoint .* Input/output error"):
        checkpoints.wait()
    assert steps(checkpoints) == [2]


def test_find_takes_one_checkpoint_or_a_folder_of_them(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path), 1, 2)
    assert find(tmp_path).step == 2
    assert find(str(tmp_path / "step-00000001")).step == 1


@pytest.mark.parametrize("keep", [0, -1, True, "3"])
def test_keep_is_a_number(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(ArgumentError, match="number of checkpoints to keep"):
        Checkpoints(tmp_path, keep=keep)


def _number_of_no_process() -> int:
    pid = os.posix_spawn("/bin/true", ["/bin/true"], {})
    os.waitpid(pid, 0)
    return pid
