"""From an image to its latents: patches and learnt tokens through bidirectional Mamba, then self-attention.

Legend: B images, P patches, L latents, C features of a token.
"""

import math

import torch
from torch import Tensor, nn

from oomph.models.ginr.blocks import Mixing, MixingBlock
from oomph.nn import BidirectionalMamba


class Encoder(nn.Module):
    """[B, channels, size, size] -> [B, L, C].

    Latent tokens stand between the patches, evenly, so that scans from either side have read patches before
    they come to a latent; after the patches they would learn nothing from the scan that goes backward.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        channels: int,
        dim: int,
        num_latents: int,
        depth: int,
        **mamba: int,
    ) -> None:
        """mamba: d_state, d_conv, expand."""
        super().__init__()
        self.patch_size = patch_size
        patches = (image_size // patch_size) ** 2
        self.groups = math.gcd(patches, num_latents)
        self.num_latents = num_latents
        self.embed = nn.Linear(channels * patch_size**2, dim)
        self.positions = nn.Parameter(torch.randn(patches, dim) * 0.02)
        self.latents = nn.Parameter(torch.randn(num_latents, dim) * 0.02)
        self.layers = nn.ModuleList(MambaLayer(dim, **mamba) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, images: Tensor) -> Tensor:
        p = self.patch_size
        batch = len(images)
        images = images.to(self.embed.weight.dtype)
        rows = images.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # [B, channels, rows, p, columns, p]
        patches_BPC = rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        tokens_BPC = self.embed(patches_BPC) + self.positions
        grouped = tokens_BPC.unflatten(1, (self.groups, -1))
        latents = self.latents.to(tokens_BPC.dtype).unflatten(0, (self.groups, -1)).expand(batch, -1, -1, -1)
        x_BTC = torch.cat([grouped, latents], dim=2).flatten(1, 2)
        for layer in self.layers:
            x_BTC = layer(x_BTC)
        each = self.num_latents // self.groups
        latents_BLC = x_BTC.unflatten(1, (self.groups, -1))[:, :, -each:].flatten(1, 2)
        out: Tensor = self.norm(latents_BLC)
        return out


class MambaLayer(nn.Module):
    """x + Mamba(norm(x))."""

    def __init__(self, dim: int, **mamba: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mamba = BidirectionalMamba(dim, **mamba)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mamba(self.norm(x))
        return out


class LatentProcessor(nn.Module):
    """Self-attention blocks over the latents: [B, L, C] -> [B, L, C]."""

    def __init__(self, mixing: Mixing, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixingBlock(mixing) for _ in range(depth))

    def forward(self, latents: Tensor) -> Tensor:
        for block in self.blocks:
            latents = block(latents)
        return latents
