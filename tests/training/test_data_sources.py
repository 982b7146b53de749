"""Where documents come from: text, JSONL, parquet, the standard library, the hub; bad input is one line."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from corpora import drawn, numbered_lines, opened

from oomph.errors import UserError
from oomph.training.config import Curriculum, Stage
from oomph.training.data import sources
from oomph.training.data.sources import Corpus, JsonLines, TextFile, open_parquet, open_text


def documents(corpus: Corpus) -> list[str]:
    return [document for block in range(corpus.blocks) for document in corpus.read(block)]


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1000, 10_000])
@pytest.mark.parametrize(
    "content", ["a\nbb\nccc\n", "\n\n\n", "no end", "é" * 500, "日本\n語" * 99, "x" * 300 + "\n" + "y"]
)
def test_blocks_of_any_size_join_to_the_file_and_never_cut_a_character(
    tmp_path: Path, content: str, block: int
) -> None:
    path = tmp_path / "file.txt"
    path.write_text(content, encoding="utf-8")
    file = TextFile(path, path.stat().st_size, block)
    assert "".join(text for number in range(file.blocks) for text in file.read(number)) == content


@pytest.mark.parametrize("block", [1, 30, 1000])
def test_jsonl_gives_every_line_once_however_long_the_lines_are(tmp_path: Path, block: int) -> None:
    texts = [f"text {number} " + "z" * (number * 37 % 200) for number in range(50)]
    path = tmp_path / "file.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\r\n\n" for text in texts))
    file = JsonLines(path, path.stat().st_size, block)
    assert [text for number in range(file.blocks) for text in file.read(number)] == texts


def test_half_a_surrogate_pair_in_jsonl_does_not_stop_a_run(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text('{"text": "bad \\ud800 half"}\n')
    assert documents(open_text(str(path))) == ["bad ? half"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(b"\xef\xbb\xbfhello\n")
    assert documents(open_text(str(path))) == ["hello\n"]


def test_folders_and_globs_are_read_in_a_stable_order_without_empty_and_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("secret")
    assert documents(open_text(str(tmp_path))) == ["a.txt", "b.txt", "sub/c.md"]
    assert documents(open_text(str(tmp_path / "*.txt"))) == ["a.txt", "b.txt"]
    assert documents(open_text(str(tmp_path / "**" / "*.md"))) == ["sub/c.md"]


def test_the_standard_library_is_the_same_every_time_and_without_installed_packages() -> None:
    one, two = open_text("stdlib"), open_text("stdlib")
    assert one.parts == two.parts
    assert one.size > 5_000_000
    assert not [part for part in one.parts if "site-packages" in str(getattr(part, "path", ""))]


@pytest.mark.parametrize("rows_per_group", [7, 1000])
def test_parquet_gives_every_row_once_and_resumes(tmp_path: Path, rows_per_group: int) -> None:
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"document {number}" for number in range(200)]
    path = tmp_path / "file.parquet"
    tables.write_table(arrow.table({"id": range(200), "text": texts}), path, row_group_size=rows_per_group)
    assert documents(open_text(str(path))) == texts
    whole = drawn(opened(path, tmp_path), 80)
    run = opened(path, tmp_path)
    drawn(run, 41)
    resumed = opened(path, tmp_path)
    resumed.train.load_state_dict(run.train.state_dict())
    assert drawn(resumed, 39) == whole[41:]


def test_bad_parquet_is_one_line_each(tmp_path: Path) -> None:
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tables.write_table(arrow.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_text("this is not parquet")
    with pytest.raises(
        UserError, match=r'a.parquet has no column "text" \(it has id, body\); name the column'
    ):
        open_text(str(tmp_path / "a.parquet"))
    with pytest.raises(UserError, match=r'^column "id" of .* holds int64, not text$'):
        open_text(str(tmp_path / "a.parquet"), "id")
    with pytest.raises(UserError, match=r"b.parquet cannot be read as parquet: "):
        open_text(str(tmp_path / "b.parquet"))


def test_a_missing_library_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_text("whatever")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it could not be found
    with pytest.raises(UserError) as caught:
        open_parquet(str(tmp_path / "a.parquet"))
    assert str(caught.value) == (
        "reading parquet needs the package pyarrow, which is not installed; pip install 'oomph[train]'"
    )


@pytest.mark.parametrize("name", ["wikitext-2", "wikitext-103", "fineweb-edu"])
def test_hub_data_without_a_network_are_one_line_within_seconds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        open_text(name)
    assert time.monotonic() - start < 20
    assert str(caught.value).startswith(f"{name} is on the hub, and 127.0.0.1 does not answer; give a path")
    assert '"stdlib"' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()

    def hang(*args: Any, **kwargs: Any) -> None:
        given_up.wait(60)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", hang)
    start = time.monotonic()
    assert not sources.is_reachable("https://example.invalid", timeout=0.05)
    assert time.monotonic() - start < 30
    given_up.set()


def test_a_hub_table_is_read_by_blocks_of_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [f"row {number}\n" if number % 3 else "" for number in range(1000)]
    table = datasets.Dataset.from_dict({"text": rows})
    monkeypatch.setattr(sources, "_datasets", lambda name: datasets)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: table)
    assert "".join(documents(open_text("wikitext-2"))) == "".join(rows)
    assert drawn(opened("wikitext-2", tmp_path), 3)


def test_a_streamed_hub_data_set_is_its_parquet_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("fsspec")
    paths = [tmp_path / f"{number}.parquet" for number in range(2)]
    for number, path in enumerate(paths):
        tables.write_table(arrow.table({"text": [f"{number} {row}" for row in range(20)]}), path)

    class Hub:
        def load_dataset_builder(self, *_: Any) -> Any:
            files = {"train": [path.as_uri() for path in paths]}
            return SimpleNamespace(config=SimpleNamespace(data_files=files))

    monkeypatch.setattr(sources, "_datasets", lambda name: Hub())
    assert documents(open_text("fineweb-edu")) == [f"{n} {row}" for n in range(2) for row in range(20)]
    assert drawn(opened("fineweb-edu", tmp_path, workers=1), 2) == drawn(opened("fineweb-edu", tmp_path), 2)


def test_a_hub_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def load_dataset(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("no such thing\nand a long story")

    monkeypatch.setattr(sources, "_datasets", lambda name: Failing())
    with pytest.raises(
        UserError, match=r"^wikitext-2 cannot be loaded from the hub \(no such thing\); give a path"
    ):
        open_text("wikitext-2")


def test_describe_says_what_the_data_are(tmp_path: Path) -> None:
    source = numbered_lines(tmp_path / "corpus.txt", 300)
    assert opened(source, tmp_path).description == (
        f"{source}: 5.5 KiB in 1 file, 1 of 6 blocks held out; 260 bytes; batches of 4 x 16"
    )


# ----------------------------------------------------------------------------------------- bad input

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
    assert message_of(path, tmp_path, validation=0.0, curriculum=Curriculum((Stage(16, 64),))).startswith(
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
    assert message_of("stdlib", tmp_path, image_size=32).startswith(
        "there is no data source 'stdlib' of images; choose from photographs, cifar10"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', "broken JSON ("),
        ("[1, 2]", 'a list; give JSON objects with a field "text"'),
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
    found = message_of(path, tmp_path, curriculum=Curriculum((Stage(64, 64),)), validation=0.0)
    assert found.startswith(f"{path}:2002: {message}")


def test_a_broken_line_is_named_while_a_vocabulary_is_learned(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a b c"}\n' * 99 + "{broken\n")
    found = message_of(path, tmp_path, tokenizer="words", vocab_size=6, validation=0.0)
    assert found.startswith(f"{path}:100: broken JSON (")


def test_a_sequence_longer_than_the_data_says_how_many_tokens_there_are(tmp_path: Path) -> None:
    source = tmp_path / "short.txt"
    source.write_text("x" * 98)
    found = message_of(source, tmp_path, curriculum=Curriculum((Stage(4096, 1),)), validation=0.0)
    assert found == (
        f"seq_len=4096 is longer than the data: {source} has 100 tokens for training; "
        "give seq_len <= 100 or more data"
    )
    assert drawn(opened(source, tmp_path, curriculum=Curriculum((Stage(100, 1),)), validation=0.0), 2)
    found = message_of(source, tmp_path, curriculum=Curriculum((Stage(50, 5),)), validation=0.0, epochs=2)
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
