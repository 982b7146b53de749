"""torch's caching allocator with the settings that a Workload asks for, while it is measured."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from oomph.errors import UserError
from oomph.workload import set_allocator

# As good as torch's own default, which cannot be given: no block is as large as this.
_NO_MAX_SPLIT = 2**43 - 1  # MiB
_DEFAULTS = f"expandable_segments:False,max_split_size_mb:{_NO_MAX_SPLIT}"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first that is set counts


@contextlib.contextmanager
def allocator_set_to(settings: str | None, device: torch.device) -> Iterator[None]:
    """The allocator with these settings, then again with those that the process was started with.

    Memory that was reserved before keeps the form it has, so there must be none: a UserError otherwise.
    """
    at_start = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
    if not settings or settings == at_start:
        yield
        return
    if torch.cuda.memory_reserved(device):
        raise UserError(
            f"allocator={settings!r} cannot be set any more: this process holds CUDA memory already; "
            f"start it with {_VARIABLES[1]}={settings}, or measure in a fresh process"
        )
    set_allocator(settings)
    try:
        yield
    finally:
        set_allocator(_DEFAULTS)
        if at_start:
            set_allocator(at_start)
