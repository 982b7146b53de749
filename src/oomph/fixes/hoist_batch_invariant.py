"""Work that does not depend on the batch runs on one row, whose result the whole batch uses.

Query positions, coordinates or learned tokens are often expanded along the batch and then go through layers:
every row computes, and saves for backward, the same numbers. A tensor with stride 0 in its first dimension
(the result of expand) holds one row for the whole batch. Inside the chosen modules, operations that treat
rows independently run on that row, and expand their result again; its gradient is the sum over the batch.
Every other operation gets the expanded tensor: where rows start to differ (dropout, real data, batch
statistics), the rest runs on the whole batch. The forward runs once; nothing is run in advance or again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from oomph.errors import UserError
from oomph.fixes.lazy_tensor import (
    Args,
    Kwargs,
    LazyMode,
    LazyModeFix,
    LazyTensor,
    program_line,
    writes_by_name,
)
from oomph.fixes.registry import FixContext, Target
from oomph.torch_internals import (
    current_graph_task_id,
    disable_torch_function,
    tree_leaves,
    tree_map,
    tree_map_only,
)

# By the name under which torch, torch.Tensor or torch.nn.functional have them.
_ELEMENTWISE = frozenset(
    "add sub mul div neg exp log sin cos tan tanh sigmoid relu relu6 gelu silu elu leaky_relu mish softplus "
    "logsigmoid hardswish hardsigmoid hardtanh celu selu erf abs square sqrt rsqrt pow reciprocal clamp "
    "clamp_min clamp_max where lerp addcmul addcdiv maximum minimum fmod remainder floor ceil round sign "
    "eq ne lt le gt ge logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or masked_fill "
    "isnan rsub to float double half bfloat16 type_as __rtruediv__ __rpow__".split()
)
_RESHAPES = frozenset("reshape flatten unflatten view".split())
_OF_GRADIENTS = frozenset("grad backward register_hook retain_grad".split())


def _reduces(input: Tensor, dim: Any, *_: Any, **__: Any) -> bool:
    return _excludes_first(dim, input.dim())


def _embeds(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> bool:
    """Not torch.embedding, which takes the weight first."""
    return not (input.is_floating_point() or max_norm is not None or scale_grad_by_freq)


def _convolves(spatial: int, input: Tensor, *_: Any, **__: Any) -> bool:
    return input.dim() == spatial + 2


def _has_row_of_norms(input: Tensor, normalized_shape: Sequence[int], *_: Any, **__: Any) -> bool:
    return len(normalized_shape) < input.dim()


def _multiplies(input: Tensor, other: Tensor, /) -> bool:
    if not is_batch_invariant(input) or input.dim() < 2:
        return False
    if other.dim() <= 2:
        return not is_batch_invariant(other)
    return other.dim() == input.dim() and (is_batch_invariant(other) or other.shape[0] == 1)


def _joins(tensors: Sequence[Tensor], dim: int = 0, *, new: int = 0) -> bool:
    same = all(map(is_batch_invariant, tensors)) and len({one.shape[0] for one in tensors}) == 1
    return same and _excludes_first(dim, tensors[0].dim() + new)


def _attends(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *_: Any,
    **__: Any,
) -> bool:
    dims = query.dim()
    shared = attn_mask is None or attn_mask.dim() < dims or attn_mask.shape[0] == 1
    batches = all(is_batch_invariant(one) and one.dim() == dims for one in (query, key, value))
    return batches and dims > 2 and dropout_p == 0 and (shared or is_batch_invariant(attn_mask))


# Whether each row of the result depends on the same row of `input` alone, which no other argument has a row
# for. Called as the function is: a call with another signature is not understood, and gets the whole batch.
_OF_ONE: dict[str, Callable[..., bool]] = {
    "linear": lambda input, weight, bias=None: input.dim() > 1,
    "embedding": _embeds,
    "group_norm": lambda input, *_, **__: input.dim() > 1,
    "layer_norm": _has_row_of_norms,
    "rms_norm": _has_row_of_norms,
    "dropout": lambda input, p=0.5, training=True, *_, **__: p == 0 or not training,
    "norm": lambda input, p=2, dim=None, *_, **__: _excludes_first(dim, input.dim()),
    **dict.fromkeys(
        "softmax log_softmax sum mean amax amin cumsum logsumexp argmax argmin var std".split(), _reduces
    ),
    **{f"conv{kind}{n}d": partial(_convolves, n) for kind in ("", "_transpose") for n in (1, 2, 3)},
}
_OF_SEVERAL: dict[str, Callable[..., bool]] = {
    "matmul": _multiplies,
    "bmm": _multiplies,
    **dict.fromkeys("cat concat concatenate".split(), _joins),
    "stack": partial(_joins, new=1),
    "scaled_dot_product_attention": _attends,
}


class BatchInvariantMode(LazyMode):
    sees_writes = True
    functions = frozenset(
        {*_ELEMENTWISE, *_OF_ONE, *_OF_SEVERAL, *_RESHAPES, *_OF_GRADIENTS, "repeat", "contiguous"}
    )

    def __init__(self) -> None:
        super().__init__()
        # Of one row where the program has all rows, and of a copy where it has a view.
        self._storages: set[StorageWeakRef] = set()
        self._given: set[StorageWeakRef | None] = set()

    def begin(self, arguments: Any) -> None:
        """The caller may ask for the gradient of every row of what it gives. A checkpoint does not."""
        if current_graph_task_id() != -1:
            return
        given = [one for one in _tensors(arguments) if one.requires_grad and is_batch_invariant(one)]
        self._given = set(map(_storage, given))

    def handle(self, name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if name in _OF_GRADIENTS:
            of_inputs = {"grad": args[1:2], "backward": ()}
            asked = kwargs.get("inputs", of_inputs.get(name, args[:1]))
            if any(map(is_batch_invariant, _tensors(asked))):
                raise UserError(
                    f"fix 'hoist_batch_invariant': {program_line()}: {name} asks for the gradient of every "
                    "row of a tensor that holds one row for the whole batch; name other modules=[...]"
                )
            return func(*args, **kwargs)
        if any(map(self._is_ours, _written(name, args, kwargs))):
            raise UserError(
                f"fix 'hoist_batch_invariant': {program_line()}: {name} writes into a tensor that holds one "
                "row for the whole batch; write it out of place, or name other modules=[...]"
            )
        if name == "repeat" and (row := _row_to_repeat(*args, **kwargs)) is not None:
            return self._expanded(row.clone(), args[1] if isinstance(args[1], int) else args[1][0])
        tensors = _tensors((args, kwargs))
        invariant = [one for one in tensors if is_batch_invariant(one)]
        if not invariant or not self._given.isdisjoint(map(_storage, invariant)):
            return func(*args, **kwargs)
        first, rows = invariant[0], invariant[0].shape[0]
        if name in _RESHAPES:
            return self._reshaped(func, *args, **kwargs)
        # The forward of an autograd.Function, which has no gradients, may give the memory to a kernel.
        if name == "contiguous" and torch.is_grad_enabled():
            layout = kwargs.get("memory_format", torch.contiguous_format)
            return self._expanded(first[:1].clone(memory_format=layout), rows)
        if not _rows_are_independent(name, args, kwargs, tensors, invariant):
            return func(*args, **kwargs)
        given, options = tree_map(
            lambda leaf: leaf[:1] if is_batch_invariant(leaf) else leaf, (tuple(args), dict(kwargs))
        )
        return tree_map_only(
            Tensor, lambda leaf: self._expanded(leaf, rows, tensors), func(*given, **options)
        )

    def returned(self, leaf: Any) -> Any:
        """The caller may write into what a module returns."""
        return leaf.contiguous() if self._is_ours(leaf) else leaf

    def _expanded(self, row: Tensor, rows: int, arguments: Sequence[Tensor] = ()) -> Tensor:
        """One row for all. Of one that shares the memory of an argument, the program knows."""
        result = row.expand(rows, *row.shape[1:])
        return result if _storage(row) in set(map(_storage, arguments)) else self._noted(result)

    def _noted(self, result: Tensor) -> Tensor:
        storage = _storage(result)
        if storage is not None:
            self._storages.add(storage)
        return result

    def _reshaped(self, func: Any, input: Tensor, *sizes: Any, **options: Any) -> Tensor:
        """On the row where the first dimension stays; else all rows are needed, in memory of their own."""
        if any(isinstance(one, torch.dtype) for one in (*sizes, *options.values())):
            return func(input, *sizes, **options)
        try:
            shape = func(torch.empty(input.shape, device="meta"), *sizes, **options).shape
        except RuntimeError:  # the program's own error
            return func(input, *sizes, **options)
        if len(shape) > 1 and shape[0] == input.shape[0]:
            return self._expanded(input[:1].reshape(1, *shape[1:]), shape[0], [input])
        result = input.reshape(shape)
        return self._noted(result) if self._is_ours(input) else result

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, Tensor) and _storage(value) in self._storages


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
        strided = value.layout is torch.strided and not value.is_nested
        has_own_gradient = value.requires_grad and value.is_leaf
        return (
            strided
            and not has_own_gradient
            and value.dim() > 0
            and value.shape[0] > 1
            and value.stride(0) == 0
        )


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    if isinstance(tensor, LazyTensor):
        return None
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a subclass or a layout without one
        return None


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _written(name: str, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The arguments that a call writes into. Of a custom op, which of them is not known."""
    writes = writes_by_name(name) and name != "requires_grad_"
    if not writes and kwargs.get("inplace") is not True:
        return _tensors(kwargs.get("out"))
    return _tensors((args if "." in name else args[:1], kwargs.get("out")))


def _row_to_repeat(tensor: Tensor, *sizes: Any, **kwargs: Any) -> Tensor | None:
    """The one row that x.repeat(B, 1, 1) repeats."""
    wanted = tuple(sizes[0]) if sizes and isinstance(sizes[0], Sequence) else sizes
    if kwargs or not wanted or not isinstance(wanted[0], int) or wanted[0] < 2 or set(wanted[1:]) - {1}:
        return None
    shape = (1,) * (len(wanted) - tensor.dim()) + tuple(tensor.shape)
    if len(shape) != len(wanted) or shape[0] != 1 or len(shape) < 2:
        return None
    return tensor.reshape(shape)


def _rows_are_independent(
    name: str, args: Args, kwargs: Kwargs, tensors: Sequence[Tensor], invariant: Sequence[Tensor]
) -> bool:
    """Whether each row of the result depends on the same row of the arguments only."""
    if kwargs.get("out") is not None or (name == "where" and len(args) + len(kwargs) < 3):
        return False
    if name in _ELEMENTWISE:
        return _have_row_for_batch(tensors)
    alone = len(invariant) == 1 and invariant[0] is (args[0] if args else kwargs.get("input"))
    rule = _OF_SEVERAL.get(name) or (_OF_ONE.get(name) if alone else None)
    try:
        return rule is not None and rule(*args, **kwargs)
    except TypeError:  # another signature
        return False


def _have_row_for_batch(tensors: Sequence[Tensor]) -> bool:
    """All operands have one row for the batch, or none along the result's first dimension."""
    dims = max(one.dim() for one in tensors)
    rows = {one.shape[0] for one in tensors if is_batch_invariant(one)}
    return len(rows) == 1 and all(
        one.dim() == dims if is_batch_invariant(one) else one.dim() < dims or one.shape[0] == 1
        for one in tensors
    )


def _excludes_first(dim: Any, dims: int) -> bool:
    given = dim if isinstance(dim, Sequence) and not isinstance(dim, str) else (dim,)
    return bool(given) and all(type(one) is int and one % dims != 0 for one in given)
