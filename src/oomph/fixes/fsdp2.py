"""FSDP2: parameters, gradients and optimizer state are sharded over the ranks of a process group.

Every rank holds 1/N of them and gathers a block's parameters when the block runs. Activations are not
sharded: each rank has those of its own batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from oomph.errors import UserError
from oomph.fixes.journal import Journal
from oomph.fixes.registry import Fix, FixContext, Target, check_whole_number
from oomph.nn.blocks import block_names, blocks
from oomph.parallel.parallelize import Parallel, blocks_with_own_parameters
from oomph.workload import Workload

_PROPOSED_RANKS = (2, 8)


class FSDP2(Fix):
    name = "fsdp2"
    kind = "exact"
    changes = "Parameters, gradients and optimizer state are sharded over the ranks by FSDP2."
    places_model = True

    def targets(self, context: FixContext) -> Iterable[Target]:
        names = tuple(block_names(context.model))
        if not names or _is_sharded(context.model) or context.workload.parallel is not None:
            return
        for ranks in _PROPOSED_RANKS:
            yield Target(names, {"ranks": ranks}, "the batch is that of one rank")

    def change_workload(
        self, workload: Workload, *, ranks: int | None = None, reshard_after_forward: bool = True
    ) -> Workload:
        """`ranks`: the size of the process group; by default that of the one that is initialised.
        `reshard_after_forward`: free a block's gathered parameters after forward, and gather them again in
        backward."""
        _check_ranks(ranks)
        if workload.parallel is not None:
            raise UserError(f"fix {self.name!r}: the step is already spread over ranks")
        size = ranks or (dist.get_world_size() if dist.is_available() and dist.is_initialized() else None)
        if size is None:
            raise UserError(f"fix {self.name!r} needs the number of ranks: give fsdp2:ranks=8")
        parallel = Parallel(size, reshard_after_forward=reshard_after_forward)
        return replace(workload, parallel=parallel)

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        ranks: int | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        """Of a model that is there: over the process group of the program."""
        _check_ranks(ranks)
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
        what = f"parameters over {dist.get_world_size()} ranks"
        journal.record("", what, undo=lambda: None, check=_refuse_undo)
        for name, _ in blocks_with_own_parameters(blocks(model)):
            journal.record(name, "gathers its parameters when it runs", lambda: None)
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        Parallel(dist.get_world_size(), reshard_after_forward=reshard_after_forward).apply(model, device)


def _check_ranks(ranks: object) -> None:
    if ranks is not None:
        check_whole_number("fsdp2", "ranks", ranks, 1)


def _refuse_undo(_: object) -> None:
    raise UserError("fix 'fsdp2' cannot be undone in a model; build the model again")


def _is_sharded(model: nn.Module) -> bool:
    return any(type(module).__name__.startswith("FSDP") for module in model.modules())
