"""Token batches for the tests of the language models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def tokens(vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(7))


def text_batch(vocabulary: int, batch: int, length: int) -> Callable[[torch.device], dict[str, Tensor]]:
    """A batch factory for a Workload."""

    def make(device: torch.device) -> dict[str, Tensor]:
        ids = torch.randint(0, vocabulary, (batch, length), device=device)
        return {"input_ids": ids, "labels": ids}

    return make
