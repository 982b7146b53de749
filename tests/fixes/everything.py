"""A tiny model in which nearly every fix finds something to do."""

from functools import partial

import torch
from small import MLP, Attention, plain_loss, seeded, tiny_batch
from torch import nn

import oomph

WIDTH, HEADS, LONGEST, VOCABULARY = 16, 2, 24, 67


class RotaryEmbedding(nn.Module):
    """One in every layer, as older models have it."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, size, 2) / size), persistent=False)

    def forward(self, x, positions):
        angles = positions[:, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Modulated(nn.Module):
    """A weight per token, made and then used."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.1)
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        delta = torch.einsum("bto,bti->btoi", self.left(x), self.right(x))
        return torch.einsum("btoi,bti->bto", self.weight + delta, x)


class Block(nn.Module):
    def __init__(self, with_branches):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(WIDTH, HEADS, LONGEST), MLP(WIDTH)
        self.rotary = RotaryEmbedding(WIDTH)
        if with_branches:
            self.memory = oomph.nn.KimiDeltaAttention(WIDTH, HEADS, 8)
            self.modulated = Modulated(WIDTH)
        self.with_branches = with_branches

    def forward(self, x, positions):
        cos, sin = self.rotary(x, positions)
        half = torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1)
        x = x + self.attention(self.norm(x * cos + half * sin))
        if self.with_branches:
            x = x + 0.1 * self.memory(x)[0] + self.modulated(0.1 * x)
        return x + self.mlp(x)


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.queries = nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(with_branches=first) for first in (True, False))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        rows, length = tokens.shape
        places = self.project(self.queries[:length].expand(rows, -1, -1))  # the same in every row
        x = self.embed(tokens) + places
        for block in self.blocks:
            x = block(x, torch.arange(length, device=tokens.device))
        return self.head(x)


def batch(device):
    return tiny_batch(device, rows=4, length=12, vocabulary=VOCABULARY)


def optimizer(params):
    """Keeps its gradients between the steps, as old code does."""
    made = torch.optim.AdamW(params, lr=1e-3)
    made.zero_grad = partial(made.zero_grad, set_to_none=False)
    return made


def workload():
    return oomph.Workload(lambda: seeded(Everything), batch, plain_loss, optimizer)
