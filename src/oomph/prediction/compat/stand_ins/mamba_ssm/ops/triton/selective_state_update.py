"""Memory: state-spaces/mamba, mamba_ssm/ops/triton/selective_state_update.py; for generation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from oomph.prediction.compat import stand_ins

_kernel = partial(stand_ins.kernel, "mamba_ssm")


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Any = None,
) -> Tensor:
    """One step of x [batch, channels] or [batch, heads, channels]; `state` is updated in place."""
    out = torch.empty_like(x)
    _kernel((state, x, dt, A, B, C, D, z, dt_bias, out))
    return out
