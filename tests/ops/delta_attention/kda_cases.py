"""Calls of the kernels of delta attention, and what is right for them: the recurrence, token by token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NAMES = ("o", "state", "grad q", "grad k", "grad v", "grad log_alpha", "grad beta", "grad initial_state")


@dataclass(frozen=True)
class Case:
    """The shape and dtypes of a call; its numbers are always the same. `packed`: the ends of sequences."""

    batch: int = 1
    tokens: int = 20
    heads: int = 1
    dk: int = 16
    dv: int = 16
    dtype: torch.dtype = torch.float32
    decay: float = 1.0
    decay_dtype: torch.dtype | None = None
    packed: tuple[int, ...] | None = None
    device: str = "cpu"

    @property
    def sequences(self) -> int:
        return self.batch if self.packed is None else len(self.packed) - 1

    def inputs(self) -> list[Tensor]:
        """q, k, v, log_alpha, beta and the initial state."""
        make = torch.Generator().manual_seed(0)
        lead = (self.batch, self.tokens, self.heads)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, dtype=torch.float64)

        k = torch.nn.functional.normalize(normal(*lead, self.dk), dim=-1)
        log_alpha = -self.decay * torch.rand(*lead, self.dk, generator=make, dtype=torch.float64)
        beta = torch.rand(*lead, generator=make, dtype=torch.float64)
        made = [normal(*lead, self.dk), k, normal(*lead, self.dv), log_alpha, beta]
        dtypes = [self.dtype] * 3 + [self.decay_dtype or self.dtype, self.dtype]
        state = normal(self.sequences, self.heads, self.dk, self.dv)
        return [
            *(x.to(self.device, dtype) for x, dtype in zip(made, dtypes, strict=True)),
            state.to(self.device, torch.float32),
        ]

    def gradients(self) -> list[Tensor]:
        """Of o and of the final state."""
        make = torch.Generator().manual_seed(1)
        o = torch.randn(self.batch, self.tokens, self.heads, self.dv, generator=make)
        state = torch.randn(self.sequences, self.heads, self.dk, self.dv, generator=make)
        return [o.to(self.device, self.dtype), state.to(self.device)]


def token_by_token(
    inputs: Sequence[Tensor], scale: float, packed: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    q, k, v, log_alpha, beta, initial = inputs
    if packed is not None:
        parts = [
            token_by_token([*(x[:, start:stop] for x in inputs[:5]), initial[n : n + 1]], scale)
            for n, (start, stop) in enumerate(itertools.pairwise(packed))
        ]
        return torch.cat([o for o, _ in parts], 1), torch.cat([state for _, state in parts])
    state, outputs = initial, [v[:, :0]]
    for t in range(q.shape[1]):
        state = state * log_alpha[:, t, :, :, None].exp()
        answer = (state * k[:, t, :, :, None]).sum(2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - answer))[:, :, None]
        outputs.append(scale * (state * q[:, t, :, :, None]).sum(2)[:, None])
    return torch.cat(outputs, 1), state


def expected(case: Case, scale: float) -> list[Tensor]:
    """o, the final state and the gradients of all inputs, in float64."""
    leaves = [x.double().requires_grad_() for x in case.inputs()]
    results = token_by_token(leaves, scale, case.packed)
    torch.autograd.backward(results, [x.double() for x in case.gradients()])
    return [*(x.detach() for x in results), *(x.grad for x in leaves if x.grad is not None)]


def errors(found: Sequence[Tensor], right: Sequence[Tensor]) -> dict[str, float]:
    """By name, relative to the size of what is right."""
    pairs = zip(NAMES, found, right, strict=True)
    return {name: float((x.double() - y).norm() / y.norm().clamp(min=1e-300)) for name, x, y in pairs}
