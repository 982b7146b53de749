"""Memory: Dao-AILab/causal-conv1d, causal_conv1d/causal_conv1d_interface.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpp_functions import (
    causal_conv1d_bwd_function,
    causal_conv1d_fwd_function,
    causal_conv1d_update_function,
)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if 1 in tensor.stride()[1:] else tensor.contiguous()


def _is_silu(activation: str | None) -> bool:
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    return activation is not None


class CausalConv1dFn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        seq_idx: Tensor | None,
        initial_states: Tensor | None,
        return_final_states: bool,
        final_states_out: Tensor | None,
        activation: str | None,
    ) -> Any:
        silu = _is_silu(activation)
        x = _dense(x)
        bias = bias.contiguous() if bias is not None else None
        if return_final_states and final_states_out is None:
            final_states_out = x.new_empty(x.shape[0], weight.shape[1] - 1, x.shape[1]).transpose(1, 2)
        out = causal_conv1d_fwd_function(x, weight, bias, seq_idx, initial_states, final_states_out, silu)
        ctx.save_for_backward(x, weight, bias, seq_idx, initial_states)
        ctx.silu, ctx.needs_states = silu, initial_states is not None and initial_states.requires_grad
        ctx.return_final_states = return_final_states
        return (out, final_states_out) if return_final_states else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *others: Any) -> Any:
        x, weight, bias, seq_idx, initial_states = ctx.saved_tensors
        dfinal = others[0] if ctx.return_final_states else None
        dx, dweight, dbias, dinitial = causal_conv1d_bwd_function(
            x,
            weight,
            bias,
            _dense(dout),
            seq_idx,
            initial_states,
            dfinal,
            None,
            ctx.needs_states,
            ctx.silu,
        )
        return dx, dweight, dbias, None, dinitial, None, None, None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Of x [batch, channels, L] with weight [channels, width]."""
    return CausalConv1dFn.apply(
        x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out, activation
    )


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Any:
    """Of x [batch, channels] or [batch, channels, L]; for generation."""
    silu = _is_silu(activation)
    columns = x if x.dim() == 3 else x.unsqueeze(-1)
    out = causal_conv1d_update_function(columns, conv_state, weight, bias, silu)
    return out if x.dim() == 3 else out.squeeze(-1)
