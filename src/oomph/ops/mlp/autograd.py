"""A known MLP in tiles: every matrix product writes into memory that exists, and backward is hand-written.

Shapes: N tokens, D features in, O features out, F hidden features, T rows of a tile.

Forward holds two [T, F] buffers and the result. Backward computes gate and up again (not the product with
down), and holds three: gate, up and grad hidden, which one elementwise pass overwrites with grad gate, hidden
and grad up. That is eleven products against the nine that save every [N, F] tensor, and nothing grows with N
but the result and grad x. Saved for backward: x and the weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomph.ops.common import (
    Kernels,
    OpFunction,
    matmul_into,
    no_autocast,
    refuse_second_derivatives,
    wide_dtype,
)
from oomph.ops.mlp.weights import activate

_KERNELS = Kernels("oomph.ops.mlp.kernels")
_KERNEL_BLOCK = 1024
# Elements that plain torch handles at a time: its temporaries have this size. A round number: small beside a
# tile, and large enough that Python's part is small.
_ELEMENTS = 1 << 20
# Tokens cast at a time where a half-precision product is summed in fp32 on a CPU.
_CAST_TOKENS = 512


@dataclass(frozen=True)
class TiledMLPConfig:
    """How a known MLP is computed."""

    activation: str
    tile: int
    dtype: torch.dtype  # of the matrix products
    use_triton: bool


class _Tensors(NamedTuple):
    """One per tensor of MLPWeights: the weights, or their gradients. None: absent, or not needed."""

    up: Any
    down: Any
    gate: Any
    up_bias: Any
    gate_bias: Any
    down_bias: Any


class TiledMLP(OpFunction):
    """x [..., D], the tensors of MLPWeights and a TiledMLPConfig -> [..., O] in the config's dtype."""

    op = "tiled_mlp"

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_config: Any) -> Tensor:
        *weights, config = weights_and_config
        ctx.config = config
        # Products have a dtype given; autocast must not cast a second time.
        with no_autocast(x):
            out = _forward(x, _cast(weights, config.dtype), config)
        ctx.save_for_backward(x, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        refuse_second_derivatives("tiled_mlp")
        # Read once: checkpointing computes them again at every access.
        x, *weights = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[:-1]
        with no_autocast(x):
            grads = _backward(grad_out, x, weights, ctx.config, needs_x, needs)
        return (*grads, None)


def _forward(x: Tensor, w: _Tensors, config: TiledMLPConfig) -> Tensor:
    x_ND = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
    out_NO = x.new_empty(x_ND.shape[0], w.down.shape[0], dtype=config.dtype)
    up_TF = x.new_empty(config.tile, w.up.shape[0], dtype=config.dtype)
    gate_TF = None if w.gate is None else torch.empty_like(up_TF)
    for start, stop in spans(x_ND.shape[0], config.tile):
        gate, up = _first_rows(gate_TF, stop - start), up_TF[: stop - start]
        _gate_and_up(_product_rows(x_ND, start, stop, config.dtype), w, gate, up)
        _activate(config, gate, up)
        _linear_into(out_NO[start:stop], up, w.down, w.down_bias)
    return out_NO.view(*x.shape[:-1], w.down.shape[0])


def _backward(
    grad_out: Tensor,
    x: Tensor,
    weights: list[Tensor | None],
    config: TiledMLPConfig,
    needs_x: bool,
    needs: list[bool],
) -> list[Tensor | None]:
    """The gradients of x, up, down, gate and the biases, in their dtypes; None where not needed."""
    w = _cast([*weights[:-1], None], config.dtype)
    tokens = x.shape[:-1].numel()
    x_ND = x.detach().reshape(tokens, x.shape[-1])
    grad_out_NO = grad_out.reshape(tokens, grad_out.shape[-1])
    grad_x_ND = torch.empty_like(x_ND, memory_format=torch.contiguous_format) if needs_x else None
    sums = _empty_sums(weights, needs, one_tile=tokens <= config.tile)
    needs_grad_hidden = needs_x or any(_Tensors(*needs)._replace(down=False, down_bias=False))
    if needs_grad_hidden or sums.down is not None:
        # The buffers are freed before the sums are rounded, so that this is not the peak.
        _backward_of_tiles(x_ND, grad_out_NO, w, config, sums, grad_x_ND, needs_grad_hidden)
    if sums.down_bias is not None:
        torch.sum(grad_out_NO, 0, dtype=sums.down_bias.dtype, out=sums.down_bias)
    grads: list[Tensor | None] = [None if grad_x_ND is None else grad_x_ND.view(x.shape)]
    remaining = list(sums)
    del sums
    for weight in weights:
        total = remaining.pop(0)
        grads.append(None if total is None or weight is None else total.to(weight.dtype))
        del total  # each fp32 sum is freed before the next is rounded
    return grads


def _backward_of_tiles(
    x_ND: Tensor,
    grad_out_NO: Tensor,
    w: _Tensors,
    config: TiledMLPConfig,
    sums: _Tensors,
    grad_x_ND: Tensor | None,
    needs_grad_hidden: bool,
) -> None:
    up_TF = x_ND.new_empty(config.tile, w.up.shape[0], dtype=config.dtype)
    gate_TF = None if w.gate is None else torch.empty_like(up_TF)
    grad_TF = torch.empty_like(up_TF) if needs_grad_hidden else None
    for start, stop in spans(x_ND.shape[0], config.tile):
        count, first = stop - start, start == 0
        x_TD = _product_rows(x_ND, start, stop, config.dtype)
        grad_out_TO = _product_rows(grad_out_NO, start, stop, config.dtype)
        gate, up, grad = _first_rows(gate_TF, count), up_TF[:count], _first_rows(grad_TF, count)
        _gate_and_up(x_TD, w, gate, up)
        if grad is None:  # only down is trained
            _activate(config, gate, up)
            _add_product(sums.down, grad_out_TO.t(), up, first)
            continue
        matmul_into(grad, grad_out_TO, w.down)
        _differentiate(config, gate, up, grad)
        grad_gate, hidden, grad_up = gate, up, grad  # overwritten by these
        _add_product(sums.down, grad_out_TO.t(), hidden, first)
        _add_product(sums.up, grad_up.t(), x_TD, first)
        _add_rows(sums.up_bias, grad_up, first)
        if grad_gate is not None:
            _add_product(sums.gate, grad_gate.t(), x_TD, first)
            _add_rows(sums.gate_bias, grad_gate, first)
        if grad_x_ND is not None:
            # Where x is wider than the products (autocast), they are made in their own dtype first.
            grad_x_TD = grad_x_ND[start:stop]
            same = grad_x_TD.dtype == config.dtype
            product = grad_x_TD if same else torch.empty_like(grad_x_TD, dtype=config.dtype)
            matmul_into(product, grad_up, w.up)
            if grad_gate is not None:
                matmul_into(product, grad_gate, w.gate, add=True)
            if not same:
                grad_x_TD.copy_(product)


def _empty_sums(weights: list[Tensor | None], needs: list[bool], *, one_tile: bool) -> _Tensors:
    """Where the gradients of the weights are summed over tiles: in fp32, float64 for float64."""

    def empty(weight: Tensor | None, need: bool) -> Tensor | None:
        if weight is None or not need:
            return None
        # With one tile nothing is summed, and the products of matrices can be rounded as they are made.
        dtype = weight.dtype if one_tile and weight.dim() == 2 else wide_dtype(weight.dtype)
        # empty_like keeps the layout of a transposed weight, so its gradient needs no copy afterwards.
        return torch.empty_like(weight, dtype=dtype)

    return _Tensors(*map(empty, weights, needs))


def _cast(weights: Any, dtype: torch.dtype) -> _Tensors:
    return _Tensors(*(None if each is None else each.detach().to(dtype) for each in weights))


def spans(tokens: int, rows: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of every tile; one empty tile where there are no tokens."""
    for start in range(0, max(tokens, 1), rows):
        yield start, min(start + rows, tokens)


# Matrix products -------------------------------------------------------------------------------------


def _gate_and_up(x_TD: Tensor, w: _Tensors, gate_TF: Tensor | None, up_TF: Tensor) -> None:
    _linear_into(up_TF, x_TD, w.up, w.up_bias)
    if gate_TF is not None:
        _linear_into(gate_TF, x_TD, w.gate, w.gate_bias)


def _linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        matmul_into(out, x, weight.t())
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _add_product(total_MN: Tensor | None, a_MT: Tensor, b_TN: Tensor, first: bool) -> None:
    """total += a b, each product and the sum in total's dtype; `first` overwrites total instead."""
    if total_MN is None:
        return
    if total_MN.stride(0) == 1 and total_MN.stride(1) != 1:
        # A column-major total (the gradient of a transposed weight) is a row-major transpose.
        total_MN, a_MT, b_TN = total_MN.t(), b_TN.t(), a_MT.t()
    casts = total_MN.dtype != a_MT.dtype and total_MN.device.type != "cuda"
    # A cast of the whole tile would be larger than the tile's own buffers.
    tokens = a_MT.shape[1]
    for start, stop in spans(tokens, _CAST_TOKENS if casts else max(tokens, 1)):
        matmul_into(total_MN, a_MT[:, start:stop], b_TN[start:stop], add=not first or start > 0)


def _add_rows(total_F: Tensor | None, rows_TF: Tensor, first: bool) -> None:
    if total_F is None:
        return
    if first:
        torch.sum(rows_TF, 0, dtype=total_F.dtype, out=total_F)
    else:
        total_F.add_(torch.sum(rows_TF, 0, dtype=total_F.dtype))


def _first_rows(buffer: Tensor | None, count: int) -> Tensor | None:
    return None if buffer is None else buffer[:count]


def _product_rows(matrix: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows of a matrix, in `dtype` and in a layout that a product takes without a copy of its own."""
    rows = matrix[start:stop].to(dtype)
    # A gradient that was broadcast (from a sum, say) has stride 0; the copy is one tile's, not the whole.
    return rows if rows.stride(-1) == 1 and rows.stride(0) >= rows.shape[1] else rows.contiguous()


# Activation and its derivative, by one Triton kernel or plain torch ----------------------------------
# Both compute in fp32 (float64 for float64), allocate nothing of a tile's size, and overwrite what they read.
# `gate` is None in an MLP without one.


def _activate(config: TiledMLPConfig, gate: Tensor | None, up: Tensor) -> None:
    """up := act(gate) * up, or act(up)."""
    if config.use_triton:
        _launch("activate", config, gate, up, up)
        return
    dtype = wide_dtype(up.dtype)
    for gate_part, up_part in _flat_parts(gate, up):
        if gate_part is None:
            up_part.copy_(activate(config.activation, up_part.to(dtype)))
        else:
            torch.mul(activate(config.activation, gate_part.to(dtype)), up_part, out=up_part)


def _differentiate(config: TiledMLPConfig, gate: Tensor | None, up: Tensor, grad: Tensor) -> None:
    """gate, up and grad hidden become grad gate, hidden and grad up."""
    if config.use_triton:
        _launch("differentiate", config, gate, up, grad, up if gate is None else gate, up)
        return
    dtype = wide_dtype(up.dtype)
    for gate_part, up_part, grad_part in _flat_parts(gate, up, grad):
        # Where nothing is cast these are the buffers themselves, so each is read before it is written.
        up_wide, grad_wide = up_part.to(dtype), grad_part.to(dtype)
        if gate_part is None:
            value, slope = _value_and_slope_times(config.activation, up_wide, grad_wide)
            up_part.copy_(value)
            grad_part.copy_(slope)
            continue
        value, slope = _value_and_slope_times(config.activation, gate_part.to(dtype), grad_wide * up_wide)
        gate_part.copy_(slope)
        torch.mul(value, up_wide, out=up_part)
        torch.mul(value, grad_wide, out=grad_part)


def _launch(name: str, config: TiledMLPConfig, gate: Tensor | None, *buffers: Tensor) -> None:
    count = buffers[0].numel()
    if count == 0:
        return
    grid = (-(-count // _KERNEL_BLOCK),)
    arguments = (buffers[0] if gate is None else gate, *buffers, count)  # without a gate it is not read
    constants: dict[str, Any] = {
        "ACTIVATION": config.activation,
        "GATED": gate is not None,
        "BLOCK": _KERNEL_BLOCK,
    }
    _KERNELS.launch(name, grid, *arguments, **constants)


def _flat_parts(gate: Tensor | None, up: Tensor, *others: Tensor) -> Iterator[tuple[Any, ...]]:
    """The buffers, flat, in parts of equal bounds; None stays None."""
    flat = [None if each is None else each.view(-1) for each in (gate, up, *others)]
    for start in range(0, up.numel(), _ELEMENTS):
        yield tuple(None if each is None else each[start : start + _ELEMENTS] for each in flat)


def _value_and_slope_times(activation: str, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """act(z) and act'(z) * grad."""
    value = activate(activation, z)
    if activation == "silu":
        return value, torch.ops.aten.silu_backward(grad, z)
    if activation == "relu":
        return value, torch.ops.aten.threshold_backward(grad, z, 0)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return value, torch.ops.aten.gelu_backward(grad, z, approximate=approximate)
