"""Segments: the tokens that the chunked implementations process at a time, which bounds their memory.

A segment is a range of tokens of every sequence (with packed sequences, of the packed tokens), in whole
chunks. Forward saves the states at the starts of segments; backward recomputes everything
else, one segment at a time.
"""

from dataclasses import dataclass


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
