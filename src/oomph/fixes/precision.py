"""What a workload computes in."""

from __future__ import annotations

import torch

from oomph import gpus
from oomph.fixes.fix import Patient
from oomph.fixes.optimizers.conversion import dtype_of

_FIRST_WITH_BFLOAT16 = (8, 0)


def has_float32(patient: Patient) -> bool:
    """Are most of the parameters float32, or wider?"""
    sizes = {True: 0, False: 0}
    for parameter in patient.model.parameters():
        sizes[dtype_of(patient.workload, parameter) in (torch.float32, torch.float64)] += parameter.numel()
    return sizes[True] > sizes[False]


def lacks_bfloat16(patient: Patient) -> bool:
    """Is the GPU one that computes bfloat16 by way of float32 only?"""
    if patient.prediction.gpu is None:
        return False
    return gpus.find(patient.prediction.gpu).capability < _FIRST_WITH_BFLOAT16
