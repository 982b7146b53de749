"""A run's folder: never written over, never shared, and what is wrong with it is one line."""

import errno
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_runs import Recorder, assert_equal_runs, differences, rows_of, state_of, trained, uninterrupted

from oomph.errors import UserError
from oomph_lab.training.checkpoint import Checkpoints
from oomph_lab.training.config import load
from oomph_lab.training.run import lock_folder, train


def refused(match, *arguments, **options):
    with pytest.raises(UserError, match=match) as caught:
        trained(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_may_change_when_a_run_is_resumed(tmp_path):
    run = tmp_path / "run"
    trained(run, ["training.steps=1"])
    changed = ["model.hidden_size=32", "optimizer.learning_rate=0.5", "fixes=[optimizer_8bit]"]
    message = refused("was started with another config", run, [*changed, "log_every=3"], resume=True)
    assert "model.hidden_size was 16 and is 32" in message
    assert "optimizer.learning_rate was 0.01 and is 0.5" in message
    assert "fixes was" in message
    assert "log_every" not in message
    free = ["training.log_every=2", "training.keep=1", "training.eval_every=1", "training.on_nan=skip"]
    assert trained(run, free, resume=True).step == 6


def test_a_run_that_has_no_checkpoint_yet_starts_from_the_beginning(tmp_path):
    trained(tmp_path / "run", ["training.save=false", "training.steps=2"])
    events = Recorder()
    trained(tmp_path / "run", resume=True, callbacks=events)
    assert any("no checkpoint yet" in message for message in events.messages)
    assert_equal_runs(uninterrupted(), tmp_path / "run")


def test_a_config_beside_somebodys_checkpoints_is_not_a_runs_own(tmp_path):
    trained(tmp_path / "run", ["training.steps=1"])
    mine = tmp_path / "project" / "config.yaml"
    (mine.parent / "checkpoints").mkdir(parents=True)
    mine.write_text((tmp_path / "run" / "config.yaml").read_text())
    assert load(mine).output.dir == str(tmp_path / "run")
    assert load(tmp_path / "run" / "config.yaml").name == "run"


def test_a_corrupt_checkpoint_is_passed_over_and_said(tmp_path):
    trained(tmp_path / "run", ["training.save_every=2"])
    (file,) = (tmp_path / "run" / "checkpoints" / "step-00000006").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    events = Recorder()
    trained(tmp_path / "run", ["training.save_every=2"], resume=True, callbacks=events)
    said = "\n".join(events.messages)
    assert "skipped: " in said
    assert "step-00000006" in said
    assert "resumed at step 4" in said
    assert rows_of(tmp_path / "run") == rows_of(uninterrupted())
    assert rows_of(tmp_path / "run", "evaluation") == rows_of(uninterrupted(), "evaluation")


def test_a_full_disk_stops_the_run_and_leaves_what_was_saved(tmp_path, monkeypatch):
    real, calls = os.statvfs, 0

    def filling(path):
        nonlocal calls
        calls += 1
        return real(path) if calls == 1 else SimpleNamespace(f_bavail=1, f_frsize=512)

    with monkeypatch.context() as patches:
        patches.setattr(os, "statvfs", filling)
        refused(
            r"no room on disk for the checkpoint of step 4: it needs .* free; earlier checkpoints",
            tmp_path / "run",
            ["training.save_every=2"],
        )
    assert [saved.step for saved in Checkpoints(tmp_path / "run" / "checkpoints").all()] == [2]
    trained(tmp_path / "run", ["training.save_every=2"], resume=True)
    assert_equal_runs(uninterrupted(), tmp_path / "run")


def test_data_that_fail_later_lose_no_step(tmp_path, monkeypatch):
    from oomph_lab.training.data.text import PackedText

    real, calls = PackedText.__next__, 0

    def failing(self):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise UserError("text.txt is gone")
        return real(self)

    with monkeypatch.context() as patches:
        patches.setattr(PackedText, "__next__", failing)
        refused("text.txt is gone", tmp_path / "run")
    assert state_of(tmp_path / "run")["step"] == 3
    trained(tmp_path / "run", resume=True)
    assert_equal_runs(uninterrupted(), tmp_path / "run")


def test_a_device_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused("finds no GPU", tmp_path / "run", ["training.device=cuda"])


def test_a_runs_own_config_goes_on_with_that_run_with_all_that_was_given(tmp_path, monkeypatch):
    changes = ["training.clip=0.5", "training.schedule=constant"]
    trained(tmp_path / "straight", changes)
    monkeypatch.setenv("HOME", str(tmp_path))
    trained(tmp_path / "run", [*changes, "training.steps=2", "output.dir=~/run", "data.field='1e5'"])
    refused("training.clip was 0.5 .*; continue with its own, `oomph train", tmp_path / "run", resume=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").rename(tmp_path / "elsewhere" / "run")
    config = load(tmp_path / "elsewhere" / "run" / "config.yaml", ["training.steps=6"])
    assert config.name == "run"
    assert train(config, resume=True).step == 6
    assert differences(state_of(tmp_path / "elsewhere" / "run"), state_of(tmp_path / "straight")) == []


def test_what_a_run_writes_is_not_its_data(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "events.txt").write_text("".join(f"{number} lines of it\n" for number in range(400)))
    changes = [f"data.source={texts}", f"output.dir={texts}/runs/a"]
    trained(tmp_path / "run", [*changes, "training.steps=2"])
    assert trained(tmp_path / "run", changes, resume=True).step == 6


def test_a_disk_that_is_full_from_the_start_is_one_line(tmp_path, monkeypatch):
    real = Path.write_text

    def full(self, *arguments, **options):
        if self.name == "config.partial":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    refused("the run in .*run ended: No space left on device.*; make room", tmp_path / "run")


def test_two_runs_cannot_be_in_one_folder_at_once(tmp_path):
    trained(tmp_path / "run", ["training.steps=1"])
    read, write = os.pipe()
    other = os.fork()
    if other == 0:
        with lock_folder(tmp_path / "run"):
            os.write(write, b"held")
            signal.pause()
    try:
        assert os.read(read, 4) == b"held"
        refused(r"another run is using .*; wait for it", tmp_path / "run", resume=True)
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    # The lock went with its process, although nobody could take it back.
    assert trained(tmp_path / "run", resume=True).step == 6


def test_held_out_data_that_cannot_be_read_lose_nothing(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise UserError("rows.jsonl:41: broken JSON")

    monkeypatch.setattr("oomph_lab.training.trainer.evaluate", broken)
    with pytest.raises(UserError, match="broken JSON"):
        trained(tmp_path / "run")
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest().step == 6
