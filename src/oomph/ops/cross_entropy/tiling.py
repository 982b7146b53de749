"""How much of the logits is held at a time: the numbers behind `memory_budget`."""

from dataclasses import dataclass

from oomph.units import MiB, format_bytes

# Measured on an H200: from 1024 rows on, the three matrix products run at the speed of undivided ones, and
# 512 MiB holds 1024 rows and more up to 262,144 classes in bf16. Smaller buffers cost time, larger ones only
# memory.
DEFAULT_BUDGET = 512 * MiB

# Below this many rows the weight gradient, read and written once per block, costs more time than computing
# the logits twice in blocks of more rows and fewer classes. A CPU computes less per byte it can move.
_FEWEST_ROWS = {"cuda": 384, "cpu": 128}
_SLICED_ROWS = 2048
_FEWEST_COLUMNS = 4096

# Rows of logits start at multiples of this many numbers, because cuBLAS is several times slower on others.
_ALIGNMENT = 8

# Per token: log-sum-exp, target logit, scale and loss in fp32, the target in int64 and a flag.
_BYTES_PER_TOKEN = 32


def padded(n_classes: int) -> int:
    """The length of a row of logits in memory."""
    return _ceil(n_classes, _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Tiling:
    """A block of logits: at most `rows` tokens by `columns` classes."""

    rows: int
    columns: int

    def describe(self, n_tokens: int, n_classes: int, bytes_per_logit: int) -> str:
        blocks = _ceil(n_tokens, self.rows)
        noun = "block" if blocks == 1 else "blocks"
        size = format_bytes(min(self.rows, n_tokens) * min(self.columns, n_classes) * bytes_per_logit)
        columns = "" if self.columns >= n_classes else f" by {self.columns} classes, logits computed twice"
        return f"{blocks} {noun} of {self.rows} tokens{columns}, {size} each"


@dataclass(frozen=True)
class Sizes:
    """What the choice depends on."""

    n_tokens: int
    hidden: int
    n_classes: int
    bytes_per_logit: int  # all copies of a block's logits together
    wide_size: int = 4  # bytes of one number of dX while it is summed up
    device: str = "cuda"


def choose_tiling(sizes: Sizes, budget: int) -> Tiling:
    """The blocks that fit into `budget` bytes beside the inputs and the gradients.

    All classes at a time while that leaves enough rows: the logits are then computed once. Otherwise fewer
    classes at a time, and twice: once for the log-sum-exp, once for the gradients.
    """
    n_tokens, n_classes = max(1, sizes.n_tokens), sizes.n_classes
    # The allocator may hand out up to 1 MiB more than asked for each large buffer, of which there are two.
    budget -= n_tokens * _BYTES_PER_TOKEN + min(2 * MiB, budget // 16)
    rows = budget // (padded(n_classes) * sizes.bytes_per_logit)
    if rows >= n_tokens:
        return Tiling(n_tokens, n_classes)
    if rows >= _FEWEST_ROWS.get(sizes.device, _FEWEST_ROWS["cuda"]):
        return Tiling(_rounded(rows), n_classes)
    rows = min(_SLICED_ROWS, n_tokens)
    while rows > 16 and _columns(budget, rows, sizes) < min(_FEWEST_COLUMNS, n_classes):
        rows //= 2
    # The smallest block is 16 tokens by 128 classes, whatever the budget.
    columns = max(128, _columns(budget, rows, sizes) // 128 * 128)
    if columns >= n_classes:
        return Tiling(rows, n_classes)
    # Equal blocks, so that none is a remainder too small to run at full speed.
    equal = _ceil(n_classes, _ceil(n_classes, columns))
    return Tiling(rows, _ceil(equal, 128) * 128)


def _columns(budget: int, rows: int, sizes: Sizes) -> int:
    """What is left for logits once a block's dX, kept in fp32, has its place."""
    return (budget - rows * sizes.hidden * sizes.wide_size) // (rows * sizes.bytes_per_logit)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _rounded(rows: int) -> int:
    """Whole tiles of the matrix product, and few of them left over in its last wave."""
    step = 512 if rows >= 1024 else 128
    return rows // step * step
