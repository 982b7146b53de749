"""GINR: images as functions of position, from a Mamba encoder and a SCENT-style decoder.

The encoder maps an image to latents; the decoder maps latents and positions to pixels, at several scales:

    gamma_k = Fourier features of scale k         m = query + attention(query, latents, -strength |t - s|^2)
    m_k = ReLU(bandwidth_k(gamma_k) + modulation_k(m))
    h_0 = m_0      h_(i+1) = hv_i(m_(i+1) + h_i)      out = sum of out_i(h_i + skip_i(gamma_i))

What depends on positions alone (gamma, query, skip, and bandwidth unless it attends to the latents) is
computed for one image and broadcast to the batch. Names that the report uses are kept. The presets
are the report's model and the solutions that change it.

Legend: B images, N positions, P patches, L latents, K context tokens, C features, H heads, E head size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass as validated_dataclass
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.nn import BidirectionalMamba, GatedMLP
from oomph.ops import attention, locality_bias
from oomph.ops.common import no_autocast
from oomph.ops.softmax_attention.arguments import LocalityBias
from oomph.torch_internals import register_dataclass
from oomph_lab.systems.config_checks import STRICT, check_multiple, invalid_if, one_of, valid_if

MIXINGS = ("self", "cross", "feedforward", "residual")


@validated_dataclass(frozen=True, config=STRICT)
class GINRConfig:
    """query_mixing: how the decoder's blocks mix positions, see Mixing; "self" is the report's.
    queries_per_step: number of random positions per training step (SCENT's remedy); None: all.
    query_chunk: positions decoded at a time, with the same outputs; not with "self", which mixes all of them.
    """

    image_size: PositiveInt = 32
    patch_size: PositiveInt = 2
    channels: PositiveInt = 3
    dim: PositiveInt = 256
    num_latents: Annotated[
        PositiveInt,
        valid_if(lambda n: round(n**0.5) ** 2 == n, "give a square number: latents are placed on a grid"),
    ] = 256
    encoder_depth: PositiveInt = 1
    d_state: PositiveInt = 16
    d_conv: PositiveInt = 4
    expand: PositiveInt = 2
    processor_depth: NonNegativeInt = 2
    feature_dim: Annotated[
        PositiveInt, valid_if(lambda n: n % 2 == 0, "give an even number: half are sines, half cosines")
    ] = 64
    hidden_dim: PositiveInt = 512
    # One per scale; 16 is the highest frequency of 32 pixels.
    sigmas: Annotated[
        tuple[float, ...],
        valid_if(lambda each: each and min(each) > 0, "give one number > 0 for each scale"),
    ] = (2.0, 8.0)
    num_layers: PositiveInt = 3
    heads: PositiveInt = 8
    dim_head: PositiveInt = 64
    mult: PositiveInt = 4
    locality: NonNegativeFloat = 10.0
    query_mixing: Annotated[str, one_of(MIXINGS)] = "self"
    queries_per_step: PositiveInt | None = None
    query_chunk: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_multiple(self, "image_size", of="patch_size")
        positions = self.image_size**2
        too_many = (self.queries_per_step or 0) > positions
        invalid_if(too_many, "queries_per_step", f"the image has {positions} positions")
        invalid_if(
            self.query_chunk is not None and self.query_mixing == "self",
            "query_chunk",
            "with query_mixing='self' all positions attend to each other, so chunks would change the "
            "outputs; give queries_per_step, or another query_mixing",
        )

    @property
    def layer_num(self) -> int:
        """The number of scales."""
        return len(self.sigmas)

    def build(self) -> "GINR":
        return GINR(self)


PRESETS: Mapping[str, GINRConfig] = {
    "default": GINRConfig(),
    "solution_1_feedforward": GINRConfig(query_mixing="feedforward"),
    "solution_2_cross": GINRConfig(query_mixing="cross"),
    "solution_5_resolution": GINRConfig(image_size=16),
    "scent_queries": GINRConfig(queries_per_step=256),
    "residual": GINRConfig(query_mixing="residual", encoder_depth=6),  # the original, before SCENT's decoder
    "tiny": GINRConfig(
        image_size=8,
        dim=32,
        num_latents=16,
        processor_depth=1,
        feature_dim=16,
        hidden_dim=32,
        sigmas=(1.0, 3.0),
        num_layers=2,
        heads=2,
        dim_head=16,
        mult=2,
    ),
}


class Attention(nn.Module):
    """Self-attention, or with context_dim cross-attention; no N x N matrix is materialised."""

    def __init__(
        self, query_dim: int, context_dim: int | None = None, heads: int = 8, dim_head: int = 64
    ) -> None:
        super().__init__()
        context_dim = query_dim if context_dim is None else context_dim
        self.heads, self.dim_head = heads, dim_head
        inner = heads * dim_head
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_k = nn.Linear(context_dim, inner, bias=False)
        self.to_v = nn.Linear(context_dim, inner, bias=False)
        self.to_out = nn.Linear(inner, query_dim)

    def forward(self, x: Tensor, context: Tensor | None = None, bias: LocalityBias | None = None) -> Tensor:
        """x [B, N, C], or [1, N, C] for the same positions in every image; context [B, K, c] -> [B, N, C]."""
        context = x if context is None else context
        q, k, v = (
            self._by_head(to(of)) for to, of in ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        )
        out_BHNE = self.attend(q.expand(k.shape[0], -1, -1, -1), k, v, bias)
        out: Tensor = self.to_out(out_BHNE.transpose(1, 2).flatten(2))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: LocalityBias | None) -> Tensor:
        return attention(q, k, v, bias=bias)

    def _by_head(self, x_BNI: Tensor) -> Tensor:
        return x_BNI.unflatten(-1, (self.heads, self.dim_head)).transpose(1, 2)


class FeedForward(GatedMLP):
    """GEGLU, `down(gelu(gate x) * up x)`; the mult times wider features are not saved for backward."""

    def __init__(self, dim: int, mult: int = 4) -> None:
        super().__init__(dim, dim * mult, "gelu", bias=True)


class PreNorm(nn.Module):
    """fn(norm(x)), and with context_dim fn(norm(x), norm(context))."""

    def __init__(self, dim: int, fn: nn.Module, context_dim: int | None = None) -> None:
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)
        self.norm_context = None if context_dim is None else nn.LayerNorm(context_dim)

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        inputs = [self.norm(x)]
        if self.norm_context is not None:
            inputs.append(self.norm_context(context))
        out: Tensor = self.fn(*inputs, **options)
        return out


class ResidualBlock(nn.Module):
    """x + W2 ReLU(W1 x), per position: the block of the original decoder."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fc2(F.relu(self.fc1(x)))
        return out


@dataclass(frozen=True)
class LayerClasses:
    """The classes of a block's layers; the naive form has its own."""

    attention: type[Attention] = Attention
    feed_forward: type[FeedForward] = FeedForward


@dataclass(frozen=True)
class Mixing:
    """How a block mixes positions, and its dimensions.

    kind: "self" (self-attention), "cross" (cross-attention to the latents), "feedforward" (a second
    feed-forward instead of attention), "residual" (a ResidualBlock instead of both).
    """

    kind: str
    dim: int
    context_dim: int
    heads: int = 8
    dim_head: int = 64
    mult: int = 4
    layers: LayerClasses = LayerClasses()


class MixingBlock(nn.Module):
    """Two residual sublayers: `Mixing.kind`, then a feed-forward."""

    def __init__(self, mixing: Mixing) -> None:
        super().__init__()
        self.kind = kind = mixing.kind
        dim, layers = mixing.dim, mixing.layers
        self.mix: nn.Module
        self.feed: nn.Module | None = None
        if kind == "residual":
            self.mix = ResidualBlock(dim)
            return
        self.feed = PreNorm(dim, layers.feed_forward(dim, mult=mixing.mult))
        if kind == "feedforward":
            self.mix = PreNorm(dim, layers.feed_forward(dim, mult=mixing.mult))
            return
        context_dim = mixing.context_dim if kind == "cross" else None
        attend = layers.attention(dim, context_dim, heads=mixing.heads, dim_head=mixing.dim_head)
        self.mix = PreNorm(dim, attend, context_dim)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """x [B, N, C] or [1, N, C] -> the same; with kind "cross", [B, N, C] for the context's B."""
        if self.feed is None:
            mixed: Tensor = self.mix(x)
            return mixed
        x = x + (self.mix(x, context) if self.kind == "cross" else self.mix(x))
        out: Tensor = x + self.feed(x)
        return out


class Encoder(nn.Module):
    """[B, channels, size, size] -> [B, L, C].

    Latent tokens are spread evenly between the patches, so that the scans of both directions read patches
    before each latent. After all patches, they would get nothing from the backward scan.
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


class FourierFeatures(nn.Module):
    """Sines and cosines of pi x . f, with fixed frequencies f ~ N(0, 1) * sigma: [N, 2] -> [N, features].

    Positions are in [-1, 1], so f = 1 is one period over the image; with sigma near 0 the features would be
    nearly constant.
    """

    frequencies: Tensor

    def __init__(self, features: int, sigma: float) -> None:
        super().__init__()
        self.sigma = sigma
        self.register_buffer("frequencies", torch.randn(2, features // 2) * sigma)

    def forward(self, t_N2: Tensor) -> Tensor:
        # At least float32: in bfloat16 high frequencies lose their phase.
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
    """Positions [N, 2] and latents [B, L, c], placed at `latent_points` [L, 2] -> [B, N, channels]."""

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
        attend = mixing.layers.attention(
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
        """gamma per scale: [1, N, feature_dim], shared by the batch."""
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
        """out_i(h + skip_i(gamma)) as two products: the sum would be saved for every image."""
        lin, skip = self.out_lins[scale], self.skip_lins[scale]
        assert isinstance(lin, nn.Linear)
        pixels: Tensor = lin(h_BNC) + F.linear(skip(gamma), lin.weight)
        return pixels


@dataclass(frozen=True, eq=False)
class GINROutput:
    """loss: mean squared error; psnr in dB, for images in [0, 1]; pixels [B, N, channels]."""

    loss: Tensor
    psnr: Tensor
    pixels: Tensor


register_dataclass(GINROutput)


class GINR(nn.Module):
    """model(images) reconstructs images [B, channels, size, size] with values in [0, 1].

    In training, at config.queries_per_step random positions if that is set; otherwise at all positions.
    """

    grid: Tensor

    decoder_class: type[Decoder] = Decoder
    layer_classes = LayerClasses()

    def __init__(self, config: GINRConfig) -> None:
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
            mixing(config.query_mixing, config.hidden_dim, config.dim, layers=self.layer_classes),
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
        """Pixels [B, N, channels] at positions in [-1, 1], `query_chunk` positions at a time."""
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
