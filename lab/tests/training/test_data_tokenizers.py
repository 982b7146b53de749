"""Words, BPE and bytes: their special tokens, their caps, and the way back to text."""

import pytest
from corpora import opened

from oomph.errors import UserError
from oomph_lab.training.data import Tokenizer
from oomph_lab.training.data.sources import Split, open_text
from oomph_lab.training.data.tokenizers import SPECIALS, learn, sample

TEXT = "the cat and the dog and the bird (one, two)\n" * 40 + "a rare zebra\n" * 3
STRANGE = "naïve 日本語 🎈 \t tabs\r\n  <eos> <unk> <pad>\n\n\x7f end "


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def learned(kind, size, source):
    corpus = open_text(str(source))
    return learn(kind, size, corpus, Split(corpus.blocks, 0.0))


def test_words_are_the_most_frequent_ones_and_the_rest_is_unknown(source):
    words = learned("words", 7, source)
    assert words.vocab_size == 7
    assert (words.unk, words.pad, words.sos, words.eos) == (0, 1, 2, 3)
    assert words.decode(words.encode("the cat and zebra")) == "the and"
    assert words.encode("zebra") == [words.unk]
    assert words.encode("the <unk> and") == [words.encode("the")[0], words.unk, words.encode("and")[0]]


@pytest.mark.parametrize(("kind", "size"), [("bpe", 270), ("bytes", None)])
def test_bpe_and_bytes_give_back_any_text_exactly(source, kind, size):
    tokenizer = learned(kind, size, source)
    for text in (TEXT, STRANGE, "", "x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(("kind", "size"), [("bpe", 270), ("bytes", None), ("words", 12)])
def test_text_never_becomes_a_special_token_also_after_loading(source, tmp_path, kind, size):
    tokenizer = learned(kind, size, source)
    tokenizer.save(tmp_path / "saved.json")
    for each in (tokenizer, Tokenizer.load(tmp_path / "saved.json")):
        assert not {each.pad, each.sos, each.eos} & set(each.encode("<sos> <pad> <eos>"))
        assert len({each.unk, each.pad, each.sos, each.eos}) == len(SPECIALS)
        assert (each.kind, each.vocab_size) == (tokenizer.kind, tokenizer.vocab_size)
        assert each.encode(TEXT + STRANGE) == tokenizer.encode(TEXT + STRANGE)


def test_the_run_s_folder_keeps_the_tokenizer_and_refuses_another_one(source, tmp_path):
    folder = tmp_path / "run"
    first = opened(source, folder, tokenizer="bpe", vocab_size=270)
    before = (folder / "tokenizer.json").read_bytes()
    again = opened(source, folder, tokenizer="bpe", vocab_size=270)
    assert again.tokenizer.encode(TEXT) == first.tokenizer.encode(TEXT)
    assert (folder / "tokenizer.json").read_bytes() == before
    message = r"tokenizer.json was made with vocab_size=270, and the config asks for 271; use another folder"
    with pytest.raises(UserError, match=message):
        opened(source, folder, tokenizer="bpe", vocab_size=271)


def test_large_data_are_sampled_evenly_and_validation_is_left_out(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("".join(f"{number:07d}\n" for number in range(50_000)))
    corpus = open_text(str(path))
    split = Split(corpus.blocks, 0.1)
    lines = [int(line) for piece in sample(corpus, split, 100_000) for line in piece.split()]
    assert 8 * len(lines) == pytest.approx(90_000, rel=0.2)
    assert {line // 10_000 for line in lines} == set(range(5))
    held = {
        line
        for i in range(split.held_out)
        for doc in corpus.read(split.validation(i))
        for line in doc.split()
    }
    assert not {f"{line:07d}" for line in lines} & held


def test_a_vocabulary_that_is_too_small_and_a_foreign_file_say_what_is_valid(source):
    with pytest.raises(UserError, match=r"^vocab_size=100 is too small for bpe; give at least 260$"):
        learned("bpe", 100, source)
    with pytest.raises(UserError, match=r"is not a tokenizer that oomph saved: FileNotFoundError"):
        Tokenizer.load(source.with_name("none.json"))
