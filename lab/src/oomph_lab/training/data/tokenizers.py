"""Tokenizers: words, byte-level BPE and plain bytes. Documents become <sos> ... <eos>."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from oomph.errors import UserError
from oomph.units import KiB, MiB, format_bytes
from oomph_lab.training.data.sources import Corpus, Split
from oomph_lab.training.libraries import need

UNK, PAD, SOS, EOS = SPECIALS = ("<unk>", "<pad>", "<sos>", "<eos>")
PIECE_CHARACTERS = 1 << 11  # a tokenizer's memory and time grow with what it is given at once
SAMPLE_BYTES = 64 * MiB
# BPE with few tokens settles on little text, and training takes a second for every few MiB.
_BPE_BYTES_PER_TOKEN = 16 * KiB
# A word, one character that is not a letter, or what some corpora write for a rare word.
_WORD = r"<unk>|\w+|[^\w\s]"


class Tokenizer(ABC):
    """Text to token ids and back. unk, pad, sos, eos: the ids of the special tokens.

    Text never becomes a special token: "<eos>" in a document is text. The exception is "<unk>" among words,
    which some corpora contain in place of rare ones.
    """

    kind: str
    vocab_size: int
    unk: int
    pad: int
    sos: int
    eos: int

    @abstractmethod
    def encode_pieces(self, pieces: Sequence[str]) -> list[torch.Tensor]:
        """The ids of each piece, int32, without special tokens around them."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Text without the special tokens. Words are joined by spaces."""

    @abstractmethod
    def to_json(self) -> str: ...

    def save(self, path: str | Path) -> None:
        # The library's own raises a bare Exception when the disk is full.
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        return self.encode_pieces([text])[0].tolist()

    @staticmethod
    def load(path: str | Path) -> Tokenizer:
        """What `save` wrote. Words and BPE are files of the `tokenizers` library."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            model = json.loads(text)["model"]["type"]
            if model == "Bytes":
                return Bytes()
            library = need("tokenizers", "a tokenizer of words or BPE")
            loaded = Learned(library.Tokenizer.from_str(text), "words" if model == "WordLevel" else "bpe")
            loaded.encode("text with words it may not have")
            return loaded
        except UserError:
            raise
        except Exception as error:  # the library's own errors have no other class
            raise UserError(f"{path} is not a tokenizer that oomph saved: {error!r:.200}") from error


class Bytes(Tokenizer):
    """Token b is byte b of the UTF-8 text; the special tokens follow."""

    kind = "bytes"
    vocab_size = 256 + len(SPECIALS)
    unk, pad, sos, eos = range(256, 256 + len(SPECIALS))

    def encode_pieces(self, pieces: Sequence[str]) -> list[torch.Tensor]:
        return [_tensor(bytearray(piece.encode()), torch.uint8).to(torch.int32) for piece in pieces]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def to_json(self) -> str:
        content = {"version": "1.0", "model": {"type": "Bytes"}, "special_tokens": list(SPECIALS)}
        return json.dumps(content, indent=2) + "\n"


class Learned(Tokenizer):
    """A tokenizer of the `tokenizers` library: words, byte-level BPE, or a pretrained model's own.

    specials: the ids of unk, pad, sos and eos; None: those of tokens with our names."""

    def __init__(self, inner: Any, kind: str, specials: Sequence[int] | None = None) -> None:
        self.kind = kind
        self._inner, self._specials = inner, specials
        # Otherwise "<eos>" in a document would end it. The library does not save this setting.
        inner.encode_special_tokens = True
        self.vocab_size = inner.get_vocab_size()
        if specials is None:
            ids = inner.get_vocab()
            if sorted(ids.values()) != list(range(self.vocab_size)):
                raise ValueError("the ids of its tokens are not consecutive")
            specials = [ids[name] for name in SPECIALS]
        self.unk, self.pad, self.sos, self.eos = specials

    def __reduce__(self) -> tuple[Any, ...]:
        return Learned, (self._inner, self.kind, self._specials)

    def encode_pieces(self, pieces: Sequence[str]) -> list[torch.Tensor]:
        encoded = self._inner.encode_batch_fast(list(pieces), add_special_tokens=False)
        return [_tensor(array("i", piece.ids), torch.int32) for piece in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=True)

    def to_json(self) -> str:
        return self._inner.to_str(pretty=True)  # type: ignore[no-any-return]


def pretrained(folder: str | Path) -> Tokenizer:
    """The tokenizer.json in a folder of Hugging Face weights. config.json names its special tokens.

    Those that it does not have are its end of text."""
    library, path = need("tokenizers", "the model's own tokenizer"), Path(folder) / "tokenizer.json"
    try:
        inner = library.Tokenizer.from_file(str(path))
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except Exception as error:  # the library's own errors have no other class
        raise UserError(f"{path} cannot be read as a tokenizer: {error!r:.200}") from error
    ids = [config.get(f"{name}_token_id") for name in ("bos", "eos", "pad")]
    bos, eos, pad = (each[0] if isinstance(each, list) and each else each for each in ids)
    end = next((each for each in (eos, bos, pad) if isinstance(each, int)), 0)
    pad, sos, eos = (each if isinstance(each, int) else end for each in (pad, bos, eos))
    return Learned(inner, "pretrained", (eos, pad, sos, eos))


def _tensor(numbers: bytearray | array[int], dtype: torch.dtype) -> torch.Tensor:
    # frombuffer refuses an empty buffer.
    return torch.frombuffer(numbers, dtype=dtype) if len(numbers) else torch.empty(0, dtype=dtype)


def cut(document: str) -> Iterator[str]:
    """Pieces of at most PIECE_CHARACTERS, cut after the end of a line if possible, else before a space."""
    start = 0
    while len(document) - start > PIECE_CHARACTERS:
        limit = start + PIECE_CHARACTERS
        end = document.rfind("\n", start, limit) + 1
        if end <= start:
            end = document.rfind(" ", start + 1, limit)
        if end <= start:
            end = limit
        yield document[start:end]
        start = end
    yield document[start:]


# ---------------------------------------------------------------------------------------- learning


def learn(
    kind: str, vocab_size: int | None, corpus: Corpus, split: Split, sample_bytes: int = SAMPLE_BYTES
) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens, special ones included (bytes: always 260).

    Of more than `sample_bytes` (BPE: 16 KiB per token), evenly spread blocks are read. Validation data are
    never read.
    """
    least = {"words": len(SPECIALS) + 1, "bpe": 256 + len(SPECIALS), "bytes": Bytes.vocab_size}[kind]
    if vocab_size is not None and vocab_size < least:
        raise UserError(f"vocab_size={vocab_size} is too small for {kind}; give at least {least}")
    if kind == "bytes" or vocab_size is None:
        return Bytes()
    if kind == "bpe":
        sample_bytes = min(sample_bytes, vocab_size * _BPE_BYTES_PER_TOKEN)
    texts = sample(corpus, split, sample_bytes)
    learned = _learn_words(vocab_size, texts) if kind == "words" else _learn_bpe(vocab_size, texts)
    found = learned.vocab_size
    if found < vocab_size:
        what = "different words" if kind == "words" else "different tokens that BPE can form"
        where = corpus.name
        if corpus.size > sample_bytes:
            where = f"a sample of {format_bytes(sample_bytes)} of {where}"
        raise UserError(
            f"vocab_size={vocab_size} is larger than the data: {where} has {found - len(SPECIALS)} {what}, "
            f"{found} with {' '.join(SPECIALS)}; give vocab_size <= {found}"
        )
    return learned


def sample(corpus: Corpus, split: Split, sample_bytes: int) -> Iterator[str]:
    """Pieces of every n-th training block, about `sample_bytes` in all."""
    blocks = corpus.blocks
    wanted = blocks
    if corpus.size > sample_bytes:
        wanted = max(1, blocks * sample_bytes // corpus.size)
    for index in range(wanted):
        block = index * blocks // wanted
        if not split.is_held_out(block):
            for document in corpus.read(block):
                yield from cut(document)


def _learn_words(vocab_size: int, texts: Iterable[str]) -> Learned:
    """The most frequent words; ties in alphabetical order.

    Counted here: the library's trainer takes five times as long and does not say how many words there are."""
    library = need("tokenizers", "a vocabulary of words")
    pattern = re.compile(_WORD)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(pattern.findall(text))
    for special in SPECIALS:
        counts.pop(special, None)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    vocabulary = {word: index for index, word in enumerate([*SPECIALS, *ranked][:vocab_size])}
    inner = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token=UNK))
    inner.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(_WORD), behavior="removed", invert=True)
    inner.add_special_tokens(list(SPECIALS))
    return Learned(inner, "words")


def _learn_bpe(vocab_size: int, texts: Iterable[str]) -> Learned:
    library = need("tokenizers", "byte-level BPE")
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        # Every byte is a token, so no text is ever unknown.
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Read before: the library would wrap what an iterator raises.
    inner.train_from_iterator(list(texts), trainer=trainer)
    return Learned(inner, "bpe")
