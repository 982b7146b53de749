"""Planted programs: language models with one mistake each. `# cause:` marks its line and names it."""

import torch
import torch.nn.functional as F
from torch import nn

from oomph import Workload


class SelfAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        B, T, d = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).reshape(B, T, d))


class Block(nn.Module):
    def __init__(self, d, heads, attention=SelfAttention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = attention(d, heads)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab=512, d=256, layers=4, heads=4, attention=SelfAttention):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.h = nn.ModuleList(Block(d, heads, attention) for _ in range(layers))
        self.norm, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.norm(x))


def next_token_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def trainer(model, loss, batch, **options):
    """The step of a plain loop."""
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)

    def step():
        ids = torch.randint(batch[2], batch[:2], device="cuda")
        loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def logits_of_a_large_vocabulary():
    def loss(model, ids):
        logits = model(ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())  # cause: logits

    return trainer(GPT(vocab=128_256, layers=2), loss, (8, 1024, 128_256))


def logits_cast_to_float():
    def loss(model, ids):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(ids)
        shifted = logits[:, :-1, :].contiguous().float()
        return F.cross_entropy(shifted.view(-1, shifted.size(-1)), ids[:, 1:].flatten())  # cause: logits

    return trainer(GPT(vocab=50_304, d=512, layers=4), loss, (8, 1024, 50_304))


class EagerAttention(SelfAttention):
    def forward(self, x):
        B, T, d = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
        mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        weights = F.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)  # cause: attention matrices
        return self.out((weights @ v).transpose(1, 2).reshape(B, T, d))


def eager_attention():
    return Workload(
        model=lambda: GPT(attention=EagerAttention),
        batch=lambda device, B, T: torch.randint(512, (B, T), device=device),
        loss=lambda model, ids: next_token_loss(model(ids), ids),
        sizes={"B": 4, "T": 2048},
    )


class AttentionWithWeights(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=True)[0]  # cause: attention matrices


def attention_that_returns_weights():
    return trainer(
        GPT(attention=AttentionWithWeights),
        lambda model, ids: next_token_loss(model(ids), ids),
        (4, 2048, 512),
    )


class OuterProductMemory(SelfAttention):
    """Linear attention with a state per token."""

    def forward(self, x):
        B, T, d = x.shape
        q, k, v = (t.view(B, T, self.heads, -1) for t in self.qkv(x).chunk(3, -1))
        states = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)  # cause: state transitions
        return self.out(torch.einsum("bthd,bthde->bthe", q, states).reshape(B, T, d))


def state_of_every_token():
    return trainer(
        GPT(attention=OuterProductMemory), lambda model, ids: next_token_loss(model(ids), ids), (8, 512, 512)
    )


class HyperLinear(nn.Module):
    """Each token modulates the weight."""

    def __init__(self, d, heads, rank=8):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, 2 * d) / d**0.5)
        self.down, self.left = nn.Linear(d, rank), nn.Parameter(torch.randn(rank, d))
        self.right, self.out = nn.Parameter(torch.randn(rank, 2 * d)), nn.Linear(2 * d, d)

    def forward(self, x):
        delta = torch.einsum(
            "bsr,rd,rf->bsdf", self.down(x), self.left, self.right
        )  # cause: per-token weight deltas
        return self.out(torch.einsum("bsd,bsdf->bsf", x, self.weight + delta))


def weight_of_every_token():
    return trainer(
        GPT(attention=HyperLinear, layers=2),
        lambda model, ids: next_token_loss(model(ids), ids),
        (2, 256, 512),
    )


def one_hot_targets():
    def loss(model, ids):
        targets = F.one_hot(ids, 32_000).float()  # cause: one-hot
        return F.mse_loss(model(ids).mean(-1), targets.mean(-1))

    return trainer(GPT(vocab=32_000, d=64, layers=1), loss, (16, 1024, 32_000))


class OneHotInput(GPT):
    def forward(self, ids):
        rows = torch.eye(self.wte.num_embeddings, device=ids.device)  # cause: one-hot
        x = rows[ids] @ self.wte.weight
        for block in self.h:
            x = block(x)
        return self.lm_head(self.norm(x))


def identity_of_the_vocabulary():
    return trainer(
        OneHotInput(vocab=30_000, d=128, layers=2),
        lambda model, ids: next_token_loss(model(ids), ids),
        (2, 128, 30_000),
    )


def vocabulary_of_another_tokenizer():
    """Bytes, with the embedding of a model for words."""
    model = GPT(d=512, layers=2)
    model.wte = nn.Embedding(151_936, 512)  # cause: oversized vocabulary
    model.lm_head = nn.Linear(512, 151_936, bias=False)
    return trainer(model, lambda model, ids: next_token_loss(model(ids), ids), (4, 256, 256))


class RotaryAttention(SelfAttention):
    def __init__(self, d, heads, positions=32_768):
        super().__init__(d, heads)
        angles = torch.outer(torch.arange(positions), 1e4 ** -torch.linspace(0, 1, d // heads))
        self.register_buffer("cos", angles.cos())  # cause: duplicate buffers
        self.register_buffer("sin", angles.sin())

    def forward(self, x):
        B, T, d = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = (t * self.cos[:T] + t.flip(-1) * self.sin[:T] for t in (q, k))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).reshape(B, T, d))


def rotary_cache_per_layer():
    model = GPT(d=128, layers=24, heads=2, attention=RotaryAttention)
    return trainer(model, lambda model, ids: next_token_loss(model(ids), ids), (1, 128, 512))


class MaskedAttention(SelfAttention):
    def __init__(self, d, heads, positions=4096):
        super().__init__(d, heads)
        self.register_buffer(
            "mask", torch.full((positions, positions), float("-inf")).triu(1)
        )  # cause: duplicate buffers

    def forward(self, x):
        B, T, d = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:T, :T])
        return self.out(x.transpose(1, 2).reshape(B, T, d))


def mask_per_layer():
    model = GPT(d=256, layers=12, attention=MaskedAttention)
    return trainer(model, lambda model, ids: next_token_loss(model(ids), ids), (1, 256, 512))


class Float32Norm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape).to(x.dtype)  # cause: fp32 upcasts


def norms_in_float32():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(Float32Norm(1024), nn.Identity()) for _ in range(16))
            self.head = nn.Linear(1024, 8, bias=False)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = Wide().cuda().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        x = torch.randn(64, 2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def many_layers():
    model = GPT(d=512, layers=24, heads=8)
    return trainer(  # cause, on no single line: activations across layers
        model, lambda model, ids: next_token_loss(model(ids), ids), (16, 1024, 512)
    )


def large_model_with_adam():
    model = GPT(d=2048, layers=6, heads=16)
    return trainer(  # cause, on no single line: optimizer state
        model, lambda model, ids: next_token_loss(model(ids), ids), (1, 128, 512), fused=True
    )
