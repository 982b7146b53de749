"""A vocabulary sharded over ranks: each holds some rows of the weight, and so some columns of the logits.

For the softmax of a row, ranks exchange three numbers: log-sum-exp, target logit, and with label smoothing
the sum of the logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.cross_entropy.rows import RowStatistics


@dataclass(frozen=True)
class VocabShard:
    """This rank's classes, and the ranks that hold the others."""

    group: Any  # a process group
    placements: tuple[Any, ...]  # of the weight
    mesh: Any
    offset: int  # first class
    size: int
    largest: int  # size of the largest shard: all ranks must use tiles of equal rows

    def combine_statistics(self, stats: RowStatistics) -> None:
        """Reduce the statistics over the ranks, in place."""
        top = stats.lse.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, self.group)
        # Classes with a logit of -inf give a log-sum-exp of -inf; where all do, the difference would be NaN.
        base = torch.where(top == -torch.inf, 0.0, top)
        sums = [torch.exp(stats.lse - base), stats.target_logit]
        if stats.smooth_sum is not None:
            sums.append(stats.smooth_sum)
        reduced = torch.stack(sums)
        dist.all_reduce(reduced, dist.ReduceOp.SUM, self.group)
        stats.lse.copy_(base + reduced[0].log())
        stats.target_logit.copy_(reduced[1])
        if stats.smooth_sum is not None:
            stats.smooth_sum.copy_(reduced[2])

    def all_reduce(self, grad_x: Tensor) -> None:
        dist.all_reduce(grad_x, dist.ReduceOp.SUM, self.group)

    def local_tensors(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The plain tensors this rank computes with; gradients go back through the conversions."""
        from torch.distributed.tensor import DTensor, Replicate

        replicated = [Replicate()] * self.mesh.ndim
        if isinstance(x, DTensor):
            # Replicated here; its gradient is all-reduced, hence replicated as well.
            x = x.redistribute(self.mesh, replicated).to_local()
        local = weight.to_local()  # type: ignore[attr-defined]
        if bias is None:
            return x, local, None
        if not isinstance(bias, DTensor):
            # Not a slice of it: every rank must get the gradient of all of it.
            bias = DTensor.from_local(bias, self.mesh, replicated, run_check=False)
        return x, local, bias.redistribute(self.mesh, self.placements).to_local()

    def differs_between_ranks(self, x: Tensor, target: Tensor) -> Tensor:
        """Whether x or target is not the same on all ranks, as under FSDP outside a module's forward.

        A boolean on the device, from sums of bit patterns: exact, whatever the order they are added in.
        """
        as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        bits = x.detach().contiguous().view(as_int).sum(dtype=torch.int64)
        low = torch.stack([bits, target.sum(dtype=torch.int64)])
        high = low.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, self.group)
        dist.all_reduce(high, dist.ReduceOp.MAX, self.group)
        return (low != high).any()


def shard_of_dtensor(weight: Tensor) -> VocabShard:
    """How a DTensor weight is sharded by rows."""
    from torch.distributed.tensor import Replicate, Shard

    placements = tuple(weight.placements)  # type: ignore[attr-defined]
    mesh = weight.device_mesh  # type: ignore[attr-defined]
    sharded = [dim for dim, placement in enumerate(placements) if placement == Shard(0)]
    others = [placement for placement in placements if placement != Shard(0)]
    if len(sharded) != 1 or any(placement != Replicate() for placement in others):
        raise ArgumentError(
            f"a DTensor weight must be Shard(0) over one mesh dimension and Replicate() over the others; "
            f"given: {list(placements)}"
        )
    ranks, rank = mesh.size(sharded[0]), mesh.get_local_rank(sharded[0])
    n_classes = weight.shape[0]
    largest = -(-n_classes // ranks)
    if largest * (ranks - 1) >= n_classes:
        raise ArgumentError(
            f"{n_classes} classes over {ranks} ranks leave a rank without any; use fewer ranks"
        )
    offset = min(rank * largest, n_classes)
    size = min(largest, n_classes - offset)
    return VocabShard(mesh.get_group(sharded[0]), placements, mesh, offset, size, largest)
