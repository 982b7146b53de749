"""A model of a head alone, and how its loss is compared before and after."""

import torch
import torch.nn.functional as F
from architectures import same_pass
from small import gradients, seeded
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oomph import fixes
from oomph.records import FixUse

# A budget that no logits fit into, so that the tiny ones of these tests are taken for large.
FIX = FixUse("fused_linear_cross_entropy", {"memory_budget": "1KiB"})


ROWS, LENGTH, WIDTH, CLASSES = 3, 7, 8, 33


class Largest(TorchDispatchMode):
    """Sees how many numbers the largest tensor has that is made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return out


class Model(nn.Module):
    """A head, and something before it."""

    def __init__(self, bias=True, dtype=torch.float64):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def batch_of(dtype=torch.float64):
    made = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=made, dtype=dtype)
    y = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=made)
    y[0, :2] = -100
    return x, y


def compare(loss, dtype=torch.float64, tolerance=1e-9, bias=True):
    """The pass with and without the fix; True if the logits were not computed."""
    model, (x, y) = seeded(lambda: Model(bias, dtype)), batch_of(dtype)
    before = gradients(model, lambda model, _: loss(model(x), y), None)
    fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {**FIX.options, "heads": ["head"]}), model)
    made = []

    def keeping(model, _):
        made.append(model(x))
        return loss(made[0], y)

    same_pass(before, gradients(model, keeping, None), tolerance)
    return not made[0].expression.computed


def fixed(dtype=torch.float32):
    model = seeded(lambda: Model(dtype=dtype))
    fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {**FIX.options, "heads": ["head"]}), model)
    return model


# The ways a loss is written.
WAYS = {
    "view": lambda z, y: F.cross_entropy(z.view(-1, z.size(-1)), y.view(-1)),
    "view with unknown rows": lambda z, y: F.cross_entropy(z.view(y.numel(), -1), y.view(-1)),
    "reshape": lambda z, y: F.cross_entropy(torch.reshape(z, (-1, z.shape[-1])), y.reshape(-1)),
    "flatten": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "flatten to -2": lambda z, y: F.cross_entropy(torch.flatten(z, 0, -2), y.flatten()),
    "module": lambda z, y: nn.CrossEntropyLoss(ignore_index=3)(z.view(-1, CLASSES), y.view(-1).clamp(min=0)),
    "sum": lambda z, y: F.cross_entropy(z.view(-1, CLASSES), y.view(-1), reduction="sum") / 5,
    "per token": lambda z, y: (
        F.cross_entropy(z.view(-1, CLASSES), y.view(-1), reduction="none") * torch.arange(21)
    ).sum(),
    "label smoothing": lambda z, y: F.cross_entropy(z.view(-1, CLASSES), y.view(-1), label_smoothing=0.2),
    "class weights": lambda z, y: F.cross_entropy(
        z.view(-1, CLASSES), y.view(-1), weight=torch.linspace(0.5, 2, CLASSES, dtype=z.dtype)
    ),
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "classes second by -1": lambda z, y: F.cross_entropy(z.transpose(-1, -2).contiguous(), y),
    "permute": lambda z, y: F.cross_entropy(z.permute(0, 2, 1), y, reduction="none").nansum(),
    "mT": lambda z, y: F.cross_entropy(z.mT, y),
    "batch second": lambda z, y: F.cross_entropy(z.transpose(0, 1).reshape(-1, CLASSES), y.t().reshape(-1)),
    "shift": lambda z, y: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].contiguous().view(-1)
    ),
    "shift in two dimensions": lambda z, y: F.cross_entropy(
        z[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1)
    ),
    "last tokens": lambda z, y: F.cross_entropy(z[:, -3:].flatten(0, 1), y[:, -3:].flatten()),
    "one token": lambda z, y: F.cross_entropy(z[:, -1], y[:, -1]),
    "masked": lambda z, y: F.cross_entropy(z[y != -100], y[y != -100]),
    "picked": lambda z, y: F.cross_entropy(z[torch.arange(3), torch.tensor([2, 3, 4])], y[:, 4]),
    "same dtype": lambda z, y: F.cross_entropy(z.to(z.dtype).to(z.device).mT, y),
    "scaled": lambda z, y: F.cross_entropy((z * 0.25 / 3).mT, y),
    "scaled from the left": lambda z, y: F.cross_entropy((2 * z).mT, y),
    "capped": lambda z, y: F.cross_entropy((torch.tanh(z / 1.7) * 1.7).view(-1, CLASSES), y.view(-1)),
    "scaled and capped": lambda z, y: F.cross_entropy((0.9 * (z * 3 / 1.7).tanh()).mT, y),
    "nll": lambda z, y: F.nll_loss(F.log_softmax(z, dim=-1).view(-1, CLASSES), y.view(-1)),
    "nll of torch's": lambda z, y: F.nll_loss(torch.log_softmax(z.view(-1, CLASSES), 1), y.view(-1)),
    "nll of classes second": lambda z, y: nn.NLLLoss()(z.transpose(1, 2).log_softmax(1), y),
}
