"""Programs made of random steps between q k^T and the product with v give what they give without the fix."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from oomph.fixes import fused_attention as fusion
from oomph.fixes.fused_attention import AttentionMode
from oomph.fixes.lazy_tensor import LazyForward

B, H, T, D = 2, 3, 5, 4
FILLS = (-math.inf, -1e9, -1e9, -2.0)
BIASES = ((H, T, 1), (1, H, T, 1), (B, 1, 1, 1), (T, 1), (1,), (H, 1, 1))  # the last is the number of keys


class Program:
    """One way from q, k and v to the result; `describe()` tells it when it goes wrong."""

    def __init__(self, seed):
        chance = random.Random(seed)
        self.made = torch.Generator().manual_seed(seed)
        self.keys = chance.choice((T, T, T, 7))
        self.product = chance.choice(("matmul", "matmul", "einsum", "einsum", "bmm"))
        fills = FILLS if chance.random() < 0.2 else [chance.choice(FILLS)]  # mostly one for all masks
        self.steps = [
            (chance.choice(sorted(self.STEPS)), chance.choice(fills)) for _ in range(chance.randint(0, 5))
        ]
        self.dim = chance.choice((-1, -1, -1, -1, 3, 2))
        self.last = chance.choice(("", "", "", "masked", "dropout", "read"))
        heads = 1 if chance.random() < 0.2 else H
        bias = chance.choice(BIASES)
        shapes = ((B, H, T, D), (B, heads, self.keys, D), (B, heads, self.keys, D), (*bias[:-1], self.keys))
        self.arguments = [self.random(*shape).requires_grad_() for shape in shapes]
        self.padding = torch.rand(B, 1, 1, self.keys, generator=self.made) < 0.3
        self.pairs = torch.rand(B, 1, T, self.keys, generator=self.made) < 0.4
        if chance.random() < 0.3:
            self.padding[0] = True  # a sequence of nothing but padding
            self.pairs[0, 0, 1] = True  # a query that sees nothing
        self.weight = self.random(B, H, T, D)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.made, dtype=torch.float64)

    def describe(self):
        return f"{self.product} {self.steps} {self.dim} {self.last} {self.keys}"

    def scores(self, q, k):
        if self.product == "einsum":
            return torch.einsum("bhqd,bhkd->bhqk", q, k.expand(B, H, self.keys, D))
        if self.product == "bmm":
            k = k.expand(B, H, self.keys, D).reshape(B * H, self.keys, D)
            return torch.bmm(q.reshape(B * H, T, D), k.transpose(1, 2)).view(B, H, T, self.keys)
        return q @ k.transpose(-1, -2)

    def future(self):
        return torch.ones(T, self.keys, dtype=torch.bool).tril(self.keys - T)

    def added_future(self, fill):
        return torch.full((T, self.keys), fill, dtype=torch.float64).triu(self.keys - T + 1)

    STEPS = {  # noqa: RUF012
        "scale": lambda self, s, bias, fill: s * 0.5,
        "divide": lambda self, s, bias, fill: s / math.sqrt(D),
        "temperature": lambda self, s, bias, fill: s * torch.full((H, 1, 1), 1.3, dtype=torch.float64),
        "bias": lambda self, s, bias, fill: s + bias,
        "future": lambda self, s, bias, fill: s.masked_fill(~self.future(), fill),
        "added future": lambda self, s, bias, fill: s + self.added_future(fill),
        "padding": lambda self, s, bias, fill: s.masked_fill(self.padding, fill),
        "pairs": lambda self, s, bias, fill: torch.masked_fill(s, self.pairs, fill),
        "where": lambda self, s, bias, fill: torch.where(self.pairs, s, torch.tensor(fill).double()),
        "padding in place": lambda self, s, bias, fill: s.masked_fill_(self.padding, fill),
        "bias in place": lambda self, s, bias, fill: s.add_(bias),
        "scale in place": lambda self, s, bias, fill: s.mul_(0.7),
        "view": lambda self, s, bias, fill: s.reshape(B * H, T, -1).view(B, H, T, -1),
    }

    def __call__(self, q, k, v, bias):
        scores = self.scores(q, k)
        kept = None
        for number, (step, fill) in enumerate(self.steps):
            if number == 1:
                kept = scores  # another name for it: sees what is changed in place
            scores = self.STEPS[step](self, scores, bias, fill)
        weights = scores.softmax(self.dim)
        if self.last == "masked":
            weights = weights.masked_fill(self.padding, 0.0)
        if self.last == "dropout":
            weights = F.dropout(weights, 0.0)
        out = weights @ v
        if self.last == "read":
            out = out * weights.sum()
        return out if kept is None else out + kept.softmax(-1) @ v

    def run(self, *around):
        out = around[0](self, *self.arguments) if around else self(*self.arguments)
        grads = torch.autograd.grad((out * self.weight).sum(), self.arguments, allow_unused=True)
        return [out.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)]


@pytest.mark.filterwarnings("ignore:fix 'fused_attention'")
@pytest.mark.parametrize("first", range(0, 200, 100))
def test_a_program_computes_the_same_with_the_fix(first, monkeypatch):
    fused, attention = [], fusion.attention
    monkeypatch.setattr(
        fusion, "attention", lambda *args, **kwargs: (fused.append(1), attention(*args, **kwargs))[1]
    )
    for seed in range(first, first + 100):
        program = Program(seed)
        wanted = program.run()
        if any(tensor.isnan().any() for tensor in wanted):
            continue  # a query without keys, and -inf: the program is ill, the op gives zeros
        for one, other in zip(program.run(LazyForward(AttentionMode)), wanted, strict=True):
            torch.testing.assert_close(
                one, other.expand_as(one), rtol=1e-8, atol=1e-8, msg=f"{seed}: {program.describe()}"
            )
    assert len(fused) > 30, len(fused)
