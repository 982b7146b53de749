"""Memory: Dao-AILab/causal-conv1d, causal_conv1d/cpp_functions.py and csrc/causal_conv1d.cpp."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from oomph.prediction.compat import stand_ins
from oomph.torch_internals import deterministic_required

_kernel = partial(stand_ins.kernel, "causal_conv1d")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _check(x: Tensor, weight: Tensor) -> None:
    checks = (
        (x.dtype in _DTYPES and weight.dtype in _DTYPES, "causal_conv1d: expected fp32, fp16 or bf16"),
        (2 <= weight.shape[-1] <= 4, "causal_conv1d only supports width between 2 and 4"),
        (x.shape[1] == weight.shape[0], "weight must have shape (dim, width)"),
        (
            x.stride(2) == 1 or x.shape[1] % 8 == 0,
            "causal_conv1d only supports channel dimension divisible by 8 for now",
        ),
        (
            x.stride(2) == 1 or (x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0),
            "causal_conv1d with channel last layout requires strides (x.stride(0) and x.stride(2)) to be "
            "multiples of 8",
        ),
    )
    for holds, message in checks:
        if not holds:
            raise RuntimeError(message)


def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    """Of x [batch, channels, L] with weight [channels, width]."""
    out = torch.empty_like(x)
    _check(x, weight)
    _kernel((x, weight, bias, seq_idx, initial_states, out, final_states_out))
    return out


def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    batch, channels, length = x.shape
    width = weight.shape[-1]
    dx = torch.empty_like(x) if dx is None else dx
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    dinitial = x.new_empty(batch, width - 1, channels).transpose(1, 2) if return_dinitial_states else None
    parts: list[Tensor] = []
    if deterministic_required():
        chunks = (batch,) if x.stride(2) == 1 else (batch, math.ceil(length / (64 if length <= 128 else 128)))
        parts = [
            each.new_zeros(*chunks, *each.shape, dtype=torch.float32)
            for each in (weight, bias)
            if each is not None
        ]
    _kernel((x, weight, bias, dout, seq_idx, initial_states, dx, dweight, dbias, dinitial, *parts))
    dweight, dbias = dweight.to(weight.dtype), None if bias is None else _as(dbias, bias)
    return dx, dweight, dbias, dinitial


def _as(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(like.dtype)


def causal_conv1d_update_function(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    silu_activation: bool = False,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(x)
    _kernel((x, conv_state, weight, bias, out))
    return out
