"""Which masks hide the keys after each query, recognised by how a forward makes them.

A tensor that is made from numbers and from a module's buffers alone, such as `torch.ones(T, T).tril()` or
`self.mask[:T, :T] == 0`, has the same entries in every call with the same sizes. `note` remembers how such
tensors are made; one of them is compared with a causal mask once. In a prediction tensors have no data:
small masks are computed on the CPU, and those that are large or made from buffers are assumed to be causal.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from oomph.fixes.lazy_tensor import Args, Kwargs
from oomph.fixes.modules import has_data
from oomph.torch_internals import disable_dispatch_modes, disable_torch_function, tree_leaves

_FILLED_WITH = {
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), 0),
}
_FILL_ARGUMENT = {"full": 1, "full_like": 1, "new_full": 2, "tensor": 0, "scalar_tensor": 0, "new_tensor": 1}
_CASTS = frozenset(
    "to type type_as bool int long float half bfloat16 double cpu cuda contiguous clone".split()
)
_DERIVED = frozenset(
    "tril triu __getitem__ view reshape expand unsqueeze squeeze transpose eq ne lt le gt ge neg log add sub "
    "rsub mul div logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or masked_fill "
    "where".split()
)
FUNCTIONS = frozenset({*_FILLED_WITH, *_FILL_ARGUMENT, "arange", *_CASTS, *_DERIVED})


@dataclass(frozen=True)
class Constant:
    """How a tensor is made from numbers and buffers."""

    made: str
    compute: Callable[[], Tensor | None] = field(compare=False)  # on the CPU; None where buffers have no data


_constants = WeakIdKeyDictionary()  # tensor -> its Constant, and the version that it describes
_count = itertools.count()
_answers: dict[Any, bool] = {}
_LARGEST_COMPUTED = 1 << 24  # entries of a mask that a prediction computes


def note(name: str, func: Any, args: Args, kwargs: Kwargs, made: Any, buffers: Collection[int]) -> None:
    """Remember how a call of one of FUNCTIONS made a tensor. `buffers`: ids of the module's buffers."""
    if not isinstance(made, Tensor) or made.requires_grad or made.is_inference():
        return
    constant = _new(name, args, kwargs, made)
    if constant is None:
        constant = _derived(name, func, args, kwargs, made, buffers)
    if constant is not None:
        _constants[made] = constant, made._version


def constant_of(tensor: Tensor, buffers: Collection[int] = ()) -> Constant | None:
    """How the tensor is made; None where that is not known, or it was written since."""
    constant, version = _constants.get(tensor, (None, 0))
    if constant is not None and version == tensor._version:
        return constant
    if id(tensor) not in buffers or tensor.is_inference():
        return None
    constant = Constant(f"buffer {next(_count)}", partial(_read, weakref.ref(tensor)))
    _constants[tensor] = constant, tensor._version
    return constant


def _read(buffer: weakref.ref[Tensor]) -> Tensor | None:
    tensor = buffer()
    return tensor.detach().cpu() if tensor is not None and has_data(tensor) else None


def _new(name: str, args: Args, kwargs: Kwargs, made: Tensor) -> Constant | None:
    if name == "arange":
        bounds = {key: kwargs[key] for key in ("start", "end", "step") if key in kwargs}
        if any(isinstance(one, Tensor) for one in (*args, *kwargs.values())):
            return None
        options = {**bounds, "dtype": made.dtype, "device": "cpu"}
        return Constant(f"arange{args} {options}", partial(torch.arange, *args, **options))
    value: Any = _FILLED_WITH.get(name)
    if name in _FILL_ARGUMENT:
        named = kwargs.get("fill_value", kwargs.get("data"))
        value = args[_FILL_ARGUMENT[name]] if len(args) > _FILL_ARGUMENT[name] else named
    if not isinstance(value, bool | int | float):
        return None
    shape, dtype = tuple(made.shape), made.dtype
    return Constant(f"{value} {shape} {dtype}", partial(torch.full, shape, value, dtype=dtype, device="cpu"))


def _derived(
    name: str, func: Any, args: Args, kwargs: Kwargs, made: Tensor, buffers: Collection[int]
) -> Constant | None:
    first = args[0] if args else None
    if name not in _CASTS and name not in _DERIVED:
        return None
    if name in _CASTS:
        own = constant_of(first, buffers) if isinstance(first, Tensor) else None
        return own and Constant(f"{own.made}.to({made.dtype})", partial(_call, Tensor.to, (own, made.dtype)))
    found: list[Any] = [constant_of(arg, buffers) if isinstance(arg, Tensor) else arg for arg in args]
    others = [*(arg for arg in args if not isinstance(arg, Tensor)), *kwargs.values()]
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(others)):
        return None
    if any(one is None and isinstance(arg, Tensor) for one, arg in zip(found, args, strict=True)):
        return None
    text = ", ".join(one.made if isinstance(one, Constant) else repr(one) for one in found)
    return Constant(f"{name}({text}, {dict(kwargs)})", partial(_call, partial(func, **kwargs), tuple(found)))


def _call(func: Any, args: Args) -> Tensor | None:
    given = [arg.compute() if isinstance(arg, Constant) else arg for arg in args]
    missing = any(isinstance(a, Constant) and g is None for a, g in zip(args, given, strict=True))
    return None if missing else func(*given)


def is_causal(
    mask: Tensor, scores: Sequence[int], form: Literal["hidden", "visible", "added"], buffers: Collection[int]
) -> bool:
    """Whether the mask hides the keys after each query's own position and no other, for scores of this shape.

    The last query is at the last key. `form`: True or False means hidden, or -inf is added where it is.
    """
    queries, keys = scores[-2:]
    if tuple(mask.shape[-2:]) != (queries, keys) or math.prod(mask.shape) != queries * keys or keys < queries:
        return False
    constant = constant_of(mask, buffers)
    if constant is None or len(mask.shape) > len(scores):
        return False
    key = constant, form, queries, keys
    if key not in _answers:
        if len(_answers) >= 4096:
            _answers.clear()
        with disable_torch_function(), disable_dispatch_modes():
            value = mask if has_data(mask) else None
            if value is None and queries * keys <= _LARGEST_COMPUTED:
                value = constant.compute()
            _answers[key] = value is None or _hides_future(value.reshape(queries, keys), form)
    return _answers[key]


def _hides_future(mask: Tensor, form: str) -> bool:
    """Compares row by row: a large mask should not need several times its memory."""
    queries, keys = mask.shape
    columns = torch.arange(keys, device=mask.device)
    for start in range(0, queries, 1024):
        part = mask[start : start + 1024]
        future = (
            columns > torch.arange(start, start + len(part), device=mask.device)[:, None] + keys - queries
        )
        hidden = part == -math.inf if form == "added" else part if form == "hidden" else ~part
        if not torch.equal(hidden, future) or (form == "added" and part.masked_fill(future, 0).any()):
            return False
    return True


@lru_cache(1024)
def number(constant: Constant) -> float | None:
    """The entry of a tensor without dimensions."""
    with disable_torch_function(), disable_dispatch_modes():
        value = constant.compute()
        return None if value is None or value.dim() else float(value)
