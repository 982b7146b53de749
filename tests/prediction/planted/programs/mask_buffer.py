"""A causal mask for the longest sequence there could be, kept in float32 on the GPU."""

import torch
import torch.nn.functional as F
from torch import nn

LONGEST = 32_768


class CausalAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.register_buffer("mask", torch.full((LONGEST, LONGEST), float("-inf")).triu(1))  # PLANTED

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        length = x.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:length, :length])


def train():
    model = CausalAttention(256).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 512, 256, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
