"""What the tests of several ops measure."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def relative_error(found: Tensor, right: Tensor) -> float:
    found, right = found.detach().double().cpu(), right.detach().double().cpu()
    return float((found - right).norm() / right.norm().clamp(min=1e-30))


def saved_beside(given: Iterable[Tensor], call: Callable[[], Any]) -> list[Tensor]:
    """What autograd saves for backward in a call, other than the tensors given."""
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = call()
    assert any(each.requires_grad for each in (result if isinstance(result, tuple) else (result,)))
    return [
        tensor for at, tensor in saved.items() if at not in {x.untyped_storage().data_ptr() for x in given}
    ]
