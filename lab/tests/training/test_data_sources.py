"""Where documents come from: text, JSONL, parquet, the standard library, the hub; bad input is one line."""

import json
import time
from types import SimpleNamespace

import pytest
from corpora import drawn, opened

from oomph.errors import UserError
from oomph_lab.training.config import Curriculum, Stage
from oomph_lab.training.data import sources
from oomph_lab.training.data.sources import JsonLines, TextFile, open_text


def documents(corpus):
    return [document for block in range(corpus.blocks) for document in corpus.read(block)]


@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("content", ["a\nbb\n\n\nno end", "é" * 500, "日本\n語" * 99, "x" * 300 + "\n" + "y"])
def test_blocks_of_any_size_join_to_the_file_and_never_cut_a_character(tmp_path, content, block):
    path = tmp_path / "file.txt"
    path.write_text(content, encoding="utf-8")
    file = TextFile(path, path.stat().st_size, block)
    assert "".join(text for number in range(file.blocks) for text in file.read(number)) == content


@pytest.mark.parametrize("block", [1, 30, 1000])
def test_jsonl_gives_every_line_once_however_long_the_lines_are(tmp_path, block):
    texts = [f"text {number} " + "z" * (number * 37 % 200) for number in range(50)]
    path = tmp_path / "file.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\r\n\n" for text in texts))
    file = JsonLines(path, path.stat().st_size, block)
    assert [text for number in range(file.blocks) for text in file.read(number)] == texts
    path.write_text('{"text": "half a surrogate pair: \\ud800"}\n')
    assert documents(open_text(str(path))) == ["half a surrogate pair: ?"]


def test_folders_and_globs_are_read_in_a_stable_order_without_empty_and_hidden_files(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa.txt")  # a byte order mark is not text
    assert documents(open_text(str(tmp_path))) == ["a.txt", "b.txt", "sub/c.md"]
    assert documents(open_text(str(tmp_path / "*.txt"))) == ["a.txt", "b.txt"]
    assert documents(open_text(str(tmp_path / "**" / "*.md"))) == ["sub/c.md"]


@pytest.mark.parametrize("rows_per_group", [7, 1000])
def test_parquet_gives_every_row_once_and_resumes(tmp_path, rows_per_group):
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


def test_bad_parquet_is_one_line_each(tmp_path):
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tables.write_table(arrow.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(
        UserError, match=r'a.parquet has no column "text" \(it has id, body\); name the column'
    ):
        open_text(str(tmp_path / "a.parquet"))
    with pytest.raises(UserError, match=r'^column "id" of .* holds int64, not text$'):
        open_text(str(tmp_path / "a.parquet"), "id")


def test_a_path_that_the_system_refuses_is_named(tmp_path):
    with pytest.raises(UserError, match=r"xxx\.txt cannot be read: File name too long"):
        open_text(f"{tmp_path}/{'x' * 300}.txt")


@pytest.mark.parametrize("name", ["wikitext-2", "fineweb-edu"])
def test_hub_data_without_a_network_are_one_line_within_seconds(name, monkeypatch):
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


def test_a_hub_table_is_read_by_blocks_of_rows(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [f"row {number}\n" if number % 3 else "" for number in range(1000)]
    table = datasets.Dataset.from_dict({"text": rows})
    monkeypatch.setattr(sources, "_datasets", lambda name: datasets)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: table)
    assert "".join(documents(open_text("wikitext-2"))) == "".join(rows)
    assert drawn(opened("wikitext-2", tmp_path), 3)


def test_a_streamed_hub_data_set_is_its_parquet_files(monkeypatch, tmp_path):
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("fsspec")
    paths = [tmp_path / f"{number}.parquet" for number in range(2)]
    for number, path in enumerate(paths):
        tables.write_table(arrow.table({"text": [f"{number} {row}" for row in range(20)]}), path)

    class Hub:
        def load_dataset_builder(self, *_):
            files = {"train": [path.as_uri() for path in paths]}
            return SimpleNamespace(config=SimpleNamespace(data_files=files))

    monkeypatch.setattr(sources, "_datasets", lambda name: Hub())
    assert documents(open_text("fineweb-edu")) == [f"{n} {row}" for n in range(2) for row in range(20)]
    assert drawn(opened("fineweb-edu", tmp_path, workers=1), 2) == drawn(opened("fineweb-edu", tmp_path), 2)


# ----------------------------------------------------------------------------------------- bad input


def message_of(source, folder, **changes):
    with pytest.raises(UserError) as caught:
        drawn(opened(source, folder, **changes), 200)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', "broken JSON ("),
        ('{"text": null}', 'no text in field "text"'),
        ('{"text": "\udcff"}', "broken JSON (not UTF-8)"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_a_broken_line_of_jsonl_is_named_by_file_and_number(tmp_path, line, message, tokenizer):
    path = tmp_path / "rows.jsonl"
    good = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(2000))
    path.write_bytes((good + "\n" + line + "\n" + good).encode("utf-8", "surrogateescape"))
    options = {"curriculum": Curriculum((Stage(64, 64),)), "validation": 0.0}
    found = message_of(path, tmp_path, tokenizer=tokenizer, vocab_size=300, **options)
    assert found.startswith(f"{path}:2002: {message}")


def test_a_folder_in_the_hubs_layout_gives_its_training_split(tmp_path):
    arrow, tables = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in ("wikitext-2-raw-v1", "wikitext-103-raw-v1"):
        (tmp_path / name).mkdir()
        for split in ("train", "validation", "test"):
            rows = arrow.table({"text": [f"{name} {split} {number}" for number in range(40)]})
            tables.write_table(rows, tmp_path / name / f"{split}-00000-of-00001.parquet")
    (tmp_path / "README.md").write_text("about the data")
    corpus = open_text(str(tmp_path / "wikitext-2-raw-v1"))
    read = {text for block in range(corpus.blocks) for text in corpus.read(block)}
    assert read == {f"wikitext-2-raw-v1 train {number}" for number in range(40)}
    with pytest.raises(UserError, match=r"has 2 data sets; give one of .*wikitext-103-raw-v1"):
        open_text(str(tmp_path))
