"""What linear_cross_entropy accepts; everything else is one clear line."""

import math
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import autocast_enabled, matmul_dtype
from oomph.ops.cross_entropy.sharded import shard_of

IMPLS = ("auto", "plain", "chunked", "triton", "reference")
REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class Arguments:
    """One call's arguments, as given."""

    x: Tensor
    weight: Tensor
    target: Tensor
    _: KW_ONLY
    bias: Tensor | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    class_weight: Tensor | None = None
    token_weight: Tensor | None = None
    shift: bool = False
    return_lse: bool = False
    num_valid: int | None = None
    accumulate_into_grad: bool = False
    check: bool = False
    memory_budget: str | int | None = None
    impl: str = "auto"

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the matrix products: autocast's where it is on, except for float64, which it leaves alone."""
        return matmul_dtype(self.x)


def check_arguments(a: Arguments) -> None:
    x, weight, target, bias = a.x, a.weight, a.target, a.bias
    common.check_one_of("impl", a.impl, IMPLS)
    common.check_one_of("reduction", a.reduction, REDUCTIONS)
    weights = {"class_weight": a.class_weight, "token_weight": a.token_weight}
    common.check_floating(x=x, weight=weight)
    common.check_floating_if_given(bias=bias, **weights)
    if not isinstance(target, Tensor) or target.dtype not in (torch.int64, torch.int32):
        found = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ArgumentError(f"target must be a tensor of class numbers (int64 or int32); given: {found}")
    _check_shapes(a)
    common.check_same_device(x=x, weight=weight, target=target, bias=bias, **weights)
    if not autocast_enabled(x):
        common.check_same_dtype(x=x, weight=weight, bias=bias)
    for name, tensor in weights.items():
        if tensor is not None and tensor.requires_grad:
            raise ArgumentError(f"{name} requires a gradient, which is not computed; give {name}.detach()")
    _check_numbers(a)
    if a.accumulate_into_grad and not weight.is_leaf:
        raise ArgumentError(
            "accumulate_into_grad=True needs a weight that owns its .grad (a parameter); "
            "the one given is the result of a computation"
        )
    if a.accumulate_into_grad and shard_of(weight) is not None:
        raise ArgumentError(
            "accumulate_into_grad=True is not there for a vocabulary-sharded weight; leave it out"
        )


def _check_numbers(a: Arguments) -> None:
    if not (_is_number(a.label_smoothing) and 0.0 <= a.label_smoothing <= 1.0):
        given = a.label_smoothing
        raise ArgumentError(f"label_smoothing={given!r} is not valid; choose a number from 0 to 1")
    if not (_is_number(a.z_loss) and a.z_loss >= 0):
        raise ArgumentError(f"z_loss={a.z_loss!r} is not valid; choose 0 or a positive number")
    if a.softcap is not None and not (_is_number(a.softcap) and a.softcap > 0):
        raise ArgumentError(
            f"softcap={a.softcap!r} is not valid; choose a positive number, or None for no cap"
        )
    if isinstance(a.ignore_index, bool) or not isinstance(a.ignore_index, Integral):
        raise ArgumentError(f"ignore_index={a.ignore_index!r} is not valid; give a whole number")
    n = a.num_valid
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
        raise ArgumentError(
            f"num_valid={n!r} is not valid; give the number of kept targets as an int, or None"
        )


def _is_number(given: object) -> bool:
    return isinstance(given, Real) and not isinstance(given, bool) and math.isfinite(given)


def _check_shapes(a: Arguments) -> None:
    x, weight, target = a.x, a.weight, a.target
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ArgumentError(f"weight must be [classes, hidden size]; given: {list(weight.shape)}")
    n_classes, hidden = weight.shape
    if x.dim() < 1 or x.shape[-1] != hidden:
        raise ArgumentError(
            f"x must be [..., {hidden}] to match weight {list(weight.shape)}; given: {list(x.shape)}"
        )
    if target.shape != x.shape[:-1]:
        hint = " (with shift=True too: oomph shifts, not the caller)" if a.shift else ""
        raise ArgumentError(
            f"target must have x's leading shape {list(x.shape[:-1])}, one class per token; "
            f"given: {list(target.shape)}{hint}"
        )
    if a.shift and target.dim() < 1:
        raise ArgumentError("shift=True needs a sequence dimension: x [..., T, hidden size], target [..., T]")
    for name, tensor in (("bias", a.bias), ("class_weight", a.class_weight)):
        if tensor is not None and tensor.shape != (n_classes,):
            raise ArgumentError(f"{name} must be [{n_classes}], one per class; given: {list(tensor.shape)}")
    if a.token_weight is not None and a.token_weight.shape != target.shape:
        raise ArgumentError(
            f"token_weight must be {list(target.shape)}, one per target; given: {list(a.token_weight.shape)}"
        )
