"""Block-sparse patterns: which blocks of keys a block of queries may see, before any causal cut.

Positions are cut into blocks of `block`. A query stands at position `index + key length - query length`, so
that during generation the newest query is at the newest key.
"""

from dataclasses import dataclass

from oomph.errors import ArgumentError

KINDS = ("local", "global", "mixed")


@dataclass(frozen=True)
class BlockPattern:
    """Blocks of keys that a block of queries sees.

    local:  those at most `window` blocks away, on either side.
    global: every `stride`-th block of the keys (0, stride, ...), and the query's own block.
    mixed:  both.
    """

    kind: str
    block: int = 64
    window: int = 1
    stride: int = 2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            valid = ", ".join(map(repr, KINDS))
            raise ArgumentError(f"BlockPattern kind={self.kind!r} is not valid; choose from {valid}")
        for name, smallest in (("block", 1), ("window", 0), ("stride", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise ArgumentError(f"BlockPattern {name}={value!r} is not valid; an int from {smallest} on")

    def key_blocks(self, query_block: int, total: int, causal: bool = False) -> list[int]:
        """The blocks, of `total`, that block `query_block` of the queries sees, in rising order."""
        kept: set[int] = {query_block}
        if self.kind in ("local", "mixed"):
            kept.update(range(query_block - self.window, query_block + self.window + 1))
        if self.kind in ("global", "mixed"):
            kept.update(range(0, total, self.stride))
        last = min(total - 1, query_block) if causal else total - 1
        return sorted(block for block in kept if 0 <= block <= last)

    def count(self, length: int, causal: bool = False) -> tuple[int, int]:
        """(blocks kept, blocks in all) for self-attention over `length` positions."""
        total = -(-length // self.block)
        return sum(len(self.key_blocks(i, total, causal)) for i in range(total)), total * total


def local(window: int = 1, block: int = 64) -> BlockPattern:
    """Only the blocks at most `window` away."""
    return BlockPattern("local", block, window=window)


def global_(stride: int = 2, block: int = 64) -> BlockPattern:
    """Every `stride`-th block of the keys, and the query's own."""
    return BlockPattern("global", block, stride=stride)


def mixed(window: int = 1, stride: int = 4, block: int = 64) -> BlockPattern:
    """The union of `local(window)` and `global_(stride)`."""
    return BlockPattern("mixed", block, window=window, stride=stride)
