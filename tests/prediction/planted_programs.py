"""Programs with one memory bottleneck each. The line that causes it ends in `# PLANTED: name`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from small_programs import mean_square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oomph import Workload

PROGRAMS: dict[str, Workload | Callable[[], Any]] = {}


class Network(nn.Module):
    """Parts, and a function `forward(network, *inputs)` that uses them."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.randn(*shape, device=device, dtype=dtype)


def planted(
    name: str, model: Callable[[], nn.Module], batch: Any, loss: Any = mean_square, **options: Any
) -> None:
    PROGRAMS[name] = Workload(model, batch, loss, **options)


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__] = function
    return function


def dense_experts(self: Any, x: Tensor) -> Tensor:
    weights = self.gate(x).softmax(-1)
    per_expert = torch.matmul(x.unsqueeze(1), self.up)  # PLANTED: broadcast_matmul
    return self.down(torch.einsum("betf,bte->btf", per_expert, weights))


planted(
    "broadcast_matmul",
    lambda: Network(
        dense_experts,
        gate=nn.Linear(512, 16),
        up=nn.Parameter(torch.empty(16, 512, 1024)),
        down=nn.Linear(1024, 512),
    ),
    normal(64, 512, 512),
)


def feed_forward(self: Any, x: Tensor) -> Tensor:
    inner = torch.tanh(self.up(x)).exp()  # PLANTED: checkpointed_block
    return x + self.down(inner)


def checkpointed(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


planted(
    "checkpointed_block",
    lambda: Network(
        checkpointed,
        blocks=nn.ModuleList(
            Network(feed_forward, up=nn.Linear(256, 16_384), down=nn.Linear(16_384, 256)) for _ in range(4)
        ),
    ),
    normal(16, 2048, 256),
)


class ShiftMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(12))
        self.project = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)

        def mixed() -> Tensor:
            shifted = [x.roll(shift, dims=1) for shift in range(12)]  # PLANTED: comprehension
            total = shifted[0] * self.weights[0]
            for copy, weight in zip(shifted[1:], self.weights[1:], strict=True):
                total.addcmul_(copy, weight)
            return total

        return mixed()


planted("comprehension", ShiftMixer, normal(16, 4096, 512))


def monte_carlo_dropout(self: Any, x: Tensor) -> Tensor:
    hidden = self.hidden(x).relu()
    return self.out(F.dropout(hidden.expand(32, -1, -1), p=0.1))  # PLANTED: dropout_samples


planted(
    "dropout_samples",
    lambda: Network(monte_carlo_dropout, hidden=nn.Linear(512, 4096), out=nn.Linear(4096, 1)),
    normal(8192, 512),
    lambda model, x: model(x).var(0).mean(),
)


def eager_attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).unflatten(-1, (3, 16, 64)).permute(2, 0, 3, 1, 4)
    probabilities = (q @ k.transpose(-2, -1) / math.sqrt(64)).softmax(-1)  # PLANTED: eager_attention
    mixed = probabilities @ v
    return self.out(mixed.transpose(1, 2).flatten(2))


planted(
    "eager_attention",
    lambda: Network(
        lambda self, x: x + self.attention(x),
        attention=Network(
            eager_attention,
            qkv=nn.Linear(1024, 3072, bias=False),
            out=nn.Linear(1024, 1024, bias=False),
        ),
    ),
    normal(2, 8192, 1024, dtype=torch.bfloat16),
    lambda model, x: model(x).float().square().mean(),
    dtype="bfloat16",
)


def weight_per_sample(self: Any, x: Tensor, code: Tensor) -> Tensor:
    left = self.to_left(code).view(-1, 2048, 4)
    right = self.to_right(code).view(-1, 4, 2048)
    delta = self.scale * torch.einsum("bor,bri->boi", left, right)  # PLANTED: einsum_weight_delta
    return torch.bmm(x, delta)


planted(
    "einsum_weight_delta",
    lambda: Network(
        weight_per_sample,
        scale=nn.Parameter(torch.ones(())),
        to_left=nn.Linear(64, 2048 * 4),
        to_right=nn.Linear(64, 4 * 2048),
    ),
    lambda device: (torch.randn(256, 16, 2048, device=device), torch.randn(256, 64, device=device)),
    lambda model, batch: model(*batch).square().mean(),
)


def table_of_six_columns(self: Any, ids: Tensor) -> Tensor:
    total = torch.zeros((), device=ids.device)
    for column in range(6):
        total = total + self.table(ids[:, column])  # PLANTED: embedding_gradient
    return self.score(total)


planted(
    "embedding_gradient",
    lambda: Network(table_of_six_columns, table=nn.Embedding(4_000_000, 128), score=nn.Linear(128, 1)),
    lambda device: torch.randint(0, 4_000_000, (4096, 6), device=device),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
)


def float_logits(self: Any, tokens: Tensor) -> Tensor:
    hidden = self.block(self.embed(tokens[:, :-1]))
    targets = tokens[:, 1:].flatten()
    return F.cross_entropy(self.head(hidden).float().flatten(0, 1), targets)  # PLANTED: float_logits


planted(
    "float_logits",
    lambda: Network(
        float_logits,
        embed=nn.Embedding(128_256, 512),
        block=nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU()),
        head=nn.Linear(512, 128_256, bias=False),
    ),
    lambda device: torch.randint(0, 128_256, (4, 4097), device=device),
    lambda model, tokens: model(tokens),
    dtype="bfloat16",
)


def frozen_table() -> nn.Module:
    entities = nn.Embedding(5_000_000, 256)  # PLANTED: frozen_embedding
    entities.requires_grad_(False)
    score = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    return Network(lambda self, ids: self.score(self.entities(ids)), entities=entities, score=score)


planted(
    "frozen_embedding",
    frozen_table,
    lambda device: torch.randint(0, 5_000_000, (1024, 16), device=device),
)


def stem_without_stride(self: Any, images: Tensor) -> Tensor:
    full = F.silu(self.norm(self.stem(images)))  # PLANTED: full_resolution_convolution
    return self.head(self.reduce(full).mean((2, 3)))


planted(
    "full_resolution_convolution",
    lambda: Network(
        stem_without_stride,
        stem=nn.Conv2d(3, 128, 3, padding=1),
        norm=nn.BatchNorm2d(128),
        reduce=nn.Conv2d(128, 64, 8, stride=8),
        head=nn.Linear(64, 1000),
    ),
    normal(16, 3, 512, 512),
)


class FullJacobianSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        probabilities = x.softmax(-1)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        outer = p.unsqueeze(-1), p.unsqueeze(-2)
        jacobian = torch.diag_embed(p) - outer[0] * outer[1]  # PLANTED: function_backward_temporary
        return torch.einsum("nij,nj->ni", jacobian, grad)


planted(
    "function_backward_temporary",
    lambda: Network(lambda self, x: FullJacobianSoftmax.apply(self.layers(x)), layers=nn.Linear(256, 1000)),
    normal(1024, 256),
)


class Polynomial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coefficients: Tensor) -> Tensor:
        powers = x.unsqueeze(-1) ** torch.arange(8, device=x.device)  # PLANTED: function_saves_too_much
        ctx.save_for_backward(powers, coefficients)
        return powers @ coefficients

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        powers, coefficients = ctx.saved_tensors
        slope = powers[..., :-1] @ (coefficients[1:] * torch.arange(1, 8, device=grad.device))
        return grad * slope, torch.einsum("...,...k->k", grad, powers)


planted(
    "function_saves_too_much",
    lambda: Network(
        lambda self, x: self.second(Polynomial.apply(self.first(x), self.coefficients)),
        first=nn.Linear(512, 1024),
        coefficients=nn.Parameter(torch.ones(8)),
        second=nn.Linear(1024, 512),
    ),
    normal(65_536, 512),
)


def gather_neighbours(self: Any, points: Tensor, neighbours: Tensor) -> Tensor:
    features = self.encode(points)
    every = features.unsqueeze(1).expand(8, 2048, 2048, 64)
    wanted = neighbours.unsqueeze(-1).expand(-1, -1, -1, 64)
    return torch.gather(every, 2, wanted).amax(2)  # PLANTED: gather_from_expanded


planted(
    "gather_from_expanded",
    lambda: Network(gather_neighbours, encode=nn.Linear(3, 64)),
    lambda device: (
        torch.randn(8, 2048, 3, device=device),
        torch.randint(0, 2048, (8, 2048, 4), device=device),
    ),
    lambda model, batch: model(*batch).mean(),
)


@program
def gradient_hook() -> Callable[[], None]:
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(4)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: recorded.append(grad.clone()))  # PLANTED: gradient_hook
    x = torch.randn(64, 4096, device="cuda")

    def step() -> None:
        mean_square(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Averaging(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {name: parameter.clone() for name in "abc"}  # PLANTED: greedy_optimizer
                state["a"].lerp_(parameter, 0.5)
                parameter.add_(parameter.grad, alpha=-group["lr"])


planted(
    "greedy_optimizer",
    lambda: nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]),
    normal(64, 4096),
    optimizer=Averaging,
)


@program
def kept_outputs() -> Callable[[], None]:
    device = torch.device("cuda")
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4096)).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    x = torch.randn(65_536, 64, device=device)
    predictions: list[Tensor] = []

    def step() -> None:
        predictions.append(network(x))  # PLANTED: kept_outputs
        predictions[-1].std().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


planted(
    "large_batch",
    lambda: nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(3 * 16 * 16, 10)),
    lambda device: {"images": torch.randn(8192, 3, 256, 256, device=device)},  # PLANTED: large_batch
    lambda model, batch: mean_square(model, batch["images"]),
)


def deep(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    for layer in self.layers:
        x = torch.tanh(layer(x))  # PLANTED: loop_over_layers
    return self.head(x)


planted(
    "loop_over_layers",
    lambda: Network(
        deep,
        embed=nn.Linear(64, 512),
        layers=nn.ModuleList(nn.Linear(512, 512) for _ in range(24)),
        head=nn.Linear(512, 10),
    ),
    normal(32_768, 64),
)


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(256, 3 * 256)
        self.register_buffer("mask", torch.full((32_768, 32_768), -math.inf).triu(1))  # PLANTED: mask_buffer

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[: x.shape[1], : x.shape[1]])


@program
def mask_buffer() -> Callable[[], None]:
    model = CausalAttention().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 512, 256, device="cuda")

    def step() -> None:
        mean_square(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def one_hot(tokens: Tensor) -> Tensor:
    return torch.eye(32_768, device=tokens.device)[tokens]  # PLANTED: one_hot_identity


planted(
    "one_hot_identity",
    lambda: Network(lambda self, tokens: self.project(one_hot(tokens)), project=nn.Linear(32_768, 256)),
    lambda device: torch.randint(0, 32_768, (8, 1024), device=device),
)


def pairwise_loss(embeddings: Tensor, labels: Tensor) -> Tensor:
    distances = (embeddings[:, None] - embeddings[None]).square().sum(-1)  # PLANTED: pairwise_differences
    same = labels[:, None] == labels[None]
    return torch.where(same, distances, (1 - distances).clamp(min=0)).mean()


@program
def pairwise_differences() -> Callable[[], None]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = torch.randn(4096, 784).to(device), torch.randint(0, 10, (4096,)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        pairwise_loss(model(images), labels).backward()
        optimizer.step()

    return step


class Rotary(nn.Module):
    def __init__(self, width: int = 128, length: int = 262_144) -> None:
        super().__init__()
        self.project = nn.Linear(width, width, bias=False)
        angles = torch.outer(torch.arange(length).float(), torch.arange(0, width, 2) / width)
        table = torch.stack((angles.cos(), angles.sin()))
        self.register_buffer("rope", table, persistent=False)  # PLANTED: rope_cache_per_layer

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.rope[:, : x.shape[1]]
        even, odd = self.project(x).chunk(2, dim=-1)
        return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1)


planted("rope_cache_per_layer", lambda: nn.Sequential(*[Rotary() for _ in range(8)]), normal(1, 2048, 128))


def shifted_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits, targets = model(tokens), tokens[:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets)  # PLANTED: shifted_logits_copy


planted(
    "shifted_logits_copy",
    lambda: Network(
        lambda self, tokens: self.head(self.embed(tokens)),
        embed=nn.Embedding(50_304, 256),
        head=nn.Linear(256, 50_304, bias=False),
    ),
    lambda device: torch.randint(0, 50_304, (16, 1024), device=device),
    shifted_loss,
)


def upsample_wide_features(self: Any, latent: Tensor) -> Tensor:
    features = F.relu(self.refine(latent))
    return self.to_rgb(F.interpolate(features, scale_factor=8, mode="bilinear"))  # PLANTED: upsampling


planted(
    "upsampling",
    lambda: Network(
        upsample_wide_features, refine=nn.Conv2d(256, 256, 3, padding=1), to_rgb=nn.Conv2d(256, 3, 1)
    ),
    normal(8, 256, 64, 64),
    lambda model, latent: model(latent).abs().mean(),
)


def wide_feed_forward(self: Any, x: Tensor) -> Tensor:
    hidden = F.gelu(self.up(self.norm(x)))  # PLANTED: wide_mlp
    return x + self.down(hidden)


planted(
    "wide_mlp",
    lambda: nn.Sequential(
        *[
            Network(
                wide_feed_forward,
                norm=nn.LayerNorm(256),
                up=nn.Linear(256, 8192),
                down=nn.Linear(8192, 256),
            )
            for _ in range(2)
        ]
    ),
    normal(32, 2048, 256),
    autocast="bfloat16",
)
