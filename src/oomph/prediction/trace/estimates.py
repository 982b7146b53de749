"""What a trace without values cannot know, decided by a stated rule and noted with its line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.weak import WeakIdKeyDictionary

from oomph.prediction.trace.sites import find_site
from oomph.prediction.trace.tracer import Tracer

aten = torch.ops.aten
Fake = Callable[[OpOverload, Sequence[type], Sequence[Any], dict[str, Any]], Any]

_ALL = WeakIdKeyDictionary()  # results of `all`


def remember_all(out: torch.Tensor) -> None:
    _ALL[out] = True


def scalar(tracer: Tracer, tensor: torch.Tensor) -> bool | int | float:
    """`.item()`, `if tensor:`. Rule: "all?" is answered yes and other conditions no (masks are full, nothing is
    NaN); whole numbers are 1 and others 1.0."""
    site, _ = find_site(tracer.boundary)
    if tensor.dtype == torch.bool:
        answer = tensor in _ALL
        tracer.ledger.note(f"a condition on values of the GPU is taken as {str(answer).lower()}", site)
        return answer
    if tensor.dtype.is_floating_point:
        return 1.0  # almost always a loss or a norm to print: no note
    tracer.ledger.note("a whole number read from the GPU is taken as 1", site)
    return 1


def unknown_shape(
    tracer: Tracer, fake: Fake, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Shapes that depend on values. Rule: everything is selected, the largest that the result can be."""
    site, _ = find_site(tracer.boundary)
    tracer.ledger.note(f"the size of the result of {func.name().replace('::', '.')} depends on values: "
                       "the largest possible is assumed", site)
    source = args[0]

    def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return fake(aten.empty.memory_format, (), (list(shape),), {"dtype": dtype, "device": torch.device("cpu")})

    if func is aten.nonzero.default:
        return empty((source.numel(), source.dim()), torch.int64)
    if func is aten.masked_select.default:
        return empty((max(source.numel(), args[1].numel()),), source.dtype)
    if func is aten.index.Tensor:
        return fake(func, types, (source, _without_masks(args[1], empty), *args[2:]), kwargs)
    if func.overloadpacket in (aten._unique2, aten.unique_dim, aten.unique_consecutive):
        along = math.prod(source.shape)
        return empty((along,), source.dtype), empty(source.shape, torch.int64), empty((along,), torch.int64)
    if func is aten.repeat_interleave.Tensor:
        return empty((kwargs.get("output_size") or source.numel(),), torch.int64)
    raise NotImplementedError(f"{func.name()}: its result's size depends on values and no rule is known for it")


def _without_masks(indices: Sequence[torch.Tensor | None], empty: Callable[..., torch.Tensor]) -> list[Any]:
    """Boolean masks as the index lists they stand for, with every element selected."""
    plain: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            plain += [empty((index.numel(),), torch.int64) for _ in range(index.dim())]
        else:
            plain.append(index)
    return plain
