"""How a model is spread over ranks, and the one order in which that is applied.

1. Fixes (`oomph.apply`): they change modules of the instance, before it is moved to its device.
2. Tensor parallelism: parameters become DTensors, sharded by heads, MLP features and vocabulary.
3. Context parallelism: attention exchanges tokens for heads, KDA passes its state on; forward splits T.
4. Data parallelism over all ranks that hold the same tensor-parallel shard: FSDP2 of every block and then of
   the model, or DDP around it.
5. The optimizer, over the parameters that are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from oomph.errors import UserError
from oomph.nn.blocks import NamedModule, blocks
from oomph.workload import float_dtype

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STRATEGIES = ("fsdp2", "ddp", "tp", "cp")


@dataclass(frozen=True)
class Parallel:
    """A training step over `ranks` processes, one per GPU.

    data: "fsdp2" or "ddp", over the ranks / tp that hold the same shard. tp, cp: ranks of a tensor-parallel
    and of a context-parallel group. Of FSDP2: reshard_after_forward frees a block's gathered parameters after
    forward and gathers them again in backward; param_dtype and reduce_dtype are those of its
    MixedPrecisionPolicy; cpu_offload keeps shards, gradients and optimizer state on the host.
    """

    ranks: int
    data: str = "fsdp2"
    tp: int = 1
    cp: int = 1
    reshard_after_forward: bool = True
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "tp", "cp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"parallel {name}={value!r} is not valid; give a whole number >= 1")
        if self.data not in ("fsdp2", "ddp"):
            raise UserError(f"parallel data={self.data!r} is not valid; choose from 'fsdp2', 'ddp'")
        for name in ("reshard_after_forward", "cpu_offload"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"parallel {name}={getattr(self, name)!r} is not valid; valid: true, false")
        if self.ranks % (self.tp * self.cp):
            raise UserError(
                f"{self.ranks} ranks cannot be divided into groups of tp={self.tp} x cp={self.cp}; "
                f"give a number of ranks that is a multiple of {self.tp * self.cp}"
            )
        if self.tp > 1 and self.data == "ddp" and self.ranks > self.tp:
            raise UserError("tensor parallelism is combined with fsdp2, not with ddp")
        if self.data == "ddp" and (self.cpu_offload or self.param_dtype or self.reduce_dtype):
            raise UserError("cpu_offload, param_dtype and reduce_dtype are options of fsdp2, not of ddp")
        float_dtype(self.param_dtype, "param_dtype")
        float_dtype(self.reduce_dtype, "reduce_dtype")

    @property
    def replicas(self) -> int:
        """Groups of ranks that work on different samples."""
        return self.ranks // (self.tp * self.cp)

    def __str__(self) -> str:
        """`fsdp2 over 128 ranks x cp 8`"""
        parts = [f"{self.data} over {self.ranks // (self.tp * self.cp)} ranks"]
        parts = parts if self.replicas > 1 or self.ranks == 1 else []
        parts += [f"{name} {size}" for name, size in (("cp", self.cp), ("tp", self.tp)) if size > 1]
        return " x ".join(parts)

    def rows(self, batch: int, rank: int) -> slice:
        """Which rows of a batch of all ranks belong to this one."""
        part = batch // self.replicas
        replica = rank // (self.tp * self.cp)
        return slice(replica * part, (replica + 1) * part)

    def apply(self, model: nn.Module, device: str) -> nn.Module:
        """Steps 2 to 4 of the order above, over the process group, which has `ranks` ranks.

        `model` is changed in place and moved to the device: by FSDP2 block by block, so that all of it is
        never there. What is returned is to be called: DDP's wrapper, or the model itself.
        """
        from torch.distributed.device_mesh import init_device_mesh

        only_tp = self.ranks == self.tp > 1
        if self.data == "ddp" or only_tp:
            model.to(device)
        shape = (self.replicas, self.cp, self.tp)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replica", "cp", "tp"))
        # The ranks over which gradients are averaged, and parameters sharded, in one dimension.
        data = init_device_mesh(device, (self.ranks // self.tp, self.tp), mesh_dim_names=("data", "tp"))
        if self.tp > 1:
            from oomph.parallel.tensor_parallel import tensor_parallel

            tensor_parallel(model, data["tp"])
        if self.cp > 1:
            from oomph.parallel.context_parallel import context_parallel

            context_parallel(model, mesh.get_group("cp"))
        if only_tp:
            return model
        if self.data == "ddp":
            return nn.parallel.DistributedDataParallel(model, process_group=data.get_group("data"))
        self._shard(model, data["data"])
        return model

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        # The model's inputs are cast to param_dtype, not those of a block: RoPE tables stay in float32.
        policy = MixedPrecisionPolicy(
            param_dtype=float_dtype(self.param_dtype, "param_dtype"),
            reduce_dtype=float_dtype(self.reduce_dtype, "reduce_dtype"),
        )
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": replace(policy, cast_forward_inputs=False),
            "offload_policy": OffloadPolicy(),
        }
        if self.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        for _, block in blocks_with_own_parameters(blocks(model)):
            fully_shard(block, **options)
        fully_shard(model, **{**options, "mp_policy": policy})


def blocks_with_own_parameters(groups: Sequence[Sequence[NamedModule]]) -> list[NamedModule]:
    """Blocks that share no parameter. Others are sharded with the whole model: FSDP2 cannot gather a
    parameter with two blocks."""
    members = [member for group in groups for member in group]
    owners = Counter(id(each) for member in members for each in member.module.parameters())
    return [each for each in members if all(owners[id(one)] == 1 for one in each.module.parameters())]


def parse_parallel(text: str, ranks: int) -> Parallel:
    """`fsdp2`, `ddp`, `tp`, `cp`, each with options: `fsdp2:cp=8,reshard_after_forward=false`."""
    name, _, listed = text.partition(":")
    if name not in STRATEGIES:
        raise UserError(f"--parallel {name!r} is not valid; choose from {', '.join(STRATEGIES)}")
    options: dict[str, Any] = {} if name in ("tp", "cp") else {"data": name}
    valid = [field.name for field in fields(Parallel) if field.name not in ("ranks", "data")]
    for part in filter(None, listed.split(",")):
        key, given, value = part.partition("=")
        if not given or key not in valid:
            raise UserError(f"--parallel {text!r}: {part!r} is not valid; give {'=..., '.join(valid)}=...")
        constants: dict[str, Any] = {"true": True, "false": False, "none": None, "null": None}
        options[key] = constants.get(value.lower(), int(value) if value.isdecimal() else value)
    if name in ("tp", "cp"):  # all ranks that the other dimension leaves
        rest = options.get({"tp": "cp", "cp": "tp"}[name], 1)
        options.setdefault(name, ranks // rest if isinstance(rest, int) and rest else ranks)
    return Parallel(ranks, **options)
