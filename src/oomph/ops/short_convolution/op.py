"""The public short_convolution: the arguments checked, the implementation chosen and run."""

import functools

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import Choice, choose_triton_or_torch, explained_by, log_choice, no_autocast, no_compile
from oomph.ops.launch import why_not_triton
from oomph.ops.short_convolution.fused import LARGEST_UNIT, FusedConvolution
from oomph.ops.short_convolution.reference import reference
from oomph.ops.tokenwise import tokenwise_checkpoint

IMPLS = ("auto", "reference", "chunked", "triton")


def choose(x: Tensor, weight: Tensor, unit_size: int | None, impl: str) -> Choice:
    """What short_convolution would run with these arguments, and why."""
    common.check_one_of("impl", impl, IMPLS)
    _check(x, weight, unit_size)
    return choose_triton_or_torch(
        impl,
        x,
        why_not_triton(x) or _why_not_these(x, unit_size),
        kernels="on CUDA one kernel reads the input once and writes the output once",
        plain="plain torch, a slice of tokens at a time",
    )


@explained_by(choose)
def short_convolution(
    x: Tensor, weight: Tensor, *, unit_size: int | None = None, impl: str = "auto"
) -> Tensor:
    """silu of a depthwise causal convolution: x [B, T + K - 1, C], weight [C, 1, K] -> [B, T, C].

    Row t of the result depends on rows t .. t + K - 1 of x: the tokens before the first are for the caller to
    put in front, zeros or those of the text before. weight is that of a depthwise nn.Conv1d. `unit_size`, a
    divisor of C: each unit of so many channels is scaled to length 1, y / sqrt(|y|^2 + 1e-6).

    Computed in float32 (float64 for float64) and rounded once, to x's dtype. Kept for backward: the inputs.
    impl: "auto", "chunked" (plain torch in slices of tokens), "triton" (not for float64), "reference".
    """
    return _run(x, weight, unit_size, impl)


@no_compile
def _run(x: Tensor, weight: Tensor, unit_size: int | None, impl: str) -> Tensor:
    choice = log_choice("short_convolution", choose(x, weight, unit_size, impl))
    if choice.impl == "reference":
        with no_autocast(x):
            return reference(x, weight, unit_size)
    if choice.impl == "chunked":
        function = functools.partial(reference, unit_size=unit_size)
        return tokenwise_checkpoint(function, (x,), (weight,), halo=weight.shape[2] - 1)
    return FusedConvolution.apply(x, weight, unit_size)  # type: ignore[no-any-return]


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
    if not whole or unit_size < 1 or x.shape[2] % unit_size:
        raise ArgumentError(f"unit_size={unit_size!r} is not valid; a divisor of the {x.shape[2]} channels")


def _why_not_these(x: Tensor, unit_size: int | None) -> str | None:
    if x.dtype == torch.float64:
        return "the kernel computes in float32, which is too little for float64"
    if unit_size is not None and unit_size > LARGEST_UNIT:
        return f"the unit {unit_size} is above {LARGEST_UNIT}"
    return None
