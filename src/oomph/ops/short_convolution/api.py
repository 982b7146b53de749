"""The public function `short_convolution`, its reference, and its autograd function over Triton kernels.

Legend: B batch, T tokens, K taps, S = T + K - 1 rows of the input, C channels.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.tokenwise import tokenwise_checkpoint

IMPLS = ("auto", "reference", "chunked", "triton")
EPSILON = 1e-6
_LARGEST_UNIT = 512

_KERNELS = common.Kernels("oomph.ops.short_convolution.kernels")
_TILE = 4096  # numbers of a tile
_BACKWARD_TILE = 2048  # backward holds more tiles at once; 4096 would not fit into the registers
_CHANNELS = 64  # of a tile, where unit_size does not decide it
_ROUNDS = 8  # tiles of a backward program, at most; they share one partial sum of the weight's gradient


def choose(x: Tensor, weight: Tensor, unit_size: int | None, impl: str) -> common.Choice:
    common.check_one_of("impl", impl, IMPLS)
    _check(x, weight, unit_size)
    return common.choose_triton_or_torch(
        impl,
        x,
        common.why_not_triton(x) or _why_not_these_kernels(x, unit_size),
        kernels="on CUDA one kernel reads the input once and writes the output once",
        plain="plain torch, a slice of tokens at a time",
    )


@common.explained_by(choose)
@common.opaque_op
def short_convolution(
    x: Tensor, weight: Tensor, *, unit_size: int | None = None, impl: str = "auto"
) -> Tensor:
    """silu of a depthwise causal convolution: x [B, T + K - 1, C], weight [C, 1, K] -> [B, T, C].

    Row t of the result depends on rows t .. t + K - 1 of x: the caller prepends the K - 1 tokens before the
    first, zeros or those of the preceding text. weight is that of a depthwise nn.Conv1d. `unit_size`, a
    divisor of C: each group of so many channels is scaled to length 1, y / sqrt(|y|^2 + 1e-6).

    Computed in float32 (float64 for float64) and rounded once, to x's dtype. Saved for backward: the inputs.
    impl: "auto", "chunked" (plain torch in slices of tokens), "triton" (not for float64), "reference".
    """
    choice = common.log_choice("short_convolution", choose(**locals()))
    if choice.impl == "reference":
        with common.no_autocast(x):
            return short_convolution_reference(x, weight, unit_size)
    if choice.impl == "chunked":
        function = functools.partial(short_convolution_reference, unit_size=unit_size)
        return tokenwise_checkpoint(function, (x,), (weight,), halo=weight.shape[2] - 1)
    return _ShortConvolution.apply(x, weight, unit_size)  # type: ignore[no-any-return]


def _check(x: Tensor, weight: Tensor, unit_size: int | None) -> None:
    common.check_floating(x=x, weight=weight)
    common.check_same_device(x=x, weight=weight)
    fits = x.dim() == 3 and weight.dim() == 3 and weight.shape[:2] == (x.shape[2], 1) and weight.shape[2] > 0
    if not fits or x.shape[1] < weight.shape[2] - 1:
        raise ArgumentError(
            f"x {list(x.shape)} and weight {list(weight.shape)} do not fit together; valid: "
            "x [B, T + K - 1, C], weight [C, 1, K] with K >= 1"
        )
    if unit_size is None:
        return
    whole = isinstance(unit_size, int) and not isinstance(unit_size, bool)
    if not whole or not 1 <= unit_size < 2**31 or x.shape[2] % unit_size:
        raise ArgumentError(f"unit_size={unit_size!r} is not valid; a divisor of the {x.shape[2]} channels")


def _why_not_these_kernels(x: Tensor, unit_size: int | None) -> str | None:
    if x.dtype == torch.float64:
        return "the kernel computes in float32, which is too little for float64"
    if unit_size is not None and unit_size > _LARGEST_UNIT:
        return f"the unit {unit_size} is above {_LARGEST_UNIT}"
    return None


# Reference -------------------------------------------------------------------------------------------


def unit_vectors(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) over the last dimension: of length 1, and 0 where x is 0."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)).to(x.dtype)


def short_convolution_reference(x_BSC: Tensor, weight_C1K: Tensor, unit_size: int | None) -> Tensor:
    """silu(sum over taps of weight * x) [B, T, C]; the last tap is the token's own. Rounded once."""
    wide = torch.promote_types(x_BSC.dtype, torch.float32)
    x, weight_CK = x_BSC.to(wide), weight_C1K[:, 0].to(wide)
    taps = weight_CK.shape[1]
    tokens = x.shape[1] - taps + 1
    total = x[:, :tokens] * weight_CK[:, 0]
    for tap in range(1, taps):
        total = torch.addcmul(total, x[:, tap : tap + tokens], weight_CK[:, tap])
    y_BTC = F.silu(total)
    if unit_size is not None:
        y_BTC = unit_vectors(y_BTC.unflatten(-1, (-1, unit_size))).flatten(-2)
    return y_BTC.to(x_BSC.dtype)


# Triton ----------------------------------------------------------------------------------------------


class _ShortConvolution(common.OpFunction):
    """One kernel forward and one backward. Saved for backward: x and weight."""

    op = "short_convolution"

    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, weight_C1K: Tensor, unit_size: int | None) -> Tensor:  # type: ignore[override]
        x_BSC, weight_C1K = common.contiguous_rows(x_BSC), weight_C1K.contiguous()
        batch, rows, channels = x_BSC.shape
        taps = weight_C1K.shape[2]
        tokens = rows - taps + 1
        y_BTC = x_BSC.new_empty(batch, tokens, channels)
        if y_BTC.numel():
            size, constants = _tile_constants(channels, unit_size, _TILE)
            time_blocks = -(-tokens // constants["BLOCK_T"])
            _KERNELS.launch(
                "convolution_forward",
                (batch * time_blocks, -(-channels // size)),
                x_BSC, weight_C1K, y_BTC, tokens, channels, *x_BSC.stride()[:2],
                TAPS=taps,
                **constants,
            )  # fmt: skip
        ctx.save_for_backward(x_BSC, weight_C1K)
        ctx.unit_size = unit_size
        return y_BTC

    @staticmethod
    def backward(ctx: Any, grad_BTC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        common.refuse_second_derivatives("short_convolution")
        x_BSC, weight_C1K = ctx.saved_tensors
        want_x, want_weight, _ = ctx.needs_input_grad
        grad_BTC = common.contiguous_rows(grad_BTC)
        (batch, rows, channels), taps = x_BSC.shape, weight_C1K.shape[2]
        grad_x_BSC = x_BSC.new_empty(batch, rows, channels)
        size, constants = _tile_constants(channels, ctx.unit_size, _BACKWARD_TILE)
        rounds = _rounds(rows, constants["BLOCK_T"])
        time_blocks = -(-rows // (constants["BLOCK_T"] * rounds))
        # Of each program along batch and time, to be summed.
        partial_PKC = x_BSC.new_empty(batch * time_blocks, taps, channels, dtype=torch.float32)
        if grad_x_BSC.numel():
            _KERNELS.launch(
                "convolution_backward",
                (batch * time_blocks, -(-channels // size)),
                x_BSC, weight_C1K, grad_BTC, grad_x_BSC, partial_PKC,
                rows - taps + 1, channels, *x_BSC.stride()[:2], *grad_BTC.stride()[:2],
                TAPS=taps,
                ROUNDS=rounds,
                **constants,
            )  # fmt: skip
        grad_weight = None
        if want_weight:
            grad_weight = partial_PKC.sum(0).t().to(weight_C1K.dtype).reshape(weight_C1K.shape)
        return grad_x_BSC if want_x else None, grad_weight, None


def _tile_constants(channels: int, unit_size: int | None, tile: int) -> tuple[int, dict[str, Any]]:
    """The channels of a program, and its compile-time constants."""
    size = min(_CHANNELS, channels) if unit_size is None else unit_size
    block = common.power_of_two(size, 16)
    return size, {
        "SIZE": size,
        "UNIT": unit_size is not None,
        "EPSILON": EPSILON,
        "BLOCK_C": block,
        "BLOCK_T": max(8, tile // block),
    }


def _rounds(rows: int, block: int) -> int:
    """A power of two, so that few variants are compiled."""
    rounds = 1
    while rounds < _ROUNDS and rounds * block < rows:
        rounds *= 2
    return rounds
