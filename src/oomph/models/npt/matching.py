"""The loss of one converted layer: how far its output is from the original's, plus the size of its changes.

Layers are independent of each other where each has an input without a gradient. So a layer's gradients can
be made as soon as its loss is there, and all it would have kept for backward is free again before the next
layer runs: memory for one layer, whatever their number, and nothing is computed twice.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from oomph.models.npt.layer import NPTLayer

# Gradients of a mean over millions of elements are too small for float16. They are computed this much larger,
# times the number of elements, and divided again in float32; a power of two, so that it rounds nothing.
_HEADROOM = 2**-8


@dataclass(frozen=True)
class LayerLoss:
    total: Tensor  # matching + regularization * penalty
    matching: Tensor  # mean squared error
    penalty: Tensor  # mean over tokens of ||dW||_F^2
    student: Tensor  # the student's output [B, S, d]; with its history only in a joint stream


def matching_loss(layer: "NPTLayer", h: Tensor, attention: Tensor, target: Tensor) -> LayerLoss:
    trained = [each for each in layer.np_component.parameters() if each.requires_grad]
    if layer.gradients == "forward" and trained and torch.is_grad_enabled():
        return LayerLoss(*_GradientsInForward.apply(layer, h, attention, target, *trained))
    loss = _loss(layer, h, attention, target)
    student = loss.student if layer.current.stream == "joint" else loss.student.detach()
    return LayerLoss(loss.total, loss.matching.detach(), loss.penalty.detach(), student)


def _loss(layer: "NPTLayer", h: Tensor, attention: Tensor, target: Tensor) -> LayerLoss:
    mod = layer.np_component.modulation(attention)
    student = layer.student(h, attention, mod)
    wide = torch.promote_types(student.dtype, torch.float32)
    error_BS = (student.to(wide) - target.to(wide)).square().mean(dim=-1)
    mask = layer.current.token_mask
    matching = _mean(error_BS, mask)
    penalty = _mean(layer.np_component.penalty(mod), mask)
    return LayerLoss(matching + layer.regularization * penalty, matching, penalty, student)


def _mean(x_BS: Tensor, mask_BS: Tensor | None) -> Tensor:
    if mask_BS is None:
        return x_BS.mean()
    weight_BS = mask_BS.to(x_BS.dtype)
    return (x_BS * weight_BS).sum() / weight_BS.sum().clamp(min=1)


class _GradientsInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Any, h: Tensor, attention: Tensor, target: Tensor, *trained: Tensor) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = _loss(layer, h, attention, target)
        factor = 2.0 ** (max(1, target.numel()).bit_length() - 1) * _HEADROOM
        gradients = torch.autograd.grad(loss.total, trained, torch.full_like(loss.total, factor))
        ctx.save_for_backward(*(each / factor for each in gradients))
        results = tuple(each.detach() for each in (loss.total, loss.matching, loss.penalty, loss.student))
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (None, None, None, None, *(g * each for each in ctx.saved_tensors))
