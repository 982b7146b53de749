"""A decoder upsamples wide features before it reduces them to three channels."""

import torch
import torch.nn.functional as F
from torch import nn

from oomph import Workload


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.refine = nn.Conv2d(256, 256, 3, padding=1)
        self.to_rgb = nn.Conv2d(256, 3, 1)

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.refine(latent))
        return self.to_rgb(F.interpolate(features, scale_factor=8, mode="bilinear"))  # PLANTED


workload = Workload(
    model=Decoder,
    batch=lambda device: torch.randn(8, 256, 64, 64, device=device),
    loss=lambda model, latent: model(latent).abs().mean(),
)
