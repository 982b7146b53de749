"""Under FSDP2, on two CPU processes: losses and gradients are those of the module without tiles."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from mlp_samples import NormalisedGated, PlainGated
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from oomph.errors import ArgumentError
from oomph.nn.mlp import GatedMLP, TiledMLP
from oomph.ops.mlp import tiled_mlp

RANKS = 2


class Block(nn.Module):
    def __init__(self, mlp: nn.Module, tiled: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.mlp = TiledMLP(mlp, tile=3) if tiled else mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def outcome(module: nn.Module, x: Tensor, tile: int | None = None) -> list[Tensor]:
    """Loss, gradient of x and gradients of all parameters, whole, after two steps of accumulation."""
    x = x.detach().requires_grad_()
    for _ in range(2):
        out = module(x) if tile is None else tiled_mlp(module, x, tile=tile)
        out.square().mean().backward()
    grads = [each.grad for each in module.parameters()]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in grads]
    return [out.square().mean().detach(), x.grad, *whole]


def check_sharded(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    try:
        x = torch.randn(10, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        for make in (PlainGated, NormalisedGated, lambda: GatedMLP(12, 20, tile=3)):
            for tile, in_block in ((3, False), (None, True)):
                torch.manual_seed(0)
                plain = make().double()
                expected_module = Block(plain, tiled=False).double() if in_block else plain
                expected = outcome(expected_module, x)
                torch.manual_seed(0)
                module = make().double()
                sharded = fully_shard(Block(module, tiled=True).double() if in_block else module)
                for one, other in zip(outcome(sharded, x, tile), expected, strict=True):
                    torch.testing.assert_close(one, other)
        inner = PlainGated().double()
        fully_shard(inner.w1)
        with pytest.raises(ArgumentError, match="w1 inside the module is sharded on its own"):
            tiled_mlp(inner, x)
    finally:
        dist.destroy_process_group()


def test_sharded_modules_and_blocks_give_the_losses_and_gradients_of_whole_ones() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(check_sharded, args=(port,), nprocs=RANKS)
