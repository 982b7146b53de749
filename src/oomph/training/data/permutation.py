"""Orders without lists: a shuffled range, and what is held out of it, in constant memory."""

from __future__ import annotations

from math import ceil

_ROUNDS = 6
_MASK = (1 << 64) - 1
# The part held out for validation does not move with the run's seed: runs with different seeds compare.
_SPLIT_KEY = 0x6F6F6D7068


def mixed(*numbers: int) -> int:
    """64 well-mixed bits of some whole numbers; the same on every machine and in every process."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class Permutation:
    """A one-to-one shuffle of range(size), computed number by number.

    A Feistel network permutes the next even power of two; a number that lands outside of the range is sent
    through again until it lands inside. A list would grow with the data: a million blocks, a million numbers.
    """

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self._half = max(1, ceil(max(size - 1, 1).bit_length() / 2))
        self._low = (1 << self._half) - 1
        self._keys = [mixed(*key, turn) for turn in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        return self._walk(index, forward=True)

    def position(self, value: int) -> int:
        """Where `value` stands: the inverse of indexing."""
        return self._walk(value, forward=False)

    def _walk(self, number: int, forward: bool) -> int:
        if not 0 <= number < self.size:
            raise IndexError(number)
        while True:
            number = self._forward(number) if forward else self._backward(number)
            if number < self.size:
                return number

    def _forward(self, number: int) -> int:
        left, right = number >> self._half, number & self._low
        for key in self._keys:
            left, right = right, left ^ (mixed(key, right) & self._low)
        return left << self._half | right

    def _backward(self, number: int) -> int:
        left, right = number >> self._half, number & self._low
        for key in reversed(self._keys):
            left, right = right ^ (mixed(key, left) & self._low), left
        return left << self._half | right


class Split:
    """range(size) in two: `held_out` numbers for validation, the others for training."""

    def __init__(self, size: int, fraction: float) -> None:
        self.size = size
        # At least one of each, where there are two.
        self.held_out = min(max(ceil(size * fraction), 1), size - 1) if fraction > 0 else 0
        self._order = Permutation(size, _SPLIT_KEY)

    def is_held_out(self, number: int) -> bool:
        return self.held_out > 0 and self._order.position(number) < self.held_out

    def training(self, index: int) -> int:
        """The index-th of the others, in a mixed order too."""
        return self._order[self.held_out + index]

    def validation(self, index: int) -> int:
        """The index-th number held out; in a mixed order, so that the first few stand for all."""
        return self._order[index]
