"""Memory: state-spaces/mamba, mamba_ssm/ops/triton/layernorm_gated.py."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oomph.prediction.compat import stand_ins

_kernel = partial(stand_ins.kernel, "mamba_ssm")


def norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    group_size: int | None,
    is_rms_norm: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Of rows; the result, the means and 1 / standard deviation."""
    out = torch.empty_like(x) if out is None else out
    count = x.shape[0] * (x.shape[1] // (group_size or x.shape[1]))
    mean = None if is_rms_norm else x.new_empty(count, dtype=torch.float32)
    scale = x.new_empty(count, dtype=torch.float32)
    _kernel((x, weight, bias, z, out, mean, scale))
    return out, mean, scale


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    scale: Tensor,
    z: Tensor | None,
    group_size: int | None,
    dz: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`out`: where the result is computed again."""
    columns = x.shape[1]
    group_size = group_size or columns
    dx = torch.empty_like(x)
    if z is not None and dz is None:
        dz = torch.empty_like(z)
    widest = min(65536 // x.element_size(), 1 << (group_size - 1).bit_length())
    warps = min(max(widest // 256, 1), 8)
    multiprocessors = stand_ins.gpu("mamba_ssm").multiprocessors
    parts = math.ceil(multiprocessors * math.ceil(4 / warps) / (columns // group_size))
    sums = [
        each.new_empty(parts, columns, dtype=torch.float32) for each in (weight, bias) if each is not None
    ]
    _kernel((dy, x, weight, bias, mean, scale, z, dx, dz, out, *sums))
    dweight = sums[0].sum(0).to(weight.dtype)
    dbias = None if bias is None else sums[1].sum(0).to(bias.dtype)
    return dx, dweight, dbias, dz


def _rows(tensor: Tensor) -> Tensor:
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class LayerNormFn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        z: Tensor | None,
        group_size: int | None,
        is_rms_norm: bool,
    ) -> Tensor:
        ctx.shape, ctx.group_size = x.shape, group_size
        x, z = _rows(x), None if z is None else _rows(z)
        weight = weight.contiguous()
        out, mean, scale = norm_forward(x, weight, bias, z, group_size, is_rms_norm)
        ctx.save_for_backward(x, weight, bias, mean, scale, z)
        return out.reshape(ctx.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, mean, scale, z = ctx.saved_tensors
        given = _rows(dy), x, weight, bias, mean, scale, z, ctx.group_size
        dx, dweight, dbias, dz = norm_backward(*given)
        dz = None if dz is None else dz.reshape(ctx.shape)
        return dx.reshape(ctx.shape), dweight, dbias, dz, None, None


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Any:
    return LayerNormFn.apply(x, weight, bias, z, group_size, is_rms_norm)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Any:
    return LayerNormFn.apply(x, weight, bias, z, group_size, True)


class RMSNorm(nn.Module):
    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:
        return rmsnorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


class LayerNorm(RMSNorm):
    def __init__(
        self, hidden_size: int, *args: Any, device: Any = None, dtype: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, *args, **{**kwargs, "device": device, "dtype": dtype})
        self.bias = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:
        return layernorm_fn(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)
