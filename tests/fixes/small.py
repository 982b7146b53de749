"""A hand-written language model, small enough for a CPU, and how to compare a model before and after."""

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import oomph


class Attention(nn.Module):
    """Written out, with a stored mask, as many tutorials have it."""

    def __init__(self, width, heads, longest):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        scores = (q @ k.transpose(-2, -1)) * (k.size(-1) ** -0.5)
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        return self.proj((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, width, heads, longest):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads, longest), MLP(width)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class TinyLM(nn.Module):
    def __init__(self, vocabulary=97, width=32, heads=4, layers=3, longest=64):
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads, longest) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain_loss(model, batch):
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.view(-1, logits.size(-1)), batch["targets"].view(-1))


def tiny_batch(device, rows=4, length=24, vocabulary=97):
    made = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (rows, length + 1), generator=made).to(device)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def uneven(device, key="targets", tokens="tokens"):
    """Rows with very different numbers of labels that count; the last row has none."""
    batch = tiny_batch(device, rows=6)
    labels = batch["targets"].clone()
    for row in range(6):
        labels[row, : 4 * row + 4] = -100
    return {tokens: batch["tokens"], key: labels}


def workload(**sizes):
    return oomph.Workload(lambda: seeded(lambda: TinyLM(**sizes)), tiny_batch, plain_loss)


def seeded(build):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return build()


def gradients(model, loss, batch):
    """The loss and the gradient of every parameter, by name."""
    model.zero_grad()
    value = loss(model, batch)
    value.backward()
    return value.detach(), {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def same_gradients(before, after, tolerance, floor=0.0):
    """Are loss and all gradients the same, relative to the largest entry of each?

    With `floor`, relative to at least that share of the largest of all: the gradient of a key's bias, which
    softmax does not see, is zero but for rounding.
    """
    (loss, grads), (new_loss, new_grads) = before, after
    torch.testing.assert_close(new_loss, loss, rtol=tolerance, atol=0)
    assert new_grads.keys() == grads.keys()
    largest = max((grad.abs().max() for grad in grads.values() if grad is not None), default=0.0)
    for name, grad in grads.items():
        if grad is None:
            assert new_grads[name] is None, name
            continue
        size = max(grad.abs().max(), floor * largest, 1e-30)
        off = (new_grads[name] - grad).abs().max() / size
        assert off <= tolerance, f"{name} is off by {off:.2e}"


same_pass = partial(same_gradients, tolerance=1e-5, floor=1e-4)


def state_of(model):
    """Everything that a fix may change in a model, to see that undo brings it back."""
    modules = {}
    for name, module in model.named_modules():
        own = {
            key: value
            for key, value in vars(module).items()
            if key not in ("_parameters", "_buffers", "_modules")
        }
        modules[name] = (
            type(module),
            {key: (id(value), _entries(value)) for key, value in own.items()},
            _entries(module._parameters),
            _values(module._buffers),
            _entries(module._modules),
        )
    config = getattr(model, "config", None)
    return modules, None if config is None else copy.deepcopy(vars(config))


def _values(buffers):
    """In their order, with the bits of each: undo may bring back an equal tensor."""
    return [
        (name, None if one is None else (one.dtype, one.stride(), one.flatten().view(torch.uint8).tolist()))
        for name, one in buffers.items()
    ]


def _entries(value):
    """In their order, each by its identity, and by its value where that is a plain one."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(key, id(each), each if isinstance(each, int | float | str) else None) for key, each in pairs]
