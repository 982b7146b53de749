"""One table serves many columns, and each of them makes a dense gradient of the whole table."""

import torch
from torch import nn

from oomph import Workload


class ClickModel(nn.Module):
    def __init__(self, rows: int, width: int, columns: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.columns = columns
        self.score = nn.Linear(width, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=ids.device)
        for column in range(self.columns):
            total = total + self.table(ids[:, column])  # PLANTED
        return self.score(total)


workload = Workload(
    model=lambda: ClickModel(4_000_000, 128, columns=6),
    batch=lambda device: torch.randint(0, 4_000_000, (4096, 6), device=device),
    loss=lambda model, ids: model(ids).square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
)
