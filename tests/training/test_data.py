"""Batches of text: every token once an epoch, shuffled, resumable to the exact batch, in bounded memory."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import CURRICULUM, drawn, numbered_lines, opened
from torch.utils.data._utils.pin_memory import pin_memory

from oomph.errors import UserError
from oomph.training.config import Curriculum, Stage, load_dict
from oomph.training.data import DataOptions, open_data
from oomph.training.data.loader import _WorkerBatch
from oomph.training.data.sources import Permutation, Split
from oomph.training.data.text import map_ahead
from oomph.units import MiB

ROW = Curriculum((Stage(1, 1),))
BATCHES = 60  # several epochs of the corpus


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 257, 1000])
def test_a_permutation_is_one_to_one_and_knows_its_inverse(size: int) -> None:
    order = Permutation(size, 3, 4)
    values = [order[index] for index in range(size)]
    assert sorted(values) == list(range(size))
    assert [order.position(value) for value in values] == list(range(size))
    if size > 7:
        assert values != [Permutation(size, 3, 5)[index] for index in range(size)]


def test_a_permutation_of_a_million_million_numbers_takes_no_memory() -> None:
    order = Permutation(10**12, 1)
    assert order.position(order[123_456_789_012]) == 123_456_789_012


@pytest.mark.parametrize("window", [1, 50, 100_000])
def test_every_token_is_seen_exactly_once_per_epoch(tmp_path: Path, window: int) -> None:
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


def test_rows_in_order_are_the_text_itself_with_marks_around_documents(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.txt").write_text(f"text of {name}\n")
    run = opened(folder, tmp_path, curriculum=Curriculum((Stage(7, 1),)), shuffle=False, validation=0.0)
    joined = [token for batch in drawn(run, 8) for row in batch for token in row]
    tokenizer = run.tokenizer
    assert tokenizer is not None
    one, two = ([tokenizer.sos, *b"text of %c\n" % name, tokenizer.eos] for name in b"ab")
    endless = (one + two) * 3
    assert joined == endless[: len(joined)]  # across the end of the epoch too, nothing lost, no padding


def test_only_the_tail_after_the_last_whole_batch_is_lost(tmp_path: Path) -> None:
    source = numbered_lines(tmp_path / "corpus.txt", 200)
    total = sum(1 for _ in opened(source, tmp_path, curriculum=ROW, epochs=3).train)
    run = opened(source, tmp_path, epochs=3)
    assert sum(batch["input_ids"].numel() for batch in run.train) == total // 64 * 64
    assert next(run.train, None) is None


def test_shuffling_changes_the_order_between_epochs_and_is_the_same_in_every_run(tmp_path: Path) -> None:
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


def test_a_single_long_file_is_shuffled_over_its_whole_length(tmp_path: Path) -> None:
    source = tmp_path / "long.txt"
    source.write_text("".join(f"{number:07d}\n" for number in range(100_000)))
    run = opened(source, tmp_path, curriculum=Curriculum((Stage(64, 8),)), shuffle_window=256)
    assert run.tokenizer is not None
    text = run.tokenizer.decode(token for batch in drawn(run, 300) for row in batch for token in row)
    seen = {int(line) // 10_000 for line in text.split("\n") if len(line) == 7}
    assert len(seen) >= 6  # tenths of the file, of which a fifth was drawn; in order, these would be two


def test_training_and_validation_share_nothing_and_validation_is_the_same_for_every_seed(
    tmp_path: Path,
) -> None:
    source = tmp_path / "corpus.txt"
    source.write_text("".join(f"{number:07d}\n" for number in range(20_000)))
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
        assert len(held_lines) == pytest.approx(2000, rel=0.25)
        held.append(validated)
    assert held[0] == held[1]


def test_a_split_holds_out_at_least_one_and_never_all() -> None:
    assert Split(2, 0.001).held_out == 1
    assert Split(2, 0.99).held_out == 1
    assert Split(100, 0.02).held_out == 2
    assert Split(100, 0.0).held_out == 0
    split = Split(100, 0.1)
    assert {split.validation(i) for i in range(10)} == {n for n in range(100) if split.is_held_out(n)}


def test_batches_follow_the_stages_by_number(tmp_path: Path) -> None:
    run = opened(numbered_lines(tmp_path / "corpus.txt", 300), tmp_path, curriculum=CURRICULUM)
    shapes = [next(run.train)["input_ids"].shape for _ in range(16)]
    assert shapes == [(3, 8)] * 7 + [(2, 32)] * 5 + [(4, 16)] * 4


def test_a_batch_is_int64_and_its_labels_are_a_copy(tmp_path: Path) -> None:
    batch = next(opened(numbered_lines(tmp_path / "corpus.txt", 300), tmp_path).train)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_the_last_row_of_validation_is_padded_and_its_padding_is_no_label(tmp_path: Path) -> None:
    run = opened(
        numbered_lines(tmp_path / "corpus.txt", 300), tmp_path, curriculum=Curriculum((Stage(100, 2),))
    )
    batches = list(run.validation())
    assert run.tokenizer is not None
    padding = batches[-1]["input_ids"] == run.tokenizer.pad
    assert padding.any()
    assert torch.equal(batches[-1]["labels"] == -100, padding)
    assert all((batch["labels"] >= 0).all() for batch in batches[:-1])


def test_a_workers_batch_takes_no_shared_memory(tmp_path: Path) -> None:
    """Containers have 64 MiB of it, and a tensor from there takes a connection to the worker."""
    corpus = numbered_lines(tmp_path / "lines.txt", 100)
    run = opened(corpus, tmp_path, workers=1)
    for tensor in next(run.train).values():
        assert not tensor.is_shared()
        tensor.add_(1)  # its own memory, to be written to as any other
    run.train.close()


def test_the_loaders_thread_pins_what_a_worker_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    sent = (_WorkerBatch({"images": np.zeros(3, dtype=np.float32)}), 0, {"position": 7})
    batch, worker, state = pin_memory(sent)
    assert batch["images"].tolist() == [1.0, 1.0, 1.0]
    assert (worker, state) == (0, {"position": 7})


def test_work_ahead_in_threads_keeps_order_and_raises_in_turn() -> None:
    def items() -> Iterator[int]:
        for number in range(40):
            started.append(number)
            yield number
        raise OSError("the disk is gone")

    def slow_if_even(number: int) -> int:
        time.sleep(0.002 if number % 2 == 0 else 0)
        return number * number

    started: list[int] = []
    results = map_ahead(slow_if_even, items(), ahead=5)
    assert next(results) == 0
    assert started == [0, 1, 2, 3, 4]
    assert [next(results) for _ in range(39)] == [number * number for number in range(1, 40)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)
    failing = map_ahead(lambda number: 1 // (2 - number), range(5))
    assert [next(failing) for _ in range(2)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(failing)


def test_a_config_opens_like_options(tmp_path: Path) -> None:
    source = str(numbered_lines(tmp_path / "corpus.txt", 300))
    data = {"source": source, "tokenizer": "bytes", "seq_len": 16, "batch_tokens": 70}
    config = load_dict({"system": "pythia", "data": data, "training": {"accumulate": 3}}, "test")
    same = DataOptions(source, Curriculum((Stage(16, 4),)), tokenizer="bytes", vocab_size=None)
    run = open_data(config, tmp_path / "one")
    assert drawn(run, 9) == drawn(open_data(same, tmp_path / "two"), 9)


def test_a_curriculum_counts_optimizer_steps_and_batches() -> None:
    curriculum = Curriculum((Stage(8, 2, 3, steps=5), Stage(16, 2, 1, steps=4), Stage(4, 1, 3)))
    assert [curriculum.stage_number(step) for step in (0, 4, 5, 8, 9, 99)] == [0, 0, 1, 1, 2, 2]
    last = curriculum.stages[-1]
    found = [curriculum.at_batch(batch) for batch in (0, 14, 15, 19, 99)]
    assert [left for _, left in found] == [15, 1, 4, None, None]
    assert found[3] == (last, None)
    assert curriculum.identity() == [[8, 2, 15], [16, 2, 4], [4, 1, None]]


# ---------------------------------------------------------------------------------------- resume


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
    changes = {"curriculum": CURRICULUM, "tokenizer": tokenizer}
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
    changes = {"curriculum": CURRICULUM}
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
    run = opened(corpus, tmp_path, curriculum=Curriculum((Stage(64, 4),)), shuffle_window=64)
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
    state = opened(
        corpus, tmp_path, curriculum=Curriculum((Stage(8, 2, steps=3), Stage(16, 2, steps=9)))
    ).train.state_dict()
    opened(
        corpus, tmp_path, curriculum=Curriculum((Stage(8, 2, steps=3), Stage(16, 2, steps=99)))
    ).train.load_state_dict(state)
    with pytest.raises(UserError, match=r"^the data are not those of the checkpoint: stages was "):
        opened(
            corpus, tmp_path, curriculum=Curriculum((Stage(8, 2, steps=4), Stage(16, 2)))
        ).train.load_state_dict(state)


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
from oomph.training.config import Curriculum, Stage
from oomph.training.data import DataOptions, open_data

data = open_data(
    DataOptions(source=sys.argv[1], curriculum=Curriculum((Stage(4096, 4),)), tokenizer="bytes", workers=1),
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


# ---------------------------------------------------------------------------------------- memory

READ = """
import json, os, resource, sys, time
from oomph.training.config import Curriculum, Stage
from oomph.training.data import DataOptions, open_data

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

source, folder = sys.argv[1:]
open_data(DataOptions("stdlib", Curriculum((Stage(2048, 4),)), tokenizer="bytes"), folder + "/warm")
before = resident()
start = time.process_time()
data = open_data(DataOptions(source, Curriculum((Stage(2048, 4),)), tokenizer="bytes"), folder)
opening = time.process_time() - start
numbers = set()
for _ in range(400):
    batch = next(data.train)
    for row in batch["input_ids"][:1]:
        lines = data.tokenizer.decode(row.tolist()).split("\\n")[1:-1]
        numbers.update(int(line[:9]) for line in lines)
state = data.train.state_dict()
start = time.process_time()
data.train.load_state_dict(state)
next(data.train)
print(json.dumps({"grown": resident() - before, "opening": opening, "resuming": time.process_time() - start,
                  "first": min(numbers), "last": max(numbers), "blocks": state["identity"]["blocks"]}))
"""


def written(path: Path, size: int) -> int:
    """Lines of 512 bytes, each with its number; written by the MiB. The number of lines."""
    lines = size // 512
    step = MiB // 512
    rest = (" the quick brown fox jumps over the lazy dog" * 12)[:502]
    with path.open("w", encoding="ascii") as file:
        for first in range(0, lines, step):
            file.write("".join([f"{number:09d}{rest}\n" for number in range(first, first + step)]))
    return lines


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "large.txt"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc")
def test_a_file_of_256_mebibytes_takes_no_more_memory_than_one_of_64(large: Path, tmp_path: Path) -> None:
    found = {}
    for size in (64 * MiB, 256 * MiB):
        lines = written(large, size)
        assert large.stat().st_size == size
        command = [sys.executable, "-c", READ, str(large), str(tmp_path / str(size))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        found[size] = json.loads(done.stdout)
        # Batches come from all over the file, although only 3 MiB of it were asked for.
        assert found[size]["last"] - found[size]["first"] > lines / 4
        assert found[size]["grown"] < 48 * MiB
        assert found[size]["opening"] < 2
        assert found[size]["resuming"] < 2
    assert found[256 * MiB]["blocks"] == 256
    assert found[256 * MiB]["grown"] < found[64 * MiB]["grown"] + 16 * MiB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_worker_hands_out_pinned_batches_and_a_state_that_resumes(tmp_path: Path) -> None:
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
