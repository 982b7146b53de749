"""Hand-written convolutional networks. Shapes: B batch, C channels, H and W the image's sides."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn


class ConvBlock(nn.Module):
    """Two convolutions with group norm, SiLU and a residual path, as in diffusion models."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, inside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x_BCHW)))
        return self.skip(x_BCHW) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    """Down and up again, with skips; transposed convolutions on the way up."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(ConvBlock(width, width) for width in widths[:-1])
        self.shrink = nn.ModuleList(nn.Conv2d(low, high, 3, stride=2, padding=1) for low, high in pairs)
        self.middle = ConvBlock(widths[-1], widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(high, low, 2, stride=2) for low, high in reversed(pairs))
        self.up = nn.ModuleList(ConvBlock(2 * low, low) for low, _ in reversed(pairs))
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        x = self.stem(x_BCHW)
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x)
            skips.append(x)
            x = shrink(x)
        x = self.middle(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], dim=1))
        return self.out(x)


class BatchNormNet(nn.Module):
    """A plain convolutional classifier with batch norm, max pooling and dropout (VGG-like)."""

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inside = 3
        for outside in (64, 128, 256, 512):
            layers += [
                nn.Conv2d(inside, outside, 3, padding=1, bias=False),
                nn.BatchNorm2d(outside),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ]
            inside = outside
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512 * 16, 1024), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(1024, classes),
        )  # fmt: skip

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x_BCHW))


def denoising_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["noisy"]), batch["clean"])


def class_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])
