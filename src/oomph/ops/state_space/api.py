"""selective_scan: the public function, its checks, and the choice of an implementation."""

from typing import Any

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.state_space import reference
from oomph.ops.state_space.autograd import SelectiveScan, round_up_chunk, why_not_kernels
from oomph.ops.state_space.chunked import Scan, ScanInputs

DIRECTIONS = ("forward", "backward", "both")
IMPLS = ("auto", "reference", "chunked", "triton")


def _choose(
    impl: str, direction: str, delta_softplus: bool, chunk_size: int | None, **tensors: Any
) -> common.Choice:
    common.check_one_of("impl", impl, IMPLS)
    common.check_one_of("direction", direction, DIRECTIONS)
    common.check_flags(delta_softplus=delta_softplus)
    common.check_whole(**common.not_none(chunk_size=chunk_size))
    _check_tensors(direction, **tensors)
    n = tensors["A"].shape[-1]
    choice = common.choose_triton_or_torch(
        impl,
        tensors["x"],
        common.why_not_triton(tensors["x"]) or why_not_kernels(n, common.state_dtype(*tensors.values())),
        kernels="one kernel per pass, with the states in registers",
    )
    if choice.impl == "reference":
        return choice
    chunk = chunk_size or max(64, 4 * n)  # large states are saved less often
    settings = {"chunk_size": round_up_chunk(chunk) if choice.impl == "triton" else chunk}
    return common.Choice(choice.impl, choice.reason, settings)


@common.explained_by(_choose)
@common.opaque_op
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
    choice = common.log_choice("selective_scan", _choose(**locals()))
    tensors = (x, delta, A, B, C, D, z, delta_bias)
    if choice.impl == "reference":
        wide: list[Any] = [
            None if each is None else each.to(common.state_dtype(*tensors)) for each in tensors
        ]
        arguments = (*wide, delta_softplus, direction)
        with common.no_autocast(x):
            return reference.selective_scan(*arguments).to(x.dtype)
    inputs = ScanInputs(*tensors)
    if direction != "both":  # a leading dimension of directions; z has none
        inputs = ScanInputs(*(None if each is None else each.unsqueeze(0) for each in tensors))._replace(z=z)
    elif x.dim() == 3:
        inputs = inputs._replace(x=x.unsqueeze(0))
    needs_grad = any(each is not None and each.requires_grad for each in tensors)
    directions, batch, length, d = inputs.delta.shape
    scan = Scan(
        *(directions, batch, length, d, inputs.A.shape[2]),
        reverse_first=direction == "backward",
        softplus=delta_softplus,
        chunk=choice.settings["chunk_size"],
        save_states=torch.is_grad_enabled() and needs_grad,
    )
    y: Tensor = SelectiveScan.apply(choice.impl, scan, *inputs)
    return y


def _check_tensors(direction: str, x: Tensor, A: Tensor, **others: Tensor | None) -> None:
    """Values are not checked, because that would synchronise."""
    optional = ("D", "z", "delta_bias")
    floats = {name: each for name, each in others.items() if each is not None or name not in optional}
    common.check_floating(x=x, A=A, **floats)  # type: ignore[arg-type]
    common.check_same_device(x=x, A=A, **others)
    pair = [2] if direction == "both" else []
    if x.dim() != 3 and not (pair and x.dim() == 4 and x.shape[0] == 2):
        valid = "[B, L, d], or [2, B, L, d] with one x per direction" if pair else "[B, L, d]"
        raise ArgumentError(f"x has shape {list(x.shape)}; valid for direction={direction!r}: {valid}")
    if A.dim() != 2 + len(pair) or A.shape[-1] == 0:
        raise ArgumentError(
            f"A has shape {list(A.shape)}; valid for direction={direction!r}: "
            f"[{'2, ' if pair else ''}d, n] with n >= 1"
        )
    (batch, length, d), n = x.shape[-3:], A.shape[-1]
    why = f", for x {list(x.shape)}, n={n} and direction={direction!r}"
    common.check_shape([*pair, batch, length, d], why, delta=others["delta"])
    common.check_shape([*pair, d, n], why, A=A)
    common.check_shape([*pair, batch, length, n], why, B=others["B"], C=others["C"])
    common.check_shape([*pair, d], why, D=others["D"], delta_bias=others["delta_bias"])
    common.check_shape([batch, length, d], why, z=others["z"])
