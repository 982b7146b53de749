"""How many tokens a tile has: a rule in bytes, so that it fits any width of model.

The buffers of a tile are the memory the op takes beyond its results, and they do not grow with the tokens.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.units import MiB, format_bytes

# On a GPU: large enough for a tile's products to run at full speed, small beside one layer's activations.
GPU_BUFFERS = 224 * MiB
# On a CPU products reach full speed with fewer rows, and small buffers stay nearer to the caches.
CPU_BUFFERS = 32 * MiB
# On a CPU gate and up of the first tiles are kept for backward as far as they fit here. Computing them again
# is two products of eleven, and host memory is plentiful; a constant, so the peak stays flat in the tokens.
# Nothing is kept on a GPU, where this memory is what the op is there to save.
CPU_KEPT = 64 * MiB
# Every tile reads and writes the whole fp32 gradient of each weight. Below about 2048 rows that traffic takes
# a third of the products' own time or more, however wide the layer, so no default goes lower.
GPU_ROWS = 2048
CPU_ROWS = 256
# GPU products work on blocks of 128 rows; a tile of whole blocks wastes none.
BLOCK = 128


def rows_of_a_tile(
    tokens: int, bytes_per_row: int, device: str, tile: int | None, memory_budget: int | None
) -> int:
    """Rows of a tile: `tile` if given, else as many as the budget (or the default for the device) holds."""
    if tile is not None:
        return max(1, min(tile, tokens))
    if memory_budget is not None:
        most = memory_budget // bytes_per_row
        if most < 1:
            raise ArgumentError(
                f"memory_budget={format_bytes(memory_budget)} is too small; one token's buffers take "
                f"{format_bytes(bytes_per_row)}"
            )
    elif device == "cpu":
        most = max(CPU_BUFFERS // bytes_per_row, CPU_ROWS)
    else:
        most = max(GPU_BUFFERS // bytes_per_row, GPU_ROWS)
    return _evenly(tokens, most)


def tile_and_kept(
    tokens: int, hidden: int, itemsize: int, gated: bool, device: str, tile: int | None, budget: int | None
) -> tuple[int, int]:
    """Rows of a tile of a recognised MLP, and how many of the first rows have gate and up kept for backward.

    A budget holds both; what the default tile does not need of it goes to the rows that are kept.
    """
    per_row = bytes_of_buffers(hidden, itemsize, gated)
    if device != "cpu":
        return rows_of_a_tile(tokens, per_row, device, tile, budget), 0
    for_tile = None if budget is None else min(budget, max(CPU_BUFFERS, CPU_ROWS * per_row))
    rows = rows_of_a_tile(tokens, per_row, device, tile, for_tile)
    room = CPU_KEPT if budget is None else budget - rows * per_row
    most = room // bytes_kept(hidden, itemsize, gated)
    return rows, tokens if tokens <= most else most - most % rows


def spans(tokens: int, rows: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of every tile; one empty tile where there are no tokens."""
    for start in range(0, max(tokens, 1), rows):
        yield start, min(start + rows, tokens)


def bytes_of_buffers(hidden: int, itemsize: int, gated: bool) -> int:
    """What one row of a recognised MLP takes in backward, where most is held: (gate,) up and d(hidden)."""
    return (3 if gated else 2) * max(hidden, 1) * itemsize


def bytes_kept(hidden: int, itemsize: int, gated: bool) -> int:
    """What one row takes that is kept for backward: (gate and) up."""
    return (2 if gated else 1) * max(hidden, 1) * itemsize


def bytes_by_parameters(parameters: Sequence[Tensor], width: int, itemsize: int) -> int:
    """An estimate of what one row takes inside an unknown function: its matrices say how wide it gets.

    Each matrix makes one tensor of at most its longer side; autograd keeps about two of each.
    """
    return 2 * itemsize * (_widths(parameters) or 8 * width)


def _widths(parameters: Iterable[Tensor]) -> int:
    return sum(max(parameter.shape[-2:]) for parameter in parameters if parameter.dim() >= 2)


def _evenly(tokens: int, most: int) -> int:
    """At most `most` rows, whole blocks where possible, tiles of equal size rather than a small last one."""
    if tokens <= most:
        return max(tokens, 1)
    if most < BLOCK:
        return most
    most -= most % BLOCK
    tiles = -(-tokens // most)
    rows = -(-tokens // tiles)
    return min(most, -(-rows // BLOCK) * BLOCK)


def has_batch_norm(module: nn.Module) -> bool:
    """Does some layer look at all tokens at once? Then tiles would see other statistics."""
    norms = (nn.modules.batchnorm._BatchNorm,)
    return any(isinstance(each, norms) and each.training for each in module.modules())
