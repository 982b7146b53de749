"""Tokenizers: words, byte-level BPE and plain bytes, with one face. Documents become <sos> ... <eos>."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from oomph.errors import UserError
from oomph.training.data.needs import need

UNK, PAD, SOS, EOS = SPECIALS = ("<unk>", "<pad>", "<sos>", "<eos>")
KINDS = ("words", "bpe", "bytes")


class Tokenizer(ABC):
    """Text to numbers and back. `unk`, `pad`, `sos` and `eos` are the numbers of the special tokens.

    Text never becomes a special token, whatever is written in it: "<eos>" in a document is text. The one
    exception is "<unk>" among words, which some corpora hold in the place of rare ones.
    """

    kind: str
    vocab_size: int
    unk: int
    pad: int
    sos: int
    eos: int

    @abstractmethod
    def encode_pieces(self, pieces: Sequence[str]) -> list[torch.Tensor]:
        """The tokens of each piece, int32, without special tokens around them."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; special tokens are left out. Words come back joined by spaces."""

    @abstractmethod
    def save(self, path: str | Path) -> None: ...

    def encode(self, text: str) -> list[int]:
        return self.encode_pieces([text])[0].tolist()

    @staticmethod
    def load(path: str | Path) -> Tokenizer:
        """What `save` wrote. Words and BPE are files of the `tokenizers` library, of use elsewhere too."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            model = content["model"]["type"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not a tokenizer that oomph saved: {type(error).__name__}") from error
        if model == "Bytes":
            return Bytes()
        tokenizers = need("tokenizers", "a tokenizer of words or BPE")
        return Trained(tokenizers.Tokenizer.from_file(str(path)), "words" if model == "WordLevel" else "bpe")


class Bytes(Tokenizer):
    """Token b is byte b of the UTF-8 text; the special tokens come after. Nothing is learned."""

    kind = "bytes"
    vocab_size = 256 + len(SPECIALS)
    unk, pad, sos, eos = range(256, 256 + len(SPECIALS))

    def encode_pieces(self, pieces: Sequence[str]) -> list[torch.Tensor]:
        return [_tensor(bytearray(piece.encode()), torch.uint8).to(torch.int32) for piece in pieces]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def save(self, path: str | Path) -> None:
        content = {"version": "1.0", "model": {"type": "Bytes"}, "special_tokens": list(SPECIALS)}
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class Trained(Tokenizer):
    """A tokenizer of the `tokenizers` library: words or byte-level BPE."""

    def __init__(self, inner: Any, kind: str) -> None:
        self.kind = kind
        self._inner = inner
        # Otherwise "<eos>" written in a document would end it. The library does not save this.
        inner.encode_special_tokens = True
        self.vocab_size = inner.get_vocab_size()
        self.unk, self.pad, self.sos, self.eos = (inner.token_to_id(name) for name in SPECIALS)

    def __reduce__(self) -> tuple[Any, ...]:
        return Trained, (self._inner, self.kind)

    def encode_pieces(self, pieces: Sequence[str]) -> list[torch.Tensor]:
        encoded = self._inner.encode_batch_fast(list(pieces), add_special_tokens=False)
        return [_tensor(array("i", piece.ids), torch.int32) for piece in encoded]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=True)

    def save(self, path: str | Path) -> None:
        # Not by the library's own: it raises a bare Exception where the disk is full.
        Path(path).write_text(self._inner.to_str(pretty=True), encoding="utf-8")


def _tensor(numbers: bytearray | array[int], dtype: torch.dtype) -> torch.Tensor:
    # An empty buffer has no address, which frombuffer refuses.
    return torch.frombuffer(numbers, dtype=dtype) if len(numbers) else torch.empty(0, dtype=dtype)
