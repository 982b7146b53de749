"""A corpus as one endless stream of tokens, with a position in it that can be gone back to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import torch
from torch.utils.data import get_worker_info

from oomph.training.data.ahead import in_order, threads_to_use
from oomph.training.data.permutation import Permutation, Split
from oomph.training.data.pieces import Piece, chunks
from oomph.training.data.sources.corpus import Corpus
from oomph.training.data.tokens import Tokenizer


class Position(NamedTuple):
    """A token of the stream: the turn-th block of an epoch, a chunk of the block, a token of the chunk."""

    epoch: int = 0
    turn: int = 0
    chunk: int = 0
    token: int = 0


Chunk = tuple[Position, list[Piece]]
# Some more than the tokens of a window: the next one is ready when the last batch of this one is handed out.
_CHUNKS_AHEAD = 320


@dataclass(frozen=True)
class TokenStream:
    """Tokens of the training blocks, epoch after epoch, each in its own order."""

    corpus: Corpus
    split: Split
    tokenizer: Tokenizer
    shuffle: bool = True
    seed: int = 0
    epochs: int | None = None  # None: no end

    def read(self, start: Position) -> Iterator[tuple[Position, torch.Tensor]]:
        """Chunks of tokens (int32) from `start` on. Only the block that `start` lies in is opened again."""
        for position, tokens in self._encoded(self._chunks(start)):
            if position.token < len(tokens):
                yield position, tokens[position.token :]

    def _encoded(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Position, torch.Tensor]]:
        """In a worker ahead of time, in threads: one alone makes a million tokens a second, of which a small
        model on a large GPU takes more."""

        def encode(chunk: Chunk) -> tuple[Position, torch.Tensor]:
            return chunk[0], join(chunk[1], self.tokenizer)

        if get_worker_info() is None:
            return map(encode, chunks)
        return in_order(encode, chunks, threads=threads_to_use(), ahead=_CHUNKS_AHEAD)

    def _chunks(self, start: Position) -> Iterator[Chunk]:
        turns = self.corpus.blocks
        for epoch in count(start.epoch):
            if self.epochs is not None and epoch >= self.epochs:
                return
            empty = True
            order = Permutation(turns, self.seed, epoch) if self.shuffle else range(turns)
            for turn in range(start.turn if epoch == start.epoch else 0, turns):
                block = order[turn]
                if self.split.is_held_out(block):
                    continue
                here = (epoch, turn) == (start.epoch, start.turn)
                first = start.chunk if here else 0
                for chunk, pieces in enumerate(islice(chunks(self.corpus.read(block)), first, None), first):
                    empty = False
                    skipped = start.token if here and chunk == start.chunk else 0
                    yield Position(epoch, turn, chunk, skipped), pieces
            if empty and epoch > start.epoch:
                return  # documents without text: no epoch will ever have a token

    def count(self, enough: int) -> int:
        """How many tokens an epoch has; counting stops at `enough`."""
        total = 0
        for position, tokens in self.read(Position()):
            if position.epoch > 0 or total >= enough:
                break
            total += len(tokens)
        return total


def validation_tokens(corpus: Corpus, split: Split, tokenizer: Tokenizer) -> Iterator[torch.Tensor]:
    """Chunks of tokens of the held-out blocks, always in the same order."""
    for index in range(split.held_out):
        for pieces in chunks(corpus.read(split.validation(index))):
            yield join(pieces, tokenizer)


def join(pieces: list[Piece], tokenizer: Tokenizer) -> torch.Tensor:
    """Pieces one after the other, with <sos> where a document starts and <eos> where it ends."""
    sos = torch.tensor([tokenizer.sos], dtype=torch.int32)
    eos = torch.tensor([tokenizer.eos], dtype=torch.int32)
    parts: list[torch.Tensor] = []
    for piece, tokens in zip(pieces, tokenizer.encode_pieces([piece.text for piece in pieces]), strict=True):
        if piece.starts:
            parts.append(sos)
        parts.append(tokens)
        if piece.ends:
            parts.append(eos)
    return torch.cat(parts)
