"""Temporaries of CUB's sorts, scans and selections, from which ops of several families are built.

The radix sort's temporary holds alternate buffers for keys and values and a little per tile. CUB's share per
tile, at most 3 % of its temporary, is assumed to be the same on other GPUs. The tiles were measured on an
H200 with torch 2.11.
"""

from __future__ import annotations

import math

from oomph.prediction.allocator import round_up

INDEX = 8  # bytes
SCALAR = 8
_ALIGNED = 256
_DIGITS = 256  # of a radix pass over eight bits


def layout_bytes(*parts: int) -> int:
    """Each part is aligned; the whole has room to be aligned itself."""
    return sum(round_up(part, _ALIGNED) for part in parts) + _ALIGNED - 1


def radix_sort_bytes(items: int, key: int, value: int, bits: int | None = None) -> int:
    """CUB's temporary for sorting so many keys of `key` bytes with values of `value` bytes (0: none)."""
    passes = math.ceil((8 * key if bits is None else max(bits, 1)) / 8)
    tiles = math.ceil(items / (_ONESWEEP_TILE if value else _ONESWEEP_TILE_KEYS)[key])
    alternate = (items * key, items * value) if passes > 1 else (0, 0)
    return layout_bytes(passes * _DIGITS * 8, tiles * _DIGITS * 4, *alternate, passes * 4)


# Items that one block sorts, by the bytes of a key. Measured on an H200, with values of eight bytes.
_ONESWEEP_TILE = {8: 4608, 4: 5376, 2: 5632, 1: 5632}
# The same without values; keys of two bytes and of one are not measured.
_ONESWEEP_TILE_KEYS = {8: 5760, 4: 6912, 2: 5632, 1: 5632}


def scan_bytes(items: int, size: int = INDEX) -> int:
    """CUB's temporary for a scan: a descriptor per tile, small beside the items. The tiles are those measured
    on an H200 for scans of float32 and selections of int64."""
    return tile_states(items, (4096, 16) if size > 4 else (1920, 8))


def tile_states(items: int, tiles: tuple[int, int]) -> int:
    tile, descriptor = tiles
    return layout_bytes(1, (math.ceil(items / tile) + 32) * descriptor)


# Items of a tile and bytes of its descriptor, in CUB's other algorithms.
SELECT = 4096, 8  # DeviceSelect::Flagged and ::Unique, which count in 32 bits
MASK_SCAN = 896, 16  # the int64 prefix sum of a mask
RUN_LENGTH = 768, 16  # DeviceRunLengthEncode
