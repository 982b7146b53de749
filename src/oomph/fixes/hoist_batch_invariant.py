"""Work that does not depend on the batch runs on one row, whose result the whole batch uses.

Query positions, coordinates or learned tokens are often expanded along the batch and then go through layers:
every row computes, and saves for backward, the same numbers. A tensor with stride 0 in its first dimension
(the result of expand) holds one row for the whole batch. Inside the chosen modules, operations that treat
rows independently run on that row, and expand their result again; its gradient is the sum over the batch.
Every other operation gets the expanded tensor: where rows start to differ (dropout, real data, batch
statistics), the rest runs on the whole batch. The forward runs once; nothing is run in advance or again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from oomph.errors import UserError
from oomph.fixes.lazy_tensor import Args, Kwargs, LazyMode, LazyModeFix, program_line, writes_by_name
from oomph.fixes.registry import FixContext, Target
from oomph.torch_internals import disable_torch_function, tree_leaves, tree_map, tree_map_only

# By the name under which torch, torch.Tensor or torch.nn.functional have them.
_ELEMENTWISE = frozenset(
    "add sub mul div neg exp log sin cos tan tanh sigmoid relu relu6 gelu silu elu leaky_relu mish softplus "
    "logsigmoid hardswish hardsigmoid hardtanh celu selu erf abs square sqrt rsqrt pow reciprocal clamp "
    "clamp_min clamp_max where lerp addcmul addcdiv maximum minimum fmod remainder floor ceil round sign "
    "eq ne lt le gt ge logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or masked_fill "
    "isnan rsub to float double half bfloat16 type_as contiguous __rtruediv__ __rpow__".split()
)
_ROWS_OF_FIRST = {  # function of the first argument's rows, with weights -> the dimensions that a batch has
    "linear": 2,
    "embedding": 1,
    "group_norm": 2,
    **dict.fromkeys((f"conv{transpose}{n}d" for transpose in ("", "_transpose") for n in (1, 2, 3)), 3),
}
_REDUCTIONS = frozenset(  # along other dimensions than the first
    "softmax log_softmax sum mean amax amin cumsum logsumexp norm argmax argmin var std".split()
)
_JOINS = frozenset("cat concat concatenate stack".split())
_RESHAPES = frozenset("reshape flatten unflatten view".split())
_SDPA = "scaled_dot_product_attention"


class BatchInvariantMode(LazyMode):
    sees_writes = True
    functions = frozenset(
        {*_ELEMENTWISE, *_ROWS_OF_FIRST, *_REDUCTIONS, *_JOINS, *_RESHAPES, _SDPA}
        | set("matmul bmm layer_norm rms_norm dropout repeat".split())
    )

    def __init__(self) -> None:
        super().__init__()
        self._copies = WeakIdKeyDictionary()  # made where the program asked for a view: must not be written

    def handle(self, name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if self._writes_one_row(name, args, kwargs):
            raise UserError(
                f"fix 'hoist_batch_invariant': {program_line()}: {name} writes into a tensor that holds one "
                "row for the whole batch; write it out of place, or name other modules=[...]"
            )
        if name == "repeat" and (expanded := _as_expand(*args, **kwargs)) is not None:
            return expanded
        if not any(is_batch_invariant(leaf) for leaf in _tensors(args, kwargs)):
            return func(*args, **kwargs)
        rows = _rows_of_result(name, args, dict(kwargs))
        if rows is not None:
            given, options = tree_map(
                lambda leaf: leaf[:1] if is_batch_invariant(leaf) else leaf, (tuple(args), dict(kwargs))
            )
            result = func(*given, **options)
            return tree_map_only(Tensor, lambda leaf: leaf.expand(rows, *leaf.shape[1:]), result)
        return self._reshaped(func, name, args, kwargs) if name in _RESHAPES else func(*args, **kwargs)

    def returned(self, leaf: Any) -> Any:
        """The caller may write into what a module returns."""
        return leaf.contiguous() if is_batch_invariant(leaf) else leaf

    def _reshaped(self, func: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
        """On the row where the first dimension stays; else all rows are needed, in memory of their own."""
        tensor = args[0]
        try:
            shape = func(torch.empty(tensor.shape, device="meta"), *args[1:], **kwargs).shape
        except RuntimeError:  # the program's own error
            return func(*args, **kwargs)
        if len(shape) > 1 and shape[0] == tensor.shape[0]:
            return tensor[:1].reshape(1, *shape[1:]).expand(shape)
        result = tensor.reshape(shape)
        if name == "view":
            self._copies[result] = True
        return result

    def _writes_one_row(self, name: str, args: Args, kwargs: Kwargs) -> bool:
        writes = writes_by_name(name) and name != "requires_grad_"
        written = [kwargs.get("out"), args[0] if args and (writes or kwargs.get("inplace") is True) else None]
        return any(
            isinstance(one, Tensor)
            and (is_batch_invariant(one) or one in self._copies or one._base in self._copies)
            for one in written
        )


class HoistBatchInvariant(LazyModeFix):
    name = "hoist_batch_invariant"
    kind = "exact"
    changes = "Work that is the same for every row of the batch is done once, for one row."
    mode = BatchInvariantMode
    effect = "rows that are the same are computed once"

    def targets(self, context: FixContext) -> Iterable[Target]:
        if not self.is_applied(context.model):
            yield Target(("",))  # the prediction with the fix shows whether it saves anything


def is_batch_invariant(value: Any) -> bool:
    """Whether one row in memory stands for the whole batch."""
    if not isinstance(value, Tensor):
        return False
    with disable_torch_function():  # lazy logits must not be computed to answer
        return 0 in value.stride() and value.shape[0] > 1 and value.stride(0) == 0


def _tensors(args: Args, kwargs: Kwargs) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def _as_expand(tensor: Tensor, *sizes: Any, **kwargs: Any) -> Tensor | None:
    """x.repeat(B, 1, 1) of one row as an expand of the same numbers."""
    wanted = tuple(sizes[0]) if sizes and isinstance(sizes[0], Sequence) else sizes
    if kwargs or not wanted or not isinstance(wanted[0], int) or wanted[0] < 2 or set(wanted[1:]) - {1}:
        return None
    shape = (1,) * (len(wanted) - tensor.dim()) + tuple(tensor.shape)
    if len(shape) != len(wanted) or shape[0] != 1 or len(shape) < 2:
        return None
    return tensor.expand(wanted[0], *shape[1:])


def _rows_of_result(name: str, args: Args, kwargs: dict[str, Any]) -> int | None:
    """The rows of the result, where each depends on the same row of the arguments only; else None."""
    if name in _ELEMENTWISE:
        return _elementwise_rows(_tensors(args, kwargs))
    if not args:
        return None
    first = args[0]
    if name in _JOINS:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        same = all(is_batch_invariant(one) for one in first) and len({one.shape[0] for one in first}) == 1
        return (
            first[0].shape[0] if same and _excludes_first(dim, first[0].dim() + (name == "stack")) else None
        )
    if not is_batch_invariant(first):
        return None
    independent = False
    if name in _ROWS_OF_FIRST:
        weights = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, Tensor)]
        if name == "embedding":  # the indices come first; max_norm changes the weight
            independent = len(args) <= 3 and kwargs.get("max_norm") is None
        else:
            independent = first.dim() >= _ROWS_OF_FIRST[name] and not any(map(is_batch_invariant, weights))
    elif name in ("matmul", "bmm"):
        second = args[1] if len(args) > 1 else next(iter(kwargs.values()), None)
        if isinstance(second, Tensor) and first.dim() >= 2:
            shared = not is_batch_invariant(second) if second.dim() <= 2 else second.dim() == first.dim()
            independent = shared and (second.dim() <= 2 or is_batch_invariant(second) or second.shape[0] == 1)
    elif name in _REDUCTIONS:
        at = 2 if name == "norm" else 1
        independent = _excludes_first(args[at] if len(args) > at else kwargs.get("dim"), first.dim())
    elif name in ("layer_norm", "rms_norm"):
        independent = len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) < first.dim()
    elif name == "dropout":
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        independent = p == 0 or not (args[2] if len(args) > 2 else kwargs.get("training", True))
    elif name == _SDPA:
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        shared = mask is None or mask.dim() < first.dim() or mask.shape[0] == 1 or is_batch_invariant(mask)
        given = [one for one in (*args[:3], *kwargs.values()) if isinstance(one, Tensor) and one is not mask]
        independent = shared and p == 0 and all(map(is_batch_invariant, given))
    return first.shape[0] if independent else None


def _elementwise_rows(tensors: list[Tensor]) -> int | None:
    """All operands have one row for the batch, or none along the result's first dimension."""
    dims = max(one.dim() for one in tensors)
    invariant = [is_batch_invariant(one) for one in tensors]
    rows = {
        one.shape[0] for one, is_row in zip(tensors, invariant, strict=True) if is_row and one.dim() == dims
    }
    others_fit = all(
        one.dim() == dims if is_row else one.dim() < dims or one.shape[0] == 1
        for one, is_row in zip(tensors, invariant, strict=True)
    )
    return rows.pop() if len(rows) == 1 and others_fit else None


def _excludes_first(dim: Any, dims: int) -> bool:
    given = dim if isinstance(dim, Sequence) and not isinstance(dim, str) else (dim,)
    return bool(given) and all(isinstance(one, int) and one % dims != 0 for one in given)
