"""Batches of text: a stream of tokens, packed into rows without padding and shuffled in a bounded window.

The state is a position in the stream and two numbers. The tokens of the window are not part of it: they are
read again from the window's start, at most WINDOW_TOKENS or one batch.

Shapes: B batch size, T sequence length, both of the stage that a batch belongs to; N rows of a window.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from oomph.errors import UserError
from oomph_lab.training.config import Curriculum
from oomph_lab.training.data.sources import Corpus, Split, shuffled
from oomph_lab.training.data.tokenizers import Tokenizer, cut

Batch = dict[str, torch.Tensor]
Item = TypeVar("Item")
Result = TypeVar("Result")

IGNORED_LABEL = -100  # of the losses
WINDOW_TOKENS = 1 << 20
CHUNK_CHARACTERS = 1 << 16
# More than the tokens of a window: the next one is ready when the last batch of this one is taken.
_CHUNKS_AHEAD = 320
_MOST_THREADS = 8


class Piece(NamedTuple):
    """A part of a document. starts, ends: whether the document does so with it."""

    text: str
    starts: bool
    ends: bool


class Position(NamedTuple):
    """A token of the stream: the turn-th block of an epoch, a chunk of the block, a token of the chunk."""

    epoch: int = 0
    turn: int = 0
    chunk: int = 0
    token: int = 0


Chunk = tuple[Position, list[Piece]]
TokenChunk = tuple[Position, torch.Tensor]


def chunks(documents: Iterable[str]) -> Iterator[list[Piece]]:
    """Consecutive pieces of about CHUNK_CHARACTERS together: the unit that a position counts."""
    gathered: list[Piece] = []
    size = 0
    for document in documents:
        pieces = list(cut(document))
        for index, text in enumerate(pieces):
            gathered.append(Piece(text, index == 0, index == len(pieces) - 1))
            size += len(text) + 1  # an empty document takes memory too
            if size >= CHUNK_CHARACTERS:
                yield gathered
                gathered, size = [], 0
    if gathered:
        yield gathered


def encode(pieces: list[Piece], tokenizer: Tokenizer) -> torch.Tensor:
    """Tokens of consecutive pieces, int32, with <sos> and <eos> around each document."""
    sos = torch.tensor([tokenizer.sos], dtype=torch.int32)
    eos = torch.tensor([tokenizer.eos], dtype=torch.int32)
    parts: list[torch.Tensor] = []
    for piece, tokens in zip(pieces, tokenizer.encode_pieces([piece.text for piece in pieces]), strict=True):
        parts += [sos, tokens] if piece.starts else [tokens]
        if piece.ends:
            parts.append(eos)
    return torch.cat(parts)


@dataclass(frozen=True)
class TokenStream:
    """Tokens of the training blocks, epoch after epoch, each in its own order. epochs None: no end."""

    corpus: Corpus
    split: Split
    tokenizer: Tokenizer
    shuffle: bool = True
    seed: int = 0
    epochs: int | None = None

    def read(self, start: Position) -> Iterator[TokenChunk]:
        """Chunks of tokens (int32) from `start` on. Only the block of `start` is opened again."""

        def encoded(chunk: Chunk) -> TokenChunk:
            return chunk[0], encode(chunk[1], self.tokenizer)

        chunks = self._chunks(start)
        # In a worker ahead of time, in threads: one thread makes a million tokens a second, and a small model
        # on a large GPU takes more.
        in_worker = get_worker_info() is not None
        for position, tokens in map_ahead(encoded, chunks) if in_worker else map(encoded, chunks):
            if position.token < len(tokens):
                yield position, tokens[position.token :]

    def _chunks(self, start: Position) -> Iterator[Chunk]:
        turns = self.corpus.blocks
        for epoch in count(start.epoch):
            if self.epochs is not None and epoch >= self.epochs:
                return
            empty = True
            order = shuffled(turns, self.seed, epoch) if self.shuffle else range(turns)
            for turn in range(start.turn if epoch == start.epoch else 0, turns):
                block = order[turn]
                if self.split.is_held_out(block):
                    continue
                is_first = (epoch, turn) == (start.epoch, start.turn)
                first = start.chunk if is_first else 0
                for chunk, pieces in enumerate(islice(chunks(self.corpus.read(block)), first, None), first):
                    empty = False
                    skipped = start.token if is_first and chunk == start.chunk else 0
                    yield Position(epoch, turn, chunk, skipped), pieces
            if empty and epoch > start.epoch:
                return  # documents without text: no epoch has a token

    def count(self, enough: int) -> int:
        """The tokens of an epoch; counting stops at `enough`."""
        total = 0
        for position, tokens in self.read(Position()):
            if position.epoch > 0 or total >= enough:
                break
            total += len(tokens)
        return total


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], ahead: int = _CHUNKS_AHEAD
) -> Iterator[Result]:
    """map(function, items) in threads, in order, with up to `ahead` results in progress."""
    # On Linux the cores that this process may use; one is the training's.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    executor = ThreadPoolExecutor(max(1, min(_MOST_THREADS, cores - 1)))
    try:
        futures = (executor.submit(function, item) for item in items)
        pending = deque(islice(futures, ahead))
        while pending:
            yield pending.popleft().result()
            pending.extend(islice(futures, 1))
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


class PackedText(IterableDataset[Batch]):
    """Batches {"input_ids": int64 [B, T], "labels": int64 [B, T]}, endless unless the stream ends.

    Documents continue from row to row; the only tokens lost are those after the last whole batch of the last
    epoch. It is its own iterator. window: rows that are shuffled with each other.
    """

    _batch: int
    _taken: int
    _size: int  # B
    _start: Position
    _next_start: Position
    _rows_NT: torch.Tensor | None
    _pending: deque[TokenChunk]  # read from the stream, not yet in a batch
    _chunks: Iterator[TokenChunk] | None

    def __init__(self, stream: TokenStream, curriculum: Curriculum, window: int) -> None:
        self.stream = stream
        self.curriculum = curriculum
        self.window = window
        self.load_state_dict({"batch": 0, "taken": 0, **Position()._asdict()})

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows_NT = self._read_window() if self._rows_NT is None else self._rows_NT
        rows_BT = rows_NT[self._taken * self._size : (self._taken + 1) * self._size]
        if not len(rows_BT):
            raise UserError(
                f"batch {self._taken} of a window of {len(rows_NT) // self._size} is not in the data"
            )
        ids_BT = rows_BT.to(torch.int64)
        self._taken += 1
        if self._taken * self._size == len(rows_NT):
            self._batch, self._taken, self._start = self._batch + self._taken, 0, self._next_start
            self._rows_NT = None
        return {"input_ids": ids_BT, "labels": ids_BT.clone()}

    def state_dict(self) -> dict[str, int]:
        """batch: the number of the window's first batch. taken: how many of the window are used."""
        return {"batch": self._batch, "taken": self._taken, **self._start._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batch = int(state["batch"])
        self._taken = int(state["taken"])
        self._start = Position(*(int(state[name]) for name in Position._fields))
        if not all(0 <= number < 1 << 62 for number in (self._batch, self._taken, *self._start)):
            raise ValueError("a position in the data is not valid")
        self._size = 0
        self._forget_window()

    def _forget_window(self) -> None:
        self._rows_NT, self._chunks, self._pending = None, None, deque()
        self._next_start = self._start

    def __getstate__(self) -> dict[str, Any]:
        """For a worker process: without the open stream, which cannot be pickled."""
        unread = dict.fromkeys(("_rows_NT", "_chunks"))
        return {**self.__dict__, **unread, "_pending": deque(), "_next_start": self._start}

    def _read_window(self) -> torch.Tensor:
        """The shuffled rows of the window that starts at the state's position."""
        stage, left = self.curriculum.at_batch(self._batch)
        assert stage.seq_len is not None
        wanted = 1
        if self.stream.shuffle:
            rows = min(self.window, WINDOW_TOKENS // stage.seq_len)
            wanted = max(1, rows // stage.batch_size)
        if left is not None:
            wanted = min(wanted, left)
        tokens = self._take(wanted, stage.tokens)
        if tokens is None:
            raise StopIteration
        rows_NT = tokens.view(-1, stage.seq_len)
        if self.stream.shuffle:
            order = shuffled(len(rows_NT), self.stream.seed, self._batch, stage.seq_len)
            rows_NT = rows_NT[torch.tensor(order)]
        self._rows_NT, self._size = rows_NT, stage.batch_size
        return rows_NT

    def _take(self, wanted: int, size: int) -> torch.Tensor | None:
        """`wanted` batches of `size` tokens; fewer, but at least one, if an epoch ends before."""
        if self._chunks is None:
            self._chunks = self.stream.read(self._next_start)
        parts: list[TokenChunk] = []
        have = 0
        while have < wanted * size:
            part = self._pending.popleft() if self._pending else next(self._chunks, None)
            ends_epoch = part is None or (parts and part[0].epoch != parts[0][0].epoch)
            if ends_epoch and have >= size:
                wanted = have // size
            if part is None:
                break
            parts.append(part)
            have += len(part[1])
        if have < wanted * size:
            # The tail of the last epoch; kept, so that asking again gives the same answer.
            self._pending.extend(parts)
            return None
        self._put_back(parts, have - wanted * size)
        position, tokens = parts[-1]
        after = position._replace(token=position.token + len(tokens))
        self._next_start = self._pending[0][0] if self._pending else after
        return torch.cat([tokens for _, tokens in parts])

    def _put_back(self, parts: list[TokenChunk], surplus: int) -> None:
        while surplus:
            position, tokens = parts.pop()
            kept = max(len(tokens) - surplus, 0)
            surplus -= len(tokens) - kept
            self._pending.appendleft((position._replace(token=position.token + kept), tokens[kept:]))
            if kept:
                parts.append((position, tokens[:kept]))


def validation_batches(
    corpus: Corpus, split: Split, tokenizer: Tokenizer, seq_len: int, batch_size: int
) -> Iterator[Batch]:
    """Every held-out token once, always in the same order; the last row is padded, with ignored labels."""
    gathered: list[torch.Tensor] = []
    have, size = 0, seq_len * batch_size
    for index in range(split.held_out):
        for pieces in chunks(corpus.read(split.validation(index))):
            gathered.append(encode(pieces, tokenizer))
            have += len(gathered[-1])
            if have >= size:
                joined = torch.cat(gathered)
                whole = have // size * size
                for rows_BT in joined[:whole].view(-1, batch_size, seq_len):
                    ids_BT = rows_BT.to(torch.int64)
                    yield {"input_ids": ids_BT, "labels": ids_BT.clone()}
                gathered, have = [joined[whole:].clone()], have - whole
    if have:
        rows = -(-have // seq_len)
        ids = torch.full((rows * seq_len,), tokenizer.pad, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED_LABEL)
        ids[:have] = labels[:have] = torch.cat(gathered).to(torch.int64)
        yield {"input_ids": ids.view(rows, seq_len), "labels": labels.view(rows, seq_len)}
