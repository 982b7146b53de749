"""Where a step began: what it takes from, as it was before it took anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Before:
    """The data's position and torch's generators; those of Python and numpy are not drawn from in a step.

    Taken before every step, so that a step which fails half way leaves the state of the one before it.
    """

    data: dict[str, Any]
    host: Tensor
    gpu: Tensor | None

    @classmethod
    def of(cls, batches: Any, device: torch.device) -> Before:
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(batches.state_dict(), torch.get_rng_state(), gpu)

    def draw_again(self, device: torch.device) -> None:
        """The random numbers of the step are those that come next."""
        torch.set_rng_state(self.host)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, device)
