"""The loop that never holds the logits: blocks of rows, and where memory is short blocks of classes as well.

Each block of logits lives in one buffer: made by a matrix product, turned into its own gradient in place,
used in the two products of the backward pass, overwritten by the next block.

N tokens, D hidden size, V classes, R rows of a block, C classes of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oomph.ops.common import matmul_into
from oomph.ops.cross_entropy.problem import LossOptions, Rows, RowStatistics
from oomph.ops.cross_entropy.tiling import Tiling, padded

Combine = Callable[[RowStatistics], None]


class SoftmaxRows(Protocol):
    """See rows_torch.softmax_rows; rows_triton has another."""

    def __call__(
        self,
        logits_RV: Tensor,
        rows: Rows,
        stats: RowStatistics,
        options: LossOptions,
        *,
        column: int = 0,
        find_lse: bool,
        merge: bool = False,
        write_gradient: bool,
        grad_lse: Tensor | None = None,
    ) -> None: ...


class TargetRows(Protocol):
    """The weight gradient's largest terms, added apart from the products and at the end.

    The sum over blocks is rounded to the weight's dtype once per block. What a token adds to the row of its
    own target is much larger than what it adds elsewhere; added last, from fp32, it is rounded once.
    """

    def clear_targets(self, gradient_RV: Tensor, rows: Rows, column: int) -> None: ...

    def add_target_rows(
        self, weight_VD: Tensor, x_ND: Tensor, rows: Rows, target_gradient_N: Tensor
    ) -> None: ...


@dataclass(frozen=True)
class Gradients:
    """Where the gradients go; None: not wanted. `adds_to_weight`: the buffer already holds a gradient."""

    x_ND: Tensor | None = None
    weight_VD: Tensor | None = None
    bias_V: Tensor | None = None
    adds_to_weight: bool = False

    @property
    def wanted(self) -> bool:
        return self.x_ND is not None or self.weight_VD is not None or self.bias_V is not None


@dataclass(frozen=True)
class Sweep:
    """One problem's tensors (x and weight in the dtype of the matrix products) and how to go over them."""

    x_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    rows: Rows
    options: LossOptions
    tiling: Tiling
    softmax_rows: SoftmaxRows
    target_rows: TargetRows | None = None
    combine: Combine | None = None  # joins the statistics of all ranks that share the vocabulary

    def run(
        self,
        gradients: Gradients,
        known_lse: Tensor | None = None,
        grad_lse: Tensor | None = None,
    ) -> RowStatistics:
        """Statistics of every row, and the gradients wanted. With `known_lse` the first half is skipped."""
        n = self.rows.target.shape[0]
        apart = self._adds_targets_apart(gradients)
        smooth = self.options.label_smoothing != 0.0
        stats = RowStatistics.empty(n, self.rows.scale, smooth=smooth, targets=apart)
        if known_lse is not None:
            stats.lse.copy_(known_lse)
        if gradients.x_ND is not None and self.rows.index is not None:
            gradients.x_ND.zero_()
        if n == 0 and gradients.weight_VD is not None and not gradients.adds_to_weight:
            gradients.weight_VD.zero_()
        self._go_over_blocks(gradients, stats, known_lse is None, grad_lse)
        if self.target_rows is not None and stats.target_gradient is not None:
            assert gradients.weight_VD is not None
            self.target_rows.add_target_rows(gradients.weight_VD, self.x_ND, self.rows, stats.target_gradient)
        return stats

    def _go_over_blocks(
        self, gradients: Gradients, stats: RowStatistics, find_lse: bool, grad_lse: Tensor | None
    ) -> None:
        n, v = self.rows.target.shape[0], self.weight_VD.shape[0]
        width = min(self.tiling.columns, v)
        buffer = self.x_ND.new_empty(min(self.tiling.rows, n), padded(width))
        accumulator = self._x_accumulator(gradients, width < v)
        for first in range(0, n, self.tiling.rows):
            end = min(first + self.tiling.rows, n)
            block = _Block(self, first, end, stats.part(first, end), buffer, width)
            if grad_lse is not None:
                block.grad_lse = grad_lse[first:end]
            if find_lse:
                block.find_lse(with_gradient=gradients.wanted)
            if gradients.wanted:
                block.differentiate(gradients, accumulator)

    def _adds_targets_apart(self, gradients: Gradients) -> bool:
        """Only where sums over several blocks are rounded to less than fp32."""
        return (
            self.target_rows is not None
            and gradients.weight_VD is not None
            and gradients.weight_VD.dtype.itemsize < 4
            and (gradients.adds_to_weight or self.rows.target.shape[0] > self.tiling.rows)
        )

    def _x_accumulator(self, gradients: Gradients, sliced: bool) -> Tensor | None:
        """dX of one block of rows is a sum over blocks of classes: kept in fp32 where x is narrower."""
        if gradients.x_ND is None or not (sliced or self.rows.index is not None):
            return None
        wide = self.rows.scale.dtype if sliced else self.x_ND.dtype
        return self.x_ND.new_empty(
            min(self.tiling.rows, self.rows.target.shape[0]), self.x_ND.shape[1], dtype=wide
        )


class _Block:
    """One block of rows."""

    def __init__(
        self, sweep: Sweep, first: int, end: int, stats: RowStatistics, buffer: Tensor, width: int
    ) -> None:
        self.sweep = sweep
        self.first = first
        self.end = end
        self.stats = stats
        self.buffer = buffer
        self.width = width
        self.grad_lse: Tensor | None = None
        self.rows = sweep.rows.part(first, end)
        index = self.rows.index
        self.x_RD = _part(sweep.x_ND, first, end) if index is None else sweep.x_ND.index_select(0, index)
        self.in_buffer: int | None = None  # first class of the logits (or gradients) in the buffer
        self.is_gradient = False

    @property
    def _starts(self) -> range:
        return range(0, self.sweep.weight_VD.shape[0], self.width)

    def find_lse(self, with_gradient: bool) -> None:
        combine = self.sweep.combine
        if len(self._starts) == 1 and combine is None:
            self._softmax(self._logits(0), 0, find_lse=True, write_gradient=with_gradient)
            self.is_gradient = with_gradient
            return
        for start in self._starts:
            self._softmax(self._logits(start), start, find_lse=True, merge=start > 0, write_gradient=False)
        if combine is not None:
            combine(self.stats)
            # Ignored rows were combined as well.
            self.stats.lse.copy_(torch.where(self.rows.kept, self.stats.lse, 0.0))

    def differentiate(self, gradients: Gradients, accumulator: Tensor | None) -> None:
        """Backwards over the blocks of classes: the last one's logits are still in the buffer."""
        n = self.end - self.first
        sweep, part = self.sweep, (self.first, self.end)
        for position, start in enumerate(reversed(self._starts)):
            g_RC = self._logits(start)
            if not self.is_gradient:
                self._softmax(g_RC, start, find_lse=False, write_gradient=True)
            self.is_gradient = False
            classes = start, start + g_RC.shape[1]
            if gradients.x_ND is not None:
                whole, rows = (gradients.x_ND, part) if accumulator is None else (accumulator, (0, n))
                _sum_of_products(
                    _part(whole, *rows), g_RC, _part(sweep.weight_VD, *classes), add=position > 0
                )
            if gradients.bias_V is not None:
                _part(gradients.bias_V, *classes).add_(g_RC.sum(0, dtype=gradients.bias_V.dtype))
            if gradients.weight_VD is not None:
                if self.stats.target_gradient is not None and sweep.target_rows is not None:
                    sweep.target_rows.clear_targets(g_RC, self.rows, start)
                add = gradients.adds_to_weight or self.first > 0
                dw_CD = _part(gradients.weight_VD, *classes)
                for some in _aligned_classes(g_RC):
                    matmul_into(_part(dw_CD, *some), _columns(g_RC, *some).t(), self.x_RD, add=add)
            self.in_buffer = None
        if gradients.x_ND is not None and accumulator is not None:
            summed_RD = _part(accumulator, 0, n)
            if self.rows.index is None:
                _part(gradients.x_ND, *part).copy_(summed_RD)
            else:
                gradients.x_ND.index_copy_(0, self.rows.index, summed_RD.to(gradients.x_ND.dtype))

    def _logits(self, start: int) -> Tensor:
        n = self.end - self.first
        weight_CD = _part(self.sweep.weight_VD, start, start + self.width)
        logits_RC = _columns(_part(self.buffer, 0, n), 0, weight_CD.shape[0])
        if self.in_buffer != start:
            for some in _aligned_classes(logits_RC):
                some_weight, into = _part(weight_CD, *some), _columns(logits_RC, *some)
                if self.sweep.bias_V is None:
                    torch.mm(self.x_RD, some_weight.t(), out=into)
                else:
                    bias_C = _part(_part(self.sweep.bias_V, start, start + self.width), *some)
                    torch.addmm(bias_C, self.x_RD, some_weight.t(), out=into)
            self.in_buffer = start
        return logits_RC

    def _softmax(
        self,
        logits: Tensor,
        start: int,
        *,
        find_lse: bool,
        merge: bool = False,
        write_gradient: bool,
    ) -> None:
        self.sweep.softmax_rows(
            logits,
            self.rows,
            self.stats,
            self.sweep.options,
            column=start,
            find_lse=find_lse,
            merge=merge,
            write_gradient=write_gradient,
            grad_lse=self.grad_lse,
        )


def _part(x: Tensor, first: int, end: int) -> Tensor:
    """x[first:end]; x itself where that is all: a view costs the host as much as a product."""
    return x if first == 0 and end >= x.shape[0] else x[first:end]


def _columns(x: Tensor, first: int, end: int) -> Tensor:
    return x if first == 0 and end >= x.shape[1] else x[:, first:end]


def _aligned_classes(logits_RC: Tensor) -> list[tuple[int, int]]:
    """All classes, or those up to a multiple of 8 and the few that are left.

    cuBLAS multiplies half-precision matrices several times slower where a size is not a multiple of 8, and
    GPT-2 has 50,257 classes.
    """
    size = logits_RC.shape[1]
    left = size % 8 if logits_RC.dtype.itemsize == 2 else 0
    return [(0, size)] if left in (0, size) else [(size - left, size), (0, size - left)]


def _sum_of_products(dx_RD: Tensor, g_RC: Tensor, weight_CD: Tensor, *, add: bool) -> None:
    # The few classes first: their share is small, and so is what rounding it between the two costs.
    for some in _aligned_classes(g_RC):
        matmul_into(dx_RD, _columns(g_RC, *some), _part(weight_CD, *some), add=add)
        add = True
