"""A GPT on characters, with gradient accumulation, evaluation and checkpoints."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--n-layer", type=int, default=8)
parser.add_argument("--n-embd", type=int, default=768)
parser.add_argument("--block-size", type=int, default=512)
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--out", default="ckpt.pt")
args = parser.parse_args()
device, batch_size, vocab = "cuda", 16, 256


class Block(nn.Module):
    def __init__(self, dim, heads=12):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(0.1))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocab, args.n_embd),
            nn.Embedding(args.block_size, args.n_embd),
        )
        self.blocks = nn.ModuleList(Block(args.n_embd) for _ in range(args.n_layer))
        self.norm, self.head = nn.LayerNorm(args.n_embd), nn.Linear(args.n_embd, vocab, bias=False)

    def forward(self, x, y):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


data = torch.randint(0, vocab, (200_000,))


def get_batch():
    starts = torch.randint(len(data) - args.block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + args.block_size] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + args.block_size] for i in starts])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.tensor([model(*get_batch()).item() for _ in range(10)])
    model.train()
    return losses.mean()


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
best, step = float("inf"), 0
while True:
    if step % 2 == 0:
        val = estimate_loss()
        print(f"step {step}: val loss {val:.4f}")
        if val < best:
            best = val
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.out)
    for _ in range(args.accumulate):
        loss = model(*get_batch()) / args.accumulate
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    if step == 5000:
        break
print("checkpoint", os.path.getsize(args.out))
