"""Gradient accumulation fusion: weight gradients of linear layers are added to `.grad` by the matmul.

Saves a temporary of the weight's size from a step's second pass on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from oomph.errors import UserError
from oomph.fixes.fused_linear_cross_entropy import accumulating_forward, is_fused
from oomph.fixes.journal import Journal
from oomph.fixes.modules import chosen_modules, is_plain_call, is_plain_linear
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.ops.common import (
    accumulates_into_grad,
    has_hooks,
    matmul_dtype,
    matmul_into,
    no_autocast,
    refuse_second_derivatives,
)

_LARGE = 1 / 8  # of the largest weight: smaller temporaries never make the peak


class GradientAccumulationFusion(Fix):
    name = "gradient_accumulation_fusion"
    kind = "exact"
    changes = "From a step's second pass on, weight gradients are added to .grad as they are computed."
    excludes: ClassVar = {
        "optimizer_in_backward": "its hooks run when autograd accumulates a gradient, which does not happen",
        "fsdp2": "FSDP2's hooks run when autograd accumulates a gradient, which does not happen",
    }

    def targets(self, context: FixContext) -> Iterable[Target]:
        micro_batches = context.workload.micro_batches
        if context.workload.accumulate * (1 if micro_batches is None else micro_batches.parts) < 2:
            return
        names = _largest_linears(context.model)
        if names:
            yield Target(tuple(names), {"modules": names})

    def change_model(
        self, model: nn.Module, journal: Journal, *, modules: Sequence[str] | None = None
    ) -> None:
        """`modules`: names of nn.Linear modules; by default those with the largest weights."""
        names = _largest_linears(model) if modules is None else modules
        if modules is None and not names:
            raise UserError(f"fix {self.name!r}: the model has no plain nn.Linear that is trained")
        for name, module in chosen_modules(model, names, self.name).items():
            why = _why_not(module)
            if why is not None:
                raise UserError(f"fix {self.name!r}: {name!r} {why}")
            what = "its weight gradient is added to .grad in place"
            if is_fused(module):
                journal.set(module, "forward", accumulating_forward(module), name, what)
            else:
                journal.wrap_forward(module, _linear, name, what)


def _largest_linears(model: nn.Module) -> list[str]:
    sizes = {
        name: module.weight.numel() * module.weight.element_size()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and _why_not(module) is None
    }
    largest = max(sizes.values(), default=0)
    return [name for name, size in sizes.items() if size >= largest * _LARGE]


def _why_not(module: nn.Module) -> str | None:
    if not (is_plain_linear(module) or is_fused(module)):
        if "forward" in vars(module):
            return "has a forward that was already replaced; undo that first"
        return f"is a {type(module).__name__}, or its weight is computed; it must be a plain nn.Linear"
    assert isinstance(module, nn.Linear)
    if not module.weight.requires_grad:
        return "is frozen: its weight has no gradient"
    if has_hooks(module.weight):
        return "has hooks on its weight, which would not be called; remove them"
    return None


def _linear(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    linear = forward.__self__  # type: ignore[attr-defined]
    assert isinstance(linear, nn.Linear)
    x: Any = args[0] if args else kwargs.get("input")
    applies = torch.is_grad_enabled() and linear.weight.requires_grad and is_plain_call(linear, x)
    if len(args) + len(kwargs) != 1 or not applies:
        return forward(*args, **kwargs)
    return _LinearAccumulatingGrad.apply(x, linear.weight, linear.bias, matmul_dtype(x))


class _LinearAccumulatingGrad(torch.autograd.Function):
    """F.linear in `dtype`; backward adds the weight gradient to weight.grad if there is one.

    x [..., in_features], weight [out_features, in_features]. Saves x in `dtype` and the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        ctx.weight = weight  # owns .grad; a saved tensor may come back as another object
        with no_autocast(x):
            cast = x.to(dtype)
            # The weight is saved, not its cast, which would be alive until backward.
            ctx.save_for_backward(cast if ctx.needs_input_grad[1] else None, weight)
            bias_cast = None if bias is None else bias.to(dtype)
            # Detached: autograd lets nobody write into a view that a Function made.
            return torch.nn.functional.linear(cast, weight.to(dtype), bias_cast).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        refuse_second_derivatives("a linear layer with fix 'gradient_accumulation_fusion'", "undo the fix")
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        x_dtype, bias_dtype = ctx.dtypes
        dx = dw = db = None
        with no_autocast(grad):
            grad_NV = grad.reshape(-1, grad.shape[-1])
            if wants_weight:
                dw = _weight_gradient(grad_NV, x.reshape(-1, x.shape[-1]), ctx.weight)
            if wants_bias:
                db = grad_NV.sum(0).to(bias_dtype)
            if wants_x:
                dx_ND = (grad_NV @ weight.to(grad.dtype)).to(x_dtype)
                dx = dx_ND.reshape(*grad.shape[:-1], weight.shape[1])
        return dx, dw, db, None


def _weight_gradient(grad_NV: Tensor, x_ND: Tensor, weight_VD: Tensor) -> Tensor | None:
    """Add the gradient to .grad and return None, where autograd would do nothing but add it."""
    if weight_VD.grad is None or not accumulates_into_grad(weight_VD):
        return (grad_NV.t() @ x_ND).to(weight_VD.dtype)
    matmul_into(weight_VD.grad, grad_NV.t(), x_ND, add=True)
    return None
