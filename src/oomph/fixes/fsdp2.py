"""FSDP2: parameters, gradients and optimizer state are sharded over the ranks of a process group.

Every rank holds 1/N of them and gathers a block's parameters when the block runs. Activations are not
sharded: each rank has those of its own batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from oomph.errors import UserError
from oomph.fixes.journal import Journal
from oomph.fixes.modules import has_data
from oomph.fixes.registry import Fix, FixContext, Target, check_flag, check_whole_number
from oomph.nn.blocks import NamedModule, block_names, blocks
from oomph.units import format_bytes

_SHARDED_STAGES = ("parameters", "gradients", "optimizer state")
_PROPOSED_RANKS = (2, 8)


class FSDP2(Fix):
    name = "fsdp2"
    kind = "exact"
    changes = "Parameters, gradients and optimizer state are sharded over the ranks by FSDP2."

    def targets(self, context: FixContext) -> Iterable[Target]:
        """Savings are computed: one process cannot trace several ranks."""
        names = tuple(block_names(context.model))
        if not names or _is_sharded(context.model):
            return
        held = sum(size for stage, size in context.prediction.by_stage() if stage in _SHARDED_STAGES)
        gathered = 2 * _largest_block(context.model)  # the block that runs, and the prefetched next one
        for ranks in _PROPOSED_RANKS:
            note = f"computed: 1/{ranks} of {format_bytes(held)} stays on a rank"
            yield Target(names, {"ranks": ranks}, note, saving=held - held // ranks - gathered)

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        ranks: int | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        """`ranks`: the required size of the process group; by default any. `reshard_after_forward`: free a
        block's gathered parameters after forward, and gather them again in backward."""
        check_flag(self.name, "reshard_after_forward", reshard_after_forward)
        if ranks is not None:
            check_whole_number(self.name, "ranks", ranks, 1)
        if not all(has_data(parameter) for parameter in model.parameters()):
            raise UserError(
                "FSDP2 cannot be traced without its ranks; the saving is computed from parameters, gradients "
                "and optimizer state, less the blocks that are gathered"
            )
        if not dist.is_available() or not dist.is_initialized():
            raise UserError(
                f"fix {self.name!r} needs a process group: start the script with torchrun "
                f"--nproc-per-node={ranks or 'N'} and call torch.distributed.init_process_group() in it"
            )
        if ranks is not None and ranks != dist.get_world_size():
            given = dist.get_world_size()
            raise UserError(f"fix {self.name!r}: ranks={ranks}, but the process group has {given}")
        if _is_sharded(model):
            raise UserError(f"fix {self.name!r}: the model is already sharded")
        _shard(model, journal, reshard_after_forward)


def _shard(model: nn.Module, journal: Journal, reshard_after_forward: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    what = f"parameters over {dist.get_world_size()} ranks"
    journal.record("", what, undo=lambda: None, check=_refuse_undo)
    for name, block in blocks_with_own_parameters(blocks(model)):
        fully_shard(block, reshard_after_forward=reshard_after_forward)
        journal.record(name, "gathers its parameters when it runs", lambda: None)
    fully_shard(model, reshard_after_forward=reshard_after_forward)


def _refuse_undo(_: object) -> None:
    raise UserError("fix 'fsdp2' cannot be undone in a model; build the model again")


def blocks_with_own_parameters(groups: list[list[NamedModule]]) -> list[NamedModule]:
    """Blocks that share no parameter. Others are sharded with the whole model: FSDP2 cannot gather a
    parameter with two blocks."""
    members = [member for group in groups for member in group]
    owners = Counter(id(each) for member in members for each in member.module.parameters())
    return [each for each in members if all(owners[id(one)] == 1 for one in each.module.parameters())]


def _is_sharded(model: nn.Module) -> bool:
    return any(type(module).__name__.startswith("FSDP") for module in model.modules())


def _largest_block(model: nn.Module) -> int:
    """Bytes."""
    sizes = [
        sum(one.numel() * one.element_size() for one in block.parameters())
        for group in blocks(model)
        for _, block in group
    ]
    return max(sizes, default=0)
