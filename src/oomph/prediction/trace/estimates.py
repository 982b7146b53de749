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
Fake = Callable[[OpOverload, Sequence[Any], dict[str, Any]], Any]


def scalar(tracer: Tracer, tensor: torch.Tensor) -> bool | int | float:
    """`.item()`, `if tensor:`. Rule, where the value is not known: conditions are false (nothing is NaN),
    whole numbers are 1 and others 1.0."""
    value = tracer.values.of(tensor)
    if value is not None:
        return value.item()
    site, _ = find_site(tracer.boundary)
    if tensor.dtype == torch.bool:
        tracer.ledger.note("a condition on values of the GPU is taken as false", site)
        return False
    if tensor.dtype.is_floating_point:
        tracer.ledger.note_first("numbers read from the GPU (a loss to print, a norm) are taken as 1.0", site)
        return 1.0
    tracer.ledger.note("a whole number read from the GPU is taken as 1", site)
    return 1


def equality(tracer: Tracer, left: torch.Tensor, right: torch.Tensor) -> bool:
    """`torch.equal`. Rule, where the values are not known: they differ."""
    known = tracer.values.of(left), tracer.values.of(right)
    if known[0] is not None and known[1] is not None:
        return bool(torch.equal(known[0], known[1]))
    tracer.ledger.note("tensors of the GPU are taken as not equal", find_site(tracer.boundary)[0])
    return False


def unknown_shape(
    tracer: Tracer,
    fake: Fake,
    func: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Shapes that depend on values. Rule: one-hot masks select about their share (experts are balanced); of
    everything else all is selected, the largest that the result can be."""
    source = args[0]
    known = tracer.values.of(source)

    def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return fake(aten.empty.memory_format, (list(shape),), {"dtype": dtype, "device": torch.device("cpu")})

    if func is aten.nonzero.default and known is not None:
        found = known.nonzero()
        result = empty(found.shape, torch.int64)
        tracer.values.put(result, found)
        return result
    if func is aten.index.Tensor and all(i is None or tracer.values.of(i) is not None for i in args[1]):
        return fake(func, (source, _without_masks(args[1], empty, tracer), *args[2:]), kwargs)
    site, _ = find_site(tracer.boundary)
    rule = "about an even share is assumed" if source in _CLASSES else "the largest possible is assumed"
    tracer.ledger.note(f"the size of the result of {_name(func)} depends on values: {rule}", site)
    if func is aten.nonzero.default:
        return empty((math.ceil(source.numel() * _next_share(source)), source.dim()), torch.int64)
    if func is aten.masked_select.default:
        return empty((max(source.numel(), args[1].numel()),), source.dtype)
    if func is aten.index.Tensor:
        return fake(func, (source, _without_masks(args[1], empty, tracer), *args[2:]), kwargs)
    if func.overloadpacket in (aten._unique2, aten.unique_dim, aten.unique_consecutive):
        along = math.prod(source.shape)
        return empty((along,), source.dtype), empty(source.shape, torch.int64), empty((along,), torch.int64)
    if func is aten._ctc_loss.Tensor:
        longest = _longest_target(tracer, *args[1:4])
        frames, batch = source.shape[0], source.shape[1]
        return empty((batch,), source.dtype), empty((batch, frames, 2 * longest + 1), source.dtype)
    if func is aten.repeat_interleave.Tensor:
        return empty((kwargs.get("output_size") or source.numel(),), torch.int64)
    raise NotImplementedError(
        f"{_name(func)}: its result's size depends on values and no rule is known for it"
    )


_CLASSES = WeakIdKeyDictionary()  # one-hot masks: how many classes, and how many were asked for so far
_KEEPS_CLASSES = {
    aten.view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.index.Tensor,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten._to_copy.default,
    aten.ne.Scalar,
    aten.gt.Scalar,
}


def note_one_hot(mask: torch.Tensor, classes: int) -> None:
    _CLASSES[mask] = [classes, 0]


def _next_share(mask: torch.Tensor) -> float:
    """Experts are never quite balanced: in turn they get 3/4 to 5/4 of an even share, together all."""
    classes = _CLASSES.get(mask)
    if classes is None:
        return 1.0
    turn = classes[1] % classes[0]
    classes[1] += 1
    return (0.75 + 0.5 * (turn + 0.5) / classes[0]) / classes[0]


def carry_over(tracer: Tracer, func: OpOverload, args: Sequence[Any], out: Any) -> None:
    """What is known of an op's values that `scalar` and `unknown_shape` can use."""
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
        tracer.values.put(args[1], torch.zeros(args[1].shape))  # no gradient overflowed: the optimizer steps
    elif func in _KEEPS_CLASSES and args[0] in _CLASSES:
        _CLASSES[out] = _CLASSES[args[0]]  # one count for all views of the mask


def _longest_target(tracer: Tracer, targets: torch.Tensor, inputs: Any, lengths: torch.Tensor) -> int:
    known = tracer.values.of(lengths)
    if known is not None:
        return int(known.max())
    return targets.shape[1] if targets.dim() == 2 else math.ceil(targets.numel() / lengths.numel())


def _name(func: OpOverload) -> str:
    return func.name().replace("::", ".")


def _without_masks(
    indices: Sequence[torch.Tensor | None], empty: Callable[..., torch.Tensor], tracer: Tracer
) -> list[Any]:
    """Boolean masks as the index lists they stand for; of an unknown mask, every element is selected."""
    plain: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            value = tracer.values.of(index)
            selected = index.numel() if value is None else int(value.count_nonzero())
            plain += [empty((selected,), torch.int64) for _ in range(index.dim())]
        else:
            plain.append(index)
    return plain
