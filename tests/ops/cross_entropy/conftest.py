"""Every test here runs with poisoned memory: what torch.empty returns is NaN until it is written."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    # On a GPU, cuBLAS would ask for an environment variable.
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    # It fills new memory, as long as this is on (its default)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
