"""Attention as people write it: every class has the same weights and arguments, and its own way."""

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LONGEST = 16, 4, 32


class Style(nn.Module):
    """`forward(x, padding)`: x [B, T, C], padding [B, T] True where there is a token."""

    key_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        # A softmax does not see a bias of the keys: its gradient would be nothing but rounding.
        self.k, self.v = (nn.Linear(WIDTH, self.key_heads * size, bias=False) for _ in range(2))
        self.prepare()

    def prepare(self) -> None: ...

    def heads_of(self, x):
        """q, k, v as [B, H, T, D]."""
        b, t, _ = x.shape
        return (f(x).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))

    def joined(self, y):
        return self.o(y.transpose(1, 2).reshape(y.shape[0], y.shape[2], WIDTH))


class StoredMask(Style):
    """nanoGPT."""

    def prepare(self):
        self.register_buffer("bias", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))
        self.attn_dropout = nn.Dropout(0.0)

    def forward(self, x, padding):
        t = x.size(1)
        q, k, v = self.heads_of(x)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.joined(self.attn_dropout(att) @ v)


class OneHeadAtATime(Style):
    """ "Let's build GPT": modules of one head, three dimensions."""

    def prepare(self):
        self.register_buffer("tril", torch.tril(torch.ones(LONGEST, LONGEST)))

    def forward(self, x, padding):
        t = x.shape[1]
        heads = []
        for q, k, v in zip(*(f(x).chunk(HEADS, -1) for f in (self.q, self.k, self.v)), strict=True):
            wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
            wei = wei.masked_fill(self.tril[:t, :t] == 0, float("-inf"))
            heads.append(F.softmax(wei, dim=-1) @ v)
        return self.o(torch.cat(heads, -1))


class BoolBufferInPlace(Style):
    """ "LLMs from scratch": an upper triangle, filled in place, scaled inside the softmax."""

    def prepare(self):
        self.register_buffer("mask", torch.triu(torch.ones(LONGEST, LONGEST), diagonal=1), persistent=False)

    def forward(self, x, padding):
        n = x.shape[1]
        q, k, v = self.heads_of(x)
        scores = q @ k.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:n, :n], -torch.inf)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        return self.joined((weights @ v).contiguous())


class AddedMaskBuffer(Style):
    """Zeros and -inf, added; a learned bias besides."""

    def prepare(self):
        self.register_buffer("mask", torch.full((LONGEST, LONGEST), -torch.inf).triu(1))
        self.relative = nn.Parameter(torch.randn(HEADS, LONGEST, LONGEST))

    def forward(self, x, padding):
        t = x.shape[1]
        q, k, v = self.heads_of(x)
        scores = torch.matmul(q, k.mT) / math.sqrt(q.size(-1))
        scores = scores + self.relative[:, :t, :t]
        scores = scores + self.mask[:t, :t].to(scores.dtype)
        return self.joined(torch.matmul(scores.softmax(-1), v))


def attention(query, key, value, mask=None, dropout=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class Annotated(Style):
    """The annotated transformer: a function, padding and future in one mask, weights kept."""

    def prepare(self):
        self.dropout, self.attn = nn.Dropout(p=0.0), None

    def forward(self, x, padding):
        t = x.shape[1]
        mask = padding[:, None, None, :] & torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        y, self.attn = attention(*self.heads_of(x), mask=mask, dropout=self.dropout)
        return self.joined(y)


class PaddingOnly(Style):
    """An encoder: keys masked by a large negative number, one sequence of nothing but padding."""

    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~padding[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.joined(torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1), v))


class EinsumWithoutTranspose(Style):
    """Heads in the third dimension throughout; a causal mask made on the way; additive padding."""

    def forward(self, x, padding):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1) for f in (self.q, self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        causal = torch.triu(torch.full((t, t), float("-inf"), dtype=x.dtype, device=x.device), diagonal=1)
        scores = scores + causal
        scores = scores + (1.0 - padding[:, None, None, :].to(x.dtype)) * -10000.0
        return self.o(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(b, t, WIDTH))


class Alibi(Style):
    """BLOOM: baddbmm on joined batch and heads, views in between, softmax in float."""

    def prepare(self):
        self.slopes = nn.Parameter(torch.rand(HEADS))

    def forward(self, x, padding):
        b, t, _ = x.shape
        q, k, v = (y.reshape(b * HEADS, t, -1) for y in self.heads_of(x))
        places = torch.arange(t, device=x.device, dtype=x.dtype)
        alibi = (self.slopes[:, None] * places)[:, None, :].repeat(b, 1, 1)
        scores = torch.baddbmm(alibi, q, k.transpose(1, 2), beta=1.0, alpha=q.shape[-1] ** -0.5)
        scores = scores.view(b, HEADS, t, t)
        future = torch.ones(t, t, device=x.device, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = F.softmax(scores, dim=-1, dtype=wide).to(x.dtype)
        y = torch.bmm(weights.view(b * HEADS, t, t), v)
        return self.joined(y.view(b, HEADS, t, -1))


class GroupedByRepeating(Style):
    """GPT-2's torch.where with a scalar on the device; keys repeated."""

    key_heads = 2

    def prepare(self):
        mask = torch.tril(torch.ones((LONGEST, LONGEST), dtype=torch.bool))
        self.register_buffer("bias", mask.view(1, 1, LONGEST, LONGEST), persistent=False)

    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        k, v = (y.repeat_interleave(HEADS // 2, dim=1) for y in (k, v))
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=scores.dtype, device=scores.device)
        t, s = q.size(-2), k.size(-2)
        causal = self.bias[:, :, s - t : s, :s]
        least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
        scores = torch.where(causal, scores.to(scores.dtype), least)
        return self.joined(torch.matmul(nn.functional.softmax(scores, dim=-1).type(v.dtype), v))


class GroupedByExpanding(Style):
    """Queries in groups, five dimensions; keys expanded by broadcasting."""

    key_heads = 2

    def forward(self, x, padding):
        b, t, _ = x.shape
        q, k, v = self.heads_of(x)
        q = q.view(b, 2, HEADS // 2, t, -1)
        scores = q @ k[:, :, None].transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(t, t, device=x.device).tril() == 0, float("-inf"))
        return self.joined((scores.softmax(-1) @ v[:, :, None]).reshape(b, HEADS, t, -1))


class OneKeyHead(Style):
    """Multi-query attention, scaled in place, bias added in place."""

    key_heads = 1

    def prepare(self):
        self.relative = nn.Parameter(torch.randn(1, 1, LONGEST, LONGEST))

    def forward(self, x, padding):
        t = x.shape[1]
        q, k, v = self.heads_of(x)
        scores = q @ k.transpose(-1, -2)
        scores *= q.shape[-1] ** -0.5
        scores += self.relative[..., :t, :t]
        scores = scores.masked_fill(padding[:, None, None, :].logical_not(), float("-inf"))
        return self.joined(scores.softmax(dim=-1) @ v)


class CausalAndPadding(Style):
    """A stored causal mask with -inf, then padding with a finite number: left padding leaves empty rows."""

    def prepare(self):
        self.register_buffer("mask", torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril())

    def forward(self, x, padding):
        t = x.shape[1]
        q, k, v = self.heads_of(x)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~self.mask[None, None, :t, :t], float("-inf"))
        scores = scores.masked_fill(~padding[:, None, None, :], -1e9)
        return self.joined(scores.softmax(-1) @ v)


class ZeroedAfter(CausalAndPadding):
    """Padding and future in one matrix; weights are set to zero by it once more after the softmax."""

    def forward(self, x, padding):
        t = x.shape[1]
        q, k, v = self.heads_of(x)
        mask = ~(padding[:, None, None, :] & self.mask[:t, :t])
        scores = (q @ k.transpose(-1, -2)).masked_fill(mask, -1e9)
        return self.joined(scores.softmax(-1).masked_fill(mask, 0.0) @ v)


class SameFillTwice(CausalAndPadding):
    """Both with one number; keys are masked by a matrix."""

    def forward(self, x, padding):
        t = x.shape[1]
        q, k, v = self.heads_of(x)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~self.mask[None, None, :t, :t], -1e9)
        scores = scores.masked_fill(~padding[:, None, None, :].expand(-1, 1, t, -1), -1e9)
        return self.joined(scores.softmax(-1) @ v)


class SeparateFunctions(nn.Module):
    """The attention in a module of its own, without parameters, which returns the weights too."""

    class Scaled(nn.Module):
        def forward(self, q, k, v, mask):
            attn = torch.bmm(q, k.transpose(1, 2)) / np_power(k.size(2))
            attn = torch.softmax(attn.masked_fill(mask, -math.inf), 2)
            return torch.bmm(attn, v), attn

    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.attention = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), self.Scaled()

    def forward(self, x, padding):
        q, k, v = self.qkv(x).chunk(3, -1)
        future = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(diagonal=1).bool()
        y, _ = self.attention(q, k, v, future)
        return self.o(y)


def np_power(size):
    return torch.tensor(size).float().sqrt()


FUSED = [
    StoredMask,
    OneHeadAtATime,
    BoolBufferInPlace,
    AddedMaskBuffer,
    Annotated,
    PaddingOnly,
    EinsumWithoutTranspose,
    GroupedByRepeating,
    OneKeyHead,
    SameFillTwice,
    SeparateFunctions,
]
# Correct, but not fused: see the warning that they get.
NOT_FUSED = [Alibi, GroupedByExpanding, CausalAndPadding, ZeroedAfter]
