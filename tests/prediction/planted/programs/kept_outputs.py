"""The predictions of every step are kept on the GPU for a plot that is drawn at the end."""

import torch
from torch import nn


def train():
    device = torch.device("cuda")
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4096)).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    x = torch.randn(65_536, 64, device=device)
    predictions: list[torch.Tensor] = []

    def step() -> None:
        predictions.append(network(x))  # PLANTED
        loss = predictions[-1].std()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
