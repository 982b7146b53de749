"""More images at once than the network needs."""

import torch
import torch.nn.functional as F
from torch import nn

from oomph import Workload


def batch(device: torch.device) -> dict[str, torch.Tensor]:
    images = torch.randn(8192, 3, 256, 256, device=device)  # PLANTED
    labels = torch.randint(0, 10, (8192,), device=device)
    return {"images": images, "labels": labels}


class SmallNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shrink = nn.AvgPool2d(16)
        self.head = nn.Linear(3 * 16 * 16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.shrink(images).flatten(1))


workload = Workload(
    model=SmallNetwork,
    batch=batch,
    loss=lambda model, batch: F.cross_entropy(model(batch["images"]), batch["labels"]),
)
