"""Inputs that the tests of modulated_linear share."""

from dataclasses import dataclass

import torch
from torch import Tensor

NAMES = ("h", "weight", "A", "B", "mod", "bias")


@dataclass
class Inputs:
    h: Tensor
    weight: Tensor
    A: Tensor
    B: Tensor
    mod: Tensor
    bias: Tensor | None

    def all(self):
        return self.h, self.weight, self.A, self.B, self.mod, self.bias

    def copy(self, dtype, train="h weight A B mod bias"):
        """The same numbers in `dtype`; the inputs named in `train` require gradients."""
        trained = train.split()
        made = {
            name: None if each is None else each.detach().to(dtype).requires_grad_(name in trained)
            for name, each in zip(NAMES, self.all(), strict=True)
        }
        return Inputs(**made)

    def gradients(self):
        return {
            name: each.grad
            for name, each in zip(NAMES, self.all(), strict=True)
            if each is not None and each.grad is not None
        }


def inputs(lead=(2, 5), d=7, f=11, r=3, mod_lead=None, bias=True, dtype=torch.float64, seed=0):
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

    mod = normal(*(lead if mod_lead is None else mod_lead), r)
    return Inputs(
        normal(*lead, d), normal(d, f), normal(d, r), normal(r, f), mod, normal(f) if bias else None
    )
