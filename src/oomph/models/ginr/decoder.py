"""From latents and positions to pixels, at several scales.

    gamma_k = Fourier features of scale k         m = query + attention(query, latents, -strength |t - s|^2)
    m_k = ReLU(bandwidth_k(gamma_k) + modulation_k(m))
    h_0 = m_0      h_(i+1) = hv_i(m_(i+1) + h_i)      out = sum of out_i(h_i + skip_i(gamma_i))

What depends on positions alone (gamma, query, skip, and bandwidth unless it looks at the latents) is computed
for one image and broadcast to the batch.

Legend: B images, N positions, L latents, C features.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.models.ginr.blocks import Mixing, MixingBlock, PreNorm
from oomph.ops import locality_bias
from oomph.ops.common import no_autocast


class FourierFeatures(nn.Module):
    """Sines and cosines of pi x . f, with fixed frequencies f ~ N(0, 1) * sigma: [N, 2] -> [N, features].

    At sigma near 0 they would hardly change over the image; a position is in [-1, 1], so f = 1 is one period.
    """

    frequencies: Tensor

    def __init__(self, features: int, sigma: float) -> None:
        super().__init__()
        self.sigma = sigma
        self.register_buffer("frequencies", torch.randn(2, features // 2) * sigma)

    def forward(self, t_N2: Tensor) -> Tensor:
        # In float32 at least: in bfloat16 high frequencies would lose their phase.
        wide = torch.promote_types(t_N2.dtype, torch.float32)
        with no_autocast(t_N2):
            phase = math.pi * (t_N2.to(wide) @ self.frequencies.to(wide))
        return torch.cat([phase.sin(), phase.cos()], dim=-1).to(self.frequencies.dtype)


class Branch(nn.Module):
    """ReLU(Linear), then num_layers - 1 mixing blocks."""

    def __init__(self, in_dim: int, mixing: Mixing, num_layers: int) -> None:
        super().__init__()
        self.lin = nn.Linear(in_dim, mixing.dim)
        self.blocks = nn.ModuleList(MixingBlock(mixing) for _ in range(num_layers - 1))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = F.relu(self.lin(x))
        for block in self.blocks:
            x = block(x, context)
        return x


class Decoder(nn.Module):
    """positions [N, 2] and latents [B, L, c], which stand at `latent_points` [L, 2] -> [B, N, channels]."""

    latent_points: Tensor

    def __init__(
        self,
        mixing: Mixing,
        latent_points: Tensor,
        *,
        channels: int,
        feature_dim: int,
        sigmas: Sequence[float],
        num_layers: int,
        locality: float,
    ) -> None:
        super().__init__()
        self.layer_num, self.num_layers, self.locality = len(sigmas), num_layers, locality
        hidden = mixing.dim
        self.register_buffer("latent_points", latent_points)
        self.fourier = nn.ModuleList(FourierFeatures(feature_dim, sigma) for sigma in sigmas)
        self.query_lin = nn.Linear(feature_dim, hidden)
        attend = mixing.parts.attention(
            hidden, mixing.context_dim, heads=mixing.heads, dim_head=mixing.dim_head
        )
        self.cross_attention = PreNorm(hidden, attend, mixing.context_dim)
        scales = range(self.layer_num)
        self.bandwidth_lins = nn.ModuleList(Branch(feature_dim, mixing, num_layers) for _ in scales)
        self.modulation_lins = nn.ModuleList(Branch(hidden, mixing, num_layers) for _ in scales)
        self.hv_lins = nn.ModuleList(MixingBlock(mixing) for _ in scales[1:])
        self.skip_lins = nn.ModuleList(nn.Linear(feature_dim, hidden) for _ in scales)
        self.out_lins = nn.ModuleList(nn.Linear(hidden, channels) for _ in scales)

    def features(self, t_N2: Tensor, batch: int) -> list[Tensor]:
        """gamma per scale: [1, N, feature_dim], for all images of the batch."""
        return [fourier(t_N2).unsqueeze(0) for fourier in self.fourier]

    def forward(self, t_N2: Tensor, latents_BLC: Tensor) -> Tensor:
        gammas = self.features(t_N2, len(latents_BLC))
        query = self.query_lin(gammas[0])
        near = locality_bias(t_N2, self.latent_points, self.locality)
        m_BNC = query + self.cross_attention(query, latents_BLC, bias=near)
        h_BNC: Tensor | None = None
        out: Tensor | None = None
        for scale, gamma in enumerate(gammas):
            bandwidth = self.bandwidth_lins[scale](gamma, latents_BLC)
            m_k = F.relu(bandwidth + self.modulation_lins[scale](m_BNC, latents_BLC))
            h_BNC = m_k if h_BNC is None else self.hv_lins[scale - 1](m_k + h_BNC, latents_BLC)
            pixels = self._pixels(scale, h_BNC, gamma)
            out = pixels if out is None else out + pixels
        assert out is not None
        return out

    def _pixels(self, scale: int, h_BNC: Tensor, gamma: Tensor) -> Tensor:
        """out_i(h + skip_i(gamma)), the two apart: their sum would be kept for every image."""
        lin, skip = self.out_lins[scale], self.skip_lins[scale]
        assert isinstance(lin, nn.Linear)
        pixels: Tensor = lin(h_BNC) + F.linear(skip(gamma), lin.weight)
        return pixels
