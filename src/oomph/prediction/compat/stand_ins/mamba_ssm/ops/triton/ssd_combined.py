"""Memory: state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py and the files of ops that it calls, where
kernels are not required to be deterministic.

x, z [batch, L, heads, head size]; dt [batch, L, heads]; A [heads]; B and C [batch, L, groups, states].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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

from .layernorm_gated import norm_backward, norm_forward

_FLOAT = torch.float32


@dataclass(frozen=True)
class _Sizes:
    batch: int
    length: int
    heads: int
    head: int
    groups: int
    states: int
    chunk: int

    @staticmethod
    def of(x: Tensor, B: Tensor, chunk: int) -> _Sizes:
        if x.shape[2] % B.shape[2]:
            raise AssertionError("the number of heads must be a multiple of the number of groups")
        batch, length, heads, head = x.shape
        return _Sizes(batch, length, heads, head, B.shape[2], B.shape[3], chunk)

    @property
    def chunks(self) -> int:
        return math.ceil(self.length / self.chunk)

    @property
    def of_steps(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.chunks, self.chunk

    @property
    def of_states(self) -> tuple[int, ...]:
        return self.batch, self.chunks, self.heads, self.head, self.states

    @property
    def flops(self) -> float:
        of_groups = self.groups * self.chunk * self.states
        return (
            self.batch * self.length * (of_groups + self.heads * self.head * (4 * self.states + self.chunk))
        )

    def splits(self) -> int:
        """Of the heads of a group, between programs that sum over them."""
        multiprocessors, per_group = stand_ins.gpu("mamba_ssm").multiprocessors, self.heads // self.groups
        of_one = max(min(math.ceil(self.batch * self.chunks * self.heads / multiprocessors), per_group), 1)
        return math.ceil(per_group / of_one)

    def kernel(self, name: str, tensors: tuple[Tensor | None, ...], share: float = 0.0) -> None:
        """`share`: of the flops of the forward pass."""
        key = name, self.heads, self.head, self.groups, self.states, self.chunk
        stand_ins.kernel("mamba_ssm", tensors, flops=share * self.flops, tuned_for=key)


def _dense(tensor: Tensor | None) -> Any:
    if tensor is None or tensor.stride(-1) == 1 or (tensor.dim() == 4 and tensor.stride(1) == 1):
        return tensor
    return tensor.contiguous()


def _steps(sizes: _Sizes, dt: Tensor, A: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums of dt * A in each chunk, and dt."""
    dt_out, sums = (dt.new_empty(sizes.of_steps, dtype=_FLOAT) for _ in range(2))
    sizes.kernel("chunk_cumsum_fwd", (dt, A, bias, dt_out, sums))
    return sums, dt_out


def _chunk_states(sizes: _Sizes, B: Tensor, x: Tensor, dt: Tensor, sums: Tensor) -> Tensor:
    states = x.new_empty(sizes.of_states, dtype=_FLOAT)
    sizes.kernel("chunk_state_fwd", (B, x, dt, sums, states), 0.3)
    return states


def _passed_states(
    sizes: _Sizes, states: Tensor, sums: Tensor, initial: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    out = states.new_empty(sizes.of_states, dtype=dtype)
    final = states.new_empty(sizes.batch, *sizes.of_states[2:], dtype=_FLOAT)
    sizes.kernel("state_passing_fwd", (states, sums, initial, out, final))
    return out, final


def _products(sizes: _Sizes, C: Tensor, B: Tensor) -> Tensor:
    CB = C.new_empty(sizes.batch, sizes.chunks, sizes.groups, sizes.chunk, sizes.chunk, dtype=_FLOAT)
    sizes.kernel("bmm_chunk_fwd", (C, B, CB), 0.1)
    return CB


def _scan_forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk: int,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The result, that before the gate, dt, the sums of dt * A, and the last states."""
    sizes = _Sizes.of(x, B, chunk)
    x, B, C, D, z = map(_dense, (x, B, C, D, z))
    sums, dt = _steps(sizes, dt, A, dt_bias)
    states = _chunk_states(sizes, B, x, dt, sums)
    states, final = _passed_states(sizes, states, sums, initial, C.dtype)
    CB = _products(sizes, C, B)
    out = x.new_empty(x.shape)
    before_gate = None if z is None else x.new_empty(x.shape)
    sizes.kernel("chunk_scan_fwd", (CB, x, dt, sums, C, states, D, z, out, before_gate), 0.6)
    return out, before_gate, dt, sums, final


def _scan_backward(
    dout: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk: int,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial: Tensor | None,
    given: tuple[Tensor | None, ...] = (None, None, None, None, None),
    recompute: bool = False,
) -> tuple[Any, ...]:
    """`given`: where the gradients of x, dt, B, C and z are written."""
    sizes = _Sizes.of(x, B, chunk)
    dx, ddt_out, dB_out, dC_out, dz = given
    dout = _dense(dout)
    dB_out = torch.empty_like(B) if dB_out is None else dB_out
    dC_out = torch.empty_like(C) if dC_out is None else dC_out
    ddt_out = torch.empty_like(dt) if ddt_out is None else ddt_out
    dt_in = dt.clone()
    sums, dt = _steps(sizes, dt_in, A, dt_bias)
    CB = _products(sizes, C, B)
    states = _chunk_states(sizes, B, x, dt, sums)
    states, _ = _passed_states(sizes, states, sums, initial, _FLOAT)
    gated, dD = None, None
    blocks = math.ceil(chunk / 32)
    if z is not None:
        if D is not None:
            dD = x.new_empty(blocks, sizes.batch, sizes.chunks, *_like(D), dtype=_FLOAT)
        dz = torch.empty_like(z) if dz is None else dz
        gated = torch.empty_like(x) if recompute else None
        ungated = torch.empty_like(dout)
        sizes.kernel("chunk_scan_bwd_dz", (x, z, dout, dz, gated, ungated, dD))
        dout = ungated
        dD = None if D is None or dD is None else dD.sum(dim=(0, 1, 2)).to(D.dtype).reshape(D.shape)
    dstates = x.new_empty(sizes.of_states, dtype=_FLOAT)
    sizes.kernel("chunk_scan_bwd_dstates", (C, sums, dout, dstates), 0.3)
    dstates_out, states_out = (x.new_empty(sizes.of_states) for _ in range(2))
    dinitial = None if initial is None else torch.empty_like(initial)
    decay_parts = math.ceil(sizes.head * sizes.states / 64)
    ddecay = x.new_empty(sizes.batch, sizes.heads, sizes.chunks, decay_parts, dtype=_FLOAT)
    sizes.kernel("state_passing_bwd", (states, dstates, dstates_out, states_out, ddecay))
    states, dstates = states_out, dstates_out
    ddecay = ddecay.sum(dim=-1)
    dD_parts = None
    if D is not None:
        dD_parts = x.new_zeros(blocks, sizes.batch, sizes.chunks, *_like(D), dtype=_FLOAT)
    dx = torch.empty_like(x) if dx is None else dx
    ddt = x.new_empty(sizes.of_steps, dtype=_FLOAT)
    sizes.kernel("chunk_scan_chunk_state_bwd_dx", (x, dt, sums, B, CB, dout, dstates, dD_parts, dx, ddt), 0.9)
    if D is not None and dD_parts is not None:
        summed = dD_parts.sum(dim=(0, 1, 2))
        dD = summed.to(D.dtype).reshape(D.shape) if z is None else dD
    splits = sizes.splits()
    of_groups = sizes.batch, sizes.length, splits, sizes.groups, sizes.states
    after = x.new_empty(sizes.of_steps, dtype=_FLOAT)
    dB = x.new_empty(of_groups, dtype=_FLOAT)
    sizes.kernel("chunk_state_bwd_db", (x, dt, sums, dstates, B, dB, after), 0.3)
    dB = dB.sum(2)
    torch.cumsum(after, dim=-1, out=after)
    before = x.new_empty(sizes.of_steps, dtype=_FLOAT)
    dC = x.new_empty(of_groups, dtype=_FLOAT)
    sizes.kernel("chunk_scan_bwd_dc", (states, sums, dout, C, dC, before), 0.3)
    dC = dC.sum(2)
    square = sizes.batch, sizes.chunks, splits, sizes.groups, chunk, chunk
    dCB = x.new_empty(square, dtype=_FLOAT)
    sizes.kernel("chunk_scan_bwd_dcb", (x, dt, sums, dout, dCB), 0.3)
    dCB = dCB.sum(2)
    sizes.kernel("bmm_chunk_bwd", (C, dCB, dB, dB_out), 0.1)
    sizes.kernel("bmm_chunk_bwd", (B, dCB, dC, dC_out), 0.1)
    before[..., -1] += ddecay
    before_steps = before.flip([-1]).cumsum(dim=-1).flip([-1])
    inside = x.new_empty(*sizes.of_steps[:3], blocks, chunk, dtype=_FLOAT)
    sizes.kernel("chunk_scan_bwd_ddAcs_stable", (x, dt, sums, dout, CB, inside), 0.3)
    inside = inside.sum(dim=3)
    inside += after + before_steps
    dbias = None if dt_bias is None else torch.empty_like(dt_bias, dtype=_FLOAT)
    dA = torch.empty_like(A, dtype=_FLOAT)
    sizes.kernel("chunk_cumsum_bwd", (inside, ddt, dt_in, A, dt_bias, ddt_out, dA, dbias))
    return dx, ddt_out, dA, dB_out, dC_out, dD, dz, dbias, dinitial, gated


def _like(D: Tensor) -> tuple[int, int]:
    """The sizes of its partial sums, of one or all elements of a head."""
    return D.shape[0], D.shape[1] if D.dim() == 2 else 1


class MambaChunkScanCombinedFn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        initial: Tensor | None,
        chunk: int,
        return_final: bool,
    ) -> Any:
        given = x, dt, A, B, C, chunk, D, z, dt_bias, initial
        out, before_gate, _, sums, final = _scan_forward(*given)
        saved_out = out if z is None else before_gate
        ctx.save_for_backward(saved_out, x, dt, sums, A, B, C, D, z, dt_bias, initial)
        ctx.chunk = chunk
        return (out, final) if return_final else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *others: Any) -> Any:
        _, x, dt, _, A, B, C, D, z, dt_bias, initial = ctx.saved_tensors
        given = dout, x, dt, A, B, C, ctx.chunk, D, z, dt_bias, initial
        return *_scan_backward(*given)[:9], None, None


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    return MambaChunkScanCombinedFn.apply(*given, chunk_size, return_final_states)


@dataclass
class _Block:
    """Of Mamba 2's block: what is not a tensor."""

    chunk: int
    head: int
    groups: int
    return_final: bool
    silu: bool
    heads: int = 0
    states: int = 0
    mlp: int = 0  # channels that pass the scan by, in a gated pair

    @property
    def channels(self) -> int:
        return self.heads * self.head

    def split(self, zxbcdt: Tensor) -> tuple[Tensor, ...]:
        widths = 2 * self.mlp, self.channels, self.channels + 2 * self.groups * self.states, self.heads
        return zxbcdt.split(widths, dim=-1)

    def scanned(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, B, C = xBC.split([self.channels, *[self.groups * self.states] * 2], dim=-1)
        grouped = (each.unflatten(-1, (self.groups, self.states)) for each in (B, C))
        return self.by_head(x), *grouped

    def by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head))


def _aligned(tensor: Tensor) -> Tensor:
    if tensor.shape[2] % 8:
        raise AssertionError("Number of convolution channels is required to be a multiple of 8.")
    return (tensor if tensor.stride(1) % 8 == 0 else tensor.contiguous()).transpose(1, 2)


class MambaSplitConv1dScanCombinedFn(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(
        ctx: Any,
        zxbcdt: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        initial: Tensor | None,
        norm_weight: Tensor | None,
        out_weight: Tensor | None,
        out_bias: Tensor | None,
        block: _Block,
    ) -> Any:
        block.heads = D.shape[0]
        block.states = (conv_weight.shape[0] - block.channels) // block.groups // 2
        width = 2 * block.channels + 2 * block.groups * block.states + block.heads
        block.mlp = (zxbcdt.shape[-1] - width) // 2
        zx0, z, xBC, dt = block.split(zxbcdt)
        conv = causal_conv1d_fwd_function(
            _aligned(xBC), conv_weight, conv_bias, None, None, None, block.silu
        ).transpose(1, 2)
        x, B, C = block.scanned(conv)
        gate = block.by_head(z) if norm_weight is None else None
        scanned = x, dt, A, B, C, block.chunk, D, gate, dt_bias, initial
        out, before_gate, _, _, final = _scan_forward(*scanned)
        scale, kept = None, out if before_gate is None else before_gate
        out = out.flatten(2)
        if norm_weight is not None:
            norm_weight = norm_weight.contiguous()
            all_channels = block.mlp + block.channels
            whole = out.new_empty(*out.shape[:2], all_channels) if block.mlp else None
            normed = None if whole is None else whole[..., block.mlp :].flatten(0, 1)
            group = block.channels // block.groups
            rows, gates = out.flatten(0, 1), z.flatten(0, 1)
            normed, _, scale = norm_forward(rows, norm_weight, None, gates, group, True, normed)
            out = normed.unflatten(0, out.shape[:2]) if whole is None else whole
        elif block.mlp:
            out = torch.cat([F.silu(zx0[..., : block.mlp]) * zx0[..., block.mlp :], out], dim=-1)
        if out_weight is not None:
            if torch.is_autocast_enabled("cuda"):
                dtype = torch.get_autocast_dtype("cuda")
                out, out_weight = out.to(dtype), out_weight.to(dtype)
                out_bias = out_bias.to(dtype) if out_bias is not None else None
            out = F.linear(out, out_weight, out_bias)
        inputs = zxbcdt, conv_weight, conv_bias, kept, A, D, dt_bias, initial
        ctx.save_for_backward(*inputs, norm_weight, scale, out_weight, out_bias)
        ctx.block = block
        return (out, final) if block.return_final else out

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx: Any, dout: Tensor, *others: Any) -> Any:
        zxbcdt, conv_weight, conv_bias, out, A, D, dt_bias, initial, *of_output = ctx.saved_tensors
        norm_weight, scale, out_weight, out_bias = of_output
        block: _Block = ctx.block
        recompute = out_weight is not None
        again = out.new_empty(*out.shape[:2], block.mlp + block.channels) if recompute else None
        _, z, xBC, dt = block.split(zxbcdt)
        conv = causal_conv1d_fwd_function(
            _aligned(xBC), conv_weight, conv_bias, None, None, None, block.silu
        ).transpose(1, 2)
        x, B, C = block.scanned(conv)
        dzxbcdt = torch.empty_like(zxbcdt)
        _, dz, dxBC_out, ddt = block.split(dzxbcdt)
        dxBC = torch.empty_like(xBC)
        dx, dB, dC = block.scanned(dxBC)
        dprojected = dout
        if out_weight is not None:
            dout = F.linear(dout, out_weight.t())
        dscanned = block.by_head(dout[..., block.mlp :])
        dnorm_weight = None
        scan = x, dt, A, B, C, block.chunk, D
        if norm_weight is None:
            *grads, gated = _scan_backward(
                dscanned,
                *scan,
                block.by_head(z),
                dt_bias,
                initial,
                (dx, ddt, dB, dC, block.by_head(dz)),
                recompute,
            )
            again = None if gated is None else gated.flatten(2)
        else:
            group = block.channels // block.groups
            rows = dscanned.flatten(2).flatten(0, 1), out.flatten(2).flatten(0, 1)
            written = None if again is None else again[..., block.mlp :].flatten(0, 1)
            gates, dgates = z.flatten(0, 1), dz.flatten(0, 1)
            drows, dnorm_weight, *_ = norm_backward(
                *rows, norm_weight, None, None, scale, gates, group, dgates, written
            )
            dscanned = block.by_head(drows.unflatten(0, out.shape[:2]))
            *grads, _ = _scan_backward(dscanned, *scan, None, dt_bias, initial, (dx, ddt, dB, dC, None))
        _, _, dA, _, _, dD, _, dbias, dinitial = grads
        dweight = dout_bias = None
        if out_weight is not None and again is not None:
            dweight = dprojected.flatten(0, 1).t() @ again.flatten(0, 1)
            dout_bias = dprojected.sum(dim=(0, 1)) if out_bias is not None else None
        _, dconv_weight, dconv_bias, _ = causal_conv1d_bwd_function(
            _aligned(xBC),
            conv_weight,
            conv_bias,
            _aligned(dxBC),
            None,
            None,
            None,
            _aligned(dxBC_out),
            False,
            block.silu,
        )
        of_inputs = dzxbcdt, dconv_weight, dconv_bias, dbias, dA, dD, dinitial
        return *of_inputs, dnorm_weight, dweight, dout_bias, None


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    """Of zxbcdt [batch, L, 2 * channels + 2 * groups * states + heads]."""
    if activation not in (None, "silu", "swish"):
        raise AssertionError(f"activation must be None, silu or swish, not {activation!r}")
    head = headdim if D.dim() == 1 else D.shape[1]
    if head is None:
        raise AssertionError("headdim must be given where D has one dimension")
    block = _Block(chunk_size, head, ngroups, return_final_states, activation is not None)
    weights = conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states
    return MambaSplitConv1dScanCombinedFn.apply(
        zxbcdt, *weights, rmsnorm_weight, outproj_weight, outproj_bias, block
    )
