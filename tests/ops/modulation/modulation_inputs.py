"""Inputs that the tests of modulated_linear share."""

from __future__ import annotations

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

    def all(self) -> tuple[Tensor | None, ...]:
        return self.h, self.weight, self.A, self.B, self.mod, self.bias

    def copy(self, dtype: torch.dtype, train: str = "h weight A B mod bias") -> Inputs:
        """The same numbers in `dtype`; the inputs named in `train` require gradients."""
        trained = train.split()
        made = {
            name: None if each is None else each.detach().to(dtype).requires_grad_(name in trained)
            for name, each in zip(NAMES, self.all(), strict=True)
        }
        return Inputs(**made)  # type: ignore[arg-type]

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: each.grad
            for name, each in zip(NAMES, self.all(), strict=True)
            if each is not None and each.grad is not None
        }


def inputs(
    lead: tuple[int, ...] = (2, 5),
    d: int = 7,
    f: int = 11,
    r: int = 3,
    mod_lead: tuple[int, ...] | None = None,
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

    mod = normal(*(lead if mod_lead is None else mod_lead), r)
    return Inputs(
        normal(*lead, d), normal(d, f), normal(d, r), normal(r, f), mod, normal(f) if bias else None
    )
