"""Real steps on the CPU: what a workload's parameters become, with a fix and without."""

from functools import cached_property

import torch

import oomph
from oomph import fixes
from oomph.fixes.registry import FixContext


def trained(workload, steps=3, each=lambda optimizer: None):
    """The parameters by name after some steps, and the optimizer."""
    torch.manual_seed(0)
    model = workload.model()
    if workload.dtype is not None:
        model.to(workload.dtype)
    model.train()
    optimizer = workload.optimizer(model.parameters())
    batch = workload.make_batch(torch.device("cpu"))
    for _ in range(steps):
        for part, factor in workload.passes(batch):
            (workload.loss(model, part) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        each(optimizer)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, optimizer


def same_parameters(before, after, tolerance):
    assert before.keys() == after.keys()
    for name, parameter in before.items():
        off = (after[name].double() - parameter.double()).abs().max() / parameter.abs().max().clamp_min(1e-30)
        assert off <= tolerance, f"{name} is off by {off:.2e}"


def proposed(name, workload):
    """A fix's proposals, priced."""
    return fixes.propose(oomph.predict(workload, gpu="h200"), workload, only=(name,))


class _PredictedIfRead:
    """A prediction that is made when an attribute is read: most fixes read the model and the optimizer."""

    def __init__(self, workload):
        self.workload = workload

    def __getattr__(self, name):
        return getattr(self._prediction, name)

    @cached_property
    def _prediction(self):
        return oomph.predict(self.workload, gpu="h200")


def not_found(name, workload):
    """Does the fix say that it does not apply? What it looks at needs no large model."""
    context = FixContext(_PredictedIfRead(workload), workload)
    return fixes.find(name).proposals(context) == []
