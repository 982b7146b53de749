"""What a batch holds: every token once an epoch, shuffled, in the shapes of the curriculum."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import CURRICULUM, drawn, numbered_lines, opened
from torch.utils.data._utils.pin_memory import pin_memory

from oomph.training.data import Schedule, Stage
from oomph.training.data.loader import _Plain
from oomph.training.data.permutation import Permutation, Split

ROW = Schedule((Stage(1, 1),))


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
    run = opened(source, tmp_path, schedule=ROW, shuffle_window=window, epochs=2)
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
    run = opened(folder, tmp_path, schedule=Schedule((Stage(7, 1),)), shuffle=False, validation=0.0)
    joined = [token for batch in drawn(run, 8) for row in batch for token in row]
    tokenizer = run.tokenizer
    assert tokenizer is not None
    one, two = ([tokenizer.sos, *b"text of %c\n" % name, tokenizer.eos] for name in b"ab")
    endless = (one + two) * 3
    assert joined == endless[: len(joined)]  # across the end of the epoch too, nothing lost, no padding


def test_only_the_tail_after_the_last_whole_batch_is_lost(tmp_path: Path) -> None:
    source = numbered_lines(tmp_path / "corpus.txt", 200)
    total = sum(1 for _ in opened(source, tmp_path, schedule=ROW, epochs=3).train)
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
    run = opened(source, tmp_path, schedule=Schedule((Stage(64, 8),)), shuffle_window=256)
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
        run = opened(source, tmp_path, validation=0.1, seed=seed, epochs=1, schedule=Schedule((Stage(8, 1),)))
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
    run = opened(numbered_lines(tmp_path / "corpus.txt", 300), tmp_path, schedule=CURRICULUM)
    shapes = [next(run.train)["input_ids"].shape for _ in range(16)]
    assert shapes == [(3, 8)] * 7 + [(2, 32)] * 5 + [(4, 16)] * 4


def test_a_batch_is_int64_and_its_labels_are_a_copy(tmp_path: Path) -> None:
    batch = next(opened(numbered_lines(tmp_path / "corpus.txt", 300), tmp_path).train)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_the_last_row_of_validation_is_padded_and_its_padding_is_no_label(tmp_path: Path) -> None:
    run = opened(numbered_lines(tmp_path / "corpus.txt", 300), tmp_path, schedule=Schedule((Stage(100, 2),)))
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
    sent = (_Plain({"images": np.zeros(3, dtype=np.float32)}), 0, {"position": 7})
    batch, worker, state = pin_memory(sent)
    assert batch["images"].tolist() == [1.0, 1.0, 1.0]
    assert (worker, state) == (0, {"position": 7})
