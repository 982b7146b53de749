"""A vision Transformer in bf16 whose blocks are recomputed in the backward pass."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--no-checkpoint", action="store_true")
parser.add_argument("--batch", type=int, default=64)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * dim, dim))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim=1024, depth=12):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, 196, dim))
        self.blocks = nn.ModuleList(Block(dim, 16) for _ in range(depth))
        self.head = nn.Linear(dim, 1000)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x) if args.no_checkpoint else checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))


model = ViT().to(device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(10):
    x = torch.randn(args.batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    loss = nn.functional.cross_entropy(model(x).float(), torch.randint(1000, (args.batch,), device="cuda"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, round(loss.item(), 3), torch.cuda.max_memory_allocated() // 2**20, "MiB")
