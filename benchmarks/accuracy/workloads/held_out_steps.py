"""Held out: hand-written training steps that nobody tuned the predictor on.

Shapes: B batch, C channels, H and W a image's sides.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.accuracy.workloads.entry import Entry

Step = Callable[[], None]


def physics_informed() -> Step:
    """The Laplacian of a network, in double precision: derivatives of derivatives, then backward."""
    layers: list[nn.Module] = [nn.Linear(2, 400), nn.Tanh()]
    for _ in range(5):
        layers += [nn.Linear(400, 400), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(400, 1)).double().cuda().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def derivative(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    def step() -> None:
        x = torch.rand(30_000, 2, dtype=torch.float64, device="cuda", requires_grad=True)
        border = torch.rand(5_000, 2, dtype=torch.float64, device="cuda").round()
        slope = derivative(model(x), x)
        laplacian = derivative(slope[:, 0], x)[:, 0] + derivative(slope[:, 1], x)[:, 1]
        wanted = torch.sin(math.pi * x.detach()).prod(dim=1)
        loss = F.mse_loss(laplacian, wanted) + 10 * model(border).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def checkpointed_muon() -> Step:
    """A stack checkpointed in four segments; Muon steps the matrices and AdamW the rest."""
    blocks = nn.Sequential(
        *(
            nn.TransformerEncoderLayer(
                896, 14, 3584, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(12)
        )
    )
    model = nn.ModuleDict(
        {"words": nn.Embedding(20000, 896), "blocks": blocks, "head": nn.Linear(896, 20000, bias=False)}
    )
    model.to("cuda", torch.bfloat16).train()
    matrices = [p for p in blocks.parameters() if p.ndim == 2]
    hidden = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in hidden]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)]
    ids = torch.randint(0, 20000, (10, 512), device="cuda")
    hidden_at = torch.rand(ids.shape, device="cuda") < 0.15
    shown, wanted = ids.masked_fill(hidden_at, 0), ids.masked_fill(~hidden_at, -100)

    def step() -> None:
        x = checkpoint_sequential(blocks, 4, model["words"](shown), use_reentrant=False)
        logits = model["head"](x)
        F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


class PixelAttention(nn.Module):
    """Every pixel attends to every other."""

    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(32, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x_BCHW.shape
        qkv = self.qkv(self.norm(x_BCHW)).view(b, 3, self.heads, c // self.heads, h * w).transpose(3, 4)
        y = F.scaled_dot_product_attention(qkv[:, 0], qkv[:, 1], qkv[:, 2])
        return x_BCHW + self.out(y.transpose(2, 3).reshape(b, c, h, w))


class TimedBlock(nn.Module):
    """A residual block that is told the time by a shift and a scale; attention may follow."""

    def __init__(self, inside: int, outside: int, time: int, attention: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inside), nn.GroupNorm(32, outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.time = nn.Linear(time, 2 * outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()
        self.attend = PixelAttention(outside) if attention else nn.Identity()

    def forward(self, x_BCHW: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x_BCHW)))
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, dim=1)
        y = self.conv2(F.silu(self.norm2(y) * (1 + scale) + shift))
        return self.attend(self.skip(x_BCHW) + y)


class TimedUNet(nn.Module):
    """Three resolutions, attention at the lower two, nearest-neighbour upsampling."""

    def __init__(self, channels: int = 4, base: int = 128) -> None:
        super().__init__()
        time, low, middle, high = 4 * base, base, 2 * base, 3 * base
        self.base = base
        self.time = nn.Sequential(nn.Linear(base, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(channels, base, 3, padding=1)
        downwards = ((base, low, False), (low, middle, True), (middle, high, True))
        upwards = ((2 * high, high, True), (high + middle, middle, True), (middle + low, low, False))
        self.down = nn.ModuleList(TimedBlock(i, o, time, attention) for i, o, attention in downwards)
        self.middle = TimedBlock(high, high, time)
        self.up = nn.ModuleList(TimedBlock(i, o, time, attention) for i, o, attention in upwards)
        self.norm = nn.GroupNorm(32, base)
        self.out = nn.Conv2d(base, channels, 3, padding=1)

    def forward(self, x_BCHW: torch.Tensor, t_B: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(self.base // 2, device=t_B.device)
        angle = t_B[:, None].float() * torch.exp(-math.log(10000) * steps / len(steps))
        time = self.time(torch.cat([angle.sin(), angle.cos()], dim=1))
        x, skips = self.stem(x_BCHW), []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        return self.out(F.silu(self.norm(x)))


def diffusion() -> Step:
    """Predict the noise at a random time, under bf16 autocast, with a running average of the weights."""
    model = TimedUNet().cuda().train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device="cuda"), dim=0)
    clean = torch.randn(24, 4, 64, 64, device="cuda")

    def step() -> None:
        t = torch.randint(0, 1000, (len(clean),), device="cuda")
        share = kept[t][:, None, None, None]
        noise = torch.randn_like(clean)
        with torch.autocast("cuda", torch.bfloat16):
            guess = model(share.sqrt() * clean + (1 - share).sqrt() * noise, t)
            loss = F.mse_loss(guess.float(), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.001)

    return step


HELD_OUT_STEPS = {
    "held-physics-fp64": Entry(physics_informed, "MLP in double precision, Laplacian by create_graph=True"),
    "held-checkpoint-muon": Entry(
        checkpointed_muon, "nn.TransformerEncoderLayer stack, bf16, checkpoint_sequential, Muon and AdamW"
    ),
    "held-diffusion-average": Entry(
        diffusion,
        "diffusion U-Net with attention, bf16 autocast, running average of the weights",
        convolutions=True,
    ),
}
