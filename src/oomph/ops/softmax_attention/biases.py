"""Biases that are computed where they are needed, instead of being held as a matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from oomph.errors import ArgumentError


@runtime_checkable
class BiasFunction(Protocol):
    """What is added to the scaled score of query `q_index` and key `k_index` in batch b and head h.

    The four are integer tensors that broadcast against each other (scalars inside FlexAttention), and so must
    the result. Elementwise arithmetic and indexing only; no branches on values.

    A function may have an attribute `tensors`: those it reads. Gradients flow to the ones listed there; a
    function that reads a tensor which requires a gradient and does not list it is refused.
    """

    def __call__(self, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class LocalityBias:
    """-strength * |t - s|^2 between the query's point t and the key's point s.

    Points are [d, N], or [B, d, N] where they differ over the batch: one coordinate of neighbouring points
    lies in neighbouring places, and a kernel reads it at full width.
    """

    query_points: Tensor
    key_points: Tensor
    strength: float = 10.0

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return (self.query_points, self.key_points)

    @property
    def is_batched(self) -> bool:
        """Does the bias differ over the batch?"""
        return 3 in (self.query_points.dim(), self.key_points.dim())

    def __call__(self, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        t, s = self.query_points, self.key_points
        distance: Tensor | None = None
        for axis in range(t.shape[-2]):  # one coordinate at a time: no [.., d] axis beside the scores
            t_axis = t[b, axis, q_index] if t.dim() == 3 else t[axis][q_index]
            s_axis = s[b, axis, k_index] if s.dim() == 3 else s[axis][k_index]
            difference = t_axis - s_axis
            square = difference * difference
            distance = square if distance is None else distance + square
        assert distance is not None
        return distance * -self.strength

    def fill(self, out_BQK: Tensor, difference_BQK: Tensor, t_BdQ: Tensor, s_BdK: Tensor) -> None:
        """Write the bias between t and s into `out`, with `difference` as the only other memory."""
        nothing = out_BQK.new_zeros(())
        for axis in range(t_BdQ.shape[1]):
            torch.sub(t_BdQ[:, axis, :, None], s_BdK[:, axis, None], out=difference_BQK)
            total = out_BQK if axis else nothing
            torch.addcmul(total, difference_BQK, difference_BQK, value=-self.strength, out=out_BQK)

    def check_shape(self, batch: int, queries: int, keys: int) -> None:
        for name, points, length in (("t", self.query_points, queries), ("s", self.key_points, keys)):
            if points.shape[-1] != length or (points.dim() == 3 and points.shape[0] != batch):
                given = (*points.shape[:-2], points.shape[-1], points.shape[-2])
                raise ArgumentError(
                    f"locality_bias {name} has shape {given}; "
                    f"valid here: [{length}, d] or [{batch}, {length}, d]"
                )


def locality_bias(t: Tensor, s: Tensor, strength: float = 10.0) -> LocalityBias:
    """The bias -strength * |t - s|^2 between query points t and key points s, each [N, d] or [B, N, d].

    Computed in fp32 (float64 if the points are), whatever the dtype of the attention: squared distances in
    bf16 would be off by whole units of score. Differentiable in t and s.
    """
    for name, points in (("t", t), ("s", s)):
        if not isinstance(points, Tensor) or points.dim() not in (2, 3) or not points.is_floating_point():
            given = tuple(points.shape) if isinstance(points, Tensor) else type(points).__name__
            raise ArgumentError(f"locality_bias {name} is {given}; valid: a float tensor [N, d] or [B, N, d]")
    if t.shape[-1] != s.shape[-1] or t.shape[-1] == 0:
        raise ArgumentError(
            f"locality_bias needs points of one dimension; given t with {t.shape[-1]}, s with {s.shape[-1]}"
        )
    wide = torch.float64 if torch.float64 in (t.dtype, s.dtype) else torch.float32
    t, s = (points.to(wide).transpose(-1, -2).contiguous() for points in (t, s))
    return LocalityBias(t, s, float(strength))


def declared_tensors(bias: BiasFunction) -> Sequence[Tensor]:
    """The tensors that a bias function says it reads."""
    return tuple(getattr(bias, "tensors", ()))


def hidden_gradient(bias: BiasFunction, device: torch.device) -> bool:
    """Does an undeclared function depend on a tensor that requires a gradient? Asked at a single index."""
    if hasattr(bias, "tensors") or not torch.is_grad_enabled():
        return False
    index = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
    value = bias(index, index, index, index)
    return isinstance(value, Tensor) and value.requires_grad
