"""Batches of text: the token stream packed into rows without padding, mixed in a bounded window.

What has to be remembered to go on exactly is a position in the stream and two numbers. The tokens of the
window are not in the state: they are read again from its start on, at most WINDOW_TOKENS or one batch.

Shapes: B batch size, T sequence length, both of the stage that the batch number lies in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from oomph.training.data.permutation import Permutation
from oomph.training.data.stages import Schedule
from oomph.training.data.stream import Position, TokenStream

Batch = dict[str, torch.Tensor]

WINDOW_TOKENS = 1 << 20
IGNORED = -100  # what the losses leave out


class PackedText(IterableDataset[Batch]):
    """Whole batches, endless unless the stream ends. It is its own iterator: iterating again goes on.

    A batch is {"input_ids": int64 [B, T], "labels": int64 [B, T]}. Documents run on from row to row; the only
    tokens lost are those after the last whole batch of the last epoch.
    """

    _batch: int
    _taken: int
    _size: int  # B
    _start: Position
    _next_start: Position
    _rows_NT: torch.Tensor | None
    _pending: deque[tuple[Position, torch.Tensor]]  # read from the stream, not yet in a batch
    _chunks: Iterator[tuple[Position, torch.Tensor]] | None

    def __init__(self, stream: TokenStream, schedule: Schedule, window: int) -> None:
        self.stream = stream
        self.schedule = schedule
        self.window = window  # rows that are mixed with each other
        self.load_state_dict({"batch": 0, "taken": 0, **Position()._asdict()})

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows_NT = self._read_window() if self._rows_NT is None else self._rows_NT
        rows_BT = rows_NT[self._taken * self._size : (self._taken + 1) * self._size]
        ids_BT = rows_BT.to(torch.int64)
        self._taken += 1
        if self._taken * self._size == len(rows_NT):
            self._batch, self._taken, self._start = self._batch + self._taken, 0, self._next_start
            self._rows_NT = None
        return {"input_ids": ids_BT, "labels": ids_BT.clone()}

    def state_dict(self) -> dict[str, int]:
        """`batch`: the number of the window's first batch; `taken`: how many of it were handed out."""
        return {"batch": self._batch, "taken": self._taken, **self._start._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batch = int(state["batch"])
        self._taken = int(state["taken"])
        self._start = Position(*(int(state[name]) for name in Position._fields))
        self._rows_NT = None
        self._size = 0
        self._next_start = self._start
        self._pending = deque()
        self._chunks = None

    def __getstate__(self) -> dict[str, Any]:
        """For a worker process that is started afresh: without the open stream, which cannot be pickled."""
        unread: dict[str, Any] = {
            "_rows_NT": None,
            "_pending": deque(),
            "_chunks": None,
            "_next_start": self._start,
        }
        return {**self.__dict__, **unread}

    def _read_window(self) -> torch.Tensor:
        """The mixed rows of the window that starts at the state's position."""
        stage, left = self.schedule.at(self._batch)
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
            mixed = Permutation(len(rows_NT), self.stream.seed, self._batch, stage.seq_len)
            rows_NT = rows_NT[torch.tensor([mixed[row] for row in range(len(rows_NT))])]
        self._rows_NT, self._size = rows_NT, stage.batch_size
        return rows_NT

    def _take(self, wanted: int, size: int) -> torch.Tensor | None:
        """`wanted` batches of `size` tokens; fewer, but one at least, where an epoch ends before."""
        if self._chunks is None:
            self._chunks = self.stream.read(self._next_start)
        parts: list[tuple[Position, torch.Tensor]] = []
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
        self._give_back(parts, have - wanted * size)
        position, tokens = parts[-1]
        self._next_start = (
            self._pending[0][0] if self._pending else position._replace(token=position.token + len(tokens))
        )
        return torch.cat([tokens for _, tokens in parts])

    def _give_back(self, parts: list[tuple[Position, torch.Tensor]], surplus: int) -> None:
        while surplus:
            position, tokens = parts.pop()
            kept = max(len(tokens) - surplus, 0)
            surplus -= len(tokens) - kept
            self._pending.appendleft((position._replace(token=position.token + kept), tokens[kept:]))
            if kept:
                parts.append((position, tokens[:kept]))


def packed_once(chunks: Iterator[torch.Tensor], seq_len: int, batch_size: int, pad: int) -> Iterator[Batch]:
    """Every token once, in order; the last row is filled up with <pad>, which the labels leave out."""
    gathered: list[torch.Tensor] = []
    have = 0
    for tokens in chunks:
        gathered.append(tokens)
        have += len(tokens)
        if have >= seq_len * batch_size:
            joined = torch.cat(gathered)
            whole = have // (seq_len * batch_size) * (seq_len * batch_size)
            for rows_BT in joined[:whole].view(-1, batch_size, seq_len):
                ids_BT = rows_BT.to(torch.int64)
                yield {"input_ids": ids_BT, "labels": ids_BT.clone()}
            gathered, have = [joined[whole:].clone()], have - whole
    if have:
        rows = -(-have // seq_len)
        ids = torch.full((rows * seq_len,), pad, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED)
        ids[:have] = labels[:have] = torch.cat(gathered).to(torch.int64)
        yield {"input_ids": ids.view(rows, seq_len), "labels": labels.view(rows, seq_len)}
