"""modulated_linear: the arguments checked, the implementation chosen, the products run."""

import torch
from torch import Tensor

from oomph.ops import common
from oomph.ops.common import (
    Choice,
    choose_triton_or_torch,
    explained_by,
    log_choice,
    matmul_dtype,
    no_compile,
)
from oomph.ops.launch import why_not_triton
from oomph.ops.modulation import chunked, fused, reference
from oomph.ops.modulation.checks import check_arguments
from oomph.ops.modulation.function import ModulatedLinear, PullBack
from oomph.ops.modulation.weights import Int8Weight, is_torchao
from oomph.units import MiB, counted

_PULL_BACK: dict[str, PullBack] = {"chunked": chunked.pull_back, "triton": fused.pull_back}

# Where the kernel wins: enough blocks of 256 rows to fill a GPU, and a rank at which cuBLAS is bound by
# reading g. Its partial sums must fit into the room of h's gradient, which is made after they are gone: so
# they do not raise the peak.
_MANY_TOKENS = 32768
_LARGEST_PARTIALS = 256 * MiB


def choose(
    h: Tensor,
    weight: Tensor | Int8Weight,
    A: Tensor,
    B: Tensor,
    mod: Tensor,
    bias: Tensor | None,
    impl: str,
) -> Choice:
    """What modulated_linear would run with these arguments, and why."""
    common.check_one_of("impl", impl, ("auto", "reference", "chunked", "triton"))
    check_arguments(h, weight, A, B, mod, bias)
    choice = choose_triton_or_torch(
        impl,
        h,
        why_not_triton(h) or _why_not_these(h, A.shape[1]),
        kernels="many tokens and a small rank: one pass over the gradient makes both products",
    )
    if impl == "auto" and choice.impl == "triton" and (why := _why_not_worth_it(h, B)):
        return Choice("chunked", why)
    return choice


@explained_by(choose)
def modulated_linear(
    h: Tensor,
    weight: Tensor | Int8Weight,
    A: Tensor,
    B: Tensor,
    mod: Tensor,
    bias: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """h @ weight + ((h @ A) * mod) @ B + bias: every token has its own weight, `weight + A diag(mod) B`.

    h [..., d], weight [d, f] (a view such as `linear.weight.t()` is used in place), A [d, r], B [r, f],
    bias [f] -> [..., f]. mod [..., r] has h's leading shape or broadcasts to it; its gradient is summed over
    what was broadcast.

    dtypes: the products run in h's dtype (under autocast, autocast's) with float32 accumulation, and the
    result has it. The others may have any float dtype, which their gradients have too. A weight of another
    dtype, or an `Int8Weight`, is converted in slices of at most 32 MiB, never as a whole; a torchao tensor is
    converted as a whole for the time of one product.

    Exact gradients for all but an 8-bit weight; a frozen input's work is skipped. Kept for backward: inputs,
    and h @ A [..., r]; h itself only where A or weight is trained. A gradient of gradients is refused, except
    by impl="reference".

    impl: "auto", "chunked" (plain torch), "triton", "reference" (the plain expression, kept by autograd).
    """
    return _run(h, weight, A, B, mod, bias, impl)


@no_compile  # a compiler would trace the kernel's launch, and there is nothing left to fuse
def _run(
    h: Tensor,
    weight: Tensor | Int8Weight,
    A: Tensor,
    B: Tensor,
    mod: Tensor,
    bias: Tensor | None,
    impl: str,
) -> Tensor:
    choice = log_choice("modulated_linear", choose(h, weight, A, B, mod, bias, impl))
    dtype = matmul_dtype(h)
    if choice.impl == "reference":
        whole = weight.dequantize(dtype) if isinstance(weight, Int8Weight) else _whole(weight, dtype)
        others = (None if each is None else each.to(dtype) for each in (A, B, mod, bias))
        return reference.modulated_linear(h.to(dtype), whole, *others)  # type: ignore[arg-type]
    stored, scale = (weight.values, weight.scale) if isinstance(weight, Int8Weight) else (weight, None)
    pull_back = _PULL_BACK[choice.impl]
    return ModulatedLinear.apply(h.to(dtype), stored, scale, A, B, mod, bias, pull_back)  # type: ignore[no-any-return]


def _whole(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight.dequantize() if is_torchao(weight) else weight).to(dtype)


def _why_not_these(h: Tensor, rank: int) -> str | None:
    if matmul_dtype(h) == torch.float64:
        return "the kernel accumulates in float32, which is too little for float64"
    if h.device.type == "cpu" and matmul_dtype(h) == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    if rank > fused.LARGEST_RANK:
        return f"the rank {rank} is above {fused.LARGEST_RANK}"
    return None


def _why_not_worth_it(h: Tensor, B: Tensor) -> str | None:
    dtype, d = matmul_dtype(h), h.shape[-1]
    tokens, (rank, features) = h.numel() // max(1, d), B.shape
    if dtype == torch.float32:
        return "in float32 the library's products are as fast"
    if tokens < _MANY_TOKENS:
        return f"{counted(tokens, 'token')}: too few to fill a GPU with row blocks"
    if rank > fused.LARGEST_RANK_OF_TILE:
        return f"at rank {rank} the library's products are as fast"
    if not (h.requires_grad and torch.is_grad_enabled()):
        return "no gradient of h is made, whose room the kernel's partial sums would need"
    if fused.partial_bytes(tokens, features, rank) > min(tokens * d * dtype.itemsize, _LARGEST_PARTIALS):
        return "the kernel's partial sums would take too much memory"
    return None
