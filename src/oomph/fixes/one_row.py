"""Operations on a batch whose rows are all the same, done on one row.

A tensor with stride 0 in its first dimension (the result of expand) holds one row for the whole batch. Inside
OneRow, operations that treat rows alike and by themselves take that row and give a result of the same kind.
Every other operation sees the tensor that it would have seen, so nothing need be known about the modules:
where rows start to differ (dropout, real data, batch statistics), the rest goes on as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

# By the name under which torch, torch.Tensor or torch.nn.functional have them.
_ELEMENTWISE = frozenset(
    "add sub mul div true_divide neg exp log sin cos tan tanh sigmoid relu relu6 gelu silu elu leaky_relu "
    "mish softplus logsigmoid hardswish hardsigmoid hardtanh celu selu erf abs square sqrt rsqrt pow "
    "reciprocal clamp clamp_min clamp_max where lerp addcmul addcdiv maximum minimum fmod remainder floor "
    "ceil round sign eq ne lt le gt ge logical_not logical_and logical_or masked_fill isnan rsub "
    "to float double half bfloat16 type_as contiguous "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __pow__ __rpow__ "
    "__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __invert__ __and__ __or__".split()
)
_FIRST_ONLY = frozenset(  # rows of the first argument, each by itself; the others are weights
    "linear embedding group_norm conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d".split()
)
_MATMUL = frozenset("matmul bmm __matmul__".split())
_ALONG = frozenset(  # along dimensions other than the first
    "softmax log_softmax sum mean amax amin cumsum logsumexp norm argmax argmin var std".split()
)
_JOINING = frozenset("cat concat concatenate stack".split())
_RESHAPING = frozenset("reshape flatten unflatten view".split())
_ATTENTION = "scaled_dot_product_attention"
_OTHERS = frozenset(("layer_norm", "rms_norm", "dropout", _ATTENTION, "repeat"))
_LOOKED_AT = _ELEMENTWISE | _FIRST_ONLY | _MATMUL | _ALONG | _JOINING | _RESHAPING | _OTHERS
_CONTAINERS = (list, tuple, dict)


class GiveUp(Exception):
    """The program writes into a tensor that has one row instead of many."""


class OneRow(TorchFunctionMode):
    """`spared(bytes)` is told what a result would have taken more."""

    def __init__(self, spared: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.changed_something = False
        self._spared = spared
        self._copies = WeakIdKeyDictionary()  # made where a view was asked for: not to be written either

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every call and every question of a shape comes here: those of no interest have to leave soon.
        name = getattr(func, "__name__", "")
        if not kwargs:
            return self._handled(name, func, args, {}) if _matters(name) else func(*args)
        if _matters(name) or "out" in kwargs or "inplace" in kwargs:
            return self._handled(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _handled(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if _writes(name, kwargs) and self._is_ours(args[0] if args else None, kwargs.get("out")):
            raise GiveUp(name)
        if name == "repeat" and (spread := _repeated(*args, **kwargs)) is not None:
            self.changed_something = True
            return spread
        if not _some_alike(args, kwargs):
            return func(*args, **kwargs)
        rows = _rows_of_result(name, args, kwargs)
        if rows is not None:
            self.changed_something = True
            return self._on_one_row(func, args, kwargs, rows)
        if name in _RESHAPING:
            self.changed_something = True
            return self._reshaped(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _on_one_row(self, func: Any, args: Any, kwargs: Any, rows: int) -> Any:
        args, kwargs = tree_map(lambda leaf: leaf[:1] if rows_alike(leaf) else leaf, (args, kwargs))
        return tree_map(lambda leaf: self._spread(leaf, rows), func(*args, **kwargs))

    def _spread(self, row: Any, rows: int) -> Any:
        if not isinstance(row, Tensor):
            return row
        if self._spared is not None:
            self._spared((rows - 1) * row.numel() * row.element_size())
        return row.expand(rows, *row.shape[1:])

    def _reshaped(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """By row where the first dimension stays; else all rows are needed, in memory of their own."""
        tensor = args[0]
        try:
            shape = func(torch.empty(tensor.shape, device="meta"), *args[1:], **kwargs).shape
        except RuntimeError:  # the program's own mistake: let it have its error
            return func(*args, **kwargs)
        if len(shape) > 1 and shape[0] == tensor.shape[0]:
            return tensor[:1].reshape(1, *shape[1:]).expand(shape)
        result = tensor.reshape(shape)
        if name == "view":
            self._copies[result] = True
        return result

    def _is_ours(self, *targets: Any) -> bool:
        return any(
            isinstance(one, Tensor) and (rows_alike(one) or one in self._copies or one._base in self._copies)
            for one in targets
        )


def rows_alike(value: Any) -> bool:
    """One row stands for the whole batch."""
    if not isinstance(value, Tensor):
        return False
    # Not by way of modes, nor of logits that are not there yet and would be computed to answer.
    with torch._C.DisableTorchFunction():
        return 0 in value.stride() and value.shape[0] > 1 and value.stride(0) == 0


def _some_alike(args: Any, kwargs: Any) -> bool:
    with torch._C.DisableTorchFunction():  # once for all of them
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                if rows_alike(value):
                    return True
            elif isinstance(value, _CONTAINERS) and any(map(rows_alike, tree_leaves(value))):
                return True
    return False


@functools.cache
def _matters(name: str) -> bool:
    """May a call of this name, without out= or inplace=, be one to do something about?"""
    return name in _LOOKED_AT or _writes(name, {})


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("out") is not None or kwargs.get("inplace") is True:
        return True
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in ("__invert__", "__index__", "__iter__", "__int__")
        )
    return name.endswith("_") and name != "requires_grad_"


def _repeated(tensor: Tensor, *sizes: Any, **kwargs: Any) -> Tensor | None:
    """x.repeat(B, 1, 1) of one row: the same numbers as expand gives."""
    wanted = tuple(sizes[0]) if sizes and isinstance(sizes[0], Sequence) else sizes
    if kwargs or not wanted or not isinstance(wanted[0], int) or wanted[0] < 2 or set(wanted[1:]) - {1}:
        return None
    shape = (1,) * (len(wanted) - tensor.dim()) + tuple(tensor.shape)
    if len(shape) != len(wanted) or shape[0] != 1 or len(shape) < 2:
        return None
    return tensor.expand(wanted[0], *shape[1:])


def _rows_of_result(name: str, args: Any, kwargs: dict[str, Any]) -> int | None:
    """How many rows the result has, each made of the one row alone; None where that is not so."""
    if name in _ELEMENTWISE:
        return _common_rows([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
    if not args:
        return None
    first = args[0]
    if name in _JOINING:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        same = all(rows_alike(one) for one in first) and len({one.shape[0] for one in first}) == 1
        places = first[0].dim() + (name == "stack")
        return first[0].shape[0] if same and _not_first(dim, places) else None
    if not rows_alike(first):
        return None
    if name in _FIRST_ONLY:
        least = {"linear": 2, "embedding": 1}.get(name, 3 if name.startswith("conv") else 2)
        turned = name == "embedding"  # its weight comes second, and may be anything
        weights = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, Tensor)]
        fine = first.dim() >= least and (turned or not any(rows_alike(one) for one in weights))
        return first.shape[0] if fine and not _renorms(name, args, kwargs) else None
    if name in _MATMUL:
        return first.shape[0] if _is_row_product(first, args[1:], kwargs) else None
    if name in _ALONG:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if name == "norm":
            dim = args[2] if len(args) > 2 else kwargs.get("dim")
        return first.shape[0] if _not_first(dim, first.dim()) else None
    if name in ("layer_norm", "rms_norm"):
        shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        return first.shape[0] if len(shape) < first.dim() else None
    if name == "dropout":
        chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", True)
        return first.shape[0] if chance == 0 or not training else None
    if name == _ATTENTION:
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        chance = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        plain = mask is None or mask.dim() < first.dim() or mask.shape[0] == 1 or rows_alike(mask)
        given = [one for one in (*args[:3], *kwargs.values()) if isinstance(one, Tensor) and one is not mask]
        return first.shape[0] if plain and chance == 0 and all(map(rows_alike, given)) else None
    return None


def _common_rows(tensors: list[Tensor]) -> int | None:
    """Operands that have the one row, or none along the result's first dimension."""
    dims = max(one.dim() for one in tensors)
    rows = {one.shape[0] for one in tensors if rows_alike(one) and one.dim() == dims}
    others = (one for one in tensors if not (rows_alike(one) and one.dim() == dims))
    fine = len(rows) == 1 and all(
        not rows_alike(one) and (one.dim() < dims or one.shape[0] == 1) for one in others
    )
    return rows.pop() if fine else None


def _is_row_product(first: Tensor, more: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    second = more[0] if more else next(iter(kwargs.values()), None)
    if not isinstance(second, Tensor) or first.dim() < 2:
        return False
    if second.dim() <= 2:
        return not rows_alike(second)
    return second.dim() == first.dim() and (rows_alike(second) or second.shape[0] == 1)


def _renorms(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    return name == "embedding" and (len(args) > 3 or kwargs.get("max_norm") is not None)


def _not_first(dim: Any, places: int) -> bool:
    dims = dim if isinstance(dim, Sequence) and not isinstance(dim, str) else (dim,)
    return bool(dims) and all(isinstance(one, int) and one % places != 0 for one in dims)
