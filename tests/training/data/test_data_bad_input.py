"""Every mistake is one line that says what was given and what is valid."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from corpora import drawn, numbered_lines, opened

from oomph.errors import UserError
from oomph.training.data import DataSettings, Schedule, Stage, open_data
from oomph.training.data.settings import settings_of

MISTAKES = {
    "empty.txt": (b"", r"empty.txt is empty; give a file with text in it$"),
    "nul.txt": (
        b"text\0text\n" * 99,
        r"nul.txt is not a text file \(a NUL byte at offset 4\); give UTF-8 text",
    ),
    "latin.txt": ("é\n".encode("latin-1") * 99, r"latin.txt is not a text file \(not UTF-8 at offset 0\)"),
    "picture.png": (b"\x89PNG\r\n\x1a\n\0\0\0", r"picture.png is not a text file"),
}


def message_of(source: Path | str, folder: Path, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        drawn(opened(source, folder, **changes), 200)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_file_that_is_no_text_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    content, message = MISTAKES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        opened(tmp_path / name, tmp_path / "run")
    if content:
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / name).write_bytes(content)
        numbered_lines(folder / "a.txt", 100)
        with pytest.raises(UserError, match=message):
            opened(folder, tmp_path / "run")


def test_bytes_that_are_no_text_far_into_a_file_are_refused_where_they_are_met(tmp_path: Path) -> None:
    path = tmp_path / "late.txt"
    path.write_bytes(b"good line\n" * 1000 + b"\0\n" + b"good line\n" * 1000)
    assert message_of(path, tmp_path, validation=0.0, schedule=Schedule((Stage(16, 64),))).startswith(
        f"{path} is not a text file (a NUL byte at offset 10000)"
    )


def test_an_empty_folder_and_a_folder_of_empty_files_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert message_of(folder, tmp_path).startswith(f"{folder} has no files; give text, JSONL")
    (folder / "a.txt").touch()
    assert f"{folder} has 1 files, all of them empty; " in message_of(folder, tmp_path)


def test_a_path_that_does_not_exist_has_its_nearest_name_said(tmp_path: Path) -> None:
    numbered_lines(tmp_path / "corpus.txt", 10)
    nearest = f"(nearest name: {tmp_path / 'corpus.txt'}); give a file, a folder or a glob"
    assert (
        message_of(tmp_path / "corups.txt", tmp_path) == f"{tmp_path / 'corups.txt'} does not exist {nearest}"
    )
    assert message_of(tmp_path / "none" / "x.txt", tmp_path).endswith(
        "does not exist; give a file, a folder or a glob"
    )
    assert message_of(tmp_path / "*.md", tmp_path).startswith(f"no file matches {tmp_path / '*.md'}; ")


def test_an_unknown_name_lists_the_valid_ones(tmp_path: Path) -> None:
    assert message_of("wikitext2", tmp_path) == (
        "there is no data source 'wikitext2' (nearest name: wikitext-2); "
        "choose from stdlib, wikitext-2, wikitext-103, fineweb-edu or a path"
    )
    assert message_of("", tmp_path).startswith("there is no data source ''; choose from stdlib")
    assert message_of("cifar10", tmp_path).startswith("cifar10 has images, not text; choose from stdlib")
    assert message_of("stdlib", tmp_path, images=True).startswith(
        "there is no data source 'stdlib' of images; choose from photographs, cifar10"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', "broken JSON ("),
        ("[1, 2]", 'a list; every line is to be a JSON object with a field "text"'),
        ('{"body": "x", "id": 3}', 'no text in field "text" (there are: body, id); name the one'),
        ('{"text": 7}', 'no text in field "text" (it holds a int); name the one'),
        ('{"text": null}', 'no text in field "text" (it holds null); leave such lines out'),
        ('{"text": "\udcff"}', "broken JSON (not UTF-8)"),
    ],
)
def test_a_broken_line_of_jsonl_is_named_by_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(2000))
    path.write_bytes((good + "\n" + line + "\n" + good).encode("utf-8", "surrogateescape"))
    found = message_of(path, tmp_path, schedule=Schedule((Stage(64, 64),)), validation=0.0)
    assert found.startswith(f"{path}:2002: {message}")


def test_a_broken_line_is_named_while_a_vocabulary_is_learned(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a b c"}\n' * 99 + "{broken\n")
    found = message_of(path, tmp_path, tokenizer="words", vocab_size=6, validation=0.0)
    assert found.startswith(f"{path}:100: broken JSON (")


def test_a_sequence_longer_than_the_data_says_how_many_tokens_there_are(tmp_path: Path) -> None:
    source = tmp_path / "short.txt"
    source.write_text("x" * 98)
    found = message_of(source, tmp_path, schedule=Schedule((Stage(4096, 1),)), validation=0.0)
    assert found == (
        f"seq_len=4096 is longer than the data: {source} has 100 tokens for training; "
        "give seq_len <= 100 or more data"
    )
    assert drawn(opened(source, tmp_path, schedule=Schedule((Stage(100, 1),)), validation=0.0), 2)
    found = message_of(source, tmp_path, schedule=Schedule((Stage(50, 5),)), validation=0.0, epochs=2)
    assert found.startswith("a batch of 250 tokens is larger than the data: ")
    assert "has 100 tokens for training, and epochs=2" in found


def test_documents_without_any_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n\n' * 200)
    assert "has 0 tokens for training" in message_of(tmp_path / "blank.jsonl", tmp_path)


def test_data_too_small_to_hold_anything_out_say_so(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    assert message_of(tmp_path / "short.txt", tmp_path).endswith(
        "is too small to hold a part out for validation; give more data, or validation=0"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 2}, "workers=2 is not valid; choose from 0 and 1"),
        ({"validation": 1.0}, "validation=1.0 is not valid; give a fraction >= 0 and < 1"),
        ({"shuffle_window": 0}, "shuffle_window=0 is not valid; give a whole number >= 1"),
        ({"epochs": 0}, "epochs=0 is not valid; give a whole number >= 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message_of("stdlib", tmp_path, **changes).startswith(message)


def test_stages_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match=r"^seq_len=0 is not valid; give a whole number >= 1$"):
        Stage(0, 1)
    with pytest.raises(UserError, match=r"^there is no stage of batches"):
        Schedule(())


def config(**data: Any) -> SimpleNamespace:
    training = SimpleNamespace(epochs=None, accumulate=3)
    return SimpleNamespace(system="pythia", data=SimpleNamespace(**data), training=training)


def test_a_config_s_curriculum_counts_steps_of_the_optimizer(tmp_path: Path) -> None:
    stages = [
        {"seq_len": 8, "batch_tokens": 20, "steps": 5},
        SimpleNamespace(seq_len=16, batch_size=2, steps=4, accumulate=1),
        {"seq_len": 4, "batch_tokens": 4},
    ]
    settings = settings_of(config(curriculum=stages))
    assert settings.schedule.stages == (Stage(8, 2, 15), Stage(16, 2, 4), Stage(4, 1, None))
    assert settings.source == "stdlib"


def test_a_config_without_shapes_says_which_key_is_missing() -> None:
    with pytest.raises(UserError, match=r"^data.seq_len is missing"):
        settings_of(config(batch_size=1))
    with pytest.raises(UserError, match=r"^data.batch_size is missing; give it, or data.batch_tokens$"):
        settings_of(config(seq_len=1))
    with pytest.raises(UserError, match=r"^batch_tokens=10 is less than one sequence of seq_len=11$"):
        settings_of(config(seq_len=11, batch_tokens=10))


def test_a_config_opens_like_settings(tmp_path: Path) -> None:
    source = str(numbered_lines(tmp_path / "corpus.txt", 300))
    data = {"source": source, "tokenizer": "bytes", "vocab_size": 8192, "seq_len": 16, "batch_tokens": 70}
    run = open_data(config(**data), tmp_path / "one")
    same = DataSettings(source, Schedule((Stage(16, 4),)), tokenizer="bytes", vocab_size=None)
    assert drawn(run, 9) == drawn(open_data(same, tmp_path / "two"), 9)
