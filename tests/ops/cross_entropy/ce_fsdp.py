"""What two ranks check under FSDP2, where a model's forward computes the loss; run by test_ce_ranks."""

from __future__ import annotations

from typing import Any

import torch
from ce_cases import assert_close
from ce_ranks import RANKS
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from oomph.nn.loss import LinearCrossEntropyLoss
from oomph.ops import linear_cross_entropy

D, CLASSES = 6, 13


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        self.head = nn.Linear(D, CLASSES)
        self.options = options

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.body(x)
        losses = linear_cross_entropy(hidden, self.head.weight, target, bias=self.head.bias, **self.options)
        return losses.mean()


class ModelWithLoss(nn.Module):
    """The head is inside the loss, which is sharded on its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        self.loss = LinearCrossEntropyLoss(D, CLASSES, bias=True, **options)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.body(x), target).mean()


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 5, D, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (4, 5), generator=generator)


def made(kind: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options).double()


def a_sharded_model_trains_like_the_whole_one(rank: int) -> None:
    for kind in (Model, ModelWithLoss):
        for options in ({"impl": "chunked"}, {"impl": "chunked", "reduction": "none"}, {"impl": "plain"}):
            whole, sharded = made(kind, impl="reference"), made(kind, **options)
            fully_shard(sharded.body)
            if kind is ModelWithLoss:
                fully_shard(sharded.loss)
            fully_shard(sharded)
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
            theirs = torch.optim.SGD(whole.parameters(), lr=0.1)
            for _ in range(3):
                loss = sharded(*batch(rank))
                loss.backward()
                losses = [whole(*batch(each)) for each in range(RANKS)]
                (sum(losses) / RANKS).backward()
                assert_close([loss.detach()], [losses[rank].detach()], 1e-11)
                assert_close(
                    [each.grad.full_tensor() for each in sharded.parameters()],
                    [each.grad for each in whole.parameters()],
                    1e-11,
                )
                for each in (optimizer, theirs):
                    each.step()
                    each.zero_grad()
