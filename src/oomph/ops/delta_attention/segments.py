"""Segments: the tokens that the chunked implementations process at a time, which bounds their memory.

A segment is a range of tokens of every sequence (or, with packed sequences, of the packed tokens), in whole
chunks. Forward saves the states at the starts of segments; backward recomputes everything else, one segment
at a time.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceRange:
    """Tokens start..stop-1 of one sequence, counted from its start.

    `row` is the index of token `start` among all tokens, batch entries one after the other.
    """

    sequence: int
    start: int
    stop: int
    row: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Segment:
    """Ranges of different sequences that are processed together, those with most chunks first.

    `saved` is the number of states that earlier segments have saved: this segment's follow them.
    """

    ranges: tuple[SequenceRange, ...]
    chunk: int
    saved: int

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """How many ranges have a first chunk, a second chunk, and so on."""
        counts = [-(-each.tokens // self.chunk) for each in self.ranges]
        return tuple(sum(count > index for count in counts) for index in range(counts[0]))

    @functools.cached_property
    def continued(self) -> tuple[int, ...]:
        """Indices of the ranges that start from a state which an earlier segment computed."""
        return tuple(index for index, each in enumerate(self.ranges) if each.start > 0)


@dataclass(frozen=True)
class SegmentPlan:
    """All segments in order. `saved`: states at the starts of segments, without the initial ones."""

    segments: tuple[Segment, ...]
    sequences: int
    saved: int


def plan_batch(batch: int, tokens: int, chunk: int, per_segment: int) -> SegmentPlan:
    """Segments of `per_segment` tokens of every batch entry."""
    segments: list[Segment] = []
    for start in range(0, tokens if batch else 0, per_segment):
        stop = min(start + per_segment, tokens)
        ranges = tuple(SequenceRange(entry, start, stop, entry * tokens + start) for entry in range(batch))
        segments.append(Segment(ranges, chunk, batch * max(0, len(segments) - 1)))
    return SegmentPlan(tuple(segments), batch, batch * max(0, len(segments) - 1))


def plan_packed(lengths: Sequence[int], chunk: int, per_segment: int) -> SegmentPlan:
    """Segments of packed sequences: as many chunks as fit, the last chunk of each sequence padded."""
    capacity = per_segment // chunk
    segments: list[Segment] = []
    ranges: list[SequenceRange] = []
    free, saved = capacity, 0

    def close_segment() -> None:
        nonlocal free, saved, ranges
        ranges.sort(key=lambda each: -each.tokens)
        segments.append(Segment(tuple(ranges), chunk, saved))
        saved += len(segments[-1].continued)
        free, ranges = capacity, []

    first = 0
    for sequence, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + free * chunk)
            ranges.append(SequenceRange(sequence, start, stop, first + start))
            free -= -(-(stop - start) // chunk)
            start = stop
            if free == 0:
                close_segment()
        first += length
    if ranges:
        close_segment()
    return SegmentPlan(tuple(segments), len(lengths), saved)


@dataclass(frozen=True)
class MemoryCosts:
    """Bytes beside inputs, outputs and gradients: per token of a segment, fixed, and saved per segment."""

    per_token: int
    fixed: int
    states: int

    def total(self, tokens: int, per_segment: int) -> int:
        in_segment = min(tokens, per_segment)
        return self.fixed + in_segment * self.per_token + (-(-tokens // per_segment) - 1) * self.states


def tokens_per_segment(
    tokens: int, chunk: int, costs: MemoryCosts, asked: int | None, budget: int | None, default: int
) -> int:
    """A multiple of `chunk`: what was asked for, or the most that stays within the budget, or `default`.

    Short segments process few tokens at a time and save many states. Where no length meets the budget, the
    one that needs least is returned.
    """
    if asked is not None:
        return _round_up(asked, chunk)
    whole = _round_up(max(tokens, 1), chunk)
    if budget is None:
        return min(whole, _round_up(default, chunk))
    best, least = whole, costs.total(tokens, whole)
    # Of the lengths that give the same number of segments, the shortest needs least.
    for count in range(1, whole // chunk + 1):
        length = _round_up(-(-whole // count), chunk)
        needed = costs.total(tokens, length)
        if needed <= budget:
            return length
        if needed < least:
            best, least = length, needed
        if (count - 1) * costs.states > least:
            break  # the saved states alone would be more
    return best


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
