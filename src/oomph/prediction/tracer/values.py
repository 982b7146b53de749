"""Values of tensors in a trace: known where the host can compute them, else estimated by a stated rule.

Programs branch on small whole-number and boolean tensors: is there padding, are sequences packed, how many
tokens are masked. Where every input of an op is known (made by arange, ones, zeros, or moved from real data),
its result is computed on the host beside the fake. What a trace cannot know is estimated, and noted with its
line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from oomph.prediction.cuda.rules import BoundArguments, Fake, aten_ops, bind, op_name
from oomph.prediction.tracer.work import tensors_in
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

    def is_overwritten(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.untyped_storage() in self._overwritten

    def compute(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...] | None:
        """The op's results on the host, where all its tensors are known."""
        given = [*args, *kwargs.values()]
        tensors = [
            item for arg in given for item in (arg if isinstance(arg, (list, tuple)) else (arg,))
            if isinstance(item, torch.Tensor)
        ]  # fmt: skip
        if any(self.get(tensor) is None for tensor in tensors):
            return None
        real = func(*self._real(args), **self._real_options(kwargs))
        return tuple(real) if isinstance(real, (list, tuple)) else (real,)

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


# Ops that move elements and keep their values: bounds stay, and one-hot stays one-hot.
_KEEPS_VALUES = aten_ops("""
    view.default permute.default transpose.int t.default select.int slice.Tensor index.Tensor
    unsqueeze.default squeeze.dim clone.default detach.default alias.default _to_copy.default
    expand.default
""")
_KEEPS_CLASSES = _KEEPS_VALUES | aten_ops("ne.Scalar gt.Scalar")
# Sums, and ops that select or keep elements, keep an upper bound of the sum of all elements.
_KEEPS_TOTAL = (_KEEPS_VALUES - aten_ops("index.Tensor expand.default")) | aten_ops(
    "sum.default sum.dim_IntList"
)
# The position of the argument that bounds random whole numbers.
_HIGH = {
    aten.randint.default: 0,
    aten.randint.low: 1,
    aten.randint_like.default: 1,
    aten.randint_like.low_dtype: 2,
    aten.randperm.default: 0,
}
# Ops that return positions along a dimension: which of their results.
_POSITIONS = {
    aten.argmax.default: None,
    aten.argmin.default: None,
    aten.multinomial.default: None,
    **dict.fromkeys(aten_ops("topk.default sort.default sort.stable max.dim min.dim"), 1),
}


class _OneHot:
    """Shared by the views of one one-hot tensor."""

    def __init__(self, classes: int, elements: int) -> None:
        self.classes = classes
        self.elements = elements
        self.selected = 0  # experts whose tokens were looked for


class ValueEstimates:
    """Stands in for values that are not known. `note` and `note_once` write a note with the current line."""

    def __init__(
        self, values: KnownValues, note: Callable[[str], None], note_once: Callable[[str], None]
    ) -> None:
        self._values = values
        self._note = note
        self._note_once = note_once
        self._one_hot = WeakIdKeyDictionary()  # one-hot mask -> its _OneHot
        self._bounds = WeakIdKeyDictionary()  # whole numbers -> one more than the largest they can be
        self._totals = WeakIdKeyDictionary()  # counts -> the most that their sum can be
        self._stated = WeakIdKeyDictionary()  # mask -> how many elements the program says it selects

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
        """`torch.equal`, `torch.allclose`. Rule: unknown tensors differ."""
        known = self._values.get(left), self._values.get(right)
        if known[0] is not None and known[1] is not None:
            return bool(torch.equal(known[0], known[1]))
        self._note("tensors of the GPU are taken as not equal")
        return False

    def mark_one_hot(self, mask: torch.Tensor, classes: int) -> None:
        self._one_hot[mask] = _OneHot(classes, mask.numel())

    def state_selected(self, mask: torch.Tensor, rows: int) -> None:
        """The program assigns so many values to the elements that the mask selects."""
        self._stated[mask] = rows

    def share_evenly(self, mask: torch.Tensor) -> None:
        """The program indexes by the mask. If it is one-hot, each view of one expert selects as many."""
        shared = self._one_hot.get(mask)
        if shared is not None and mask not in self._stated and self._values.get(mask) is None:
            self._note_even_share()
            self._stated[mask] = math.ceil(mask.numel() / shared.classes)

    def propagate(self, func: OpOverload, args: Sequence[Any], out: Any) -> None:
        """After an op: what is known about the values of its result."""
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            # No gradient overflowed: the optimizer steps.
            self._values.set(args[1], torch.zeros(args[1].shape))
        elif func in _HIGH:
            self._bounds[out] = int(args[_HIGH[func]])
        elif func in _POSITIONS:
            self._bound_positions(func, args, out)
        elif func is aten.bincount.default:
            self._totals[out] = args[0].numel()
        elif func is aten._unique2.default:
            self._totals[out[2]] = args[0].numel()
        elif func in _KEEPS_CLASSES or func in _KEEPS_TOTAL:
            total = self._total(args[0]) if func in _KEEPS_TOTAL else None
            if total is not None:
                self._totals[out] = total
            if func in _KEEPS_CLASSES and args[0] in self._one_hot:
                self._one_hot[out] = self._one_hot[args[0]]  # one count for all views of the mask
            if func in _KEEPS_VALUES and args[0] in self._bounds:
                self._bounds[out] = self._bounds[args[0]]

    def _bound_positions(self, func: OpOverload, args: Sequence[Any], out: Any) -> None:
        source, result = args[0], _POSITIONS[func]
        dim: int | None = -1
        if func in (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim):
            dim = args[1] if len(args) > 1 else None
        elif func is aten.topk.default and len(args) > 2:
            dim = args[2]
        elif func is aten.sort.default and len(args) > 1:
            dim = args[1]
        whole = dim is None or source.dim() == 0 or func is aten.sort.stable
        self._bounds[out if result is None else out[result]] = source.numel() if whole else source.size(dim)

    def count_classes(self, ids: torch.Tensor, op: str) -> int:
        """One more than the largest id. Rule: as many as the op that made the ids can give, else one class
        per id."""
        known = self._values.get(ids)
        if known is not None:
            return int(known.max()) + 1 if known.numel() else 0
        bound = self._bound(ids)
        if bound is None:
            self._note(f"{op}: how many classes there are depends on values; one per element is assumed")
            return int(ids.numel())
        self._note(f"{op}: how many classes there are depends on values; {bound}, the most, are assumed")
        return bound

    def _bound(self, numbers: torch.Tensor) -> int | None:
        if numbers.dtype in (torch.bool, torch.uint8):
            return 2 if numbers.dtype == torch.bool else 256
        return None if self._values.is_overwritten(numbers) else self._bounds.get(numbers)

    def _total(self, counts: torch.Tensor) -> int | None:
        """The most that the sum of the counts can be: each element is counted once."""
        one_hot = self._one_hot.get(counts)
        if one_hot is not None and counts.numel() == one_hot.elements:
            return int(one_hot.elements // one_hot.classes)
        if counts.dtype == torch.bool:
            return int(counts.numel())
        return None if self._values.is_overwritten(counts) else self._totals.get(counts)

    def data_dependent_result(
        self, fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The result of an op whose shape depends on values. Rule: one-hot masks select about their share
        (experts are balanced); of everything else all is selected, the largest that the result can be."""
        if func._schema.is_mutable and "out" in kwargs:
            options = {name: value for name, value in kwargs.items() if name != "out"}
            result = self.data_dependent_result(fake, func.overloadpacket.default, args, options)
            return fake(aten.resize_.default, (kwargs["out"], list(result.shape)), {})
        rule = DATA_DEPENDENT_RESULTS.get(func.overloadpacket)
        if rule is None:
            return self._like_first_argument(fake, func, args, kwargs)
        return rule(self, fake, bind(func, args, kwargs), partial(self._values.compute, func, args, kwargs))

    def _like_first_argument(
        self, fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        self._note(
            f"the size of the result of {op_name(func)} depends on values and oomph has no rule for it: it "
            "is assumed to be as large as the first argument"
        )
        first = next(tensors_in(args, kwargs))
        results = [fake(aten.empty_like.default, (first,), {}) for _ in func._schema.returns]
        return results[0] if len(results) == 1 else tuple(results)

    def _note_largest(self, op: str) -> None:
        self._note(f"the size of the result of {op} depends on values: the largest possible is assumed")

    def _rows_selected(self, mask: torch.Tensor) -> int:
        """How many elements nonzero finds."""
        known = self._values.get(mask)
        if known is not None:
            return int(known.count_nonzero())
        stated = self._stated.get(mask)
        if stated is not None and not self._values.is_overwritten(mask):
            return int(stated)
        shared = self._one_hot.get(mask)
        if shared is None:
            self._note_largest("aten.nonzero (also run for x[mask])")
            return int(mask.numel())
        self._note_even_share()
        if mask.numel() >= shared.elements:  # all experts together
            return math.ceil(mask.numel() / shared.classes)
        # Experts are never quite balanced: in turn they get 3/4 to 5/4 of an even share, together all.
        turn = shared.selected % shared.classes
        shared.selected += 1
        share = (0.75 + 0.5 * (turn + 0.5) / shared.classes) / shared.classes
        self._stated[mask] = math.ceil(mask.numel() * share)
        return int(self._stated[mask])

    def _note_even_share(self) -> None:
        self._note(
            "the size of the result of aten.nonzero (also run for x[mask]) depends on values: about an even "
            "share is assumed, as for experts that are balanced"
        )

    def _nonzero(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        source = call["self"]
        rows = self._rows_selected(source)
        # CUDA writes one dimension after the other.
        columns = _empty(fake, (source.dim(), rows), torch.int64)
        return fake(aten.t.default, (columns,), {})

    def _index(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        """On the host. On the GPU, dispatch.py runs nonzero first."""
        plain: list[Any] = []
        for index in call["indices"]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                rows = self._rows_selected(index)
                plain += [_empty(fake, (rows,), torch.int64) for _ in range(index.dim())]
            else:
                plain.append(index)
        return fake(aten.index.Tensor, (call["self"], plain), {})

    def _masked_select(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        """On the host, as above."""
        source, mask = call["self"], call["mask"]
        elements = math.prod(torch.broadcast_shapes(source.shape, mask.shape))
        rows = self._rows_selected(mask) * elements // max(mask.numel(), 1)
        return _empty(fake, (rows,), source.dtype)

    def _unique(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        """Unique values, and on request the inverse and the counts. All are allocated as long as the input,
        however few values there are."""
        source, dim = call["self"], call.get("dim")
        if dim is not None:
            return self._unique_rows(fake, call, compute)
        n, known = source.numel(), compute()
        if known is not None:
            found = len(known[0])
        else:
            self._note_largest("aten.unique")
            found = min(n, 2) if source.dtype == torch.bool and "sorted" in call else n
        inverse, counts = call["return_inverse"], call.get("return_counts", False)
        results = (
            _first_of(fake, n, found, source.dtype),
            _empty(fake, source.shape if inverse else (0,), torch.int64),
            _first_of(fake, n, found, torch.int64) if counts else _empty(fake, (0,), torch.int64),
        )
        return results if "return_counts" in call else results[:2]

    def _unique_rows(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        source, dim = call["self"], call["dim"]
        rows = source.size(dim) if source.dim() else 1
        found, known = rows, compute()
        if known is not None:
            found = known[0].size(dim) if source.dim() else 1
        else:
            self._note_largest("aten.unique with dim")
        shape = list(source.shape)
        if shape:
            shape[dim] = found
        inverse, counts = rows if call["return_inverse"] else 0, found if call["return_counts"] else 0
        return (
            _empty(fake, shape, source.dtype),
            _empty(fake, (inverse,), torch.int64),
            _empty(fake, (counts,), torch.int64),
        )

    def _bincount(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        ids, weights, known = call["self"], call["weights"], compute()
        bins = len(known[0]) if known is not None else self.count_classes(ids, "aten.bincount")
        dtype = torch.int64
        if weights is not None:
            dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
        return _empty(fake, (max(bins, call["minlength"]),), dtype)

    def _ctc_loss(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        source, targets, lengths = call["log_probs"], call["targets"], call["target_lengths"]
        if isinstance(lengths, torch.Tensor):
            value, batches = self._values.get(lengths), lengths.numel()
        else:
            value, batches = torch.tensor(lengths), len(lengths)
        if value is not None:
            longest = int(value.max())
        else:
            self._note_largest("aten._ctc_loss")
            longest = targets.shape[1] if targets.dim() == 2 else math.ceil(targets.numel() / batches)
        frames, batch = source.shape[0], source.shape[1]
        losses = _empty(fake, (batch,), source.dtype)
        return losses, _empty(fake, (batch, frames, 2 * longest + 1), source.dtype)

    def _repeat_interleave(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        repeats = call["repeats"]
        total, known = call["output_size"], compute()
        if known is not None:
            total = len(known[0])
        elif total is None:
            bound, total = self._bound(repeats), self._total(repeats)
            if total is not None:
                rule = f"together {total} times, the most, is assumed"
            elif bound is not None:
                total = repeats.numel() * max(bound - 1, 0)
                rule = f"{max(bound - 1, 0)} times each, the most, is assumed"
            else:
                total, rule = repeats.numel(), "once each is assumed"
            self._note(
                f"aten.repeat_interleave: how often each element is repeated depends on values; {rule} "
                "(output_size= states the size)"
            )
        return _empty(fake, (total,), repeats.dtype)

    def _lstsq(self, fake: Fake, call: BoundArguments, compute: KnownResults) -> Any:
        matrix, right = call["self"], call["b"]
        unknowns, batch = matrix.shape[-1], matrix.shape[:-2]
        vector = right.dim() == matrix.dim() - 1
        columns = () if vector else (right.shape[-1],)
        overdetermined = matrix.shape[-2] > unknowns
        return (
            _empty(fake, (*batch, unknowns, *columns), matrix.dtype),
            _empty(fake, (*batch, *columns) if overdetermined else (0,), matrix.dtype),
            _empty(fake, (0,), torch.int64),
            _empty(fake, (0,), matrix.dtype),
        )


# Computes the op's results on the host; None where an input is not known.
KnownResults = Callable[[], tuple[torch.Tensor, ...] | None]
DataDependentRule = Callable[[ValueEstimates, Fake, BoundArguments, KnownResults], Any]
DATA_DEPENDENT_RESULTS: dict[Any, DataDependentRule] = {
    aten.nonzero: ValueEstimates._nonzero,
    aten.index: ValueEstimates._index,
    aten.masked_select: ValueEstimates._masked_select,
    **dict.fromkeys((aten._unique, aten._unique2, aten.unique_consecutive), ValueEstimates._unique),
    **dict.fromkeys((aten.unique_dim, aten.unique_dim_consecutive), ValueEstimates._unique_rows),
    aten.bincount: ValueEstimates._bincount,
    aten._ctc_loss: ValueEstimates._ctc_loss,
    aten.repeat_interleave: ValueEstimates._repeat_interleave,
    aten.linalg_lstsq: ValueEstimates._lstsq,
}


def _empty(fake: Fake, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return fake(aten.empty.memory_format, (list(shape),), {"dtype": dtype, "device": torch.device("cpu")})


def _first_of(fake: Fake, allocated: int, used: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that was shortened in place: its storage keeps its size."""
    whole = _empty(fake, (allocated,), dtype)
    return whole if used == allocated else fake(aten.slice.Tensor, (whole, 0, 0, used), {})
