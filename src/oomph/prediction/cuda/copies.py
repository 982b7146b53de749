"""Kernels that read their input contiguously: a strided one is copied first."""

from __future__ import annotations

import torch

from oomph.gpus import GPU
from oomph.prediction.cuda.temporaries import Bound, temporaries

aten = torch.ops.aten


def copy_if_strided(tensor: torch.Tensor | None) -> int:
    """The bytes of the copy that `tensor.contiguous()` makes; 0 where it makes none."""
    if tensor is None or tensor.is_contiguous():
        return 0
    return tensor.numel() * tensor.element_size()


@temporaries(aten.roll.default)
def _roll(call: Bound, gpu: GPU) -> list[int]:
    """Several dimensions are rolled one after the other."""
    tensor = call["self"]
    between = tensor.numel() * tensor.element_size() if len(call["dims"]) > 1 else 0
    return [copy_if_strided(tensor), between]


@temporaries(aten._softmax.default, aten._log_softmax.default)
def _one_input(call: Bound, gpu: GPU) -> list[int]:
    return [copy_if_strided(call["self"])]
