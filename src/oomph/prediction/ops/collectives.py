"""Collectives of torch.distributed: what a rank sends to the others of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oomph.torch_internals import OpOverload, group_size


def sent(func: OpOverload, args: Sequence[Any], given: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Bytes, and the ranks of the group; None where nothing is sent. In a ring a rank sends all of the
    largest tensor but its own part, twice to reduce it."""
    name, ranks = func.name().split("::")[1], group_size(args)
    whole = max((tensor.nbytes for tensor in given), default=0)
    if name == "allgather_":  # into a list
        whole *= ranks
    if name.startswith(("recv", "wait_tensor", "_wrap_tensor", "barrier")):
        return None
    times = 2 if name.startswith(("allreduce", "all_reduce")) else 1
    share = 1.0 if name.startswith("send") else (ranks - 1) / ranks
    return int(times * share * whole), ranks
