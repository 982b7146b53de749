"""Runs of several gloo ranks: the same training as one process, resumed on other numbers of ranks, and
mistakes that the first rank reports in one line while all ranks end."""

import contextlib
import io
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import config_of, differences, rows_of, state_of

from oomph.cli.main import run as run_command
from oomph.errors import UserError
from oomph_lab.training import evaluation, ranks as ranks_module
from oomph_lab.training.config import RUN_CONFIG
from oomph_lab.training.data import open_data
from oomph_lab.training.metrics import Callbacks
from oomph_lab.training.ranks import Ranks, join_ranks, parallel_of
from oomph_lab.training.run import train
from oomph_lab.training.step import workload
from oomph_lab.training.trainer import Trainer

SAME = ("data.batch_size=4", "training.steps=2", "training.eval_at_start=true")
SYSTEMS = {"longctx": SAME, "pythia": (*SAME, "model.dropout=0.0"), "ginr": (*SAME, "model.num_layers=1")}
RUNS = (
    *(("longctx", "parallel.tp=2"), ("longctx", "parallel.cp=2")),
    *(("pythia", "parallel.data=ddp"), ("ginr", "parallel.data=fsdp2")),
)


def as_rank(rank, port):
    """In a fork: what torchrun sets."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    evaluation.NEW_TOKENS = 3


def config_in(folder, overrides, system):
    """All ranks read one text, in the folder above that of the run."""
    text = () if system == "ginr" else (f"data.source={folder.parent}/text.txt",)
    return config_of(folder, (*overrides, *text), system)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {number}: {number**3}\n" for number in range(400)))
    return tmp_path


def train_all(rank, port, folder):
    as_rank(rank, port)
    for number, (system, text) in enumerate(RUNS):
        os.environ["MASTER_PORT"] = str(port + number)
        config = config_in(Path(folder) / f"{system} {text}", (*SYSTEMS[system], text), system)
        with join_ranks(config, torch.device("cpu"), None) as ranks:
            train(config, ranks=ranks)


# ------------------------------------------------------------------------------- other numbers of ranks


def resumed(config, ranks):
    """Where the state after loading is not the checkpoint's, bit for bit; then a step is trained."""
    folder = Path(config.output.dir)
    trainer = Trainer(
        config, workload(config), open_data(config, folder), folder, torch.device("cpu"), Callbacks(), ranks
    )
    trainer.resume()
    loaded = ranks.full_state(
        {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    )
    saved = state_of(folder)
    different = differences(loaded["model"], saved["model"]) if ranks.is_main_process else []
    if ranks.is_main_process:
        different += differences(loaded["optimizer"]["state"], saved["optimizer"]["state"])
    trainer.run()
    return different


def resume_on_two(rank, port, folder):
    as_rank(rank, port)
    config = config_in(Path(folder), ("data.batch_size=4", "training.steps=2"), "longctx")
    with join_ranks(config, torch.device("cpu"), None) as ranks:
        assert resumed(config, ranks) == []


# ------------------------------------------------------------------------------------------ failures


class Unreadable:
    def __init__(self, batches):
        self.state_dict = batches.state_dict

    def __iter__(self):
        raise OSError("cannot be read")


def fail_to_read_on_one(rank, port, folder):
    """Saving takes all ranks, and the other one is in its forward pass."""
    as_rank(rank, port)
    config = config_in(Path(folder), (*SAME, "parallel.data=fsdp2"), "longctx")
    ended = pytest.raises(Exception, match="cannot be read" if rank else "lost another rank")
    with ended, join_ranks(config, torch.device("cpu"), None) as ranks:
        data = open_data(config, Path(folder))
        if rank:
            data = replace(data, train=Unreadable(data.train))
        Trainer(config, workload(config), data, Path(folder), torch.device("cpu"), Callbacks(), ranks).run()
    assert not (Path(folder) / "checkpoints").exists()


# ------------------------------------------------------------------------------------------ mistakes

MISTAKES = {
    "odd batch": ("data.batch_size=3 cannot be divided over 2", ("data.batch_size=3",), ()),
    "another config": ("rank 1 has training.clip=0.5, and rank 0 clip=1.0", (), ("training.clip=0.5",)),
    "error of one": ("rank 1: ", (), ("training.steps=-1",)),
    "groups": ("2 ranks cannot be divided into groups of tp=3", ("parallel.tp=3",), ()),
    "fix": ("fix 'optimizer_8bit' is for one process", ("fixes=[optimizer_8bit]",), ()),
}


def make_mistakes(rank, port, folder):
    as_rank(rank, port)
    text = (Path(folder) / "text.txt").as_posix()
    for number, (name, (_, both, second)) in enumerate(MISTAKES.items()):
        os.environ["MASTER_PORT"] = str(port + number)
        words = [f"data.source={text}", "training.device=cpu", f"output.dir={folder}/{number}"]
        words += [*both, *(second if rank else ())]
        config = "configs/longctx_tiny.yaml"
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            try:
                status = run_command(["train", config, *words])
            except SystemExit as end:
                status = end.code
        (Path(folder) / f"{name} {rank}").write_text(f"{status} {errors.getvalue()}")


# ------------------------------------------------------------------------------------------ the tests


def everything(rank, port, folder):
    """To start processes takes longer than all that they do."""
    train_all(rank, port, folder)
    make_mistakes(rank, port + 10, folder)
    resume_on_two(rank, port + 20, f"{folder}/run")
    fail_to_read_on_one(rank, port + 21, f"{folder}/unreadable")


def test_runs_over_ranks(run_ranks, folder):
    train(config_in(folder / "run", ("data.batch_size=4", "training.steps=1"), "longctx"))
    for system, options in SYSTEMS.items():  # first, so that the ranks have what it imports
        train(config_in(folder / system, options, system))
    run_ranks(everything, 2, str(folder))
    check_same_training(folder)
    check_mistakes_are_reported_once(folder)
    config = config_in(folder / "run", ("data.batch_size=4", "training.steps=3"), "longctx")
    assert resumed(config, Ranks()) == []
    assert [row["step"] for row in rows_of(folder / "run")] == [1, 2, 3]


def check_same_training(folder):
    for system, text in RUNS:
        alone, shared = folder / system, folder / f"{system} {text}"
        for one, other in zip(rows_of(alone), rows_of(shared), strict=True):
            assert other["step"] == one["step"]
            for key in ("loss", "grad_norm", "learning_rate"):
                assert other[key] == pytest.approx(one[key], rel=1e-4), (text, key)
        assert len(rows_of(shared, "evaluation")) == 2
        expected, found = (state_of(folder)["model"] for folder in (alone, shared))
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-4, msg=f"{text} {name}")
        assert (shared / RUN_CONFIG).exists()


def check_mistakes_are_reported_once(folder):
    for name, (message, _, _) in MISTAKES.items():
        first, second = ((folder / f"{name} {rank}").read_text() for rank in (0, 1))
        assert first.startswith("2 ")
        assert message in first
        assert first.count("\n") == 1
        assert second.strip() == "2"


def test_a_port_in_use_and_a_missing_rank(monkeypatch, tmp_path):
    config = config_of(tmp_path, ("data.batch_size=4",), "longctx")
    as_environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in as_environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks_module, "START_TIMEOUT", ranks_module.timedelta(seconds=1))
    with socket.socket() as used:
        used.bind(("0.0.0.0", 0))
        used.listen()
        monkeypatch.setenv("MASTER_PORT", str(used.getsockname()[1]))
        with pytest.raises(UserError, match="port is in use"), join_ranks(config, torch.device("cpu"), None):
            pass
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    with (
        pytest.raises(UserError, match="not all of 2 ranks started within 1 s"),
        join_ranks(config, torch.device("cpu"), None),
    ):
        pass


def test_a_batch_and_a_sequence_must_be_divisible(tmp_path):
    config = config_of(tmp_path, ("data.batch_size=4", "data.seq_len=18", "parallel.cp=4"), "longctx")
    with pytest.raises(UserError, match="seq_len=18 cannot be divided over"):
        parallel_of(config, 4)
