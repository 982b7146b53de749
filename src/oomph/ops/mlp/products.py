"""The products of a tile, into memory that is already there, and their sums over tiles."""

import torch
from torch import Tensor

from oomph.ops.common import matmul_into
from oomph.ops.mlp.tiles import spans

# Tokens converted at a time where a half-precision product has to be added up in fp32 by hand.
_PIECE = 512


def project(x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None, out_NF: Tensor) -> None:
    """out = x weight^T + bias."""
    if bias_F is None:
        matmul_into(out_NF, x_ND, weight_FD.t())
    else:
        torch.addmm(bias_F, x_ND, weight_FD.t(), out=out_NF)


def accumulate_product(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, first: bool = False) -> None:
    """total += a b, each product and the sum kept in total's dtype; `first` overwrites total instead."""
    if total_MN.stride(0) == 1 and total_MN.stride(1) != 1:
        # A column-major total (the gradient of a transposed weight) is the row-major transpose.
        total_MN, a_MK, b_KN = total_MN.t(), b_KN.t(), a_MK.t()
    by_hand = total_MN.dtype != a_MK.dtype and total_MN.device.type != "cuda"
    # A conversion of the whole tile would be larger than the tile's own buffers.
    tokens = a_MK.shape[1]
    for start, stop in spans(tokens, _PIECE if by_hand else max(tokens, 1)):
        matmul_into(total_MN, a_MK[:, start:stop], b_KN[start:stop], add=not first or start > 0)


def rows(matrix: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows of a matrix, in `dtype` and in a layout that a product takes without a copy of its own."""
    piece = matrix[start:stop].to(dtype)
    # A gradient that was broadcast (from a sum, say) has stride 0; the copy is one tile's, not the whole.
    return piece if piece.stride(-1) == 1 and piece.stride(0) >= piece.shape[1] else piece.contiguous()


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over tiles are kept in: fp32, or float64 where the inputs are."""
    return torch.float64 if dtype == torch.float64 else torch.float32
