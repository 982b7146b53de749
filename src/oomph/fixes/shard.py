"""FSDP2: parameters, their gradients and the optimizer's state are spread over the ranks of a process group.

Every rank keeps 1/N of them and gathers a block's parameters when the block runs. Activations are not
sharded: each rank has those of its own batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from oomph.errors import UserError
from oomph.fixes.journal import Journal
from oomph.fixes.modules import NamedModule, blocks, has_data
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.records import Proposal
from oomph.units import format_bytes

_SHARDED = ("parameters", "gradients", "optimizer state")
_PROPOSED = (2, 8)


class FSDP2(Fix):
    name = "fsdp2"
    kind = "exact"
    changes = "Parameters, gradients and optimizer state are spread over the ranks by FSDP2."

    def targets(self, context: FixContext) -> Iterable[Target]:
        if _is_sharded(context.model):
            return
        names = tuple(name for group in blocks(context.model) for name, _ in group)
        if names:
            for ranks in _PROPOSED:
                yield Target(names, {"ranks": ranks})

    def proposals(self, context: FixContext) -> list[Proposal]:
        """With a saving by arithmetic: there is no other rank here to predict with."""
        held = sum(size for stage, size in context.prediction.by_stage() if stage in _SHARDED)
        gathered = 2 * _largest_block(context.model)  # the block that runs, and the next one, on its way
        found = []
        for proposal in super().proposals(context):
            ranks = proposal.options["ranks"]
            saving = held - held // ranks - gathered
            note = f"computed: 1/{ranks} of {format_bytes(held)} stays on a rank"
            found.append(replace(proposal, saving=saving, note=note))
        return found

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        ranks: int | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        """`ranks`: how many there must be; by default those of the process group, whatever their number.
        `reshard_after_forward`: blocks let go of what they gathered, and gather again in backward."""
        if not isinstance(reshard_after_forward, bool):
            raise UserError(
                f"fix {self.name!r}: reshard_after_forward={reshard_after_forward!r} is not valid; "
                "valid: True, False"
            )
        if ranks is not None and (isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1):
            raise UserError(f"fix {self.name!r}: ranks={ranks!r} is not valid; valid: a whole number >= 1")
        if not all(has_data(parameter) for parameter in model.parameters()):
            raise UserError(
                "FSDP2 cannot be traced without its ranks; the saving is what N ranks leave of parameters, "
                "gradients and optimizer state, less the blocks that are gathered"
            )
        if not dist.is_available() or not dist.is_initialized():
            count = ranks or "N"
            raise UserError(
                f"fix {self.name!r} needs a process group: start the script with torchrun "
                f"--nproc-per-node={count} and call torch.distributed.init_process_group() in it"
            )
        if ranks is not None and ranks != dist.get_world_size():
            given = dist.get_world_size()
            raise UserError(f"fix {self.name!r}: ranks={ranks}, but the process group has {given}")
        if _is_sharded(model):
            raise UserError(f"fix {self.name!r}: the model is sharded already")
        _shard(model, journal, reshard_after_forward)


def _shard(model: nn.Module, journal: Journal, reshard_after_forward: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    whole = _Whole(model)
    journal.record("", f"parameters over {dist.get_world_size()} ranks", whole.restore)
    for name, block in _with_own_parameters(blocks(model)):
        fully_shard(block, reshard_after_forward=reshard_after_forward)
        journal.record(name, "gathers its parameters when it runs", _nothing)
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    whole.let_go()


def _with_own_parameters(groups: list[list[NamedModule]]) -> list[NamedModule]:
    """A parameter of two blocks cannot be gathered with either; such blocks are left to the whole model."""
    members = [member for group in groups for member in group]
    owners = Counter(id(each) for member in members for each in member.module.parameters())
    return [each for each in members if all(owners[id(one)] == 1 for one in each.module.parameters())]


class _Whole:
    """A model before it is sharded: everything but the numbers, which the shards have."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, type(module), _contents(module)) for module in model.modules()]
        self._parameters = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._homes = {id(parameter): parameter.device for _, _, parameter in self._parameters}

    def let_go(self) -> None:
        """Held whole until undo, they would take the memory that sharding is to save."""
        for _, _, parameter in self._parameters:
            parameter.data = parameter.data.new_empty(0)

    def restore(self) -> None:
        """All ranks at the same time: every one gets the whole parameters."""
        from torch.distributed.tensor import DTensor

        full: dict[int, torch.Tensor] = {}
        for module, name, parameter in self._parameters:
            now = module._parameters.get(name)
            if isinstance(now, DTensor) and id(parameter) not in full:
                home = self._homes[id(parameter)]
                full[id(parameter)] = now.detach().full_tensor().to(home)
        for module, kind, contents in self._modules:
            module.__class__ = kind
            _refill(module, contents)
        for _, _, parameter in self._parameters:
            if id(parameter) in full:
                parameter.data = full[id(parameter)]
        _forget_state(module for module, _, _ in self._modules)


def _contents(module: nn.Module) -> dict[str, Any]:
    """Its attributes; of dictionaries (parameters, hooks) what they held."""
    return {
        name: (value, dict(value) if isinstance(value, dict) else None)
        for name, value in vars(module).items()
    }


def _refill(module: nn.Module, contents: dict[str, Any]) -> None:
    own = vars(module)
    for name in [name for name in own if name not in contents]:
        del own[name]
    for name, (value, held) in contents.items():
        own[name] = value
        if held is not None:
            value.clear()
            value.update(held)


def _forget_state(modules: Iterable[nn.Module]) -> None:
    """torch keeps what it knows of a sharded module beside it."""
    from torch.distributed import _composable_state

    known = getattr(_composable_state, "_module_state_mapping", {})
    for module in modules:
        known.pop(module, None)


def _is_sharded(model: nn.Module) -> bool:
    return any(type(module).__name__.startswith("FSDP") for module in model.modules())


def _largest_block(model: nn.Module) -> int:
    sizes = [
        sum(one.numel() * one.element_size() for one in block.parameters())
        for group in blocks(model)
        for _, block in group
    ]
    return max(sizes, default=0)


def _nothing() -> None:
    pass
