"""Activation and its derivative over a tile's buffers, by one Triton kernel or by plain torch.

Both compute in fp32 (float64 for float64) and allocate nothing of a tile's size. Results may take the memory
of what they are computed from; `gate` is None in an MLP without one.
"""

import torch
from torch import Tensor

from oomph.ops.launch import Kernels
from oomph.ops.mlp.products import wide
from oomph.ops.mlp.reference import activate as activation_of

_KERNELS = Kernels("oomph.ops.mlp.triton")
_BLOCK = 1024
# Elements that plain torch treats at a time: its temporaries have this size. On a CPU they stay in the last
# cache; with far smaller ones the start of each operation costs more than its work.
_PIECE = {"cpu": 1 << 18}
_PIECE_ELSEWHERE = 1 << 22


def activate(activation: str, gate: Tensor | None, up: Tensor, hidden: Tensor, use_triton: bool) -> None:
    """hidden := act(gate) * up, or act(up). `hidden` may be gate or up."""
    if use_triton:
        _launch("activate", activation, gate, up, hidden)
        return
    for gate_piece, up_piece, hidden_piece in _pieces(gate, up, hidden):
        _activate_piece(activation, gate_piece, up_piece, hidden_piece)


def differentiate(
    activation: str,
    gate: Tensor | None,
    up: Tensor,
    grad: Tensor,
    *,
    d_gate: Tensor | None,
    hidden: Tensor,
    use_triton: bool,
) -> None:
    """From gate, up and grad = d hidden: d_gate and hidden, and d up in the memory of grad.

    `d_gate` may be gate, and `hidden` may be up.
    """
    if use_triton:
        _launch("differentiate", activation, gate, up, grad, up if d_gate is None else d_gate, hidden)
        return
    for gate_piece, up_piece, grad_piece, d_gate_piece, hidden_piece in _pieces(
        gate, up, grad, d_gate, hidden
    ):
        _differentiate_piece(activation, gate_piece, up_piece, grad_piece, d_gate_piece, hidden_piece)


def _launch(name: str, activation: str, gate: Tensor | None, *buffers: Tensor) -> None:
    count = buffers[0].numel()
    if count == 0:
        return
    gated = gate is not None
    grid = (-(-count // _BLOCK),)
    first = buffers[0] if gate is None else gate  # a kernel without a gate never reads it
    _KERNELS.launch(name, grid, first, *buffers, count, ACTIVATION=activation, GATED=gated, BLOCK=_BLOCK)


def _pieces(gate: Tensor | None, up: Tensor, *others: Tensor | None) -> list[tuple]:
    """The buffers, flat, in pieces of equal bounds, None where there is none."""
    size = _PIECE.get(up.device.type, _PIECE_ELSEWHERE)
    flat = [None if each is None else each.view(-1) for each in (gate, up, *others)]
    return [
        tuple(None if each is None else each[at : at + size] for each in flat)
        for at in range(0, up.numel(), size)
    ]


def _activate_piece(activation: str, gate: Tensor | None, up: Tensor, hidden: Tensor) -> None:
    accurate = wide(up.dtype)
    if gate is None:
        hidden.copy_(activation_of(activation, up.to(accurate)))
    else:
        torch.mul(activation_of(activation, gate.to(accurate)), up, out=hidden)


def _differentiate_piece(
    activation: str,
    gate: Tensor | None,
    up: Tensor,
    grad: Tensor,
    d_gate: Tensor | None,
    hidden: Tensor,
) -> None:
    accurate = wide(up.dtype)
    up_wide, grad_wide = up.to(accurate), grad.to(accurate)
    # Where no conversion took place the *_wide names are the buffers, so each is read before it is written.
    if gate is None or d_gate is None:
        value, slope = _value_and_slope_times(activation, up_wide, grad_wide)
        hidden.copy_(value)
        grad.copy_(slope)
        return
    value, slope = _value_and_slope_times(activation, gate.to(accurate), grad_wide * up_wide)
    d_gate.copy_(slope)
    torch.mul(value, up_wide, out=hidden)
    torch.mul(value, grad_wide, out=grad)


def _value_and_slope_times(activation: str, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """act(z) and act'(z) * grad."""
    if activation == "silu":
        # By hand, because value and slope then share the exponential, which is most of the cost on a CPU.
        sigmoid = torch.sigmoid(z)
        value = z * sigmoid
        slope = torch.addcmul(sigmoid, value, 1 - sigmoid)
        return value, slope.mul_(grad)
    if activation == "gelu" and z.device.type == "cpu":
        # Torch's own derivative is up to three times slower on a CPU than these steps.
        below = torch.erf(z * 0.7071067811865476).add_(1).mul_(0.5)  # P(normal < z)
        density = (z * z).mul_(-0.5).exp_().mul_(0.3989422804014327)
        value = z * below
        return value, below.addcmul_(z, density).mul_(grad)
    value = activation_of(activation, z)
    if activation == "relu":
        return value, torch.ops.aten.threshold_backward(grad, z, 0)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return value, torch.ops.aten.gelu_backward(grad, z, approximate=approximate)
