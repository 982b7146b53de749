"""Training steps drawn at random, for the intervals of predictions: `draw(kind, seed, number)`.

A kind has families; a number draws a family and its sizes, precision and optimizer. The program is a function
of no arguments that builds everything on the GPU and returns its step. Nothing here imports oomph.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[], Any]
Program = Callable[[], Step]
_CONVOLUTIONS: list[Callable[[random.Random], tuple[str, Program]]] = []
_DATA_DEPENDENT: list[Callable[[random.Random], tuple[str, Program]]] = []
_COMPILED: list[Callable[[random.Random], tuple[str, Program]]] = []
KINDS = {"convolution": _CONVOLUTIONS, "data": _DATA_DEPENDENT, "compiled": _COMPILED}


def draw(kind: str, seed: int, number: int) -> tuple[str, Program]:
    """A description of the program, and the program. Numbers go through the families in turn."""
    families = KINDS[kind]
    order = random.Random(f"{kind} {seed} {number // len(families)}").sample(families, len(families))
    return order[number % len(families)](random.Random(f"{kind} {seed} {number}"))


# ------------------------------------------------------------------------------------------------- shared

_PRECISIONS = ("fp32", "fp32", "no-tf32", "bf16-autocast", "bf16-autocast", "fp16-autocast", "bf16")


def _trained(
    build: Callable[[], nn.Module],
    batch: Callable[[], Sequence[torch.Tensor]],
    loss: Callable[..., torch.Tensor],
    rng: random.Random,
    precisions: Sequence[str] = _PRECISIONS,
    channels_last: bool = False,
    compiled: bool = False,
) -> tuple[str, Program]:
    precision = rng.choice(precisions)
    kind = rng.choice(("sgd", "momentum", "adam", "adamw-fused"))
    last = channels_last and rng.random() < 0.35

    def program() -> Step:
        torch.manual_seed(0)
        torch.backends.cudnn.allow_tf32 = precision != "no-tf32"
        model = build().cuda()
        inputs = [each.cuda() for each in batch()]
        if precision == "bf16":
            model = model.bfloat16()
            inputs = [each.bfloat16() if each.is_floating_point() else each for each in inputs]
        if last:
            model = model.to(memory_format=torch.channels_last)
            inputs = [
                each.contiguous(memory_format=torch.channels_last) if each.dim() == 4 else each
                for each in inputs
            ]
        if compiled:
            model = torch.compile(model)
        optimizer = _optimizer(kind, model)
        amp = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}.get(precision)
        scaler = torch.amp.GradScaler("cuda", enabled=amp is torch.float16)

        def step() -> None:
            with torch.autocast("cuda", dtype=amp or torch.bfloat16, enabled=amp is not None):
                value = loss(model, *inputs)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    return f"{precision} {kind}{' channels-last' if last else ''}", program


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), 1e-3)
    if kind == "momentum":
        return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True if kind == "adamw-fused" else None)


def _convolution(family: Callable[[random.Random], tuple[str, tuple[str, Program]]]) -> None:
    def drawn(rng: random.Random) -> tuple[str, Program]:
        about, (how, program) = family(rng)
        return f"{family.__name__.strip('_')} {about} {how}", program

    _CONVOLUTIONS.append(drawn)


def _classes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return F.cross_entropy(out.logits if hasattr(out, "logits") else out, y)


def _same(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return (out.float() - F.interpolate(x, out.shape[2:]).float().mean(1, keepdim=True)).square().mean()


def _conv(dim: int, *args: Any, **options: Any) -> nn.Module:
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1](*args, **options)


def _norm(dim: int, kind: str, channels: int) -> nn.Module:
    if kind == "group":
        return nn.GroupNorm(8, channels)
    if kind == "instance":
        return (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dim - 1](channels)
    return (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1](channels)


def _batch_for(rng: random.Random, elements_of_one: int, least: int = 1) -> int:
    """As many samples as have 0.1 to 0.7 billion elements in all."""
    total = 1e8 * 7 ** rng.random()
    return max(least, int(total / elements_of_one))


# ------------------------------------------------------------------------------------------- convolutions


@_convolution
def _classifier(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    from torchvision import models

    name, per_pixel = rng.choice(
        [
            ("resnet18", 120), ("resnet34", 170), ("resnet50", 500), ("resnext50_32x4d", 600),
            ("wide_resnet50_2", 800), ("vgg11", 350), ("vgg16_bn", 700), ("alexnet", 40),
        ]
    )  # fmt: skip
    side = rng.choice((128, 160, 192, 224, 224, 256))
    batch = _batch_for(rng, per_pixel * side * side // 2, 2)
    how = _trained(
        lambda: getattr(models, name)(weights=None, num_classes=100),
        lambda: (torch.randn(batch, 3, side, side), torch.randint(100, (batch,))),
        _classes, rng, channels_last=True,
    )  # fmt: skip
    return f"{name} {batch}x3x{side}", how


@_convolution
def _mobile(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    from torchvision import models

    name, per_pixel = rng.choice(
        [
            ("mobilenet_v2", 280), ("mobilenet_v3_large", 200), ("efficientnet_b0", 400), ("mnasnet1_0", 250),
            ("regnet_y_800mf", 250), ("regnet_x_1_6gf", 350), ("densenet121", 650), ("squeezenet1_1", 130),
            ("shufflenet_v2_x1_0", 120), ("convnext_tiny", 600),
        ]
    )  # fmt: skip
    side = rng.choice((128, 192, 224, 224, 288))
    batch = _batch_for(rng, per_pixel * side * side // 2, 2)
    how = _trained(
        lambda: getattr(models, name)(weights=None, num_classes=100),
        lambda: (torch.randn(batch, 3, side, side), torch.randint(100, (batch,))),
        _classes, rng, channels_last=True,
    )  # fmt: skip
    return f"{name} {batch}x3x{side}", how


@_convolution
def _segmentation(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    from torchvision import models

    name = rng.choice(("fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large"))
    side = rng.choice((160, 224, 320))
    batch = _batch_for(rng, 700 * side * side, 2)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x)["out"], y)

    how = _trained(
        lambda: getattr(models.segmentation, name)(weights=None, weights_backbone=None, num_classes=21),
        lambda: (torch.randn(batch, 3, side, side), torch.randint(21, (batch, side, side))),
        loss, rng,
    )  # fmt: skip
    return f"{name} {batch}x3x{side}", how


@_convolution
def _video(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    from torchvision import models

    name, per = rng.choice((("r3d_18", 350), ("mc3_18", 350), ("r2plus1d_18", 700)))
    frames, side = rng.choice((8, 16)), rng.choice((64, 96, 112))
    batch = _batch_for(rng, per * frames * side * side // 4, 1)
    how = _trained(
        lambda: getattr(models.video, name)(weights=None, num_classes=50),
        lambda: (torch.randn(batch, 3, frames, side, side), torch.randint(50, (batch,))),
        _classes, rng,
    )  # fmt: skip
    return f"{name} {batch}x3x{frames}x{side}", how


class _UNetModule(nn.Module):
    def __init__(self, dim: int, base: int, depth: int, norm: str, up: str, groups: int = 1) -> None:
        super().__init__()
        widths = [base * 2**i for i in range(depth)]
        self.up = up

        def block(inside: int, outside: int) -> nn.Module:
            layers: list[nn.Module] = []
            for first in (inside, outside):
                layers += [_conv(dim, first, outside, 3, padding=1, bias=False), _norm(dim, norm, outside)]
                layers += [nn.ReLU(inplace=True)]
            return nn.Sequential(*layers)

        ins = [1 if dim == 3 else 3, *widths[:-1]]
        self.down = nn.ModuleList(block(a, b) for a, b in zip(ins, widths, strict=True))
        self.pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dim - 1](2)
        transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dim - 1]
        self.ups = nn.ModuleList(
            transposed(2 * w, w, 2, stride=2) if up == "transposed" else _conv(dim, 2 * w, w, 1)
            for w in reversed(widths[:-1])
        )
        self.out = nn.ModuleList(block(2 * w, w) for w in reversed(widths[:-1]))
        self.head = _conv(dim, base, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else self.pool(x))
            kept.append(x)
        for skip, up, out in zip(reversed(kept[:-1]), self.ups, self.out, strict=True):
            x = up(x) if self.up == "transposed" else up(F.interpolate(x, scale_factor=2))
            x = out(torch.cat([x, skip], 1))
        return self.head(x)


def _unet_of(rng: random.Random, dim: int) -> tuple[str, tuple[str, Program]]:
    base, depth = rng.choice((16, 32, 64)), rng.choice((3, 4, 5) if dim < 3 else (3, 4))
    side = {1: rng.choice((4096, 16384)), 2: rng.choice((128, 192, 256)), 3: rng.choice((32, 48, 64, 96))}[
        dim
    ]
    side -= side % 2**depth
    norm, up = rng.choice(("batch", "group", "instance")), rng.choice(("transposed", "nearest"))
    batch = _batch_for(rng, base * 14 * side**dim)
    how = _trained(
        lambda: _UNetModule(dim, base, depth, norm, up),
        lambda: (torch.randn(batch, 1 if dim == 3 else 3, *[side] * dim),),
        lambda model, x: (model(x).float() - x.float().mean(1, keepdim=True)).square().mean(),
        rng, channels_last=dim == 2,
    )  # fmt: skip
    return f"{dim}d {base} {depth} {norm} {up} {batch}x{side}", how


@_convolution
def _unet(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    return _unet_of(rng, 2)


@_convolution
def _unet_of_volumes(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    return _unet_of(rng, rng.choice((1, 3, 3)))


@_convolution
def _gan(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    """DCGAN: transposed convolutions in one network, strided ones in the other, two optimizers."""
    size, width, latent = rng.choice((32, 64, 128)), rng.choice((32, 64, 96)), rng.choice((64, 100))
    batch = _batch_for(rng, 14 * width * size * size, 8)
    doublings = {32: 3, 64: 4, 128: 5}[size]
    amp = rng.random() < 0.3
    widths = [min(width * 2**i, 8 * width) for i in range(doublings)]

    def program() -> Step:
        torch.manual_seed(0)
        up: list[nn.Module] = [nn.ConvTranspose2d(latent, widths[-1], 4, bias=False), nn.ReLU(True)]
        for first, second in zip(widths[::-1], [*widths[-2::-1], 0], strict=True):
            if second:
                up += [
                    nn.ConvTranspose2d(first, second, 4, 2, 1, bias=False),
                    nn.BatchNorm2d(second),
                    nn.ReLU(True),
                ]
        up += [nn.ConvTranspose2d(widths[0], 3, 4, 2, 1), nn.Tanh()]
        down: list[nn.Module] = []
        for first, second in zip([3, *widths[:-1]], widths, strict=True):
            down += [
                nn.Conv2d(first, second, 4, 2, 1, bias=False),
                nn.BatchNorm2d(second),
                nn.LeakyReLU(0.2, True),
            ]
        down += [nn.Conv2d(widths[-1], 1, 4)]
        generator, discriminator = nn.Sequential(*up).cuda(), nn.Sequential(*down).cuda()
        of_g = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
        of_d = torch.optim.Adam(discriminator.parameters(), 2e-4, betas=(0.5, 0.999))
        real = torch.randn(batch, 3, size, size, device="cuda")

        def score(x: torch.Tensor, target: float) -> torch.Tensor:
            out = discriminator(x).flatten().float()
            return F.binary_cross_entropy_with_logits(out, torch.full_like(out, target))

        def step() -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
                fake = generator(torch.randn(batch, latent, 1, 1, device="cuda"))
                loss = score(real, 1.0) + score(fake.detach(), 0.0)
            of_d.zero_grad()
            loss.backward()
            of_d.step()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
                loss = score(fake, 1.0)
            of_g.zero_grad()
            loss.backward()
            of_g.step()

        return step

    return f"{size} {width} {latent} {batch}", ("bf16-autocast adam" if amp else "fp32 adam", program)


class _Waves(nn.Module):
    """Dilated convolutions of one dimension with gates, as in WaveNet."""

    def __init__(self, width: int, kernel: int, layers: int, depthwise: bool) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 1)
        groups = width if depthwise else 1
        dilations = [2 ** (i % 8) for i in range(layers)]
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, kernel, padding=d * (kernel - 1) // 2, dilation=d, groups=groups)
            for d in dilations
        )
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in dilations)
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for gate, mix in zip(self.gates, self.mix, strict=True):
            a, b = gate(x).chunk(2, 1)
            x = x + mix(torch.tanh(a) * torch.sigmoid(b))
        return self.head(x)


@_convolution
def _wavenet(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    width, kernel = rng.choice((32, 64, 128, 256)), rng.choice((3, 3, 5, 7))
    layers, depthwise, length = rng.randint(4, 12), rng.random() < 0.3, rng.choice((4096, 8000, 16000))
    batch = _batch_for(rng, 7 * width * layers * length)
    how = _trained(
        lambda: _Waves(width, kernel, layers, depthwise),
        lambda: (torch.randn(batch, 1, length),),
        lambda model, x: (model(x).float() - x.float()).square().mean(), rng,
    )  # fmt: skip
    return f"{width} {kernel} {layers}{' depthwise' if depthwise else ''} {batch}x{length}", how


@_convolution
def _audio_encoder(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    width = rng.choice((128, 256, 512))
    kernels = [(10, 5), (3, 2), (3, 2), (3, 2), (2, 2)][: rng.randint(3, 5)]
    length = rng.choice((16000, 32000, 48000))
    batch = _batch_for(rng, 3 * width * length // 5 * 2)

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        inside = 1
        for kernel, stride in kernels:
            layers += [
                nn.Conv1d(inside, width, kernel, stride, bias=False),
                nn.GroupNorm(8, width),
                nn.GELU(),
            ]
            inside = width
        return nn.Sequential(*layers, nn.Conv1d(width, 64, 1))

    how = _trained(
        build,
        lambda: (torch.randn(batch, 1, length),),
        lambda model, x: model(x).float().square().mean(),
        rng,
    )
    return f"{width} {len(kernels)} {batch}x{length}", how


class _Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


@_convolution
def _super_resolution(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    width, blocks, side = rng.choice((32, 64, 128)), rng.randint(4, 12), rng.choice((48, 64, 96, 128))
    scale, kernel = rng.choice((2, 4)), rng.choice((3, 3, 5))
    batch = _batch_for(rng, width * (3 * blocks + 10) * side * side)

    def build() -> nn.Module:
        pad = kernel // 2
        body = [
            _Residual(
                nn.Sequential(
                    nn.Conv2d(width, width, kernel, padding=pad),
                    nn.ReLU(True),
                    nn.Conv2d(width, width, kernel, padding=pad),
                )
            )
            for _ in range(blocks)
        ]
        out = [nn.Conv2d(width, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale)]
        return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *body, *out)

    how = _trained(build, lambda: (torch.randn(batch, 3, side, side),), _same, rng, channels_last=True)
    return f"{width} {blocks} {kernel} x{scale} {batch}x{side}", how


@_convolution
def _mixer(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    """ConvMixer and ConvNeXt blocks: depthwise convolutions with large kernels."""
    width, blocks, kernel = rng.choice((128, 256, 384)), rng.randint(4, 10), rng.choice((5, 7, 9, 13, 31))
    patch, side = rng.choice((4, 7, 8)), rng.choice((128, 192, 224))
    wide = rng.random() < 0.5
    batch = _batch_for(rng, width * blocks * (10 if wide else 5) * (side // patch) ** 2)

    def build() -> nn.Module:
        def block() -> list[nn.Module]:
            depthwise = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
            if wide:
                return [
                    _Residual(
                        nn.Sequential(
                            depthwise, nn.GroupNorm(1, width), nn.Conv2d(width, 4 * width, 1), nn.GELU(),
                            nn.Conv2d(4 * width, width, 1),
                        )
                    )
                ]  # fmt: skip
            mixed = [nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width)]
            return [_Residual(nn.Sequential(depthwise, nn.GELU(), nn.BatchNorm2d(width))), *mixed]

        body = [layer for _ in range(blocks) for layer in block()]
        return nn.Sequential(
            nn.Conv2d(3, width, patch, patch),
            *body,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 100),
        )

    how = _trained(
        build, lambda: (torch.randn(batch, 3, side, side), torch.randint(100, (batch,))), _classes, rng,
        channels_last=True,
    )  # fmt: skip
    return f"{width} {blocks} {kernel} {patch} {batch}x{side}", how


@_convolution
def _stack(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    """Layers of any kernel, stride, dilation and groups."""
    dim = rng.choice((1, 2, 2, 2, 3))
    side = {1: rng.choice((2000, 8192)), 2: rng.choice((56, 64, 100, 128, 224)), 3: rng.choice((24, 32, 40))}[
        dim
    ]
    layers, inside, cost = [], rng.choice((1, 3, 4)), 0.0
    first, scale = inside, 1.0
    for _ in range(rng.randint(3, 8)):
        groups = rng.choice((1, 1, 1, 1, 2, 4))
        outside = rng.choice((24, 32, 48, 64, 96, 128, 256)) // groups * groups
        groups = groups if inside % groups == 0 else 1
        kernel, stride = (
            rng.choice((1, 3, 3, 3, 5, 7, 11) if dim < 3 else (1, 3, 3, 5)),
            rng.choice((1, 1, 1, 2)),
        )
        dilation = rng.choice((1, 1, 1, 1, 2))
        if scale * side / stride < 12:
            stride = 1
        layers.append((inside, outside, kernel, stride, dilation, groups))
        scale /= stride
        cost += 3 * outside * (side * scale) ** dim
        inside = outside
    batch = _batch_for(rng, int(cost))

    def build() -> nn.Module:
        modules: list[nn.Module] = []
        for i, o, kernel, stride, dilation, groups in layers:
            pad = dilation * (kernel // 2)
            modules += [_conv(dim, i, o, kernel, stride, pad, dilation, groups), nn.ReLU()]
        return nn.Sequential(*modules)

    how = _trained(
        build, lambda: (torch.randn(batch, first, *[side] * dim),),
        lambda model, x: model(x).float().square().mean(), rng, channels_last=dim == 2,
    )  # fmt: skip
    return f"{dim}d {layers} {batch}x{side}", how


@_convolution
def _autoencoder(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    """VAE: strided convolutions down, transposed ones up."""
    dim = rng.choice((1, 2, 2, 3))
    side = {1: 8192, 2: rng.choice((64, 128, 256)), 3: rng.choice((32, 64))}[dim]
    widths = [rng.choice((32, 48, 64)) * 2**i for i in range(rng.randint(2, 4))]
    kernel = rng.choice((4, 5, 3))
    batch = _batch_for(rng, 8 * widths[0] * (side // 2) ** dim)
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dim - 1]

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for a, b in zip([3, *widths[:-1]], widths, strict=True):
            layers += [_conv(dim, a, b, kernel, 2, kernel // 2), _norm(dim, "batch", b), nn.SiLU()]
        for a, b in zip(widths[::-1], [*widths[-2::-1], 3], strict=True):
            layers += [transposed(a, b, 4, 2, 1), nn.SiLU()]
        return nn.Sequential(*layers[:-1])

    how = _trained(
        build,
        lambda: (torch.randn(batch, 3, *[side] * dim),),
        lambda model, x: model(x).float().square().mean(),
        rng,
    )
    return f"{dim}d {widths} {kernel} {batch}x{side}", how


@_convolution
def _diffusion(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    """Residual blocks with group norm, and attention at the lowest resolution."""
    base, side, channels = rng.choice((64, 96, 128, 192)), rng.choice((32, 64)), rng.choice((3, 4))
    batch = _batch_for(rng, 30 * base * side * side)

    class Block(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.n1, self.c1 = nn.GroupNorm(1 if a < 32 else 16, a), nn.Conv2d(a, b, 3, padding=1)
            self.n2, self.c2 = nn.GroupNorm(16, b), nn.Conv2d(b, b, 3, padding=1)
            self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.c1(F.silu(self.n1(x)))
            return self.skip(x) + self.c2(F.silu(self.n2(y)))

    class Attention(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = (
                nn.GroupNorm(16, width),
                nn.Conv2d(width, 3 * width, 1),
                nn.Conv2d(width, width, 1),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, -1)
            y = F.scaled_dot_product_attention(q, k, v)
            return x + self.out(y.squeeze(1).transpose(1, 2).reshape(x.shape))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(channels, base, 3, padding=1)
            self.a, self.b, self.c = Block(base, base), Block(base, 2 * base), Block(2 * base, 4 * base)
            self.down1, self.down2 = nn.Conv2d(base, base, 3, 2, 1), nn.Conv2d(2 * base, 2 * base, 3, 2, 1)
            self.mid = Attention(4 * base)
            self.d, self.e = Block(6 * base, 2 * base), Block(3 * base, base)
            self.head = nn.Conv2d(base, channels, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.a(self.stem(x))
            b = self.b(self.down1(a))
            c = self.mid(self.c(self.down2(b)))
            d = self.d(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
            return self.head(self.e(torch.cat([F.interpolate(d, scale_factor=2), a], 1)))

    how = _trained(
        UNet, lambda: (torch.randn(batch, channels, side, side),),
        lambda model, x: (model(x).float() - x.float()).square().mean(), rng, channels_last=True,
    )  # fmt: skip
    return f"{base} {batch}x{channels}x{side}", how


@_convolution
def _convolution_stem(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    """A transformer over the patches of a convolution, or over a 1d convolution of a spectrum."""
    width, layers, heads = rng.choice((256, 384, 768)), rng.randint(3, 6), 8
    patch, side = rng.choice((8, 14, 16)), rng.choice((112, 224))
    tokens = (side // patch) ** 2
    batch = _batch_for(rng, width * layers * 20 * tokens)

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, width, patch, patch)
            layer = nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, batch_first=True, norm_first=True
            )
            self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.head = nn.Linear(width, 100)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.stem(x).flatten(2).transpose(1, 2)).mean(1))

    how = _trained(
        Vit, lambda: (torch.randn(batch, 3, side, side), torch.randint(100, (batch,))), _classes, rng
    )
    return f"{width} {layers} {patch} {batch}x{side}", how


# ---------------------------------------------------------------------------------- sizes that depend on data


def _data(family: Callable[[random.Random], tuple[str, Program]]) -> None:
    def drawn(rng: random.Random) -> tuple[str, Program]:
        about, program = family(rng)
        return f"{family.__name__.strip('_')} {about}", program

    _DATA_DEPENDENT.append(drawn)


def _stepping(*modules: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[torch.Tensor], None]]:
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], 1e-4)

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers[:-1])


@_data
def _masked_rows(rng: random.Random) -> tuple[str, Program]:
    """Only the rows that a random mask takes are computed."""
    rows, width = rng.choice((1, 2, 4)) * 65536, rng.choice((128, 256, 512))
    share = rng.choice((0.15, 0.3, 0.5, 0.75))

    def program() -> Step:
        torch.manual_seed(0)
        first, second = _mlp(width, width).cuda(), _mlp(width, 4 * width, width).cuda()
        x = torch.randn(rows, width, device="cuda")
        _, finish = _stepping(first, second)

        def step() -> None:
            h = first(x)
            mask = torch.rand(rows, device="cuda") < share
            finish(second(h[mask]).square().mean())

        return step

    return f"{rows}x{width} {share}", program


@_data
def _routed(rng: random.Random) -> tuple[str, Program]:
    """Mixture of experts: each gets the tokens whose best scores are its own."""
    experts, top, width = rng.choice((4, 8, 16)), rng.choice((1, 2)), rng.choice((256, 512))
    tokens, layers = rng.choice((8192, 16384, 32768)), rng.randint(1, 4)

    def program() -> Step:
        torch.manual_seed(0)

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.router = nn.Linear(width, experts)
                self.experts = nn.ModuleList(_mlp(width, 4 * width, width) for _ in range(experts))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                weights, chosen = self.router(x).softmax(-1).topk(top)
                out = torch.zeros_like(x)
                for index, expert in enumerate(self.experts):
                    token, place = torch.where(chosen == index)
                    out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
                return x + out

        model = nn.Sequential(*(Layer() for _ in range(layers))).cuda()
        x = torch.randn(tokens, width, device="cuda")
        _, finish = _stepping(model)
        return lambda: finish(model(x).square().mean())

    return f"{experts} {top} {layers} {tokens}x{width}", program


@_data
def _suppressed(rng: random.Random) -> tuple[str, Program]:
    """Boxes that remain after non-maximum suppression get features and a head."""
    boxes, width, images = rng.choice((2000, 4000)), rng.choice((256, 1024)), rng.choice((4, 8, 16))
    size, apart = rng.choice((20.0, 60.0, 120.0)), rng.choice((0.5, 0.7))

    def program() -> Step:
        from torchvision.ops import nms

        torch.manual_seed(0)
        head, scorer = _mlp(width, 4 * width, width).cuda(), nn.Linear(width, 1).cuda()
        features = torch.randn(images, boxes, width, device="cuda")
        corners = 512 * torch.rand(images, boxes, 2, device="cuda")
        rects = torch.cat([corners, corners + size * (0.5 + torch.rand(images, boxes, 2, device="cuda"))], -1)
        _, finish = _stepping(head, scorer)

        def step() -> None:
            scores = scorer(features).squeeze(-1)
            kept = [f[nms(r, s.detach(), apart)] for f, r, s in zip(features, rects, scores, strict=True)]
            finish(head(torch.cat(kept)).square().mean() + scores.square().mean())

        return step

    return f"{images}x{boxes} {width} {size} {apart}", program


@_data
def _ragged(rng: random.Random) -> tuple[str, Program]:
    """Batches whose samples have random lengths, padded to the longest."""
    batch, most, width = rng.choice((8, 16, 32)), rng.choice((512, 1024)), rng.choice((256, 512))
    vocabulary, layers = rng.choice((1000, 8000)), rng.randint(2, 4)

    def program() -> Step:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        embed, head = nn.Embedding(vocabulary, width).cuda(), nn.Linear(width, vocabulary).cuda()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True)
        body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).cuda()
        _, finish = _stepping(embed, body, head)

        def step() -> None:
            lengths = torch.randint(most // 8, most, (batch,), generator=generator).tolist()
            rows = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
            tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True).cuda()
            finish(F.cross_entropy(head(body(embed(tokens))).flatten(0, 1), tokens.flatten()))

        return step

    return f"{batch}x{most} {width} {layers} {vocabulary}", program


@_data
def _early_exit(rng: random.Random) -> tuple[str, Program]:
    """Samples leave the network once their score is above a threshold."""
    rows, width, blocks = rng.choice((8192, 32768, 65536)), rng.choice((256, 512)), rng.randint(4, 8)
    above = rng.choice((0.45, 0.5, 0.55))

    def program() -> Step:
        torch.manual_seed(0)
        body = nn.ModuleList(_mlp(width, 2 * width, width) for _ in range(blocks)).cuda()
        exits = nn.ModuleList(nn.Linear(width, 1) for _ in range(blocks)).cuda()
        x0 = torch.randn(rows, width, device="cuda")
        _, finish = _stepping(body, exits)

        def step() -> None:
            x, loss = x0, torch.zeros((), device="cuda")
            for block, leave in zip(body, exits, strict=True):
                x = x + block(x)
                score = leave(x).squeeze(-1).sigmoid()
                loss = loss + score.mean()
                x = x[score < above]
                if x.shape[0] == 0:
                    break
            finish(loss + x.square().sum() / rows)

        return step

    return f"{rows}x{width} {blocks} {above}", program


@_data
def _hard_examples(rng: random.Random) -> tuple[str, Program]:
    """The second pass sees the samples whose loss in the first was above the mean, or a quantile."""
    rows, width, classes = rng.choice((16384, 65536)), rng.choice((256, 512)), rng.choice((100, 1000))
    quantile = rng.choice((None, 0.5, 0.8))

    def program() -> Step:
        torch.manual_seed(0)
        model = _mlp(width, 4 * width, 4 * width, classes).cuda()
        x, y = torch.randn(rows, width, device="cuda"), torch.randint(classes, (rows,), device="cuda")
        _, finish = _stepping(model)

        def step() -> None:
            with torch.no_grad():
                losses = F.cross_entropy(model(x), y, reduction="none")
            bound = losses.mean() if quantile is None else losses.quantile(quantile)
            hard = (losses > bound).nonzero().squeeze(1)
            finish(F.cross_entropy(model(x[hard]), y[hard]))

        return step

    return f"{rows}x{width} {classes} {quantile}", program


@_data
def _masked_language(rng: random.Random) -> tuple[str, Program]:
    """Logits of the masked tokens only, as labels that are not -100 say."""
    batch, length, width = rng.choice((8, 16, 32)), rng.choice((256, 512)), rng.choice((256, 512))
    vocabulary, share = rng.choice((8000, 30000)), rng.choice((0.15, 0.3, 0.6))

    def program() -> Step:
        torch.manual_seed(0)
        embed, head = nn.Embedding(vocabulary, width).cuda(), nn.Linear(width, vocabulary).cuda()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.1, batch_first=True)
        body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).cuda()
        _, finish = _stepping(embed, body, head)

        def step() -> None:
            tokens = torch.randint(vocabulary, (batch, length), device="cuda")
            masked = torch.bernoulli(torch.full(tokens.shape, share, device="cuda")).bool()
            labels = tokens.masked_fill(~masked, -100)
            h = body(embed(tokens.masked_fill(masked, 0)))
            chosen = labels != -100
            finish(F.cross_entropy(head(h[chosen]), labels[chosen]))

        return step

    return f"{batch}x{length} {width} {vocabulary} {share}", program


@_data
def _radius_graph(rng: random.Random) -> tuple[str, Program]:
    """Messages along the edges of points that are near to each other."""
    points, width = rng.choice((1024, 2048, 4096)), rng.choice((64, 128))
    radius, layers = rng.choice((0.08, 0.12, 0.18)), rng.randint(1, 3)

    def program() -> Step:
        torch.manual_seed(0)
        embed = _mlp(3, width).cuda()
        messages = nn.ModuleList(_mlp(2 * width + 3, width, width) for _ in range(layers)).cuda()
        places = torch.rand(points, 3, device="cuda")
        _, finish = _stepping(embed, messages)

        def step() -> None:
            source, target = (torch.cdist(places, places) < radius).nonzero(as_tuple=True)
            h = embed(places)
            for message in messages:
                sent = message(torch.cat([h[source], h[target], places[source] - places[target]], -1))
                h = h + torch.zeros_like(h).index_add_(0, target, sent)
            finish(h.square().mean())

        return step

    return f"{points} {width} {radius} {layers}", program


@_data
def _foreground(rng: random.Random) -> tuple[str, Program]:
    """A loss over the pixels of a target's foreground, and a second over the uncertain ones."""
    batch, side, width = rng.choice((4, 8, 16)), rng.choice((128, 192, 256)), rng.choice((32, 64))
    size = rng.choice((0.1, 0.3, 0.6))

    def program() -> Step:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, width, 1), nn.ReLU(), nn.Conv2d(width, width, 1)).cuda()
        refine = _mlp(width, 4 * width, 4 * width, 1).cuda()
        x = torch.randn(batch, 3, side, side, device="cuda")
        target = torch.zeros(batch, side, side, device="cuda")
        target[:, : int(size * side)] = 1
        _, finish = _stepping(model, refine)

        def step() -> None:
            h = model(x).permute(0, 2, 3, 1)
            inside = h[target > 0.5]
            unsure = h[h.detach().mean(-1).abs() < 0.02]
            finish(refine(inside).square().mean() + refine(unsure).square().mean())

        return step

    return f"{batch}x{side} {width} {size}", program


@_data
def _packed(rng: random.Random) -> tuple[str, Program]:
    """A recurrent network over packed sequences."""
    batch, most, width = rng.choice((32, 64, 128)), rng.choice((200, 400)), rng.choice((128, 256, 512))

    def program() -> Step:
        torch.manual_seed(0)
        lengths = torch.randint(most // 10, most, (batch,))
        model, head = nn.LSTM(width, width, 2, batch_first=True).cuda(), nn.Linear(width, width).cuda()
        x = torch.randn(batch, most, width, device="cuda")
        _, finish = _stepping(model, head)

        def step() -> None:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = model(packed)
            finish(head(out.data).square().mean())

        return step

    return f"{batch}x{most} {width}", program


@_data
def _unique_rows(rng: random.Random) -> tuple[str, Program]:
    """Embeddings of the distinct ids of a batch, looked up once."""
    ids, count, width = (
        rng.choice((100_000, 300_000, 1_000_000)),
        rng.choice((200_000, 400_000)),
        rng.choice((64, 128)),
    )

    def program() -> Step:
        torch.manual_seed(0)
        table, head = nn.Embedding(ids, width).cuda(), _mlp(width, 4 * width, width).cuda()
        _, finish = _stepping(table, head)

        def step() -> None:
            batch = torch.randint(ids, (count,), device="cuda")
            distinct, place = torch.unique(batch, return_inverse=True)
            finish(head(table(distinct))[place].square().mean())

        return step

    return f"{ids} {count} {width}", program


@_data
def _densified(rng: random.Random) -> tuple[str, Program]:
    """Points whose gradients are large are doubled, those that are nearly transparent are removed."""
    points, width = rng.choice((100_000, 300_000)), rng.choice((48, 96))
    low, high = rng.choice((0.1, 0.3)), rng.choice((0.5, 0.8))

    def program() -> Step:
        torch.manual_seed(0)
        head = _mlp(width, 2 * width, 1).cuda()
        state = {"x": torch.randn(points, width, device="cuda", requires_grad=True)}
        _, finish = _stepping(head)

        def step() -> None:
            x = state["x"]
            finish(head(x).sigmoid().mean())
            with torch.no_grad():
                size = x.grad.norm(dim=-1)
                many = x[size > size.quantile(high)]
                kept = x[torch.rand(x.shape[0], device="cuda") > low]
                state["x"] = torch.cat([kept, many]).requires_grad_()

        return step

    return f"{points} {width} {low} {high}", program


# ------------------------------------------------------------------------------------------------ compiled


def _compiled(family: Callable[[random.Random], tuple[str, tuple[str, Program]]]) -> None:
    def drawn(rng: random.Random) -> tuple[str, Program]:
        about, (how, program) = family(rng)
        return f"{family.__name__.strip('_')} {about} {how}", program

    _COMPILED.append(drawn)


class _Transformer(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int, gated: bool, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(_TransformerBlock(width, gated, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, gated: bool, dropout: float) -> None:
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = (
            nn.Linear(width, (6 if gated else 4) * width),
            nn.Linear((3 if gated else 4) * width, width),
        )
        self.gated, self.drop = gated, nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (each.view(b, t, c // 64, 64).transpose(1, 2) for each in self.qkv(self.n1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.drop(self.out(y))
        h = self.up(self.n2(x))
        if self.gated:
            a, g = h.chunk(2, -1)
            h = F.silu(a) * g
        else:
            h = F.gelu(h)
        return x + self.drop(self.down(h))


def _tokens_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    out = model(tokens)
    return F.cross_entropy(out.flatten(0, 1).float(), tokens.flatten())


@_compiled
def _decoder(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    width, layers, vocabulary = rng.choice((256, 512, 768)), rng.randint(2, 6), rng.choice((8000, 32000))
    batch, length = rng.choice((4, 8, 16)), rng.choice((256, 512))
    gated, dropout = rng.random() < 0.5, rng.choice((0.0, 0.0, 0.1))
    how = _trained(
        lambda: _Transformer(width, layers, vocabulary, gated, dropout),
        lambda: (torch.randint(vocabulary, (batch, length)),),
        _tokens_loss, rng, ("fp32", "bf16-autocast", "bf16"), compiled=True,
    )  # fmt: skip
    return f"{width} {layers} {vocabulary} {gated} {dropout} {batch}x{length}", how


@_compiled
def _deep_mlp(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    width, layers, batch = rng.choice((512, 1024, 2048)), rng.randint(3, 10), rng.choice((8192, 16384, 32768))
    activation = rng.choice((nn.GELU, nn.SiLU, nn.Tanh, nn.ReLU))

    def build() -> nn.Module:
        return nn.Sequential(
            *(
                _Residual(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), activation()))
                for _ in range(layers)
            ),
            nn.Linear(width, 100),
        )

    how = _trained(
        build, lambda: (torch.randn(batch, width), torch.randint(100, (batch,))), _classes, rng,
        ("fp32", "bf16-autocast", "bf16"), compiled=True,
    )  # fmt: skip
    return f"{width} {layers} {activation.__name__} {batch}", how


@_compiled
def _convolutional(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    width, blocks, side = rng.choice((32, 64, 128)), rng.randint(3, 6), rng.choice((32, 56, 64))
    batch = _batch_for(rng, width * (3 * blocks + 3) * side * side)

    def build() -> nn.Module:
        body = [
            _Residual(
                nn.Sequential(
                    nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
                    nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
                )
            )
            for _ in range(blocks)
        ]  # fmt: skip
        return nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            *body,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 100),
        )

    how = _trained(
        build, lambda: (torch.randn(batch, 3, side, side), torch.randint(100, (batch,))), _classes, rng,
        ("fp32", "bf16-autocast"), compiled=True,
    )  # fmt: skip
    return f"{width} {blocks} {batch}x{side}", how


@_compiled
def _encoder(rng: random.Random) -> tuple[str, tuple[str, Program]]:
    width, layers, patch = rng.choice((256, 384, 512)), rng.randint(3, 6), 16
    batch, side = rng.choice((32, 64, 128)), rng.choice((112, 224))

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, width, patch, patch), nn.Linear(width, 100)
            self.blocks = nn.Sequential(*(_TransformerBlock(width, False, 0.1) for _ in range(layers)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)).mean(1))

    how = _trained(
        Vit, lambda: (torch.randn(batch, 3, side, side), torch.randint(100, (batch,))), _classes, rng,
        ("fp32", "bf16-autocast"), compiled=True,
    )  # fmt: skip
    return f"{width} {layers} {batch}x{side}", how
