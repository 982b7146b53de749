"""What the kernels are told of tensors and tiles."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.units import KiB

LOG2_E = math.log2(math.e)
SMALLEST_TILE = 16  # of a product's sides, in Triton
WIDEST_HEAD = 256
# Of an H100 or H200, less what a kernel takes for smaller things.
SHARED_MEMORY = (227 - 10) * KiB
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Tile:
    """Rows x columns that a program multiplies at a time, and how it is run."""

    rows: int
    columns: int
    warps: int
    stages: int

    @property
    def run(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def strided(x: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor [B, T, heads, D] whose rows are contiguous, and its other strides."""
    return x, x.stride(0), x.stride(1), x.stride(2)


def with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def power_of_two(size: int, least: int = 1) -> int:
    return max(least, 1 << (size - 1).bit_length()) if size > 1 else least


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
