"""Shortcuts through FakeTensorMode for the ops that make up most of a training step.

FakeTensorMode's general path costs many times what there is to find out. Ops with no result need nothing, and
those with a plain meta kernel in C++ that kernel alone. Either way an op runs once: its results for arguments
of the same layouts are made without asking again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from oomph.prediction.ops.registry import FACTS
from oomph.prediction.ops.rules import program_error
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
_MOST_LAYOUTS = 1 << 14  # calls whose results are remembered
# Of an op's results: their type, and of each its shape, strides and dtype; None for None.
_Layouts = tuple[type, list[tuple[torch.Size, tuple[int, ...], torch.dtype] | None]]


_Rule = Callable[[OpOverload, Sequence[Any], dict[str, Any]], Any]


class _Kind(NamedTuple):
    result: _Rule | None  # where it is not remembered; it may give NotImplemented
    is_plain: bool


class _Written:
    """In place of a type of results: the op returns the tensor that it writes into."""


class FastPath:
    """`run` gives an op's result on fake tensors. It raises where sizes depend on values."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        template = FakeTensor(mode, torch.empty(0, device=_META), _CPU)
        self._attributes = dict(template.__dict__)
        self._layouts: dict[Any, _Layouts | None] = {}
        self._kinds: dict[OpOverload, _Kind] = {}

    def run(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], key: Any = None) -> Any:
        """`key`: `described_call` of the op, if it is known already."""
        kind = self._kinds.get(func) or self._kind_of(func)
        if kind.result is not None:
            result = kind.result(func, args, kwargs)
            if result is not NotImplemented:
                return result
        key = key or described_call(func, args, kwargs)
        known = None if key is None else self._layouts.get(key)
        if known is not None:
            container, layouts = known
            if container is _Written:
                return _written(args, kwargs)
            made = [None if layout is None else self._empty(*layout) for layout in layouts]
            return made[0] if container is FakeTensor else container(made)
        if kind.is_plain and _all_fake(args):
            result = self._run_meta_kernel(func, args, kwargs)
        else:
            result = self.run_general(func, args, kwargs)
        if key is not None and key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = _layouts_of(func, args, kwargs, key, result)
        return result

    def run_general(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._mode.__torch_dispatch__(func, (), args, kwargs)

    def _kind_of(self, func: OpOverload) -> _Kind:
        rule: _Rule | None = None
        facts = FACTS[func]
        if facts.initialises:
            rule = _first_argument
        elif facts.is_view:
            rule = self._view
        elif facts.over_lists and not func._schema.returns:
            rule = _nothing
        elif func._schema.name.startswith("aten::_foreach_"):
            rule = self._foreach
        kind = self._kinds[func] = _Kind(rule, facts.is_plain)
        return kind

    def wrap(self, meta: torch.Tensor) -> FakeTensor:
        """A fake around a meta tensor, without the constructor's checks."""
        fake = make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=_CPU)
        fake.__dict__.update(self._attributes)
        return fake

    def _empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> FakeTensor:
        return self.wrap(torch.empty_strided(shape, stride, dtype=dtype, device=_META))

    def empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> FakeTensor:
        """A fake tensor that is neither recorded nor counted."""
        with disable_torch_function(), DisableTorchDispatch():
            return self._empty(shape, stride, dtype)

    def _run_meta_kernel(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        mode = self._mode
        options = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if FACTS[func].is_factory or "device" in kwargs:
            options["device"] = _META
        with DisableTorchDispatch(), PreserveDispatchKeyGuard():
            mode.in_kernel_invocation = True
            set_meta_in_tls_dispatch_include(True)
            try:
                result = func(*args, **options)
            except Exception as error:
                raise program_error(_in_words_of_cuda(func, args, error))  # noqa: B904 (the same exception)
            finally:
                mode.in_kernel_invocation = False
        if func._schema.is_mutable:
            return _written(args, kwargs)
        if isinstance(result, torch.Tensor):
            return self.wrap(result)
        return [self.wrap(item) for item in result]

    def _view(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._run_meta_kernel(func, args, kwargs) if _all_fake(args) else NotImplemented

    def _foreach(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One result like each tensor of the list (norms are scalars)."""
        tensors = args[0] if isinstance(args[0], (list, tuple)) else args[1]
        if "norm" in func._opname or "max" in func._opname or not _all_fake([tensors]):
            return NotImplemented
        return [self.run(aten.empty_like.default, (tensor,), {}) for tensor in tensors]


def _first_argument(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _nothing(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    return None


def _written(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that an op in place, or one with `out`, returns."""
    return kwargs["out"] if "out" in kwargs else args[0]


def _in_words_of_cuda(func: OpOverload, args: Sequence[Any], error: Exception) -> Exception:
    if func in (aten.mm.default, aten.addmm.default) and isinstance(error, RuntimeError):
        left, right = args[-2:]
        if left.dim() == right.dim() == 2 and left.shape[1] != right.shape[0]:
            sizes = " and ".join("x".join(map(str, matrix.shape)) for matrix in (left, right))
            return RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({sizes})")
    return error


_PLAIN_ARGUMENTS = (
    *(bool, int, float, str, type(None), torch.Generator),
    *(torch.dtype, torch.layout, torch.device, torch.memory_format),
)


def described_call(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same for calls whose results have the same layouts, as far as no values matter; or None."""
    try:
        options = _described(tuple(kwargs.items())) if kwargs else ()
        key = func, torch.get_default_dtype(), _described(args), options
        hash(key)
    except TypeError:
        return None
    return key


def _described(arg: Any) -> Any:
    """TypeError where more than the layout of an argument may matter."""
    if isinstance(arg, torch.Tensor):
        dtype = arg.dtype
        if dtype.is_complex or arg.layout is not torch.strided:
            raise TypeError
        return isinstance(arg, FakeTensor) or arg.device, arg.shape, arg.stride(), dtype
    if isinstance(arg, (tuple, list)):
        return tuple([_described(part) for part in arg])
    if type(arg) not in _PLAIN_ARGUMENTS:
        raise TypeError
    return type(arg), arg


def _layouts_of(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], key: Any, result: Any
) -> _Layouts | None:
    """None unless the results are dense tensors of their own, or the tensor that the op has written into."""
    if func._schema.is_mutable:
        written = result is _written(args, kwargs) and torch.Tag.inplace_view not in func.tags
        return (_Written, []) if written and described_call(func, args, kwargs) == key else None
    results = [result] if isinstance(result, torch.Tensor) else result
    if not isinstance(results, (tuple, list)):
        return None
    kind = FakeTensor if isinstance(result, torch.Tensor) else list if isinstance(result, list) else tuple
    layouts: list[Any] = []
    taken = {storage_id(one.untyped_storage()) for one in tensors_in(args, kwargs)}
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
    """Not of a class of the program's, whose own methods kernels written in Python would call."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if type(arg) is not FakeTensor:
                return False
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                if isinstance(item, torch.Tensor) and type(item) is not FakeTensor:
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


def broadcasts_into(shape: Sequence[int], largest: Sequence[int]) -> bool:
    if len(shape) > len(largest):
        return False
    return all(size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(largest), strict=False))
