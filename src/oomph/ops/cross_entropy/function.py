"""linear_cross_entropy as one node of the autograd graph.

Where the loss is one number, its gradients differ from those of loss.backward() by a factor only, so they are
made in the forward pass, while each block of logits is there: three matrix products in all. Otherwise (losses
per token, float16, whose loss scale must be in the gradients before they are rounded, or a weight gradient
that goes straight into weight.grad) the backward pass makes the logits again: four.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import accumulates_into_grad, can_accumulate_into_grad, refuse_second_derivatives
from oomph.ops.cross_entropy import rows_torch, rows_triton
from oomph.ops.cross_entropy.problem import LossOptions, Rows, token_losses
from oomph.ops.cross_entropy.sharded import VocabularyShard
from oomph.ops.cross_entropy.sweep import Gradients, SoftmaxRows, Sweep
from oomph.ops.cross_entropy.tiling import Tiling


@dataclass(frozen=True)
class Plan:
    """How one call is carried out."""

    options: LossOptions
    tiling: Tiling
    triton: bool
    dtype: torch.dtype  # of the matrix products
    per_token: bool = False  # one loss per row instead of their sum
    wants: tuple[bool, bool, bool] = (False, False, False)  # gradients of x, weight, bias
    accumulate_into: Tensor | None = None  # the parameter whose .grad takes the weight gradient
    shard: VocabularyShard | None = None

    @property
    def gradients_in_forward(self) -> bool:
        may_add = self.accumulate_into is not None and can_accumulate_into_grad(self.accumulate_into)
        return any(self.wants) and not self.per_token and self.dtype != torch.float16 and not may_add

    @property
    def softmax_rows(self) -> SoftmaxRows:
        return rows_triton.softmax_rows if self.triton else rows_torch.softmax_rows


class LinearCrossEntropy(torch.autograd.Function):
    """(loss, lse) of x [N, D] and weight [V, D]; both losses and lse in fp32, or float64 for float64."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, rows: Rows, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        early = plan.gradients_in_forward
        gradients = _buffers(x_ND, weight_VD, bias_V, plan.wants) if early else Gradients()
        stats = _sweep(x_ND, weight_VD, bias_V, rows, plan).run(gradients)
        losses = token_losses(stats, rows, plan.options)
        loss, lse = losses if plan.per_token else losses.sum(), stats.lse
        if rows.index is not None:
            n = x_ND.shape[0]
            lse = lse.new_zeros(n).index_copy_(0, rows.index, lse)
            loss = loss.new_zeros(n).index_copy_(0, rows.index, loss) if plan.per_token else loss
        ctx.rows, ctx.plan = rows, plan
        ctx.early = gradients if early else None
        # The last two may be the caller's own: autograd notices where they were changed in the meantime.
        ctx.save_for_backward(x_ND, weight_VD, bias_V, stats.lse, rows.target, rows.class_weight)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("linear_cross_entropy", "impl='plain' and impl='reference' can")
        plan: Plan = ctx.plan
        early: Gradients | None = ctx.early
        # Handed over once: they become the caller's .grad. A second backward() makes them anew.
        ctx.early = None
        if early is not None and grad_lse is None and grad_loss is not None:
            for values in (early.x_ND, early.weight_VD, early.bias_V):
                if values is not None and plan.triton:
                    rows_triton.scale_in_place(values, grad_loss)
                elif values is not None:
                    values.mul_(grad_loss)
            gradients = early
        else:
            del early
            gradients = _late_gradients(ctx, grad_loss, grad_lse)
        if plan.shard is not None and gradients.x_ND is not None:
            plan.shard.sum_over_ranks(gradients.x_ND)
        weight_grad = None if gradients.adds_to_weight else gradients.weight_VD
        return gradients.x_ND, weight_grad, gradients.bias_V, None, None


def _late_gradients(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None) -> Gradients:
    plan: Plan = ctx.plan
    rows: Rows = ctx.rows
    x_ND, weight_VD, bias_V, lse_N, *_ = ctx.saved_tensors
    if rows.index is not None:
        grad_loss = grad_loss[rows.index] if plan.per_token and grad_loss is not None else grad_loss
        grad_lse = None if grad_lse is None else grad_lse[rows.index]
    if grad_lse is not None:
        grad_lse = torch.where(rows.kept, grad_lse, 0.0)
    if grad_loss is None:
        grad_loss = rows.scale.new_zeros(())
    owner = plan.accumulate_into
    # Asked now: torch.autograd.grad() wants the gradient and not a changed .grad.
    into = owner.grad if owner is not None and plan.wants[1] and accumulates_into_grad(owner) else None
    gradients = _buffers(x_ND, weight_VD, bias_V, plan.wants, into)
    sweep = _sweep(x_ND, weight_VD, bias_V, rows.times(grad_loss), plan)
    sweep.run(gradients, known_lse=lse_N, grad_lse=grad_lse)
    return gradients


def _sweep(x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, rows: Rows, plan: Plan) -> Sweep:
    return Sweep(
        x_ND.to(plan.dtype),
        weight_VD.to(plan.dtype),
        None if bias_V is None else bias_V.to(plan.dtype),
        rows,
        plan.options,
        plan.tiling,
        plan.softmax_rows,
        rows_triton if plan.triton else None,
        None if plan.shard is None else plan.shard.combine,
    )


def _buffers(
    x_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    wants: tuple[bool, bool, bool],
    into: Tensor | None = None,
) -> Gradients:
    """Room for the gradients, in the dtypes of what they belong to: under autocast, fp32 for fp32 weights.

    `into`: the gradient that the weight's is added to.
    """
    wants_x, wants_weight, wants_bias = wants
    weight_grad = _empty(weight_VD) if wants_weight and into is None else into
    return Gradients(
        _empty(x_ND) if wants_x else None,
        weight_grad,
        torch.zeros_like(bias_V, dtype=torch.promote_types(bias_V.dtype, torch.float32))
        if wants_bias and bias_V is not None
        else None,
        adds_to_weight=into is not None,
    )


def _empty(like: Tensor) -> Tensor:
    # Contiguous whatever the original is: kernels go over these buffers as one run of numbers.
    return torch.empty_like(like, memory_format=torch.contiguous_format)
