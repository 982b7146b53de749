"""What a workload computes in."""

from __future__ import annotations

import torch

from oomph import gpus
from oomph.fixes.optimizers.conversion import dtype_of
from oomph.fixes.registry import FixContext

_FIRST_WITH_BFLOAT16 = (8, 0)


def has_float32(context: FixContext) -> bool:
    """Are most of the parameters float32, or wider?"""
    sizes = {True: 0, False: 0}
    for parameter in context.model.parameters():
        sizes[dtype_of(context.workload, parameter) in (torch.float32, torch.float64)] += parameter.numel()
    return sizes[True] > sizes[False]


def lacks_bfloat16(context: FixContext) -> bool:
    """Is the GPU one that computes bfloat16 by way of float32 only?"""
    if context.prediction.gpu is None:
        return False
    return gpus.find(context.prediction.gpu).capability < _FIRST_WITH_BFLOAT16
