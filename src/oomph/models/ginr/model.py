"""The whole: an image in, its pixels at any positions out."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from oomph.errors import ArgumentError
from oomph.models.ginr.blocks import Mixing, Parts
from oomph.models.ginr.decoder import Decoder
from oomph.models.ginr.encoder import Encoder, LatentProcessor

if TYPE_CHECKING:
    from oomph.models.ginr.config import GINRConfig


@dataclass(frozen=True, eq=False)
class GINROutput:
    """loss: mean squared error; psnr in dB, for images in [0, 1]; pixels [B, N, channels]."""

    loss: Tensor
    psnr: Tensor
    pixels: Tensor


register_dataclass(GINROutput)


class GINR(nn.Module):
    """model(images) reconstructs images [B, channels, size, size] with values in [0, 1].

    In training, where config.queries_per_step is given, at so many random positions; else at all.
    """

    grid: Tensor

    decoder_class: type[Decoder] = Decoder
    parts = Parts()

    def __init__(self, config: "GINRConfig") -> None:
        super().__init__()
        self.config = config
        mixing = partial(Mixing, heads=config.heads, dim_head=config.dim_head, mult=config.mult)
        self.encoder = Encoder(
            config.image_size,
            config.patch_size,
            config.channels,
            config.dim,
            config.num_latents,
            config.encoder_depth,
            d_state=config.d_state,
            d_conv=config.d_conv,
            expand=config.expand,
        )
        self.processor = LatentProcessor(mixing("self", config.dim, config.dim), config.processor_depth)
        self.decoder = self.decoder_class(
            mixing(config.query_mixing, config.hidden_dim, config.dim, parts=self.parts),
            positions(round(config.num_latents**0.5)),
            channels=config.channels,
            feature_dim=config.feature_dim,
            sigmas=config.sigmas,
            num_layers=config.num_layers,
            locality=config.locality,
        )
        self.register_buffer("grid", positions(config.image_size), persistent=False)

    def forward(self, images: Tensor) -> GINROutput:
        size, channels = self.config.image_size, self.config.channels
        if images.dim() != 4 or tuple(images.shape[1:]) != (channels, size, size):
            raise ArgumentError(
                f"images have shape {list(images.shape)}; valid: [B, {channels}, {size}, {size}]"
            )
        t_N2, target_BNc = self.grid, images.flatten(2).transpose(1, 2)
        if self.training and self.config.queries_per_step is not None:
            chosen = torch.randperm(len(t_N2), device=t_N2.device)[: self.config.queries_per_step]
            t_N2, target_BNc = t_N2[chosen], target_BNc[:, chosen]
        pixels_BNc = self.decode(self.encode(images), t_N2)
        wide = torch.promote_types(pixels_BNc.dtype, torch.float32)
        loss = F.mse_loss(pixels_BNc.to(wide), target_BNc.to(wide))
        return GINROutput(loss, psnr(loss.detach()), pixels_BNc)

    def encode(self, images: Tensor) -> Tensor:
        """The latents, [B, num_latents, dim]."""
        latents: Tensor = self.processor(self.encoder(images))
        return latents

    def decode(self, latents: Tensor, t_N2: Tensor) -> Tensor:
        """Pixels at positions in [-1, 1]: [B, N, channels]; `query_chunk` of them at a time."""
        chunk = self.config.query_chunk or len(t_N2)
        parts = [self.decoder(part, latents) for part in t_N2.split(chunk)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def render(self, images: Tensor, size: int) -> Tensor:
        """The images at another resolution: [B, channels, size, size]."""
        pixels = self.decode(self.encode(images), positions(size).to(self.grid))
        return pixels.transpose(1, 2).unflatten(2, (size, size))


def positions(size: int) -> Tensor:
    """The centres of size x size cells in [-1, 1]^2, row by row: [size^2, 2]."""
    axis = (torch.arange(size) + 0.5) * (2 / size) - 1
    return torch.stack(torch.meshgrid(axis, axis, indexing="ij"), dim=-1).flatten(0, 1)


def psnr(mse: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, of images in [0, 1]."""
    return -10 * torch.log10(mse)
