"""Convolutions, but for their workspaces and the layout of their results: cuda/workspaces.py enters those."""

from __future__ import annotations

import torch

from oomph.prediction.ops.registry import op

op("convolution.default", same_dtype=("input", "weight", "bias"))
op(
    "convolution.default convolution_backward.default",
    uses_cublas=lambda args: not torch.backends.cudnn.enabled,
)
