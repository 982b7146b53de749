"""Batches of text: every token once an epoch, shuffled, resumable to the exact batch, in bounded memory."""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from corpora import CURRICULUM, drawn, numbered_lines, opened

from oomph.errors import UserError
from oomph.units import MiB
from oomph_lab.training.config import Curriculum, Stage
from oomph_lab.training.data.text import map_ahead

ROW = Curriculum((Stage(1, 1),))
BATCHES = 60  # several epochs of the corpus


@pytest.mark.parametrize("window", [1, 50])
def test_every_token_is_seen_exactly_once_per_epoch(tmp_path, window):
    source = numbered_lines(tmp_path / "corpus.txt", 150)
    run = opened(source, tmp_path, curriculum=ROW, shuffle_window=window, epochs=2)
    tokens = [batch["input_ids"].item() for batch in run.train]
    assert len(tokens) % 2 == 0
    half = len(tokens) // 2
    held_out = Counter(int(t) for b in run.validation() for t in b["labels"].flatten() if t >= 0)
    everything = Counter(source.read_bytes())
    for epoch in (tokens[:half], tokens[half:]):
        seen = Counter(epoch) + held_out
        assert {token: n for token, n in seen.items() if token < 256} == everything


def test_rows_in_order_are_the_text_itself_with_marks_around_documents(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.txt").write_text(f"text of {name}\n")
    run = opened(folder, tmp_path, curriculum=Curriculum((Stage(7, 1),)), shuffle=False, validation=0.0)
    joined = [token for batch in drawn(run, 8) for row in batch for token in row]
    tokenizer = run.tokenizer
    one, two = ([tokenizer.sos, *b"text of %c\n" % name, tokenizer.eos] for name in b"ab")
    endless = (one + two) * 3
    assert joined == endless[: len(joined)]  # across the end of the epoch too, nothing lost, no padding


def test_shuffling_changes_the_order_between_epochs_and_is_the_same_in_every_run(tmp_path):
    source = numbered_lines(tmp_path / "corpus.txt", 400)
    runs = [opened(source, tmp_path, epochs=2, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (
        [row for batch in run.train for row in batch["input_ids"].tolist()] for run in runs
    )
    assert first == again
    assert first != other
    half = len(first) // 2
    assert first[:half] != first[half : 2 * half]
    plain = opened(source, tmp_path, shuffle=False, epochs=1)
    assert first[:20] != [row for batch in drawn(plain, 5) for row in batch]


def test_training_and_validation_share_nothing_and_validation_is_the_same_for_every_seed(tmp_path):
    source = tmp_path / "corpus.txt"
    source.write_text("".join(f"{number:07d}\n" for number in range(4_000)))
    held = []
    for seed in (1, 2):
        run = opened(
            source, tmp_path, validation=0.1, seed=seed, epochs=1, curriculum=Curriculum((Stage(8, 1),))
        )
        assert run.tokenizer is not None
        trained, validated = (
            run.tokenizer.decode(int(token) for batch in batches for token in batch["input_ids"].flatten())
            for batches in (
                opened(source, tmp_path, validation=0.1, shuffle=False, epochs=1).train,
                run.validation(),
            )
        )
        train_lines, held_lines = (set(text.split("\n")) for text in (trained, validated))
        # The last line of the last batch may be cut.
        assert not {line for line in train_lines & held_lines if len(line) == 7}
        assert len(held_lines) == pytest.approx(400, rel=0.3)
        held.append(validated)
    assert held[0] == held[1]


def test_batches_follow_the_stages_by_number(tmp_path):
    run = opened(numbered_lines(tmp_path / "corpus.txt", 300), tmp_path, curriculum=CURRICULUM)
    batches = [next(run.train) for _ in range(16)]
    shapes = [batch["input_ids"].shape for batch in batches]
    assert shapes == [(3, 8)] * 7 + [(2, 32)] * 5 + [(4, 16)] * 4
    ids, labels = batches[0]["input_ids"], batches[0]["labels"]
    assert ids.dtype == labels.dtype == torch.int64
    assert torch.equal(ids, labels)
    assert ids.data_ptr() != labels.data_ptr()


def test_the_last_row_of_validation_is_padded_and_its_padding_is_no_label(tmp_path):
    run = opened(
        numbered_lines(tmp_path / "corpus.txt", 300), tmp_path, curriculum=Curriculum((Stage(100, 2),))
    )
    batches = list(run.validation())
    padding = batches[-1]["input_ids"] == run.tokenizer.pad
    assert padding.any()
    assert torch.equal(batches[-1]["labels"] == -100, padding)
    assert all((batch["labels"] >= 0).all() for batch in batches[:-1])


def test_work_ahead_in_threads_keeps_the_order_and_raises():
    def reciprocal(number):
        time.sleep(0.002 if number % 2 == 0 else 0)
        return 60 // (number - 40)

    results = map_ahead(reciprocal, range(50), ahead=5)
    assert [next(results) for _ in range(40)] == [60 // (number - 40) for number in range(40)]
    with pytest.raises(ZeroDivisionError):
        next(results)


# ---------------------------------------------------------------------------------------- resume


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, lines in (("a", 90), ("b", 3), ("c", 40)):
        numbered_lines(folder / f"{name}.txt", lines)
    (folder / "d.jsonl").write_text("".join(json.dumps({"text": f"doc {n}"}) + "\n" for n in range(50)))
    return folder


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "words"])
def test_every_resumed_run_goes_on_with_the_same_batches(corpus, tmp_path, tokenizer):
    changes = {"curriculum": CURRICULUM, "tokenizer": tokenizer}
    changes["vocab_size"] = {"bytes": None, "bpe": 280, "words": 30}[tokenizer]
    whole = drawn(opened(corpus, tmp_path, **changes), BATCHES)
    run = opened(corpus, tmp_path, **changes)
    for stop in range(BATCHES - 3):
        text = json.dumps(run.train.state_dict())
        assert len(text) < 600  # positions, not tokens
        state = json.loads(text)
        resumed = opened(corpus, tmp_path, **changes)
        resumed.train.load_state_dict(state)
        assert drawn(resumed, 3) == whole[stop : stop + 3]
        assert resumed.train.state_dict() != state
        next(run.train)
    assert run.train.state_dict()["position"]["epoch"] > 1


def test_batches_do_not_depend_on_the_worker_and_a_run_resumes_with_the_other_number(corpus, tmp_path):
    changes = {"curriculum": CURRICULUM}
    whole = drawn(opened(corpus, tmp_path, **changes), BATCHES)
    stop = random.Random(0).randrange(5, 20)
    for before, after in ((0, 1), (1, 0)):
        run = opened(corpus, tmp_path, workers=before, **changes)
        assert drawn(run, stop) == whole[:stop]
        state = run.train.state_dict()
        # Containers have little shared memory, and a tensor from there takes a connection to the worker.
        assert not any(tensor.is_shared() for tensor in next(run.train).values())
        run.train.close()
        resumed = opened(corpus, tmp_path, workers=after, **changes)
        resumed.train.load_state_dict(state)
        assert drawn(resumed, 30) == whole[stop : stop + 30]
        resumed.train.close()


def test_a_state_of_other_data_or_stages_is_refused_but_a_longer_last_stage_is_not(corpus, tmp_path):
    def run(first, last):
        stages = Curriculum((Stage(8, 2, steps=first), Stage(16, 2, steps=last)))
        return opened(corpus, tmp_path, curriculum=stages).train

    state = run(3, 9).state_dict()
    run(3, 99).load_state_dict(state)
    with pytest.raises(UserError, match=r"^the data are not those of the checkpoint: stages was "):
        run(4, 9).load_state_dict(state)
    numbered_lines(corpus / "e.txt", 100)
    with pytest.raises(UserError, match=r"checkpoint: size was \d+ and is \d+; "):
        run(3, 9).load_state_dict(state)


def test_a_broken_file_met_in_a_worker_is_one_line(tmp_path):
    path = tmp_path / "late.txt"
    path.write_bytes(b"good line\n" * 2000 + b"\xff\xfe bad\n" + b"good line\n" * 2000)
    run = opened(path, tmp_path, workers=1, validation=0.0)
    with pytest.raises(UserError) as caught:
        drawn(run, 2000)
    assert str(caught.value).startswith(f"{path} is not a text file (not UTF-8 at offset 20000)")
    assert "\n" not in str(caught.value)
    run.train.close()


PROGRAM = """
import resource, sys
from multiprocessing import active_children
from pathlib import Path

sys.path.insert(0, sys.argv[3])
from corpora import Curriculum, Stage, opened

source, folder = sys.argv[1], Path(sys.argv[2])
stages = Curriculum((Stage(4096, 4),))
data = opened(source, folder, curriculum=stages)
next(data.train)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(50):
    next(data.train)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
data = opened(source, folder, curriculum=stages, workers=1)
next(data.train)  # 256 KiB a batch: more than a pipe takes while nobody reads
print(1024 * grown, active_children()[0].pid, flush=True)
"""
HERE = str(Path(__file__).parent)


def test_a_worker_ends_with_the_program_and_memory_does_not_grow_with_the_data(tmp_path):
    """The program ends without closing its data."""
    large = tmp_path / "large.txt"
    large.write_text("the quick brown fox jumps over the lazy dog\n" * 1_500_000)  # 63 MiB
    command = [sys.executable, "-c", PROGRAM, str(large), str(tmp_path), HERE]
    with (tmp_path / "printed").open("w") as printed:  # a worker that lives on would hold a pipe open
        ended = subprocess.run(command, stdout=printed, check=False, timeout=120)
    large.unlink()
    assert ended.returncode == 0
    grown, worker = map(int, (tmp_path / "printed").read_text().split())
    assert ends(worker)
    if sys.platform == "linux":  # elsewhere ru_maxrss is not in KiB
        assert grown < 24 * MiB


def test_a_worker_ends_with_a_program_that_is_killed(tmp_path):
    corpus, (read, write) = numbered_lines(tmp_path / "lines.txt", 5000), os.pipe()
    program = os.fork()
    if program == 0:
        data = opened(corpus, tmp_path, workers=1, curriculum=Curriculum((Stage(4096, 4),)))
        next(data.train)
        os.write(write, str(active_children()[0].pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(program, 0)
    assert ends(int(os.read(read, 100)))


def ends(process):
    until = time.monotonic() + 60
    while time.monotonic() < until and alive(process):
        time.sleep(0.1)
    return not alive(process)


def alive(process):
    """Not one that has ended and that nobody asked for its end."""
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat")
        return not stat.exists() or " Z " not in stat.read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize("length", [64, 4096])  # of the longer ones a pipe takes no whole batch
def test_a_worker_that_is_killed_is_one_line_where_a_batch_is_asked_for(tmp_path, length):
    corpus = numbered_lines(tmp_path / "lines.txt", 5000)
    data = opened(corpus, tmp_path, workers=1, curriculum=Curriculum((Stage(length, 4),)))
    next(data.train)
    (worker,) = active_children()
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(60)  # not raised here, in the middle of something else
    with pytest.raises(
        UserError, match=r"^the process that reads the data ended .*; continue with "
    ) as caught:
        drawn(data, 1000)
    assert "\n" not in str(caught.value)
    data.train.close()


@pytest.mark.gpu
def test_a_worker_hands_out_pinned_batches_and_a_state_that_resumes(tmp_path):
    torch.zeros(1, device="cuda")
    corpus = numbered_lines(tmp_path / "lines.txt", 300)
    whole = drawn(opened(corpus, tmp_path), 40)
    run = opened(corpus, tmp_path, workers=1)
    assert drawn(run, 10) == whole[:10]
    assert all(tensor.is_pinned() for tensor in next(run.train).values())
    state = run.train.state_dict()
    run.train.close()
    resumed = opened(corpus, tmp_path, workers=1)
    resumed.train.load_state_dict(state)
    assert drawn(resumed, 20) == whole[11:31]
    resumed.train.close()


def test_a_pickled_data_set_goes_on_where_it_stood(corpus, tmp_path):
    """As a worker that is started afresh instead of forked needs it."""
    run = opened(corpus, tmp_path, tokenizer="bpe", vocab_size=280)
    drawn(run, 7)
    dataset = pickle.loads(pickle.dumps(run.train._dataset))
    assert next(dataset)["input_ids"].tolist() == drawn(run, 1)[0]
    assert dataset.stream.tokenizer.eos not in dataset.stream.tokenizer.encode("<eos>")
