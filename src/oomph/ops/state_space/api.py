"""selective_scan: the public function, and the choice of an implementation."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import (
    Choice,
    choose_triton_or_torch,
    explained_by,
    log_choice,
    no_autocast,
    opaque_op,
    why_not_triton,
)
from oomph.ops.state_space import reference
from oomph.ops.state_space.arguments import ScanArguments, ScanOptions
from oomph.ops.state_space.autograd import SelectiveScan, round_up_chunk, why_not_kernels


def _choose(a: ScanArguments) -> Choice:
    a.check()
    n = a.A.shape[-1]
    choice = choose_triton_or_torch(
        a.impl,
        a.x,
        why_not_triton(a.x) or why_not_kernels(n, a.state_dtype),
        kernels="one kernel per pass, with the states in registers",
    )
    if choice.impl == "reference":
        return choice
    chunk = a.chunk_size or max(64, 4 * n)  # large states are saved less often
    return replace(
        choice, settings={"chunk_size": round_up_chunk(chunk) if choice.impl == "triton" else chunk}
    )


@explained_by(lambda **arguments: _choose(ScanArguments(**arguments)))
@opaque_op
def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    direction: str = "forward",
    chunk_size: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Mamba's scan: h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t, y_t = C_t . h_t + D x_t, times silu(z_t).

    x, delta, z [B, L, d]; A [d, n]; B, C [B, L, n]; D, delta_bias [d] -> y [B, L, d]. delta_bias is added to
    delta first; `delta_softplus` then applies the softplus.

    direction: "forward" from the first token on; "backward" from the last; "both" runs one scan in each and
    sums them before the gate. Then delta, A, B, C, D and delta_bias have a leading dimension of 2 (forward,
    backward), and x is [B, L, d], shared, or has one too; z and y are [B, L, d]. Index t is token t in every
    tensor, whatever the direction: nothing is flipped.

    dtypes: each tensor may have its own; y has x's, each gradient its input's. States and sums are float32,
    or float64 if an input is; with "both", the first scan's y is stored in x's dtype. Autocast has no effect.

    Exact gradients for every tensor. First derivatives only, except with impl="reference". Saved for
    backward: the inputs, and the state at every `chunk_size`-th token, B L d n / chunk_size numbers per
    direction; the default chunk_size is 4 n and at least 64, so that is at most a quarter of x's size. The
    states of all tokens never exist at once.

    A > 0 or a negative delta may overflow, as the formula does. delta = 0 leaves the state unchanged.

    impl: "auto", "chunked" (plain torch), "triton", "reference" (token by token, recorded by autograd).
    """
    a = ScanArguments(**locals())
    choice = log_choice("selective_scan", _choose(a))
    if choice.impl == "reference":
        return _run_reference(a)
    needs_grad = any(each is not None and each.requires_grad for each in a.tensors.values())
    options = ScanOptions(
        reverse_first=a.direction == "backward",
        softplus=a.delta_softplus,
        chunk=choice.settings["chunk_size"],
        save_states=torch.is_grad_enabled() and needs_grad,
    )
    y: Tensor = SelectiveScan.apply(choice.impl, options, *a.inputs())
    return y


def _run_reference(a: ScanArguments) -> Tensor:
    """The reference in the state's dtype, whatever dtypes are given."""
    dtype = a.state_dtype
    tensors: dict[str, Any] = {
        name: None if each is None else each.to(dtype) for name, each in a.tensors.items()
    }
    with no_autocast(a.x):
        y = reference.selective_scan(**tensors, delta_softplus=a.delta_softplus, direction=a.direction)
    return y.to(a.x.dtype)
