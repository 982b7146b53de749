"""A vocabulary split over ranks: each holds some rows of the weight, and so some columns of the logits.

What the softmax of a row needs from the others is three numbers: log-sum-exp, target logit, and with label
smoothing the sum of the logits.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.cross_entropy.problem import RowStatistics


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's part of the vocabulary, and the ranks that hold the rest."""

    group: Any  # a process group
    placements: tuple[Any, ...]  # of the weight
    mesh: Any
    offset: int  # first class of the part
    size: int
    largest: int  # size of the largest part: all ranks must cut their rows alike

    def combine(self, stats: RowStatistics) -> None:
        """Join the ranks' statistics of some rows, in place."""
        top = stats.lse.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, self.group)
        # An empty part has a log-sum-exp of -inf; where all are, the difference would be NaN.
        base = torch.where(top == -torch.inf, 0.0, top)
        sums = [torch.exp(stats.lse - base), stats.target_logit]
        if stats.smooth_sum is not None:
            sums.append(stats.smooth_sum)
        joined = torch.stack(sums)
        dist.all_reduce(joined, dist.ReduceOp.SUM, self.group)
        stats.lse.copy_(base + joined[0].log())
        stats.target_logit.copy_(joined[1])
        if stats.smooth_sum is not None:
            stats.smooth_sum.copy_(joined[2])

    def sum_over_ranks(self, x_grad: Tensor) -> None:
        dist.all_reduce(x_grad, dist.ReduceOp.SUM, self.group)


def shard_of(weight: Tensor) -> VocabularyShard | None:
    """How `weight` is split by rows over ranks; None for an ordinary tensor."""
    if not _is_dtensor(weight):
        return None
    from torch.distributed.tensor import Replicate, Shard

    placements = tuple(weight.placements)  # type: ignore[attr-defined]
    mesh = weight.device_mesh  # type: ignore[attr-defined]
    split = [dim for dim, placement in enumerate(placements) if placement == Shard(0)]
    others = [placement for placement in placements if placement != Shard(0)]
    if len(split) != 1 or any(placement != Replicate() for placement in others):
        raise ArgumentError(
            f"a DTensor weight must be Shard(0) over one mesh dimension and Replicate() over the others; "
            f"given: {list(placements)}"
        )
    ranks, rank = mesh.size(split[0]), mesh.get_local_rank(split[0])
    n_classes = weight.shape[0]
    largest = -(-n_classes // ranks)
    if largest * (ranks - 1) >= n_classes:
        raise ArgumentError(
            f"{n_classes} classes over {ranks} ranks leave a rank without any; use fewer ranks"
        )
    offset = min(rank * largest, n_classes)
    size = min(largest, n_classes - offset)
    return VocabularyShard(mesh.get_group(split[0]), placements, mesh, offset, size, largest)


def local_part(
    x: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The plain tensors this rank computes with; gradients go back through the conversions."""
    from torch.distributed.tensor import DTensor, Replicate

    if _is_dtensor(x):
        # Replicated here, and its gradient comes out summed over the ranks, hence replicated as well.
        x = x.redistribute(shard.mesh, [Replicate()] * shard.mesh.ndim).to_local()  # type: ignore[attr-defined]
    local = weight.to_local()  # type: ignore[attr-defined]
    if bias is None:
        return x, local, None
    if not _is_dtensor(bias):
        # Not a slice of it: every rank must get the gradient of all of it.
        bias = DTensor.from_local(bias, shard.mesh, [Replicate()] * shard.mesh.ndim, run_check=False)
    return x, local, bias.redistribute(shard.mesh, shard.placements).to_local()  # type: ignore[attr-defined]


def differ_between_ranks(x: Tensor, target: Tensor, shard: VocabularyShard) -> Tensor:
    """Whether x or target is not the same on all ranks, as under FSDP outside a module's forward.

    A boolean on the device, from sums of bit patterns: exact, whatever the order they are added in.
    """
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.detach().contiguous().view(whole).sum(dtype=torch.int64)
    low = torch.stack([bits, target.sum(dtype=torch.int64)])
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, shard.group)
    dist.all_reduce(high, dist.ReduceOp.MAX, shard.group)
    return (low != high).any()


def refuse_different_ranks(differ: Tensor) -> None:
    """Waits for the GPU, hence only with check=True."""
    if bool(differ):
        raise ArgumentError(
            "weight is split over ranks by classes, but x differs between them; x must be the same on all "
            "(under FSDP2, call linear_cross_entropy inside the wrapped module's forward)"
        )


def _is_dtensor(tensor: Tensor) -> bool:
    # A program that has a DTensor has imported its module; the others need not wait for it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
