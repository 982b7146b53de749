"""Workspaces of cuDNN's convolutions: one allocation per pass, freed when the pass is over.

cuDNN's heuristics choose the algorithm and it cannot be asked without a GPU, so these are estimates that
follow what was measured on an H200 (torch 2.11, cuDNN 9.19). Its tensor-core kernels want NHWC data: for
NCHW tensors the workspace holds a transposed copy of the input, of the output and of the weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from oomph.gpus import GPU
from oomph.prediction.cuda.temporaries import Bound, temporaries

aten = torch.ops.aten

# Partial sums of split reductions: most weight gradients, and forward passes with few tiles.
_PARTIAL_SUMS = 8 << 20


@dataclass(frozen=True)
class _Convolution:
    batch: int
    input: int  # bytes
    output: int
    weight: int
    kernel: tuple[int, ...]
    strided: bool
    padded: bool
    channels_last: bool
    depthwise: bool
    aligned: bool  # NCHW rows that a matrix product can read as they are
