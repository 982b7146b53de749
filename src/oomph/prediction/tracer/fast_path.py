"""Shortcuts through FakeTensorMode for the ops that make up most of a training step.

FakeTensorMode's general path costs many times what there is to find out. Three kinds of op need less: those
whose result's shape, strides and dtype follow from their inputs by a short rule; those with a plain meta
kernel in C++; and those with no result at all. Whatever does not fit the rule exactly goes the general way,
once: its results for arguments of the same layouts are made without asking again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from oomph.prediction.cuda.kernels import iteration_order
from oomph.prediction.cuda.rules import aten_ops, program_error
from oomph.prediction.tracer.work import tensors_in
from oomph.torch_internals import (
    DisableTorchDispatch,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    PreserveDispatchKeyGuard,
    disable_torch_function,
    make_subclass,
    set_meta_in_tls_dispatch_include,
    storage_id,
)

aten = torch.ops.aten
_CPU = torch.device("cpu")
_META = torch.device("meta")


VIEWS = aten_ops("""
    view.default _unsafe_view.default detach.default alias.default transpose.int t.default permute.default
    expand.default slice.Tensor select.int unsqueeze.default squeeze.dim squeeze.dims as_strided.default
    split.Tensor split_with_sizes.default unbind.int
""")
_PLAIN = VIEWS | aten_ops("""
    sum.default clone.default cat.default
    _softmax.default _softmax_backward_data.default _log_softmax.default _log_softmax_backward_data.default
    zero_.default fill_.Scalar baddbmm.default
    eq.Scalar ne.Scalar gt.Scalar lt.Scalar ge.Scalar le.Scalar
""")
_IN_PLACE = aten_ops("""
    copy_.default add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor
    add_.Scalar sub_.Scalar mul_.Scalar div_.Scalar
""")
_ELEMENTWISE = aten_ops("""
    add.Tensor sub.Tensor mul.Tensor div.Tensor mul.Scalar div.Scalar add.Scalar pow.Tensor_Scalar
    neg.default rsqrt.default sqrt.default exp.default cos.default sin.default
    tanh.default sigmoid.default silu.default gelu.default relu.default
    tanh_backward.default sigmoid_backward.default silu_backward.default gelu_backward.default
    threshold_backward.default
""")
_REDUCTIONS = aten_ops("mean.dim sum.dim_IntList")
_PRODUCTS = aten_ops("mm.default addmm.default bmm.default")
_PRODUCTS_INTO = aten_ops("mm.out addmm.out")
_FACTORIES = aten_ops("""
    empty.memory_format zeros.default ones.default new_empty.default new_zeros.default new_ones.default
""")
_FACTORIES_LIKE = aten_ops("empty_like.default zeros_like.default ones_like.default")
_NEW_OPTIONS = {"device": (None, _CPU), "layout": (None, torch.strided), "pin_memory": (None, False)}
_LIKE_OPTIONS = {"memory_format": (None, torch.preserve_format), "pin_memory": (None, False)}
# Results are thrown away or known: nothing to compute.
INITIALISERS = aten_ops("normal_.default uniform_.default bernoulli_.float random_.default")
_FUSED_OPTIMIZERS = aten_ops("""
    _fused_adam_.default _fused_adam_.tensor_lr _fused_adamw_.default _fused_adamw_.tensor_lr
    _fused_sgd_.default _fused_sgd_.tensor_lr _fused_adagrad_.default
""")


_MOST_LAYOUTS = 1 << 14  # calls whose results are remembered
# Of an op's results: their type, and of each its shape, strides and dtype; None for None.
_Layouts = tuple[type, list[tuple[torch.Size, tuple[int, ...], torch.dtype] | None]]


class FastPath:
    """`run` gives an op's result on fake tensors, or NotImplemented when it has to go the general way."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        template = FakeTensor(mode, torch.empty(0, device=_META), _CPU)
        self._attributes = dict(template.__dict__)
        self._layouts: dict[Any, _Layouts | None] = {}
        self._rules: dict[OpOverload, Callable[[OpOverload, Sequence[Any], dict[str, Any]], Any]] = {
            **dict.fromkeys(_PLAIN, self._plain),
            **dict.fromkeys(_ELEMENTWISE, self._elementwise),
            **dict.fromkeys(_IN_PLACE, self._in_place),
            **dict.fromkeys(_PRODUCTS, self._product),
            **dict.fromkeys(_PRODUCTS_INTO, self._product_into),
            **dict.fromkeys(_REDUCTIONS, self._reduction),
            **dict.fromkeys(_FACTORIES, self._new),
            **dict.fromkeys(_FACTORIES_LIKE, self._like),
            aten._to_copy.default: self._cast,
            **dict.fromkeys(INITIALISERS, lambda func, args, kwargs: args[0]),
            **dict.fromkeys(_FUSED_OPTIMIZERS, lambda func, args, kwargs: None),
        }

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        rule = self._rules.get(func)
        if rule is not None:
            return rule(func, args, kwargs)
        if func._opname.startswith("_foreach_") and func.namespace == "aten":
            return self._foreach(func, args)
        return NotImplemented

    def wrap(self, meta: torch.Tensor) -> FakeTensor:
        """A fake around a meta tensor, without the constructor's checks."""
        fake = make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=_CPU)
        fake.__dict__.update(self._attributes)
        return fake

    def empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> FakeTensor:
        """A fake tensor that is neither recorded nor counted."""
        with disable_torch_function(), DisableTorchDispatch():
            return self.wrap(torch.empty_strided(shape, stride, dtype=dtype, device=_META))

    def once(
        self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], compute: Callable[[], Any]
    ) -> Any:
        """What `compute` gives; computed once for tensors of the same layouts, where all results are new. It
        raises where sizes depend on values."""
        if func._schema.is_mutable:
            return compute()
        key = described_call(func, args, kwargs)
        if key is None:
            return compute()
        known = self._layouts.get(key)
        if known is not None:
            kind, layouts = known
            made = [
                None
                if layout is None
                else self.wrap(torch.empty_strided(layout[0], layout[1], dtype=layout[2], device=_META))
                for layout in layouts
            ]
            return made[0] if kind is FakeTensor else kind(made)
        result = compute()
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = _layouts_of_new(result, [*tensors_in(args, kwargs)])
        return result

    def _in_place(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Nothing new where the other tensor fits into the first."""
        target, other = args[0], args[1]
        fits = isinstance(target, FakeTensor) and 0 not in target.stride()
        if isinstance(other, torch.Tensor):
            alike = other.dtype == target.dtype and other.dtype.is_floating_point
            fits = fits and (alike or func is aten.copy_.default) and not other.is_meta
            fits = fits and broadcasts_into(other.shape, target.shape)
        else:
            fits = fits and target.dtype.is_floating_point and not isinstance(other, complex)
        return target if fits else self._plain(func, args, kwargs)

    def _plain(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not _all_fake(args):
            return NotImplemented
        if func in VIEWS:
            return self._run_meta_kernel(func, args, kwargs)
        return self.once(func, args, kwargs, lambda: self._run_meta_kernel(func, args, kwargs))

    def _run_meta_kernel(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        mode = self._mode
        with DisableTorchDispatch(), PreserveDispatchKeyGuard():
            mode.in_kernel_invocation = True
            set_meta_in_tls_dispatch_include(True)
            try:
                result = func(*args, **kwargs)
            except Exception as error:
                raise program_error(error)  # noqa: B904 (the same exception)
            finally:
                mode.in_kernel_invocation = False
        if func._schema.is_mutable:
            return args[0]
        if isinstance(result, torch.Tensor):
            return self.wrap(result)
        return [self.wrap(item) for item in result]

    def _elementwise(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = self._elementwise_of_one_dtype(args)
        return result if result is not NotImplemented else self._plain(func, args, kwargs)

    def _elementwise_of_one_dtype(self, args: Sequence[Any]) -> Any:
        """All inputs alike, or all contiguous: the result is like them."""
        first = args[0]
        if not isinstance(first, FakeTensor) or not first.dtype.is_floating_point:
            return NotImplemented
        shape, stride, dtype = first.shape, first.stride(), first.dtype
        alike, contiguous, largest = True, first.is_contiguous(), shape
        for other in args[1:]:
            if isinstance(other, torch.Tensor):
                if not isinstance(other, FakeTensor) or other.dtype != dtype:
                    return NotImplemented
                if other.shape != shape:
                    alike = False
                    if len(other.shape) > len(largest) or other.numel() > largest.numel():
                        largest = other.shape
                elif other.stride() != stride:
                    alike = False
                contiguous = contiguous and other.is_contiguous()
            elif isinstance(other, complex):
                return NotImplemented
        if alike and (contiguous or is_dense(shape, stride)):
            return self.wrap(torch.empty_strided(shape, stride, dtype=dtype, device=_META))
        if contiguous and all(
            broadcasts_into(other.shape, largest) for other in args if isinstance(other, torch.Tensor)
        ):
            return self.wrap(torch.empty(largest, dtype=dtype, device=_META))
        layout = _broadcast_layout([other for other in args if isinstance(other, torch.Tensor)])
        return (
            NotImplemented
            if layout is None
            else self.wrap(torch.empty_strided(*layout, dtype=dtype, device=_META))
        )

    def _product(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        left, right = args[-2:] if func is aten.addmm.default else args[:2]
        if kwargs or not _all_fake(args) or left.dtype != right.dtype:
            return NotImplemented
        if left.dim() == right.dim() == 2 and left.shape[1] != right.shape[0]:
            sizes = " and ".join("x".join(map(str, matrix.shape)) for matrix in (left, right))
            # In CUDA's words.
            raise program_error(RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({sizes})"))
        if left.shape[-1] != right.shape[-2]:
            return NotImplemented
        if left.dim() != right.dim() or left.shape[:-2] != right.shape[:-2]:
            return NotImplemented
        if func is aten.addmm.default and args[0].shape != right.shape[-1:]:
            return NotImplemented
        shape = (*left.shape[:-1], right.shape[-1])
        return self.wrap(torch.empty(shape, dtype=left.dtype, device=_META))

    def _product_into(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Into memory that is there: thousands of them where long sequences are worked on in tiles."""
        *added, left, right = args
        out = kwargs.get("out")
        if not isinstance(out, FakeTensor) or not kwargs.keys() <= {"out", "alpha", "beta"}:
            return NotImplemented
        if not _all_fake(args):
            return NotImplemented
        if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
            return NotImplemented
        if out.shape != (left.shape[0], right.shape[1]):
            return NotImplemented
        if any(other.dtype != out.dtype for other in args):
            return NotImplemented
        return out if all(broadcasts_into(other.shape, out.shape) for other in added) else NotImplemented

    def _reduction(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor, dims = args[0], args[1]
        if kwargs or not isinstance(tensor, FakeTensor) or not dims or not tensor.is_contiguous():
            return NotImplemented
        if not tensor.dtype.is_floating_point:
            return NotImplemented
        keep = len(args) > 2 and args[2]
        gone = {dim % tensor.dim() for dim in dims}
        shape = [
            1 if dim in gone else size for dim, size in enumerate(tensor.shape) if keep or dim not in gone
        ]
        return self.wrap(torch.empty(shape, dtype=tensor.dtype, device=_META))

    def _cast(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if not isinstance(tensor, FakeTensor):
            return NotImplemented
        others = kwargs.keys() - {"dtype", "non_blocking"}
        if not all(kwargs[name] in _NEW_OPTIONS.get(name, ()) for name in others):
            return NotImplemented
        dtype = kwargs.get("dtype") or tensor.dtype
        if not is_dense(tensor.shape, tensor.stride()):
            return self._plain(func, args, {"dtype": dtype})
        return self.wrap(torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=_META))

    def _new(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """empty(size), new_zeros(tensor, size) and their like."""
        *like, size = args
        if not all(kwargs[name] in _NEW_OPTIONS.get(name, ()) for name in kwargs if name != "dtype"):
            return NotImplemented
        dtype = kwargs.get("dtype") or (like[0].dtype if like else torch.get_default_dtype())
        if not all(isinstance(length, int) for length in size):
            return NotImplemented
        return self.wrap(torch.empty(size, dtype=dtype, device=_META))

    def _like(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Optimizers make thousands of these; torch's rule for strides is written in Python."""
        tensor = args[0]
        if not all(kwargs[name] in _LIKE_OPTIONS.get(name, ()) for name in kwargs):
            return self._plain(func, args, kwargs)
        if not isinstance(tensor, FakeTensor) or not tensor.is_contiguous():
            return self._plain(func, args, kwargs)
        return self.wrap(torch.empty(tensor.shape, dtype=tensor.dtype, device=_META))

    def _foreach(self, func: OpOverload, args: Sequence[Any]) -> Any:
        """In place: nothing new. Otherwise one result like each tensor of the list (norms are scalars)."""
        if func._schema.is_mutable:
            return None
        tensors = args[0] if isinstance(args[0], (list, tuple)) else args[1]
        if "norm" in func._opname or "max" in func._opname or not _all_fake([tensors]):
            return NotImplemented
        return [self._like(aten.empty_like.default, (tensor,), {}) for tensor in tensors]


_PLAIN_ARGUMENTS = (
    *(bool, int, float, str, type(None), torch.Generator),
    *(torch.dtype, torch.layout, torch.device, torch.memory_format),
)


def described_call(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same for calls whose results have the same layouts, as far as no values matter; or None."""
    try:
        key = func, torch.get_default_dtype(), _described(args), _described(tuple(kwargs.items()))
        hash(key)
    except TypeError:
        return None
    return key


def _described(arg: Any) -> Any:
    """TypeError where more than the layout of an argument may matter."""
    if isinstance(arg, torch.Tensor):
        if arg.dtype.is_complex or arg.layout is not torch.strided:
            raise TypeError
        return isinstance(arg, FakeTensor) or arg.device, arg.shape, arg.stride(), arg.dtype
    if isinstance(arg, (tuple, list)):
        return tuple(map(_described, arg))
    if type(arg) not in _PLAIN_ARGUMENTS:
        raise TypeError
    return type(arg), arg


def _layouts_of_new(result: Any, given: Sequence[torch.Tensor]) -> _Layouts | None:
    """None unless the results are dense tensors of their own."""
    results = [result] if isinstance(result, torch.Tensor) else result
    if not isinstance(results, (tuple, list)):
        return None
    kind = FakeTensor if isinstance(result, torch.Tensor) else list if isinstance(result, list) else tuple
    layouts: list[Any] = []
    taken = {storage_id(one.untyped_storage()) for one in given}
    for one in results:
        if one is None:
            layouts.append(None)
            continue
        if type(one) is not FakeTensor or not all(type(size) is int for size in (*one.shape, *one.stride())):
            return None
        storage = one.untyped_storage()
        last = sum((size - 1) * step for size, step in zip(one.shape, one.stride(), strict=True))
        dense = storage.nbytes() == one.element_size() * (last + 1 if one.numel() else 0)
        if not dense or one.storage_offset() or storage_id(storage) in taken or one.fake_device != _CPU:
            return None
        taken.add(storage_id(storage))
        layouts.append((one.shape, one.stride(), one.dtype))
    return kind, layouts


def _all_fake(args: Sequence[Any]) -> bool:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if not isinstance(arg, FakeTensor):
                return False
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                if isinstance(item, torch.Tensor) and not isinstance(item, FakeTensor):
                    return False
    return True


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """No gaps and no overlaps: some order of the dimensions makes it contiguous."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def _broadcast_layout(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]] | None:
    """Shape and strides of an elementwise result: dense, with its dimensions in the order of the operands'
    strides, as TensorIterator sorts them. None where that is not all that decides: for dimensions of size 1,
    and for expanded operands among several, which torch's fake kernels may copy first."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    rank = max(map(len, shapes))
    shape = list(map(max, zip(*((1,) * (rank - len(each)) + each for each in shapes), strict=True)))
    if min(shape, default=0) < 2 or not all(broadcasts_into(each, shape) for each in shapes):
        return None
    if len(tensors) > 1 and not all(all(tensor.stride()) for tensor in tensors):
        return None
    strides = [
        (0,) * (rank - tensor.dim())
        + tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        for tensor in tensors
    ]
    found, step = [0] * rank, 1
    for dim in iteration_order(shape, strides):
        found[dim] = step
        step *= shape[dim]
    return shape, found


def broadcasts_into(shape: Sequence[int], largest: Sequence[int]) -> bool:
    if len(shape) > len(largest):
        return False
    return all(size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(largest), strict=False))
