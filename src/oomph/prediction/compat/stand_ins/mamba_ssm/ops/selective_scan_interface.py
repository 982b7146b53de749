"""Memory: state-spaces/mamba, mamba_ssm/ops/selective_scan_interface.py and csrc/selective_scan/
selective_scan.cpp. Real A, and B and C that depend on the input."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd

from oomph.prediction.compat import stand_ins
from oomph.prediction.compat.stand_ins.causal_conv1d.cpp_functions import (
    causal_conv1d_bwd_function,
    causal_conv1d_fwd_function,
)

_kernel = partial(stand_ins.kernel, "mamba_ssm")
_CHUNK = 2048


def _dense(tensor: Tensor | None) -> Any:
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _check(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    checks = (
        (u.dtype in (torch.float32, torch.float16, torch.bfloat16), "u must be fp32, fp16 or bf16"),
        (A.dtype in (torch.float32, torch.complex64), "A must be fp32 or complex64"),
        (delta.dtype == u.dtype, "delta must have the dtype of u"),
        (B.dtype == (u.dtype if B.dim() >= 3 else A.dtype), "B must have the dtype of u"),
        (C.dtype == (u.dtype if C.dim() >= 3 else A.dtype), "C must have the dtype of u"),
        (D is None or D.dtype == torch.float32, "D must be fp32"),
        (A.shape[1] <= 256, "selective_scan only supports state dimension <= 256"),
        (delta.shape == u.shape, "delta must have the shape of u"),
    )
    for holds, message in checks:
        if not holds:
            raise RuntimeError(f"selective_scan: {message}")


def _scan_forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The result before the gate, the states of chunks, and the result."""
    _check(u, delta, A, B, C, D)
    gated = None if z is None else torch.empty_like(z)
    out = torch.empty_like(delta)
    batch, channels, length = u.shape
    states = A.new_empty(batch, channels, math.ceil(length / _CHUNK), A.shape[1] * 2)
    _kernel((u, delta, A, B, C, D, z, delta_bias, gated, out, states))
    return out, states, gated


def _scan_backward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    dout: Tensor,
    dz: Tensor | None,
    recompute: bool,
) -> tuple[Any, ...]:
    if z is not None and dz is None:
        dz = torch.empty_like(z)
    gated = torch.empty_like(u) if z is not None and recompute else None
    du, ddelta = torch.empty_like(u), torch.empty_like(delta)
    dA = torch.zeros_like(A)
    dB, dC = (
        torch.zeros_like(each, dtype=torch.float32 if each.dim() >= 3 else each.dtype) for each in (B, C)
    )
    dD, dbias = (None if each is None else torch.zeros_like(each) for each in (D, delta_bias))
    _kernel((u, delta, A, B, C, D, z, delta_bias, dout, du, ddelta, dA, dB, dC, dz, gated))
    return du, ddelta, dA, dB.to(B.dtype), dC.to(C.dtype), dD, dbias, dz, gated


class SelectiveScanFn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        delta_bias: Tensor | None,
        return_last_state: bool,
    ) -> Any:
        u, delta, B, C, z = map(_dense, (u, delta, B, C, z))
        D = D.contiguous() if D is not None else None
        ctx.squeezed = B.dim() == 3, C.dim() == 3
        B, C = (each.unsqueeze(1) if each.dim() == 3 else each for each in (B, C))
        out, states, gated = _scan_forward(u, delta, A, B, C, D, z, delta_bias)
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, states, None if z is None else out)
        result = out if gated is None else gated
        return (result, states[:, :, -1, 1::2]) if return_last_state else result

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *others: Any) -> Any:
        u, delta, A, B, C, D, z, delta_bias, *_ = ctx.saved_tensors
        given = u, delta, A, B, C, D, z, delta_bias
        du, ddelta, dA, dB, dC, dD, dbias, dz, _ = _scan_backward(*given, _dense(dout), None, False)
        dB, dC = (each.squeeze(1) if it else each for each, it in zip((dB, dC), ctx.squeezed, strict=True))
        return du, ddelta, dA, dB, dC, dD, dz, dbias, None


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Of u, delta and z [batch, channels, L] with A [channels, states], B and C [batch, states, L]."""
    return SelectiveScanFn.apply(u, delta, A, B, C, D, z, delta_bias, return_last_state)


def _by_sequence(rows: Tensor, length: int) -> Tensor:
    """[batch * L, states] as [batch, 1, states, L]"""
    return rows.unflatten(0, (-1, length)).transpose(1, 2).unsqueeze(1).contiguous()


def _by_row(states: Tensor) -> Tensor:
    return states.squeeze(1).transpose(1, 2).flatten(0, 1).contiguous()


class MambaInnerFn(torch.autograd.Function):
    """Convolution, projections, scan and output projection; backward computes the first two again."""

    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(
        ctx: Any,
        xz: Tensor,
        conv1d_weight: Tensor,
        conv1d_bias: Tensor | None,
        x_proj_weight: Tensor,
        delta_proj_weight: Tensor,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        A: Tensor,
        D: Tensor | None,
        delta_bias: Tensor | None,
        checkpoint_lvl: int,
    ) -> Tensor:
        length, rank, states = xz.shape[-1], delta_proj_weight.shape[1], A.shape[-1]
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            x_proj_weight, delta_proj_weight, out_proj_weight = (
                each.to(dtype) for each in (x_proj_weight, delta_proj_weight, out_proj_weight)
            )
            out_proj_bias = out_proj_bias.to(dtype) if out_proj_bias is not None else None
        xz = _dense(xz)
        conv1d_weight = conv1d_weight.squeeze(1)
        conv1d_bias = conv1d_bias.contiguous() if conv1d_bias is not None else None
        x, z = xz.chunk(2, dim=1)
        conv = causal_conv1d_fwd_function(x, conv1d_weight, conv1d_bias, None, None, None, True)
        projected = F.linear(conv.transpose(1, 2).flatten(0, 1), x_proj_weight)
        delta = _delta(delta_proj_weight, projected[:, :rank], length)
        B = _by_sequence(projected[:, rank : rank + states], length)
        C = _by_sequence(projected[:, -states:], length)
        D = D.contiguous() if D is not None else None
        out, scan_states, gated = _scan_forward(conv, delta, A, B, C, D, z, delta_bias)
        assert gated is not None
        ctx.checkpointed, ctx.has_out_bias = checkpoint_lvl >= 1, out_proj_bias is not None
        kept = (None, None) if ctx.checkpointed else (conv, delta)
        weights = conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight
        ctx.save_for_backward(xz, projected, *kept, *weights, A, B, C, D, delta_bias, scan_states, out)
        return F.linear(gated.transpose(1, 2), out_proj_weight, out_proj_bias)

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx: Any, dout: Tensor) -> Any:
        xz, projected, conv, delta, *weights, A, B, C, D, delta_bias, _, _ = ctx.saved_tensors
        conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight = weights
        batch, _, length = xz.shape
        rank, states = delta_proj_weight.shape[1], A.shape[-1]
        x, z = xz.chunk(2, dim=1)
        dout = _dense(dout)
        if ctx.checkpointed:
            conv = causal_conv1d_fwd_function(x, conv1d_weight, conv1d_bias, None, None, None, True)
            delta = _delta(delta_proj_weight, projected[:, :rank], length)
        dxz = torch.empty_like(xz)
        dx, dz = dxz.chunk(2, dim=1)
        rows = dout.permute(2, 0, 1).flatten(1)
        dout_y = (out_proj_weight.t() @ rows).unflatten(1, (batch, length)).transpose(0, 1)
        dconv, ddelta, dA, dB, dC, dD, dbias, _, gated = _scan_backward(
            conv, delta, A, B, C, D, z, delta_bias, dout_y, dz, True
        )
        dout_weight = rows @ gated.transpose(0, 1).flatten(1).t()
        dout_bias = dout.sum(dim=(0, 1)) if ctx.has_out_bias else None
        dprojected = torch.empty_like(projected)
        dB = _by_row(dB)
        dprojected[:, rank : rank + states] = dB
        dB = None
        dC = _by_row(dC)
        dprojected[:, -states:] = dC
        dC = None
        ddelta = ddelta.transpose(0, 1).flatten(1)
        ddelta_weight = ddelta @ projected[:, :rank]
        dprojected[:, :rank] = ddelta.t() @ delta_proj_weight
        dconv = dconv.transpose(0, 1).flatten(1)
        dx_weight = dprojected.t() @ conv.transpose(1, 2).flatten(0, 1)
        dconv = torch.addmm(dconv, x_proj_weight.t(), dprojected.t(), out=dconv)
        dconv = dconv.unflatten(1, (batch, length)).transpose(0, 1)
        _, dconv_weight, dconv_bias, _ = causal_conv1d_bwd_function(
            x, conv1d_weight, conv1d_bias, dconv, None, None, None, dx, False, True
        )
        grads = dxz, dconv_weight.unsqueeze(1), dconv_bias, dx_weight, ddelta_weight, dout_weight, dout_bias
        return *grads, dA, dD, dbias, None


def _delta(weight: Tensor, projected: Tensor, length: int) -> Tensor:
    return (weight @ projected.t()).unflatten(1, (-1, length)).transpose(0, 1)


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Any:
    """Of xz [batch, 2 * channels, L]."""
    others = B, C, B_proj_bias, C_proj_bias, b_rms_weight, c_rms_weight, dt_rms_weight
    if any(each is not None for each in others):
        raise NotImplementedError("oomph's stand-in for mamba_inner_fn takes no B, C, their biases and norms")
    weights = conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias
    return MambaInnerFn.apply(xz, *weights, A, D, delta_bias, checkpoint_lvl)
