"""facebookresearch/xformers, xformers/ops/fmha/attn_bias.py: which keys a query attends to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class AttentionBias:
    """Not a tensor: the kernel knows the mask. `window`: keys before and after; -1: all."""

    causal = False
    window = (-1, -1)

    def to(self, device: Any) -> Any:
        return self


class LowerTriangularMask(AttentionBias):
    causal = True

    def __init__(self, *tensor_args: Any, **tensor_kwargs: Any) -> None:
        pass

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    def __init__(self, bias: Tensor) -> None:
        self._bias = bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    causal = True


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        self.window = self.window_left, self.window_right


@dataclass
class _SeqLenInfo:
    """Where sequences start that lie one after the other."""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    def to(self, device: Any) -> _SeqLenInfo:
        start = self.seqstart.to(device, non_blocking=True)
        return _SeqLenInfo(start, self.max_seqlen, self.min_seqlen, self.seqstart_py)

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], device: Any = None) -> _SeqLenInfo:
        lengths = list(seqlens)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        start = torch.tensor(starts, dtype=torch.int32, device=device)
        return cls(start, max(lengths), min(lengths), starts)

    def split(self, tensor: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        starts = self.seqstart_py
        if batch_sizes is None:
            batch_sizes = [1] * (len(starts) - 1)
        found, at = [], 0
        for size in batch_sizes:
            part = tensor[:, starts[at] : starts[at + size]]
            found.append(part.reshape(size, -1, *tensor.shape[2:]))
            at += size
        return found


@dataclass
class BlockDiagonalMask(AttentionBias):
    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    def to(self, device: Any) -> Any:
        return type(self)(self.q_seqinfo.to(device), self.k_seqinfo.to(device), self._batch_sizes)

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> Any:
        """On the GPU that is current, where none is named."""
        device = "cuda" if device is None else device
        queries = _SeqLenInfo.from_seqlens(q_seqlen, device)
        keys = queries if kv_seqlen is None or kv_seqlen == q_seqlen else None
        return cls(queries, keys or _SeqLenInfo.from_seqlens(kv_seqlen or (), device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Any, Tensor]:
        """The mask, and the sequences [batch, L, ...] one after the other in one row."""
        lengths = [each.shape[1] for each in tensors for _ in range(each.shape[0])]
        mask = cls.from_seqlens(lengths, device=tensors[0].device)
        mask._batch_sizes = [each.shape[0] for each in tensors]
        rows = [each.reshape(1, -1, *each.shape[2:]) for each in tensors]
        return mask, torch.cat(rows, dim=1)

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    split = split_queries

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalMask:
        mask = self.make_causal()
        mask.window = window_size - 1, 0
        return mask


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    causal = True


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    causal = True
