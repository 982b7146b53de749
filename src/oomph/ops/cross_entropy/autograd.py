"""The loss and its gradients: all logits through autograd, or the loop over tiles as one autograd node."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.ops.common import (
    OpFunction,
    accumulates_into_grad,
    can_accumulate_into_grad,
    refuse_second_derivatives,
)
from oomph.ops.cross_entropy.chunked import GradientBuffers, TiledLoss, compute_over_tiles
from oomph.ops.cross_entropy.reference import CrossEntropyOptions
from oomph.ops.cross_entropy.rows import TokenRows, scale_in_place, token_losses

_IGNORED = -100


def plain_linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, rows: TokenRows, options: CrossEntropyOptions
) -> tuple[Tensor, Tensor | None]:
    """(loss, lse) with all logits at once: the fastest way where they are small. lse for return_lse only."""
    x = x_ND if rows.index is None else x_ND[rows.index]
    # Softmax and all after it in fp32, so that this path is as exact as the others.
    logits = F.linear(x, weight_VD, bias_V).to(rows.scale.dtype)
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
    per_token = options.reduction == "none"
    loss = losses * rows.scale if per_token else torch.dot(losses, rows.scale)
    if per_token:
        loss = _at_all_tokens(loss, rows, x_ND.shape[0])
    return loss, None if lse is None else _at_all_tokens(lse, rows, x_ND.shape[0])


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
        n = x_ND.shape[0]
        value = _at_all_tokens(losses, rows, n) if per_token else losses.sum()
        return value, _at_all_tokens(stats.lse, rows, n)

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
    elif rows.index is not None and loss.options.reduction == "none":
        grad_loss = grad_loss[rows.index]
    if grad_lse is not None:
        grad_lse = grad_lse if rows.index is None else grad_lse[rows.index]
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


def _at_all_tokens(values: Tensor, rows: TokenRows, n: int) -> Tensor:
    """[N] from the values of the rows; 0 for tokens that were dropped."""
    return values if rows.index is None else values.new_zeros(n).index_copy_(0, rows.index, values)
