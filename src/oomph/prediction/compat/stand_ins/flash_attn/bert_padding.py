"""Memory: Dao-AILab/flash-attention, flash_attn/bert_padding.py, which is plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _columns(indices: Tensor, count: int) -> Tensor:
    return indices[:, None].repeat(1, count)


class IndexFirstAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = input.shape[0]
        rows = input.reshape(input.shape[0], -1)
        return torch.gather(rows, 0, _columns(indices, rows.shape[1])).reshape(-1, *input.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        rows = grad_output.reshape(grad_output.shape[0], -1)
        grad = rows.new_zeros(ctx.rows, rows.shape[1])
        grad.scatter_(0, _columns(indices, rows.shape[1]), rows)
        return grad.reshape(ctx.rows, *grad_output.shape[1:]), None


class IndexPutFirstAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
        ctx.save_for_backward(indices)
        output = values.new_zeros(first_axis_dim, *values.shape[1:])
        output[indices] = values
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        return grad_output[indices], None, None


index_first_axis: Any = IndexFirstAxis.apply
index_put_first_axis: Any = IndexPutFirstAxis.apply


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows that the mask selects, their indices, where sequences start, the longest, all lengths."""
    selected = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = selected.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(selected.flatten(), as_tuple=False).flatten()
    longest = int(lengths.max().item())
    starts = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, starts, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    output: Tensor = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return output.unflatten(0, (batch, seqlen))
