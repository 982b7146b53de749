"""selective_scan: what is chosen, and how a call is brought into the one form that is computed."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import Choice, choose_triton_or_torch, explained_by, log_choice, no_autocast, no_compile
from oomph.ops.launch import why_not_triton
from oomph.ops.state_space import chunked, fused, reference
from oomph.ops.state_space.arguments import check_arguments
from oomph.ops.state_space.function import Passes, SelectiveScan
from oomph.ops.state_space.problem import Inputs, Options, cast, state_dtype

_PASSES = {
    "chunked": Passes(chunked.forward, chunked.backward),
    "triton": Passes(fused.forward, fused.backward),
}


def choose(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    direction: str,
    initial_state: Tensor | None,
    chunk_size: int | None,
    impl: str,
    **_: Any,
) -> Choice:
    """What selective_scan would run with these arguments, and why."""
    check_arguments(x, delta, A, B, C, D, z, delta_bias, direction, initial_state, chunk_size, impl)
    wide = state_dtype(x, delta, A, B, C, D, z, delta_bias, initial_state)
    choice = choose_triton_or_torch(
        impl,
        x,
        why_not_triton(x) or fused.why_not_these(A.shape[-1], wide),
        kernels="one kernel each way, which holds the states in registers",
    )
    if choice.impl == "reference":
        return choice
    chunk = chunk_size or _default_chunk(A.shape[-1])
    return replace(
        choice, settings={"chunk_size": fused.whole_chunk(chunk) if choice.impl == "triton" else chunk}
    )


@explained_by(choose)
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
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba's scan: h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t, y_t = C_t . h_t + D x_t, times silu(z_t).

    x, delta, z [B, L, d]; A [d, n]; B, C [B, L, n]; D, delta_bias [d]; initial_state [B, d, n]
    -> y [B, L, d], or (y, final state [B, d, n]) with `return_final_state`. delta_bias is added to delta
    first, then with `delta_softplus` the softplus is taken.

    direction: "forward" from the first token on; "backward" from the last; "both" runs one scan each way and
    adds them up before the gate. Then delta, A, B, C, D, delta_bias and the states are pairs with a leading 2
    (forward, backward), and x is [B, L, d], shared, or such a pair; z and y are [B, L, d]. Index t is token t
    in every tensor, whichever way it is visited: nothing is flipped. The sum is what a bidirectional block
    goes on with, and costs one output instead of two.

    dtypes: each tensor may have its own; y has x's, each gradient its input's. States and sums are float32,
    or float64 where an input is; with "both", the first scan's y waits for the second in x's dtype. Autocast
    changes nothing.

    Exact gradients for every tensor; a gradient of gradients is refused, except by impl="reference". Kept for
    backward: the inputs, and the state at every `chunk_size`-th token, B L d n / chunk_size numbers per
    direction; by default chunk_size is 4 n and at least 64, so that is at most a quarter of x's count. The
    states of all tokens never exist at once.

    A > 0, or a negative delta, is computed as it is written and may overflow, as the formula does. delta = 0
    leaves the state untouched.

    impl: "auto", "chunked" (plain torch), "triton", "reference" (token by token, kept by autograd).
    """
    return _run(
        x, delta, A, B, C, D, z, delta_bias, delta_softplus, direction, initial_state, return_final_state,
        chunk_size, impl,
    )  # fmt: skip


@no_compile  # a compiler would unroll the loops over tokens
def _run(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    softplus: bool,
    direction: str,
    initial_state: Tensor | None,
    return_final_state: bool,
    chunk_size: int | None,
    impl: str,
) -> Tensor | tuple[Tensor, Tensor]:
    choice = choose(x, delta, A, B, C, D, z, delta_bias, direction, initial_state, chunk_size, impl)
    log_choice("selective_scan", choice)
    if choice.impl == "reference":
        y, final = _reference(x, delta, A, B, C, D, z, delta_bias, softplus, direction, initial_state)
    else:
        both, given = direction == "both", (x, delta, A, B, C, D, z, delta_bias, initial_state)
        wants = any(each is not None and each.requires_grad for each in given)
        options = Options(
            first_is_leftward=direction == "backward",
            softplus=softplus,
            chunk=choice.settings["chunk_size"],
            keep_states=torch.is_grad_enabled() and wants,
            keep_final=return_final_state,
        )
        inputs = Inputs(
            x if x.dim() == 4 else x.unsqueeze(0),
            delta if both else delta.unsqueeze(0),
            A if both else A.unsqueeze(0),
            B if both else B.unsqueeze(0),
            C if both else C.unsqueeze(0),
            D if both or D is None else D.unsqueeze(0),
            z,
            delta_bias if both or delta_bias is None else delta_bias.unsqueeze(0),
            initial_state if both or initial_state is None else initial_state.unsqueeze(0),
        )
        y, final = SelectiveScan.apply(_PASSES[choice.impl], options, *inputs)
        if final is not None and not both:
            final = final.squeeze(0)
    return (y, final) if return_final_state else y


def _reference(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    softplus: bool,
    direction: str,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The reference in the state's dtype, whatever dtypes were given."""
    wide = state_dtype(x, delta, A, B, C, D, z, delta_bias, initial_state)
    with no_autocast(x):
        y, final = reference.selective_scan(
            x.to(wide),
            delta.to(wide),
            A.to(wide),
            B.to(wide),
            C.to(wide),
            cast(D, wide),
            z=cast(z, wide),
            delta_bias=cast(delta_bias, wide),
            delta_softplus=softplus,
            direction=direction,
            initial_state=cast(initial_state, wide),
        )
    return y.to(x.dtype), final


def _default_chunk(n: int) -> int:
    """Where n is large the states are, and fewer of them are kept."""
    return max(64, 4 * n)
