"""A run that is stopped and resumed reads the very batches it would have read."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import pytest
from corpora import CURRICULUM, drawn, numbered_lines, opened

from oomph.errors import UserError
from oomph.training.data import Schedule, Stage

BATCHES = 60  # several epochs of the corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, lines in (("a", 90), ("b", 3), ("c", 40)):
        numbered_lines(folder / f"{name}.txt", lines)
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": f"doc {n}"}) + "\n" for n in range(50)))
    return folder


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "words"])
def test_every_resumed_run_goes_on_with_the_same_batches(
    corpus: Path, tmp_path: Path, tokenizer: str
) -> None:
    changes = {"schedule": CURRICULUM, "tokenizer": tokenizer}
    changes["vocab_size"] = {"bytes": None, "bpe": 280, "words": 30}[tokenizer]
    whole = drawn(opened(corpus, tmp_path, **changes), BATCHES)
    run = opened(corpus, tmp_path, **changes)
    for stop in range(BATCHES - 3):
        state = json.loads(json.dumps(run.train.state_dict()))
        resumed = opened(corpus, tmp_path, **changes)
        resumed.train.load_state_dict(state)
        assert drawn(resumed, 3) == whole[stop : stop + 3]
        assert resumed.train.state_dict() != state
        next(run.train)
    assert run.train.state_dict()["position"]["epoch"] > 1


def test_batches_do_not_depend_on_the_worker_and_a_run_resumes_with_the_other_number(
    corpus: Path, tmp_path: Path
) -> None:
    changes = {"schedule": CURRICULUM}
    whole = drawn(opened(corpus, tmp_path, **changes), BATCHES)
    stop = random.Random(0).randrange(5, 20)
    for before, after in ((0, 1), (1, 0), (1, 1)):
        run = opened(corpus, tmp_path, workers=before, **changes)
        assert drawn(run, stop) == whole[:stop]
        state = run.train.state_dict()
        run.train.close()
        resumed = opened(corpus, tmp_path, workers=after, **changes)
        resumed.train.load_state_dict(state)
        assert drawn(resumed, 30) == whole[stop : stop + 30]
        resumed.train.close()


def test_the_state_is_small_and_holds_no_tokens(corpus: Path, tmp_path: Path) -> None:
    run = opened(corpus, tmp_path, schedule=Schedule((Stage(64, 4),)), shuffle_window=64)
    drawn(run, 5)
    state = run.train.state_dict()
    assert len(json.dumps(state)) < 600
    assert all(isinstance(value, int) for value in state["position"].values())


def test_resuming_opens_only_the_files_from_the_window_on(corpus: Path, tmp_path: Path) -> None:
    run = opened(corpus, tmp_path, shuffle=False, validation=0.0)
    state = run.train.state_dict()
    (corpus / "a.txt").write_bytes(b"\0" * (corpus / "a.txt").stat().st_size)
    before_last = run.train._dataset.stream.corpus.blocks - 1
    state["position"] |= {"turn": before_last, "chunk": 0, "token": 0}
    run.train.load_state_dict(state)
    assert drawn(run, 1)  # a.txt would have been refused


def test_a_state_of_other_data_is_refused_by_name(corpus: Path, tmp_path: Path) -> None:
    state = opened(corpus, tmp_path / "one").train.state_dict()
    numbered_lines(corpus / "e.txt", 100)
    with pytest.raises(
        UserError, match=r"^the data are not those of the checkpoint: size was \d+ and is \d+; "
    ):
        opened(corpus, tmp_path / "two").train.load_state_dict(state)


def test_a_pickled_data_set_goes_on_where_it_stood(corpus: Path, tmp_path: Path) -> None:
    """As a worker that is started afresh instead of forked needs it."""
    run = opened(corpus, tmp_path, tokenizer="bpe", vocab_size=280)
    drawn(run, 7)
    dataset = pickle.loads(pickle.dumps(run.train._dataset))
    assert next(dataset)["input_ids"].tolist() == drawn(run, 1)[0]
    assert dataset.stream.tokenizer.eos not in dataset.stream.tokenizer.encode("<eos>")


def test_a_state_of_other_stages_is_refused_but_a_longer_last_stage_is_not(
    corpus: Path, tmp_path: Path
) -> None:
    state = opened(corpus, tmp_path, schedule=Schedule((Stage(8, 2, 3), Stage(16, 2, 9)))).train.state_dict()
    opened(corpus, tmp_path, schedule=Schedule((Stage(8, 2, 3), Stage(16, 2, 99)))).train.load_state_dict(
        state
    )
    with pytest.raises(UserError, match=r"^the data are not those of the checkpoint: stages was "):
        opened(corpus, tmp_path, schedule=Schedule((Stage(8, 2, 4), Stage(16, 2)))).train.load_state_dict(
            state
        )


def test_a_broken_file_met_in_a_worker_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "late.txt"
    path.write_bytes(b"good line\n" * 2000 + b"\xff\xfe bad\n" + b"good line\n" * 2000)
    run = opened(path, tmp_path, workers=1, validation=0.0)
    with pytest.raises(UserError) as caught:
        drawn(run, 2000)
    assert str(caught.value).startswith(f"{path} is not a text file (not UTF-8 at offset 20000)")
    assert "\n" not in str(caught.value)
    run.train.close()


ENDING = """
import os, signal, sys
from multiprocessing import active_children
from pathlib import Path
from oomph.training.data import DataSettings, Schedule, Stage, open_data

data = open_data(
    DataSettings(source=sys.argv[1], schedule=Schedule((Stage(4096, 4),)), tokenizer="bytes", workers=1),
    Path(sys.argv[2]),
)
next(data.train)  # 256 KiB a batch: more than a pipe takes while nobody reads
print(active_children()[0].pid, flush=True)
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", "without closing its data"])
def test_a_worker_ends_with_the_program_and_the_program_does_not_wait_for_it(
    tmp_path: Path, how: str
) -> None:
    corpus = numbered_lines(tmp_path / "lines.txt", 5000)
    command = [sys.executable, "-c", ENDING, str(corpus), str(tmp_path), how]
    with (tmp_path / "worker").open("w") as told:  # of a pipe, a worker that lives on would keep an end
        ended = subprocess.run(command, stdout=told, check=False, timeout=120)
    assert ended.returncode == (-signal.SIGKILL if how == "killed" else 0)
    worker = int((tmp_path / "worker").read_text())
    until = time.monotonic() + 60
    while time.monotonic() < until and alive(worker):
        time.sleep(0.1)
    assert not alive(worker)


def alive(process: int) -> bool:
    """Not one that has ended and that nobody asked for its end."""
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat")
        return not stat.exists() or " Z " not in stat.read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize("length", [64, 4096])  # of the longer ones a pipe takes no whole batch
def test_a_worker_that_is_killed_is_one_line_where_a_batch_is_asked_for(tmp_path: Path, length: int) -> None:
    corpus = numbered_lines(tmp_path / "lines.txt", 5000)
    data = opened(corpus, tmp_path, workers=1, schedule=Schedule((Stage(length, 4),)))
    next(data.train)
    (worker,) = active_children()
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(60)  # not raised here, in the middle of something else
    with pytest.raises(UserError, match=r"^the process that reads the data ended .*; go on with ") as caught:
        drawn(data, 1000)
    assert "\n" not in str(caught.value)
    data.train.close()
