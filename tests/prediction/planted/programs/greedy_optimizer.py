"""An optimizer that keeps three copies of every parameter."""

from collections.abc import Iterable

import torch
from torch import nn

from oomph import Workload


class Averaging(torch.optim.Optimizer):
    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {name: parameter.clone() for name in ("fast", "slow", "start")}  # PLANTED
                state["fast"].lerp_(parameter, 0.5)
                state["slow"].lerp_(parameter, 0.01)
                parameter.add_(parameter.grad, alpha=-group["lr"])


workload = Workload(
    model=lambda: nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]),
    batch=lambda device: torch.randn(64, 4096, device=device),
    loss=lambda model, x: model(x).square().mean(),
    optimizer=Averaging,
)
