"""A save that fails says so in one line, at the latest with the next call, and leaves nothing behind."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oomph.errors import UserError
from oomph.training.checkpoints import Checkpoints, tensor_file
from oomph.training.checkpoints import checkpoints as module

STATE = {"x": torch.arange(1000)}


def with_first(folder: Path, **options: Any) -> Checkpoints:
    checkpoints = Checkpoints(folder, **options)
    checkpoints.save(1, STATE)
    checkpoints.wait()
    return checkpoints


def save_and_wait(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, STATE)
    checkpoints.wait()


def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fails(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tensor_file.os, "fsync", fails)


def test_a_full_disk_is_known_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = with_first(tmp_path)
    monkeypatch.setattr(module.os, "statvfs", lambda path: SimpleNamespace(f_bavail=3, f_frsize=1024))
    monkeypatch.setattr(module, "collect", None)
    with pytest.raises(UserError) as caught:
        checkpoints.save(2, STATE)
    message = str(caught.value)
    assert "no room on disk for the checkpoint of step 2: it needs 1.0 MiB (10565" in message
    assert "3.0 KiB (3072 bytes) free" in message
    assert (
        "checkpoints before it are as they were; make room or keep fewer, and go on with --resume" in message
    )
    assert "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_fills_while_writing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    checkpoints = with_first(tmp_path, asynchronous=asynchronous)
    with monkeypatch.context() as patches:
        failing(patches, 28)
        with pytest.raises(
            UserError, match=r"no room on disk for the checkpoint of step 2: it needs .* free;"
        ):
            save_and_wait(checkpoints, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    checkpoints.save(3, STATE)
    checkpoints.close()
    assert [saved.step for saved in checkpoints.all()] == [1, 3]


def test_a_write_that_the_system_stops_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    checkpoints = with_first(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        checkpoints.save(2, {"x": torch.zeros(1 << 20)})
        with pytest.raises(
            UserError, match=r"no room on disk for the checkpoint of step 2: it needs 5.0 MiB"
        ):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_an_error_of_the_thread_is_raised_by_the_next_save_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patches:
        failing(patches, 5)
        checkpoints.save(1, STATE)
        with pytest.raises(UserError, match=r"could not save step 1 in .*: Input/output error; earlier"):
            checkpoints.save(2, STATE)
    checkpoints.save(3, STATE)
    checkpoints.close()
    assert [saved.step for saved in checkpoints.all()] == [3]


def test_close_raises_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    failing(monkeypatch, 5)
    checkpoints.save(1, STATE)
    with pytest.raises(UserError, match="could not save step 1"):
        checkpoints.close()


def test_save_returns_before_the_disk_is_done_and_the_next_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, order = threading.Event(), []
    real = module.write_tensors

    def slow(path: Path, *rest: Any) -> Any:
        gate.wait(10)
        order.append(path.parent.name.split(".")[1])
        return real(path, *rest)

    monkeypatch.setattr(module, "write_tensors", slow)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, STATE)
    assert checkpoints.all() == []
    order.append("returned")
    threading.Timer(0.05, gate.set).start()
    checkpoints.save(2, STATE)
    assert [saved.step for saved in checkpoints.all()][:1] == [1]
    checkpoints.close()
    assert order == ["returned", "saving-step-00000001", "saving-step-00000002"]


def test_the_host_holds_one_copy_and_gives_it_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, STATE)
    memory = checkpoints._copies.memory
    assert memory is not None
    assert memory.numel() == 8000
    checkpoints.close()
    assert checkpoints._copies.memory is None


def test_without_room_for_a_copy_the_checkpoint_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)

    def no_room(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000 bytes.")

    monkeypatch.setattr(checkpoints._copies, "_room_for", no_room)
    with pytest.warns(UserWarning, match="the host has no room for a copy of the state"):
        checkpoints.save(1, STATE)
    assert [saved.step for saved in checkpoints.all()] == [1]


def test_a_program_that_ends_without_close_finishes_its_checkpoint(tmp_path: Path) -> None:
    script = f"""
import torch
from oomph.training.checkpoints import Checkpoints
Checkpoints({str(tmp_path)!r}).save(1, {{"x": torch.ones(3_000_000)}})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert [saved.step for saved in Checkpoints(tmp_path).all()] == [1]


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="x is a file; checkpoints need a folder"):
        Checkpoints(tmp_path / "x")
    with pytest.raises(UserError, match="cannot make the folder"):
        Checkpoints(tmp_path / "x" / "y").save(1, {})
