"""Tensor parallelism of decoders: attention by heads, MLPs by features, the vocabulary by rows.

Every parameter becomes a DTensor over the group. A module computes with its local shards; one whose weights
are sharded sums its result over the group, as in Megatron. The head's weight stays a DTensor, with which
`linear_cross_entropy` computes the loss without gathering logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from oomph.errors import UserError
from oomph.nn.blocks import blocks
from oomph.parallel.collectives import copy_to_group, reduce_from_group

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the model in place.

    Modules that cannot be split by heads or features are computed by all ranks: NSA, KDA, fused projections,
    and those whose heads or features are not a multiple of the ranks."""
    ranks, group = mesh.size(), mesh.get_group()
    layers = [member.module for members in blocks(model) for member in members]
    if not isinstance(getattr(model, "embedding", None), nn.Embedding) or not layers:
        raise UserError(
            f"tensor parallelism is for the decoders of oomph_lab.systems (longctx, hatchling, pythia); "
            f"{type(model).__name__} is not one of them"
        )
    head = {} if getattr(model, "lm_head", None) is None else {"lm_head": ColwiseParallel()}
    parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate()), **head})
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    others = [
        child
        for name, child in model.named_children()
        if name not in ("embedding", "lm_head", "rotary")
        and not any(id(each) in in_layers for each in child.modules())
    ]
    for unit in (*_units(layers), *others):
        split = _can_be_split(unit, ranks)
        _distribute(unit, mesh, split)
        _compute_with_local_shards(unit, group, split)


def _units(layers: list[nn.Module]) -> Iterator[nn.Module]:
    """Norms, attention modules and MLPs: what a block's residual branches call."""
    for layer in layers:
        for branch in layer.children():
            yield from branch.children()


def _can_be_split(unit: nn.Module, ranks: int) -> bool:
    names = {name for name, _ in unit.named_children()}
    if {"up_proj", "down_proj"} <= names <= {"up_proj", "down_proj", "gate_proj"}:
        return not unit.get_submodule("down_proj").in_features % ranks  # type: ignore[operator]
    if {"q_proj", "k_proj", "v_proj", "o_proj"} <= names <= {*_BY_ROWS, *_BY_COLUMNS, "q_norm", "k_norm"}:
        attention: Any = unit
        if "gate_proj" in names or attention.num_kv_heads % ranks:  # NSA's gates are in another order
            return False
        attention.num_heads //= ranks
        attention.num_kv_heads //= ranks
        return True
    return False


def _distribute(unit: nn.Module, mesh: DeviceMesh, split: bool) -> None:
    for path, module in unit.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            placement: Any = Replicate()
            if split and path in _BY_ROWS:
                placement = Shard(0)
            elif split and path in _BY_COLUMNS and parameter.dim() == 2:
                placement = Shard(1)
            sharded = distribute_tensor(parameter.detach(), mesh, [placement])
            module._parameters[name] = nn.Parameter(sharded, parameter.requires_grad)


def _compute_with_local_shards(unit: nn.Module, group: Any, split: bool) -> None:
    """In the unit's forward its parameters are plain tensors: this rank's shards."""
    rank = dist.get_rank(group)
    owners = [(path, module, name) for path, module in unit.named_modules() for name in module._parameters]
    held: list[tuple[nn.Module, str, Any]] = []

    def local(path: str, parameter: Any) -> Tensor:
        shard: Tensor = parameter.to_local()
        if not split or any(placement.is_shard() for placement in parameter.placements):
            return shard
        shard = copy_to_group(shard, group)  # whole, but used for a part of the heads
        if path in _BY_COLUMNS:  # the bias of the sum is added once
            return shard if rank == 0 else shard * 0
        return shard

    def before(module: nn.Module, args: Any) -> Any:
        for path, owner, name in owners:
            parameter = owner._parameters[name]
            if parameter is not None:
                held.append((owner, name, parameter))
                owner._parameters[name] = local(path, parameter)  # type: ignore[assignment]
        return (copy_to_group(args[0], group), *args[1:]) if split else None

    def after(module: nn.Module, args: Any, result: Any) -> Any:
        while held:
            owner, name, parameter = held.pop()
            owner._parameters[name] = parameter
        return reduce_from_group(result, group) if split and isinstance(result, Tensor) else None

    unit.register_forward_pre_hook(before)
    unit.register_forward_hook(after, always_call=True)
