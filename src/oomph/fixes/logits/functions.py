"""The functions that logits can go through on their way to the loss without being computed.

Each tells what the result means, given what the logits mean and their shape; None where it cannot, and the
logits are computed. Whatever it does to the leading dimensions it does to the hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.fixes.logits.record import Meaning
from oomph.ops.common import autocast_enabled

Shape = tuple[int, ...]
_T = Tensor


def cast(meaning: Meaning, shape: Shape, dtype: torch.dtype) -> Meaning | None:
    """The loss is computed in fp32 at least whatever they are; narrower or wider logits are other numbers."""
    if dtype == meaning.dtype:
        return meaning
    widened = dtype == torch.float32 and meaning.dtype in (torch.bfloat16, torch.float16)
    return replace(meaning, dtype=dtype) if widened and not meaning.normalized else None


def only_dtype(meaning: Meaning, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype after a call of `.to`; None where it asks for more."""
    device = meaning.hidden.device
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())) or kwargs.get("copy"):
        return None
    given = {name: value for name, value in kwargs.items() if name != "copy"}
    try:
        asked, dtype, _, memory_format = torch._C._nn._parse_to(*args, **given)
    except (TypeError, RuntimeError):
        return None
    elsewhere = asked is not None and (asked.type != device.type or asked.index not in (None, device.index))
    return None if elsewhere or memory_format is not None else dtype or meaning.dtype


def _to_float(meaning: Meaning, shape: Shape) -> Meaning | None:
    return cast(meaning, shape, torch.float32)


def _to_bfloat16(meaning: Meaning, shape: Shape) -> Meaning | None:
    return cast(meaning, shape, torch.bfloat16)


def _to_half(meaning: Meaning, shape: Shape) -> Meaning | None:
    return cast(meaning, shape, torch.float16)


def _contiguous(meaning: Meaning, shape: Shape) -> Meaning | None:
    return meaning


def _reshape(meaning: Meaning, shape: Shape, *sizes: Any, **named: Any) -> Meaning | None:
    wanted = named.get("shape", named.get("size", sizes))
    if len(wanted) == 1 and isinstance(wanted[0], Sequence):
        wanted = wanted[0]
    if meaning.classes_second or not wanted or not all(type(size) is int for size in wanted):
        return None
    known = math.prod(size for size in wanted if size != -1)
    if list(wanted).count(-1) > 1 or known <= 0:
        return None
    full = [math.prod(shape) // known if size == -1 else size for size in wanted]
    if math.prod(full) != math.prod(shape) or full[-1] != shape[-1]:
        return None
    return replace(meaning, hidden=meaning.hidden.reshape(*full[:-1], meaning.hidden.shape[-1]))


def _flatten(meaning: Meaning, shape: Shape, start_dim: int = 0, end_dim: int = -1) -> Meaning | None:
    start, end = start_dim % len(shape), end_dim % len(shape)
    if meaning.classes_second or start > end or (end == len(shape) - 1 and start != end):
        return None
    return replace(meaning, hidden=meaning.hidden.flatten(start, end))


def _getitem(meaning: Meaning, shape: Shape, index: Any) -> Meaning | None:
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = [_dimensions_taken(part) for part in parts]
    if meaning.classes_second or any(one is None for one in taken) or sum(p is ... for p in parts) > 1:
        return None
    used = sum(one for one in taken if one is not None)
    has_ellipsis = any(part is ... for part in parts)
    reaches_classes = used == len(shape) or (has_ellipsis and parts[-1] is not ... and taken[-1] != 0)
    whole = isinstance(parts[-1], slice) and parts[-1] == slice(None)
    if used > len(shape) or (reaches_classes and not whole) or (has_ellipsis and parts[-1] is None):
        return None
    if not has_ellipsis and parts[-1] is None and used == len(shape):
        return None
    return replace(meaning, hidden=meaning.hidden[index])


def _dimensions_taken(part: Any) -> int | None:
    """How many dimensions a part of an index picks from; None for what is not understood."""
    if part is None or part is ...:
        return 0
    if isinstance(part, slice) or type(part) is int:
        return 1
    if isinstance(part, Tensor) and part.dtype in (torch.int64, torch.bool):
        return part.dim() if part.dtype == torch.bool else 1
    return None


def _permute(meaning: Meaning, shape: Shape, *dims: Any, **named: Any) -> Meaning | None:
    wanted = named.get("dims", dims)
    if len(wanted) == 1 and isinstance(wanted[0], Sequence):
        wanted = wanted[0]
    n = len(shape)
    order = [dim % n for dim in wanted] if all(type(dim) is int and -n <= dim < n for dim in wanted) else []
    if sorted(order) != list(range(n)):
        return None
    classes = 1 if meaning.classes_second else n - 1
    place = order.index(classes)
    if place not in (1, n - 1):
        return None
    leading = [dim - (dim > classes) for dim in order if dim != classes]
    hidden = meaning.hidden.permute(*leading, n - 1)
    return replace(meaning, hidden=hidden, classes_second=place == 1 and n > 2)


def _transpose(meaning: Meaning, shape: Shape, *dims: int, **named: int) -> Meaning | None:
    a, b = dims if len(dims) == 2 else (named.get("dim0"), named.get("dim1"))
    n = len(shape)
    if type(a) is not int or type(b) is not int or not (-n <= a < n and -n <= b < n):
        return None
    order = list(range(n))
    order[a], order[b] = order[b], order[a]
    return _permute(meaning, shape, order)


def _swapped_last(meaning: Meaning, shape: Shape, *_: Any) -> Meaning | None:
    return _transpose(meaning, shape, -2, -1) if len(shape) > 1 else None


def _times(meaning: Meaning, shape: Shape, other: Any) -> Meaning | None:
    return meaning.times(float(other)) if type(other) in (int, float) else None


def _divided(meaning: Meaning, shape: Shape, other: Any, **named: Any) -> Meaning | None:
    if type(other) not in (int, float) or other == 0 or named.get("rounding_mode") is not None:
        return None
    return meaning.times(1.0 / other)


def _tanh(meaning: Meaning, shape: Shape) -> Meaning | None:
    return None if meaning.capped or meaning.normalized else replace(meaning, capped=True)


def _log_softmax(
    meaning: Meaning,
    shape: Shape,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Meaning | None:
    n = len(shape)
    classes = 1 if meaning.classes_second else n - 1
    if meaning.normalized or type(dim) is not int or not -n <= dim < n or dim % n != classes:
        return None
    if dtype is None and meaning.dtype.itemsize == 2 and autocast_enabled(meaning.hidden):
        dtype = torch.float32
    wider = meaning if dtype is None else cast(meaning, shape, dtype)
    return None if wider is None else replace(wider, normalized=True)


def _log_softmax_in_c(
    meaning: Meaning, shape: Shape, dim: int | None = None, dtype: torch.dtype | None = None
) -> Meaning | None:
    return _log_softmax(meaning, shape, dim, 3, dtype)


FUNCTIONS: dict[Any, Callable[..., Meaning | None]] = {
    _T.float: _to_float,
    _T.bfloat16: _to_bfloat16,
    _T.half: _to_half,
    _T.contiguous: _contiguous,
    _T.view: _reshape,
    _T.reshape: _reshape,
    torch.reshape: _reshape,
    _T.flatten: _flatten,
    torch.flatten: _flatten,
    _T.__getitem__: _getitem,
    _T.permute: _permute,
    torch.permute: _permute,
    _T.transpose: _transpose,
    torch.transpose: _transpose,
    _T.swapaxes: _transpose,
    _T.mT.__get__: _swapped_last,  # type: ignore[attr-defined]
    _T.mul: _times,
    torch.mul: _times,
    _T.div: _divided,
    torch.div: _divided,
    _T.true_divide: _divided,
    torch.true_divide: _divided,
    _T.tanh: _tanh,
    torch.tanh: _tanh,
    F.log_softmax: _log_softmax,
    _T.log_softmax: _log_softmax_in_c,
    torch.log_softmax: _log_softmax_in_c,
}
