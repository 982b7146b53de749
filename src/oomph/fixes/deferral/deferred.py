"""Objects that stand for tensors which are not computed unless they have to be.

A Deferred answers questions of shape, takes part in torch's calls, and follows those it understands. Any
other call gets the real tensor: at worst nothing is saved, and the result is the program's own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from oomph.fixes.deferral.mode_stack import as_written

Arguments = Sequence[Any]
Options = Mapping[str, Any]


class Deferred:
    """Subclasses: `shape`, `dtype`, `device`, `requires_grad`, `_compute`, and `follow`."""

    rank = 1  # of several in a call, the one with the lowest is asked first to follow it

    def __init__(self) -> None:
        self._real: Tensor | None = None
        self._view_of: tuple[Deferred, Callable[[Tensor], Tensor]] | None = None
        self._views: list[weakref.ref[Deferred]] = []

    shape: Any
    dtype: Any
    device: Any
    requires_grad: Any

    def follow(self, name: str, func: Any, args: Arguments, kwargs: Options) -> Any:
        """The result of a call that it understands; else NotImplemented."""
        return NotImplemented

    def _compute(self) -> Tensor:
        raise NotImplementedError

    @property
    def is_real(self) -> bool:
        return self._real is not None

    def real(self) -> Tensor:
        """The tensor. From now on this stands for it, and so do views of it: they share its memory."""
        if self._real is None:
            with as_written():
                if self._view_of is None:
                    self._real = self._compute()
                else:
                    base, view = self._view_of
                    self._real = view(base.real())
            for reference in self._views:
                view_of_this = reference()
                if view_of_this is not None:
                    view_of_this.real()
        return self._real

    def add_view(self, child: Deferred, view: Callable[[Tensor], Tensor]) -> Any:
        child._view_of = (self, view)
        self._views.append(weakref.ref(child))
        return child

    @property
    def shares_memory(self) -> bool:
        """Would a change in place show elsewhere?"""
        return self._view_of is not None or any(reference() is not None for reference in self._views)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Arguments = (), kwargs: Options | None = None
    ) -> Any:
        return call(func, args, kwargs or {})

    # Questions that need no data ------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def is_contiguous(self, **_: Any) -> bool:
        return True if self._real is None else self._real.is_contiguous()

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions: can it be copied, pickled, ...
            raise AttributeError(name)
        attribute = getattr(Tensor, name)
        if callable(attribute):
            return partial(_call_method, attribute, self)
        return getattr(self.real(), name)

    def __repr__(self) -> str:
        return repr(self.real())

    __hash__ = object.__hash__


def _call_method(method: Any, *args: Any, **kwargs: Any) -> Any:
    return call(method, args, kwargs)


def call(func: Any, args: Arguments, kwargs: Options) -> Any:
    """`func(*args, **kwargs)`, deferred further where something in the arguments knows how."""
    name = getattr(func, "__name__", "")
    with as_written():
        for each in deferred_in(args, kwargs):
            if not each.is_real:
                result = each.follow(name, func, args, kwargs)
                if result is not NotImplemented:
                    return result
        args, kwargs = tree_map_only(Deferred, lambda deferred: deferred.real(), (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)


def deferred_in(args: Arguments, kwargs: Options) -> list[Deferred]:
    """Those in the arguments, or in lists and tuples of them, by their rank."""
    found = []
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, Deferred):
            found.append(arg)
        elif isinstance(arg, list | tuple):
            found += [item for item in arg if isinstance(item, Deferred)]
    return sorted(found, key=lambda each: each.rank) if len(found) > 1 else found


_OPERATORS = {
    "__add__": torch.add,
    "__radd__": torch.add,
    "__sub__": torch.sub,
    "__rsub__": torch.rsub,
    "__mul__": torch.mul,
    "__rmul__": torch.mul,
    "__truediv__": torch.div,
    "__rtruediv__": Tensor.__rtruediv__,
    "__pow__": torch.pow,
    "__matmul__": torch.matmul,
    "__neg__": torch.neg,
    "__invert__": torch.bitwise_not,
    "__and__": torch.bitwise_and,
    "__or__": torch.bitwise_or,
    "__eq__": torch.eq,
    "__ne__": torch.ne,
    "__lt__": torch.lt,
    "__le__": torch.le,
    "__gt__": torch.gt,
    "__ge__": torch.ge,
    "__iadd__": Tensor.add_,
    "__isub__": Tensor.sub_,
    "__imul__": Tensor.mul_,
    "__itruediv__": Tensor.div_,
    "__getitem__": Tensor.__getitem__,
    "__setitem__": Tensor.__setitem__,
    "__bool__": Tensor.__bool__,
    "__float__": Tensor.__float__,
    "__iter__": Tensor.__iter__,
}


def _operator(func: Any) -> Callable[..., Any]:
    return lambda self, *others: call(func, (self, *others), {})


for _name, _func in _OPERATORS.items():
    setattr(Deferred, _name, _operator(_func))


_NOT_IN_PLACE = ("__index__", "__invert__", "__int__", "__iter__")


def changes_in_place(name: str, args: Arguments, kwargs: Options) -> bool:
    """By its name (add_, __setitem__, __iadd__), by out=, or by inplace=True, which may have no name."""
    if is_in_place_by_name(name) or (kwargs.get("out") is not None and not name.startswith("__")):
        return True
    return name in MAY_CHANGE and any(value is True for value in (*args, *kwargs.values()))


@functools.cache
def is_in_place_by_name(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")


MAY_CHANGE = {
    *("dropout", "alpha_dropout", "feature_alpha_dropout", "relu", "relu6", "elu", "celu", "selu", "silu"),
    *("mish", "leaky_relu", "rrelu", "hardtanh", "hardswish", "hardsigmoid", "threshold"),
}
