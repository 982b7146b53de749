"""A model on its device, without a moment at which it needs more room than it will have there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from oomph.workload import Workload


def built(workload: Workload, device: torch.device) -> nn.Module:
    """Built on the GPU, where billions of first weights take seconds; on the host where the GPU is too small
    for what building may need besides the model itself."""
    dtype = workload.dtype
    assert dtype is None or isinstance(dtype, torch.dtype)
    where = device if device.type == "cuda" and _has_room(workload, device) else torch.device("cpu")
    with where, _default_dtype(dtype):
        model = workload.make_model(lambda made: made)
    return model.to(device=device, dtype=dtype).train()


def _has_room(workload: Workload, device: torch.device) -> bool:
    """Twice the model: an 8-bit weight is made from a wider one."""
    with torch.device("meta"):
        found = workload.make_model(lambda made: made)
    dtype = workload.dtype
    size = sum(
        each.numel() * (dtype.itemsize if isinstance(dtype, torch.dtype) else each.element_size())
        for each in (*found.parameters(), *found.buffers())
    )
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return 2 * size <= share * torch.cuda.get_device_properties(device).total_memory


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Weights are drawn in the dtype that they will have: never a copy in float32 of all of them."""
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
