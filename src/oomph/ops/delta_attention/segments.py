"""Which tokens are worked on at a time, and from which saved states: the plan that bounds the memory.

A segment is a run of tokens of every sequence (or, where sequences are packed, of the packed tokens). Forward
saves the states at the starts of segments, and backward makes everything else again, one segment at a time.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Tokens start..stop-1 of one stream (a batch entry, or a packed sequence), counted from its start.

    `row` is the place of token `start` among all tokens, batch entries one after the other.
    """

    stream: int
    start: int
    stop: int
    row: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def resumes(self) -> bool:
        """Does it begin with a state that an earlier segment left?"""
        return self.start > 0


@dataclass(frozen=True)
class Segment:
    """Pieces of different streams that run side by side, those with most chunks first.

    `saved` is the number of states that earlier segments have saved: this one's come after them.
    """

    pieces: tuple[Piece, ...]
    chunk: int
    saved: int

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """How many pieces have a first chunk, a second, and so on."""
        counts = [-(-piece.tokens // self.chunk) for piece in self.pieces]
        return tuple(sum(count > depth for count in counts) for depth in range(counts[0]))

    @functools.cached_property
    def resuming(self) -> tuple[int, ...]:
        return tuple(place for place, piece in enumerate(self.pieces) if piece.resumes)


@dataclass(frozen=True)
class Plan:
    """All segments, in the order of time."""

    segments: tuple[Segment, ...]
    streams: int
    saved: int  # states at the starts of segments, without the initial ones


def plan_batch(batch: int, tokens: int, chunk: int, per_segment: int) -> Plan:
    """Segments of `per_segment` tokens of every batch entry."""
    segments: list[Segment] = []
    for start in range(0, tokens if batch else 0, per_segment):
        stop = min(start + per_segment, tokens)
        pieces = tuple(Piece(entry, start, stop, entry * tokens + start) for entry in range(batch))
        segments.append(Segment(pieces, chunk, batch * max(0, len(segments) - 1)))
    return Plan(tuple(segments), batch, batch * max(0, len(segments) - 1))


def plan_packed(lengths: Sequence[int], chunk: int, per_segment: int) -> Plan:
    """Segments of packed sequences: together as many chunks, the last of each sequence filled up, as fit."""
    room = per_segment // chunk
    segments: list[Segment] = []
    pieces: list[Piece] = []
    free, saved = room, 0

    def close() -> None:
        nonlocal free, saved, pieces
        pieces.sort(key=lambda piece: -piece.tokens)
        segments.append(Segment(tuple(pieces), chunk, saved))
        saved += len(segments[-1].resuming)
        free, pieces = room, []

    first = 0
    for stream, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + free * chunk)
            pieces.append(Piece(stream, start, stop, first + start))
            free -= -(-(stop - start) // chunk)
            start = stop
            if free == 0:
                close()
        first += length
    if pieces:
        close()
    return Plan(tuple(segments), len(lengths), saved)


@dataclass(frozen=True)
class Costs:
    """Bytes that backward needs: per token of a segment, beside it, and per segment for saved states."""

    per_token: int
    fixed: int
    states: int

    def total(self, tokens: int, per_segment: int) -> int:
        in_segment = min(tokens, per_segment)
        return self.fixed + in_segment * self.per_token + (-(-tokens // per_segment) - 1) * self.states


def tokens_per_segment(
    tokens: int, step: int, costs: Costs, memory_chunk_size: int | None, budget: int | None, default: int
) -> int:
    """A multiple of `step`: what was asked for, or the most that stays within the budget, or `default`.

    Short segments work on little at a time and save many states. Where no length meets the budget, the one
    that needs least is taken.
    """
    if memory_chunk_size is not None:
        return round_up(memory_chunk_size, step)
    whole = round_up(max(tokens, 1), step)
    if budget is None:
        return min(whole, round_up(default, step))
    best, least = whole, costs.total(tokens, whole)
    # Of the lengths that make the same number of segments the shortest serves best.
    for count in range(1, whole // step + 1):
        length = round_up(-(-whole // count), step)
        needed = costs.total(tokens, length)
        if needed <= budget:
            return length
        if needed < least:
            best, least = length, needed
        if (count - 1) * costs.states > least:
            break  # the saved states alone would be more
    return best


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step
