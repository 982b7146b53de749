"""The loop over tiles of logits: all logits never exist at once.

A tile has some tokens (rows) and, where memory is short, some classes (columns). Its logits are computed into
one buffer, overwritten there by their gradient, multiplied into the gradients of x and weight, and then the
next tile uses the buffer. N tokens, D hidden size, V classes, R and C rows and columns of a tile. At the end
of the file: all logits at once, for small ones.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.ops.common import (
    OpFunction,
    accumulates_into_grad,
    can_accumulate_into_grad,
    cdiv,
    matmul_into,
    refuse_second_derivatives,
)
from oomph.ops.cross_entropy import rows as row_ops
from oomph.ops.cross_entropy.reference import CrossEntropyOptions
from oomph.ops.cross_entropy.rows import RowStatistics, SoftmaxPass, TokenRows, scale_in_place, token_losses
from oomph.ops.cross_entropy.vocab_parallel import VocabShard
from oomph.units import MiB, format_bytes

# Measured on an H200: from 1024 rows on, the three matrix products run at the speed of undivided ones, and
# 512 MiB holds 1024 rows and more up to 262,144 classes in bf16. Smaller buffers cost time, larger ones only
# memory.
DEFAULT_BUDGET = 512 * MiB

# Below this many rows the weight gradient, read and written once per tile, costs more time than computing
# the logits twice in tiles of more rows and fewer classes. A CPU computes less per byte it can move.
_MIN_ROWS = {"cuda": 384, "cpu": 128}
_ROWS_OF_COLUMN_TILES = 2048
_MIN_COLUMNS = 4096

# Rows of logits start at multiples of this many numbers, because cuBLAS is several times slower on others.
_ALIGNMENT = 8

# Per token: log-sum-exp, target logit, scale and loss in fp32, the target in int64 and a flag.
_BYTES_PER_TOKEN = 32


@dataclass(frozen=True)
class LogitTileShape:
    """At most `rows` tokens by `columns` classes."""

    rows: int
    columns: int

    def describe(self, n_tokens: int, n_classes: int, bytes_per_logit: int) -> str:
        tiles = cdiv(n_tokens, self.rows)
        size = format_bytes(min(self.rows, n_tokens) * min(self.columns, n_classes) * bytes_per_logit)
        columns = "" if self.columns >= n_classes else f" by {self.columns} classes, logits computed twice"
        return f"{tiles} {'block' if tiles == 1 else 'blocks'} of {self.rows} tokens{columns}, {size} each"


def choose_tile_shape(
    n_tokens: int,
    hidden: int,
    n_classes: int,
    *,
    bytes_per_logit: int,  # all copies of a tile's logits together
    wide_itemsize: int,  # of the numbers that grad x is summed in
    device: str,
    budget: int,
) -> LogitTileShape:
    """The tiles that fit into `budget` bytes beside the inputs and the gradients.

    All classes at a time while that leaves enough rows: the logits are then computed once. Otherwise fewer
    classes at a time, and twice: once for the log-sum-exp, once for the gradients.
    """
    n_tokens = max(1, n_tokens)
    # The allocator may hand out up to 1 MiB more than asked for each large buffer, of which there are two.
    budget -= n_tokens * _BYTES_PER_TOKEN + min(2 * MiB, budget // 16)
    rows = budget // (_padded(n_classes, device) * bytes_per_logit)
    if rows >= n_tokens:
        return LogitTileShape(n_tokens, n_classes)
    if rows >= _MIN_ROWS.get(device, _MIN_ROWS["cuda"]):
        # Whole tiles of the matrix product, and few of them left over in its last wave.
        step = 512 if rows >= 1024 else 128
        return LogitTileShape(rows // step * step, n_classes)

    def columns_that_fit(rows: int) -> int:
        return (budget - rows * hidden * wide_itemsize) // (rows * bytes_per_logit)

    rows = min(_ROWS_OF_COLUMN_TILES, n_tokens)
    while rows > 16 and columns_that_fit(rows) < min(_MIN_COLUMNS, n_classes):
        rows //= 2
    # The smallest tile is 16 tokens by 128 classes, whatever the budget.
    columns = max(128, columns_that_fit(rows) // 128 * 128)
    if columns >= n_classes:
        return LogitTileShape(rows, n_classes)
    # Equal tiles: a small last one would run below full speed.
    equal = cdiv(n_classes, cdiv(n_classes, columns))
    return LogitTileShape(rows, cdiv(equal, 128) * 128)


@dataclass(frozen=True)
class TiledLoss:
    """One call: the options, and what was chosen for it."""

    options: CrossEntropyOptions
    tile: LogitTileShape
    triton: bool
    dtype: torch.dtype  # of the matrix products
    needs_grad: tuple[bool, bool, bool]  # of x, weight, bias
    accumulate_into: Tensor | None = None  # the parameter whose .grad takes the weight gradient
    shard: VocabShard | None = None


@dataclass(frozen=True)
class GradientBuffers:
    """Where the gradients are written; None: not computed."""

    x_ND: Tensor | None = None
    weight_VD: Tensor | None = None
    bias_V: Tensor | None = None
    adds_to_weight: bool = False  # weight_VD already holds a gradient


class LinearCrossEntropy(OpFunction):
    """(loss, lse) of x [N, D] and weight [V, D]; both are fp32, or float64 for float64 inputs.

    Where the loss is one number, its gradients differ from those of loss.backward() by a factor only, so they
    are computed in forward, while each tile of logits exists: three matrix products in all. Otherwise (losses
    per token; float16, whose loss scale must be in the gradients before they are rounded; a weight gradient
    that is added to weight.grad) backward computes the logits again: four.
    """

    op = "linear_cross_entropy"
    instead = "impl='plain' and impl='reference' can"

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, rows: TokenRows, loss: TiledLoss
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        per_token = loss.options.reduction == "none"
        owner = loss.accumulate_into
        gradients_in_forward = (
            any(loss.needs_grad)
            and not per_token
            and loss.dtype != torch.float16
            and not (owner is not None and can_accumulate_into_grad(owner))
        )
        gradients = GradientBuffers()
        if gradients_in_forward:
            gradients = _gradient_buffers(x_ND, weight_VD, bias_V, loss)
        stats = compute_over_tiles(x_ND, weight_VD, bias_V, rows, loss, gradients)
        losses = token_losses(stats, rows, loss.options)
        ctx.rows, ctx.loss = rows, loss
        ctx.gradients = gradients if gradients_in_forward else None
        # The last two may be the caller's own: autograd notices if they change before backward.
        ctx.save_for_backward(x_ND, weight_VD, bias_V, stats.lse, rows.target, rows.class_weight)
        return losses if per_token else losses.sum(), stats.lse

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("linear_cross_entropy", LinearCrossEntropy.instead)
        loss: TiledLoss = ctx.loss
        gradients: GradientBuffers | None = ctx.gradients
        # Returned once: they become the caller's .grad. A second backward() computes them again.
        ctx.gradients = None
        if gradients is not None and grad_lse is None and grad_loss is not None:
            for values in (gradients.x_ND, gradients.weight_VD, gradients.bias_V):
                if values is not None and loss.triton:
                    scale_in_place(values, grad_loss)
                elif values is not None:
                    values.mul_(grad_loss)
        else:
            del gradients
            gradients = _recompute_gradients(ctx, grad_loss, grad_lse)
        if loss.shard is not None and gradients.x_ND is not None:
            loss.shard.all_reduce(gradients.x_ND)
        grad_weight = None if gradients.adds_to_weight else gradients.weight_VD
        return gradients.x_ND, grad_weight, gradients.bias_V, None, None


def _recompute_gradients(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None) -> GradientBuffers:
    loss: TiledLoss = ctx.loss
    rows: TokenRows = ctx.rows
    x_ND, weight_VD, bias_V, lse_N, *_ = ctx.saved_tensors
    if grad_loss is None:
        grad_loss = rows.scale.new_zeros(())
    if grad_lse is not None:
        grad_lse = torch.where(rows.valid, grad_lse, 0.0)
    owner = loss.accumulate_into
    # Asked in backward: torch.autograd.grad() must get the gradient and leave .grad alone.
    into = owner.grad if owner is not None and loss.needs_grad[1] and accumulates_into_grad(owner) else None
    gradients = _gradient_buffers(x_ND, weight_VD, bias_V, loss, into)
    scaled = rows.scaled_by(grad_loss)
    compute_over_tiles(x_ND, weight_VD, bias_V, scaled, loss, gradients, lse_N=lse_N, grad_lse_N=grad_lse)
    return gradients


def _gradient_buffers(
    x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, loss: TiledLoss, into: Tensor | None = None
) -> GradientBuffers:
    """In the dtypes of the inputs: under autocast, fp32 for fp32 weights. `into`: weight.grad, to add to."""
    needs_x, needs_weight, needs_bias = loss.needs_grad
    # Contiguous whatever the original is: kernels go over these buffers as flat arrays.
    contiguous = torch.contiguous_format
    grad_x = torch.empty_like(x_ND, memory_format=contiguous) if needs_x else None
    grad_weight, grad_bias = into, None
    if needs_weight and into is None:
        grad_weight = torch.empty_like(weight_VD, memory_format=contiguous)
    if needs_bias and bias_V is not None:
        grad_bias = torch.zeros_like(bias_V, dtype=torch.promote_types(bias_V.dtype, torch.float32))
    return GradientBuffers(grad_x, grad_weight, grad_bias, adds_to_weight=into is not None)


def compute_over_tiles(
    x_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    rows: TokenRows,
    loss: TiledLoss,
    gradients: GradientBuffers,
    lse_N: Tensor | None = None,
    grad_lse_N: Tensor | None = None,
) -> RowStatistics:
    """The statistics of every row, and the gradients that have a buffer. With `lse_N`, gradients alone."""
    x_ND, weight_VD = x_ND.to(loss.dtype), weight_VD.to(loss.dtype)
    bias_V = None if bias_V is None else bias_V.to(loss.dtype)
    n, v, tile = rows.target.shape[0], weight_VD.shape[0], loss.tile
    starts = range(0, v, min(tile.columns, v))  # first classes of the tiles
    with_gradient = any(each is not None for each in (gradients.x_ND, gradients.weight_VD, gradients.bias_V))
    stats = _empty_statistics(rows, loss, gradients)
    if lse_N is not None:
        stats.lse.copy_(lse_N)
    if n == 0 and gradients.weight_VD is not None and not gradients.adds_to_weight:
        gradients.weight_VD.zero_()
    buffer = x_ND.new_empty(min(tile.rows, n), _padded(starts.step, x_ND.device.type))
    grad_x_buffer = None
    if gradients.x_ND is not None and len(starts) > 1:  # summed over tiles of classes, in fp32
        grad_x_buffer = x_ND.new_empty(min(tile.rows, n), x_ND.shape[1], dtype=rows.scale.dtype)
    softmax_rows = row_ops.softmax_rows_triton if loss.triton else row_ops.softmax_rows_torch
    # All classes of a row in one tile: one softmax pass finds the log-sum-exp and writes the gradient.
    single_pass = len(starts) == 1 and loss.shard is None

    for first in range(0, n, tile.rows):
        part = slice(first, min(first + tile.rows, n))
        is_whole = n <= tile.rows  # then no views: each costs the host as much time as a product
        rows_R, stats_R = (rows, stats) if is_whole else (rows[part], stats[part])
        grad_lse_R = None if grad_lse_N is None else grad_lse_N[part]
        x_RD = _rows_of(x_ND, part)

        if lse_N is None:
            for start in starts:
                logits_RC = _compute_logits(x_RD, weight_VD, bias_V, start, starts.step, buffer)
                todo = SoftmaxPass(
                    start, find_lse=True, merge=start > 0, write_gradient=single_pass and with_gradient
                )
                softmax_rows(logits_RC, rows_R, stats_R, loss.options, todo)
            if loss.shard is not None:
                loss.shard.combine_statistics(stats_R)
                # Ignored rows were combined as well.
                stats_R.lse.copy_(torch.where(rows_R.valid, stats_R.lse, 0.0))
        if not with_gradient:
            continue
        grad_x_RD = None
        if grad_x_buffer is not None:
            grad_x_RD = _rows_of(grad_x_buffer, slice(0, x_RD.shape[0]))
        elif gradients.x_ND is not None:
            grad_x_RD = _rows_of(gradients.x_ND, part)
        # Backwards: the buffer still holds the last tile. The gradient overwrites the logits.
        for start in reversed(starts):
            if lse_N is not None or start != starts[-1]:
                logits_RC = _compute_logits(x_RD, weight_VD, bias_V, start, starts.step, buffer)
            if lse_N is not None or not single_pass:
                todo = SoftmaxPass(start, find_lse=False, write_gradient=True, grad_lse=grad_lse_R)
                softmax_rows(logits_RC, rows_R, stats_R, loss.options, todo)
            if grad_x_RD is not None:
                weight_CD = _rows_of(weight_VD, slice(start, start + starts.step))
                _add_grad_x(grad_x_RD, logits_RC, weight_CD, add=start != starts[-1])
            if gradients.bias_V is not None:
                grad_bias_C = _rows_of(gradients.bias_V, slice(start, start + starts.step))
                grad_bias_C.add_(logits_RC.sum(0, dtype=gradients.bias_V.dtype))
            if gradients.weight_VD is not None:
                if stats_R.target_gradient is not None:
                    row_ops.clear_targets(logits_RC, rows_R, start)
                grad_weight_CD = _rows_of(gradients.weight_VD, slice(start, start + starts.step))
                _add_grad_weight(grad_weight_CD, logits_RC, x_RD, add=gradients.adds_to_weight or first > 0)
        if gradients.x_ND is not None and grad_x_RD is not None and grad_x_buffer is not None:
            _rows_of(gradients.x_ND, part).copy_(grad_x_RD)

    if stats.target_gradient is not None and gradients.weight_VD is not None:
        row_ops.add_target_rows(gradients.weight_VD, x_ND, rows, stats.target_gradient)
    return stats


def _empty_statistics(rows: TokenRows, loss: TiledLoss, gradients: GradientBuffers) -> RowStatistics:
    # The sum over tiles of the weight gradient is rounded to the weight's dtype once per tile. What a token
    # adds to the row of its own target is much larger than what it adds elsewhere; where that dtype is
    # narrower than fp32 it is added last, from fp32, and rounded once.
    targets_last = (
        loss.triton
        and gradients.weight_VD is not None
        and gradients.weight_VD.dtype.itemsize < 4
        and (gradients.adds_to_weight or rows.target.shape[0] > loss.tile.rows)
    )
    return RowStatistics(
        lse=torch.empty_like(rows.scale),
        target_logit=torch.empty_like(rows.scale),
        smooth_sum=torch.empty_like(rows.scale) if loss.options.label_smoothing else None,
        target_gradient=torch.empty_like(rows.scale) if targets_last else None,
    )


def _compute_logits(
    x_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, start: int, width: int, buffer: Tensor
) -> Tensor:
    """The logits of classes start .. start + width, in the buffer."""
    weight_CD = _rows_of(weight_VD, slice(start, start + width))
    logits_RC = _columns_of(_rows_of(buffer, slice(0, x_RD.shape[0])), slice(0, weight_CD.shape[0]))
    for some in _aligned_classes(logits_RC):
        some_weight, out = _rows_of(weight_CD, some), _columns_of(logits_RC, some)
        if bias_V is None:
            torch.mm(x_RD, some_weight.t(), out=out)
        else:
            bias_C = _rows_of(_rows_of(bias_V, slice(start, start + width)), some)
            torch.addmm(bias_C, x_RD, some_weight.t(), out=out)
    return logits_RC


def _add_grad_x(grad_x_RD: Tensor, gradient_RC: Tensor, weight_CD: Tensor, *, add: bool) -> None:
    # The few unaligned classes first: rounding their small share costs least.
    for some in _aligned_classes(gradient_RC):
        matmul_into(grad_x_RD, _columns_of(gradient_RC, some), _rows_of(weight_CD, some), add=add)
        add = True


def _add_grad_weight(grad_weight_CD: Tensor, gradient_RC: Tensor, x_RD: Tensor, *, add: bool) -> None:
    for some in _aligned_classes(gradient_RC):
        matmul_into(_rows_of(grad_weight_CD, some), _columns_of(gradient_RC, some).t(), x_RD, add=add)


def _aligned_classes(logits_RC: Tensor) -> list[slice]:
    """All classes, or those up to a multiple of 8 and the few that are left.

    cuBLAS multiplies half-precision matrices several times slower where a size is not a multiple of 8, and
    GPT-2 has 50,257 classes.
    """
    size = logits_RC.shape[1]
    left = size % 8 if logits_RC.dtype.itemsize == 2 else 0
    return [slice(0, size)] if left in (0, size) else [slice(size - left, size), slice(0, size - left)]


def _rows_of(x: Tensor, part: slice) -> Tensor:
    """x[part]; x itself where that is all: a view costs the host as much time as a product."""
    return x if part.start == 0 and part.stop >= x.shape[0] else x[part]


def _columns_of(x: Tensor, part: slice) -> Tensor:
    return x if part.start == 0 and part.stop >= x.shape[1] else x[:, part]


def _padded(n_classes: int, device: str) -> int:
    """The length of a row of logits in memory.

    Only cuBLAS gains by padding. On processors with AMX, oneDNN's bf16 matmuls read what is behind a row, and
    NaN there makes the result NaN (torch 2.13).
    """
    return n_classes if device == "cpu" else cdiv(n_classes, _ALIGNMENT) * _ALIGNMENT


# All logits at once ----------------------------------------------------------------------------------

_IGNORED = -100


def plain_linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, rows: TokenRows, options: CrossEntropyOptions
) -> tuple[Tensor, Tensor | None]:
    """(loss, lse) with all logits at once: the fastest way where they are small. lse for return_lse only."""
    # Softmax and all after it in fp32, so that this path is as exact as the others.
    logits = F.linear(x_ND, weight_VD, bias_V).to(rows.scale.dtype)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    # Targets out of range have a scale of NaN; they must not reach a kernel that reads where they point.
    target = torch.where(rows.valid, rows.target.clamp(0, rows.n_classes - 1), _IGNORED)
    losses = F.cross_entropy(
        logits,
        target,
        weight=rows.class_weight,
        ignore_index=_IGNORED,
        label_smoothing=options.label_smoothing,
        reduction="none",
    )
    lse = None
    if options.z_loss or options.return_lse:
        lse = torch.where(rows.valid, torch.logsumexp(logits, 1), 0.0)
        losses = losses + options.z_loss * lse.square() if options.z_loss else losses
    loss = losses * rows.scale if options.reduction == "none" else torch.dot(losses, rows.scale)
    return loss, lse
