"""A training script of a small model, which benchmarks predict: `python small_script.py KIND [PASSES]`."""

import sys

import torch
from torch import nn

WIDTH, VOCABULARY = 256, 16384
ROWS = {"mlp": 8192, "tanh": 16384, "wide": 1024, "conv": 16, "lm": 8, "gpt2": 4}


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = (each.unflatten(2, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def mlp():
    return Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def tanh():
    parts = [(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*(layer for part in parts for layer in part))


def wide():
    return nn.Sequential(nn.Linear(8 * WIDTH, 8 * WIDTH), nn.ReLU())


def conv():
    return Residual(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())


def decoder():
    return nn.Sequential(Residual(nn.LayerNorm(WIDTH), Attention()), mlp())


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(decoder() for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model_of(kind):
    if kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(n_embd=WIDTH, n_layer=6, n_head=4, vocab_size=VOCABULARY))
    if kind == "lm":
        return LanguageModel()
    block = {"mlp": mlp, "tanh": tanh, "wide": wide, "conv": conv}[kind]
    return nn.Sequential(*(block() for _ in range(12 if kind == "tanh" else 8)))


def batch_of(kind, device):
    rows = ROWS[kind]
    if kind in ("lm", "gpt2"):
        return torch.randint(VOCABULARY, (rows, 512), device=device)
    shape = (rows, 32, 64, 64) if kind == "conv" else (rows, 8 * WIDTH if kind == "wide" else WIDTH)
    return torch.randn(shape, device=device)


def loss_of(kind, model, batch):
    if kind == "gpt2":
        return model(input_ids=batch, labels=batch).loss
    if kind == "lm":
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    return model(batch).square().mean()


def main(kind, passes=1):
    model = model_of(kind).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(100):
        for _ in range(passes):
            (loss_of(kind, model, batch_of(kind, "cuda")) / passes).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
