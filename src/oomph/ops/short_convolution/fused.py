"""The convolution as one kernel forward and one backward; only the input and the weight are kept.

Legend: B batch, T tokens, K taps, S = T + K - 1 rows given, C channels, P programs along B and time.
"""

from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import refuse_second_derivatives
from oomph.ops.launch import Kernels
from oomph.ops.short_convolution.reference import EPSILON

KERNELS = Kernels("oomph.ops.short_convolution.triton")

_TILE = 4096  # numbers of a tile
_BACKWARD_TILE = 2048  # it holds more of them at once; 4096 would not fit into the registers
_CHANNELS = 64  # of a tile, where no unit decides it
_ROUNDS = 8  # of a backward program, at most; its tiles share one partial sum of the weight's gradient
LARGEST_UNIT = 512


class FusedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, weight_C1K: Tensor, unit_size: int | None) -> Tensor:  # type: ignore[override]
        x_BSC, weight_C1K = _readable(x_BSC), weight_C1K.contiguous()
        batch, rows, channels = x_BSC.shape
        taps = weight_C1K.shape[2]
        tokens = rows - taps + 1
        y_BTC = x_BSC.new_empty(batch, tokens, channels)
        if y_BTC.numel():
            size, sizes = _sizes(channels, unit_size, _TILE)
            time_blocks = -(-tokens // sizes["BLOCK_T"])
            KERNELS.launch(
                "convolve",
                (batch * time_blocks, -(-channels // size)),
                x_BSC,
                weight_C1K,
                y_BTC,
                tokens,
                channels,
                x_BSC.stride(0),
                x_BSC.stride(1),
                TAPS=taps,
                **sizes,
            )
        ctx.save_for_backward(x_BSC, weight_C1K)
        ctx.unit_size = unit_size
        return y_BTC

    @staticmethod
    def backward(ctx: Any, grad_BTC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("short_convolution")
        x_BSC, weight_C1K = ctx.saved_tensors
        want_x, want_weight, _ = ctx.needs_input_grad
        grad_BTC = _readable(grad_BTC)
        (batch, rows, channels), taps = x_BSC.shape, weight_C1K.shape[2]
        grad_x_BSC = x_BSC.new_empty(batch, rows, channels)
        size, sizes = _sizes(channels, ctx.unit_size, _BACKWARD_TILE)
        rounds = _rounds(rows, sizes["BLOCK_T"])
        time_blocks = -(-rows // (sizes["BLOCK_T"] * rounds))
        partial_PKC = x_BSC.new_empty(batch * time_blocks, taps, channels, dtype=torch.float32)
        if grad_x_BSC.numel():
            KERNELS.launch(
                "pull_back",
                (batch * time_blocks, -(-channels // size)),
                x_BSC,
                weight_C1K,
                grad_BTC,
                grad_x_BSC,
                partial_PKC,
                rows - taps + 1,
                channels,
                x_BSC.stride(0),
                x_BSC.stride(1),
                grad_BTC.stride(0),
                grad_BTC.stride(1),
                TAPS=taps,
                ROUNDS=rounds,
                **sizes,
            )
        grad_weight = None
        if want_weight:
            grad_weight = partial_PKC.sum(0).t().to(weight_C1K.dtype).reshape(weight_C1K.shape)
        return grad_x_BSC if want_x else None, grad_weight, None


def _sizes(channels: int, unit_size: int | None, tile: int) -> tuple[int, dict[str, Any]]:
    """Channels that a program owns, and its tile."""
    size = min(_CHANNELS, channels) if unit_size is None else unit_size
    block = max(16, 1 << (size - 1).bit_length())
    return size, {
        "SIZE": size,
        "UNIT": unit_size is not None,
        "EPSILON": EPSILON,
        "BLOCK_C": block,
        "BLOCK_T": max(8, tile // block),
    }


def _rounds(rows: int, block: int) -> int:
    """A power of two: few different ones, each of which is compiled once."""
    rounds = 1
    while rounds < _ROUNDS and rounds * block < rows:
        rounds *= 2
    return rounds


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()
