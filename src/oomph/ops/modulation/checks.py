"""What modulated_linear and its companions can take."""

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.modulation.weights import Int8Weight, is_torchao


def check_factors(A: Tensor, B: Tensor, mod: Tensor) -> None:
    """A [d, r], B [r, f], mod [..., r] on one device."""
    fits = A.dim() == 2 and B.dim() == 2 and mod.dim() >= 1
    rank = A.shape[1] if fits else 0
    if not fits or rank == 0 or B.shape[0] != rank or mod.shape[-1] != rank:
        raise ArgumentError(
            f"A {list(A.shape)}, B {list(B.shape)} and mod {list(mod.shape)} do not fit together; "
            "valid: A [d, r], B [r, f], mod [..., r] with r >= 1"
        )
    common.check_same_device(A=A, B=B, mod=mod)


def check_arguments(
    h: Tensor, weight: Tensor | Int8Weight, A: Tensor, B: Tensor, mod: Tensor, bias: Tensor | None
) -> None:
    common.check_floating(h=h, A=A, B=B, mod=mod)
    common.check_floating_if_given(bias=bias)
    _check_weight(weight)
    check_factors(A, B, mod)
    d, f = A.shape[0], B.shape[1]
    if h.dim() < 1 or h.shape[-1] != d or tuple(weight.shape) != (d, f):
        raise ArgumentError(
            f"h {list(h.shape)}, weight {list(weight.shape)}, A {list(A.shape)} and B {list(B.shape)} do not "
            "fit together; valid: h [..., d], weight [d, f], A [d, r], B [r, f] (an nn.Linear's weight is "
            "[f, d]: give linear.weight.t())"
        )
    if bias is not None and tuple(bias.shape) != (f,):
        raise ArgumentError(f"bias has shape {list(bias.shape)}; valid: [{f}]")
    if not _broadcasts(mod.shape[:-1], h.shape[:-1]):
        raise ArgumentError(
            f"mod {list(mod.shape)} does not broadcast to the tokens of h {list(h.shape)}; valid: leading "
            "dimensions like h's, or 1, or none"
        )
    stored = weight.values if isinstance(weight, Int8Weight) else weight
    common.check_same_device(h=h, weight=stored, A=A, B=B, mod=mod, bias=bias)


def _check_weight(weight: object) -> None:
    if isinstance(weight, Int8Weight):
        return
    valid = "a float tensor [d, f], an Int8Weight (quantize_int8(weight)), or a frozen torchao tensor"
    if not isinstance(weight, Tensor):
        raise ArgumentError(f"weight is a {type(weight).__name__}; valid: {valid}")
    if is_torchao(weight):
        if weight.requires_grad:
            raise ArgumentError("weight is quantised but requires a gradient; valid: a frozen weight")
    elif weight.dtype not in common.FLOATS:
        raise ArgumentError(f"weight has dtype {weight.dtype}; valid: {valid}")


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(to), strict=False)
    )
