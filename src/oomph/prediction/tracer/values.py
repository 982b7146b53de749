"""Values of tensors in a trace: known where the host can compute them, else estimated by a stated rule.

Programs branch on small whole-number and boolean tensors: is there padding, are sequences packed, how many
tokens are masked. Where every input of an op is known (made by arange, ones, zeros, or moved from real data),
its result is computed on the host beside the fake. What a trace cannot know is estimated, and noted with its
line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from oomph.prediction.cuda.rules import Fake, aten_ops, op_name
from oomph.torch_internals import FakeTensor, OpOverload

aten = torch.ops.aten
_MOST_ELEMENTS = 1 << 20  # beyond it a value costs more than it is worth
_MOST_FLOATS = 1 << 17  # elements up to which floats are kept too: masks made of ones, positions

_FACTORIES = aten_ops("""
    arange.default arange.start arange.start_step zeros.default ones.default full.default eye.default
    scalar_tensor.default tril_indices.default triu_indices.default
""")
# The result is known whatever the values of the tensor it is made like.
_FACTORIES_LIKE = aten_ops("""
    zeros_like.default ones_like.default full_like.default new_zeros.default new_ones.default
    new_full.default zero_.default fill_.Scalar
""")


class KnownValues:
    """Fake tensor -> its values, where they are known."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()
        self._overwritten = WeakIdKeyDictionary()  # storages that were written with something unknown

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" else None
        if tensor.untyped_storage() in self._overwritten:
            return None
        return self._known.get(tensor)

    def set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """State the values of a tensor, whatever was written into it before."""
        self._overwritten.pop(tensor.untyped_storage(), None)
        self._known[tensor] = value

    def propagate(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
        out: Any,
    ) -> None:
        """After an op: compute its result if its inputs are known, or invalidate what it overwrote."""
        results = [
            item
            for item in (out if isinstance(out, (list, tuple)) else (out,))
            if isinstance(item, FakeTensor)
        ]
        if not results or not all(map(_is_small, results)) or torch.Tag.nondeterministic_seeded in func.tags:
            return self.invalidate(func, args, kwargs)
        if given:
            known = func in _FACTORIES_LIKE or all(self.get(tensor) is not None for tensor in given)
        else:
            known = func in _FACTORIES
        if not known:
            return self.invalidate(func, args, kwargs)
        try:
            real = func(*self._real(args), **self._real_options(kwargs))
        except Exception:  # without a value, an estimate decides
            return self.invalidate(func, args, kwargs)
        reals = real if isinstance(real, (list, tuple)) else (real,)
        for fake, value in zip(
            results, (item for item in reals if isinstance(item, torch.Tensor)), strict=False
        ):
            if fake.shape == value.shape:
                self._known[fake] = value
        return None

    def invalidate(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Whatever the op wrote into, views of it included, is no longer known."""
        if not func._schema.is_mutable:
            return
        for position, parameter in enumerate(func._schema.arguments):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(parameter.name)
                for tensor in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(tensor, FakeTensor):
                        self._overwritten[tensor.untyped_storage()] = True

    def _real(self, args: Sequence[Any]) -> list[Any]:
        def real(arg: Any) -> Any:
            if isinstance(arg, torch.Tensor):
                value = self.get(arg)
                return value if value is not None else torch.empty(arg.shape, dtype=arg.dtype)
            return [real(item) for item in arg] if isinstance(arg, (list, tuple)) else arg

        return [real(arg) for arg in args]

    def _real_options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self._real([value])[0]
            for name, value in kwargs.items()
            if name not in ("device", "pin_memory")
        }


def _is_small(tensor: torch.Tensor) -> bool:
    whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return tensor.numel() <= (_MOST_ELEMENTS if whole else _MOST_FLOATS)


# Ops whose result is one-hot along the same classes as their first argument.
_KEEPS_CLASSES = aten_ops("""
    view.default permute.default transpose.int t.default select.int slice.Tensor index.Tensor
    unsqueeze.default squeeze.dim clone.default detach.default alias.default _to_copy.default ne.Scalar
    gt.Scalar
""")


class ValueEstimates:
    """Stands in for values that are not known. `note` and `note_once` write a note with the current line."""

    def __init__(
        self, values: KnownValues, note: Callable[[str], None], note_once: Callable[[str], None]
    ) -> None:
        self._values = values
        self._note = note
        self._note_once = note_once
        self._classes = WeakIdKeyDictionary()  # one-hot mask -> [how many classes, how many were selected]

    def scalar(self, tensor: torch.Tensor) -> bool | int | float:
        """`.item()`, `if tensor:`. Rule: conditions are false (nothing is NaN), whole numbers are 1 and
        others 1.0."""
        value = self._values.get(tensor)
        if value is not None:
            return value.item()
        if tensor.dtype == torch.bool:
            self._note("a condition on values of the GPU is taken as false")
            return False
        if tensor.dtype.is_floating_point:
            self._note_once("numbers read from the GPU (a loss to print, a norm) are taken as 1.0")
            return 1.0
        self._note("a whole number read from the GPU is taken as 1")
        return 1

    def equality(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """`torch.equal`. Rule: unknown tensors differ."""
        known = self._values.get(left), self._values.get(right)
        if known[0] is not None and known[1] is not None:
            return bool(torch.equal(known[0], known[1]))
        self._note("tensors of the GPU are taken as not equal")
        return False

    def mark_one_hot(self, mask: torch.Tensor, classes: int) -> None:
        self._classes[mask] = [classes, 0]

    def propagate(self, func: OpOverload, args: Sequence[Any], out: Any) -> None:
        """After an op: what is known about the values of its result."""
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            # No gradient overflowed: the optimizer steps.
            self._values.set(args[1], torch.zeros(args[1].shape))
        elif func in _KEEPS_CLASSES and args[0] in self._classes:
            self._classes[out] = self._classes[args[0]]  # one count for all views of the mask

    def data_dependent_result(
        self, fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The result of an op whose shape depends on values. Rule: one-hot masks select about their share
        (experts are balanced); of everything else all is selected, the largest that the result can be."""
        rule = DATA_DEPENDENT_RESULTS.get(func.overloadpacket)
        if rule is None:
            raise NotImplementedError(
                f"{op_name(func)}: its result's size depends on values and no rule is known for it"
            )
        return rule(self, fake, func, args, kwargs)

    def _note_size(self, func: OpOverload, source: torch.Tensor) -> None:
        even = source in self._classes
        rule = "about an even share is assumed" if even else "the largest possible is assumed"
        self._note(f"the size of the result of {op_name(func)} depends on values: {rule}")

    def _next_share(self, mask: torch.Tensor) -> float:
        """Experts are never quite balanced: in turn they get 3/4 to 5/4 of an even share, together all."""
        classes = self._classes.get(mask)
        if classes is None:
            return 1.0
        turn = classes[1] % classes[0]
        classes[1] += 1
        return (0.75 + 0.5 * (turn + 0.5) / classes[0]) / classes[0]

    def _nonzero(self, fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        known = self._values.get(source)
        if known is not None:
            found = known.nonzero()
            result = _empty(fake, found.shape, torch.int64)
            self._values.set(result, found)
            return result
        self._note_size(func, source)
        rows = math.ceil(source.numel() * self._next_share(source))
        return _empty(fake, (rows, source.dim()), torch.int64)

    def _index(self, fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Boolean masks become the index lists they stand for; an unknown mask selects every element."""
        source, indices = args[0], args[1]
        if not all(index is None or self._values.get(index) is not None for index in indices):
            self._note_size(func, source)
        plain: list[Any] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                value = self._values.get(index)
                selected = index.numel() if value is None else int(value.count_nonzero())
                plain += [_empty(fake, (selected,), torch.int64) for _ in range(index.dim())]
            else:
                plain.append(index)
        return fake(func, (source, plain, *args[2:]), kwargs)

    def _masked_select(
        self, fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        self._note_size(func, args[0])
        return _empty(fake, (max(args[0].numel(), args[1].numel()),), args[0].dtype)

    def _unique(self, fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        self._note_size(func, source)
        rows = (math.prod(source.shape),)
        values, inverse = _empty(fake, rows, source.dtype), _empty(fake, source.shape, torch.int64)
        return values, inverse, _empty(fake, rows, torch.int64)

    def _ctc_loss(self, fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        source, targets, _, lengths = args[:4]
        self._note_size(func, source)
        known = self._values.get(lengths)
        if known is not None:
            longest = int(known.max())
        else:
            longest = targets.shape[1] if targets.dim() == 2 else math.ceil(targets.numel() / lengths.numel())
        frames, batch = source.shape[0], source.shape[1]
        losses = _empty(fake, (batch,), source.dtype)
        return losses, _empty(fake, (batch, frames, 2 * longest + 1), source.dtype)

    def _repeat_interleave(
        self, fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        self._note_size(func, args[0])
        return _empty(fake, (kwargs.get("output_size") or args[0].numel(),), torch.int64)


DataDependentRule = Callable[[ValueEstimates, Fake, OpOverload, Sequence[Any], dict[str, Any]], Any]
DATA_DEPENDENT_RESULTS: dict[Any, DataDependentRule] = {
    aten.nonzero: ValueEstimates._nonzero,
    aten.index: ValueEstimates._index,
    aten.masked_select: ValueEstimates._masked_select,
    **dict.fromkeys((aten._unique2, aten.unique_dim, aten.unique_consecutive), ValueEstimates._unique),
    aten._ctc_loss: ValueEstimates._ctc_loss,
    aten.repeat_interleave: ValueEstimates._repeat_interleave,
}


def _empty(fake: Fake, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return fake(aten.empty.memory_format, (list(shape),), {"dtype": dtype, "device": torch.device("cpu")})
