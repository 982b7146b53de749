"""What the tests of linear_cross_entropy share: inputs, a run of it, a run of its specification."""

from dataclasses import dataclass, replace

import torch
from kernel_device import DEVICE
from torch import Tensor

from oomph.ops import linear_cross_entropy
from oomph.ops.cross_entropy.reference import CrossEntropyOptions, linear_cross_entropy_reference

# Of the largest number: half precision rounds the logits, their gradient and the sums of it.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# A budget nothing fits into: the smallest blocks there are, at most 16 rows by 128 classes.
TINY = 1


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None

    def but(self, **changes):
        return replace(self, **changes)

    def to(self, device):
        bias = None if self.bias is None else self.bias.to(device)
        return Inputs(self.x.to(device), self.weight.to(device), self.target.to(device), bias)


def inputs(*leading, d=6, v=13, dtype=torch.float64, bias=False, ignored=-100, seed=0):
    """Logits of deviation about 1; every third target is `ignored`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    target = torch.randint(v, leading, generator=generator)
    if ignored is not None:
        target.view(-1)[1::3] = ignored
    return Inputs(normal(*leading, d), (normal(v, d) / d**0.5).to(dtype), target, normal(v) if bias else None)


def numbers(*shape, dtype=torch.float64, seed=7):
    """Positive numbers between 0.5 and 1.5: class or token weights, gradients that arrive."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype)


@dataclass(frozen=True)
class Outcome:
    """Loss, log-sum-exp and the gradients of x, weight and bias (None: not asked for)."""

    loss: Tensor
    lse: Tensor
    gradients: tuple[Tensor | None, ...]

    @property
    def all(self):
        return [each for each in (self.loss, self.lse, *self.gradients) if each is not None]

    def cpu(self):
        gradients = tuple(None if each is None else each.cpu() for each in self.gradients)
        return Outcome(self.loss.cpu(), self.lse.cpu(), gradients)


def _differentiate(i, loss, lse, through_lse):
    total = (loss * numbers(*loss.shape).to(loss)).sum()
    if through_lse:
        total = total + (lse * numbers(*lse.shape, seed=8).to(lse)).sum()
    wanted = [each for each in (i.x, i.weight, i.bias) if each is not None and each.requires_grad]
    found = iter(torch.autograd.grad(total, wanted))
    gradients = (
        None if each is None or not each.requires_grad else next(found) for each in (i.x, i.weight, i.bias)
    )
    return Outcome(loss.detach(), lse.detach(), tuple(gradients))


def _leaf(tensor):
    # Not a clone: that would lose the strides under test.
    return None if tensor is None else tensor.detach().requires_grad_()


def leaves(i):
    return i.but(x=_leaf(i.x), weight=_leaf(i.weight), bias=_leaf(i.bias))


def run(i, *, through_lse=False, **options):
    """linear_cross_entropy and the gradients of a fixed function of its results; kernels on a GPU."""
    if options.get("impl") == "triton":
        i = i.to(DEVICE)
        options = {
            name: each.to(DEVICE) if isinstance(each, Tensor) else each for name, each in options.items()
        }
    i = leaves(i)
    result = linear_cross_entropy(i.x, i.weight, i.target, bias=i.bias, return_lse=True, **options)
    return _differentiate(i, *result, through_lse).cpu()


def expected(i, *, through_lse=False, **options):
    """The same of the specification, in float64 on the numbers as they are."""
    for ours_alone in ("impl", "memory_budget", "check"):
        options.pop(ours_alone, None)
    i = leaves(
        Inputs(i.x.double(), i.weight.double(), i.target.long(), None if i.bias is None else i.bias.double())
    )
    result = linear_cross_entropy_reference(i.x, i.weight, i.target, i.bias, CrossEntropyOptions(**options))
    return _differentiate(i, *result, through_lse)


def assert_close(ours, theirs, tolerance):
    """Within `tolerance` of each tensor's largest number; shapes equal."""
    assert len(ours) == len(theirs)
    for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.shape == other.shape
        if one.numel() == 0:
            continue
        largest = other.double().abs().max().item()
        error = (one.double() - other.double()).abs().max().item()
        assert error <= tolerance * max(largest, 1e-3), f"result {position}: {error:.2e} of {largest:.2e}"


def check(i, tolerance=None, **options):
    """Run and compare with the specification."""
    ours = run(i, **options)
    assert_close(ours.all, expected(i, **options).all, tolerance or TOLERANCE[i.x.dtype])
    return ours
