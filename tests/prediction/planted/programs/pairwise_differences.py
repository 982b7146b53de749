"""A metric-learning loss that subtracts every embedding from every other."""

import torch
from torch import nn


def pairwise_loss(embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    distances = (embeddings[:, None] - embeddings[None]).square().sum(-1)  # PLANTED
    same = labels[:, None] == labels[None]
    return torch.where(same, distances, (1 - distances).clamp(min=0)).mean()


def train():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = torch.randn(4096, 784).to(device), torch.randint(0, 10, (4096,)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        loss = pairwise_loss(model(images), labels)
        loss.backward()
        optimizer.step()

    return step
