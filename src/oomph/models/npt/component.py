"""The part of a layer that is trained: a low-rank change of the MLP's input weight, set by attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oomph.models.npt.frozen import frozen_product
from oomph.nn import ModulatedLinear
from oomph.ops.modulation import compute_weight_delta
from oomph.ops.modulation.delta import TokenIndex


class NPComponent(ModulatedLinear):
    """W + A diag(mod) B with mod = modulation_scale * tanh(attention A), in place of an MLP's projection.

    The MLP calls it with its input alone. Inside `modulated_by(mod)` that gives the student's product,
    anywhere else the frozen layer's own. W stays in the base's dtype or in 8 bits; A and B are float32 (or
    wider), because updates of a bfloat16 parameter are mostly rounded away.
    """

    def __init__(
        self, *args: Any, modulation_scale: float = 0.1, on_host: bool = False, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.modulation_scale, self.on_host = modulation_scale, on_host
        self._current: Tensor | None = None

    @classmethod
    def replacing(
        cls,
        linear: nn.Module,
        rank: int,
        *,
        modulation_scale: float = 0.1,
        eight_bit: bool = False,
        on_host: bool = False,
    ) -> "NPComponent":
        """From an nn.Linear or GPT-2's Conv1D, whose weight it shares unless `eight_bit`."""
        made = cls.from_linear(linear, rank, eight_bit=eight_bit)
        assert isinstance(made, NPComponent)
        made.modulation_scale, made.on_host = modulation_scale, on_host
        wide = torch.promote_types(made.A.dtype, torch.float32)
        made.A, made.B = (nn.Parameter(factor.detach().to(wide)) for factor in (made.A, made.B))
        made.reset_parameters()
        return made

    def modulation(self, attention: Tensor) -> Tensor:
        """[..., d] -> [..., r], at most modulation_scale in size; computed in A's dtype."""
        return self.modulation_scale * torch.tanh(attention.to(self.A.dtype) @ self.A)

    @contextmanager
    def modulated_by(self, mod: Tensor) -> Iterator[None]:
        self._current = mod
        try:
            yield
        finally:
            self._current = None

    def forward(self, h: Tensor, mod: Tensor | None = None) -> Tensor:
        """h [..., d], mod [..., r] or None -> [..., f]."""
        mod = self._current if mod is None else mod
        if mod is None:
            return frozen_product(h, self.base_weight, self.bias)
        return super().forward(h, mod)

    def compute_weight_delta(self, modulation: Tensor, token_idx: TokenIndex) -> Tensor:
        """The change of W at the tokens asked for, [..., d, f]: to look at; training never makes one.

        `on_host` makes it in host memory, where A and B go with their history: they keep their gradients.
        """
        A: Tensor = self.A
        B: Tensor = self.B
        if self.on_host:
            A, B, modulation = A.cpu(), B.cpu(), modulation.cpu()
        return compute_weight_delta(A, B, modulation, token_idx)

    def penalty(self, mod: Tensor) -> Tensor:
        """||dW||_F^2 per token, [...], without dW."""
        return self.weight_delta_norm(mod, squared=True)
