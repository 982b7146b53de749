"""A hook records a copy of every gradient of every step, for a histogram."""

import torch
from torch import nn


def train():
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(4)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: recorded.append(grad.clone()))  # PLANTED
    x = torch.randn(64, 4096, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
