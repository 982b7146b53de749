"""Hand-written plain PyTorch parts, put together by the other files.

Shapes: B batch, T tokens, D width, H heads, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Causal self-attention; `bias` adds a learned [H, T, T] bias to the scores instead."""

    def __init__(self, width: int, heads: int, bias_length: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.bias_HTT = (
            nn.Parameter(torch.zeros(heads, bias_length, bias_length)) if bias_length is not None else None
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        b, t, d = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if self.bias_HTT is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = self.bias_HTT[None, :, :t, :t].expand(b, -1, -1, -1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, bias_length: int | None = None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, bias_length)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


def _plain(block: nn.Module, x_BTD: torch.Tensor) -> torch.Tensor:
    return block(x_BTD)


class LanguageModel(nn.Module):
    """A small GPT. `run` says how each block is run (plainly, or checkpointed in some way)."""

    def __init__(
        self,
        vocabulary: int = 32000,
        width: int = 768,
        heads: int = 12,
        layers: int = 8,
        length: int = 1024,
        *,
        run: Forward = _plain,
        tied: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.run = run
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, length if bias else None) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tokens(ids_BT) + self.positions(torch.arange(ids_BT.shape[1], device=ids_BT.device))
        for block in self.blocks:
            x_BTD = self.run(block, x_BTD)
        return self.head(self.norm(x_BTD))


def next_token_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits_BTV = model(batch["ids"])
    return F.cross_entropy(
        logits_BTV[:, :-1].reshape(-1, logits_BTV.shape[-1]), batch["ids"][:, 1:].reshape(-1)
    )


def id_batch(vocabulary: int, batch: int, length: int) -> Callable[..., dict[str, torch.Tensor]]:
    return lambda device: {"ids": torch.randint(0, vocabulary, (batch, length), device=device)}


class LowRank(nn.Module):
    """A frozen linear layer with a small trainable correction (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def low_rank_model() -> LanguageModel:
    """A frozen language model whose attention and MLP layers carry trainable corrections."""
    model = LanguageModel(layers=12).requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.qkv = LowRank(block.attention.qkv)  # type: ignore[assignment]
        block.mlp[0] = LowRank(block.mlp[0])  # type: ignore[arg-type]
    return model


class SquaredReLU(torch.autograd.Function):
    """relu(x)**2, keeping only its input for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0).square()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * 2 * x.clamp(min=0)


class SquaredReLUNet(nn.Module):
    """An MLP of custom autograd Functions."""

    def __init__(self, width: int = 2048, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_BD = x_BD + SquaredReLU.apply(layer(x_BD))
        return x_BD


class LSTMLanguageModel(nn.Module):
    """Embedding, a stacked LSTM with dropout, and a head."""

    def __init__(self, vocabulary: int = 20000, width: int = 1024, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(ids_BT))[0])


class EncoderClassifier(nn.Module):
    """torch's own nn.TransformerEncoder (nn.MultiheadAttention, dropout, a padding mask) and a head."""

    def __init__(self, width: int = 512, layers: int = 8, classes: int = 100) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x_BTD: torch.Tensor, padding_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x_BTD, src_key_padding_mask=padding_BT).mean(1))
