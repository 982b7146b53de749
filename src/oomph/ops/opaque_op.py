"""Ops inside compiled models: opaque to the compiler; forward and backward run as in eager mode.

A compiler that traced into an op would unroll its loops over tiles and store what the op recomputes. Here
the graph calls `oomph::forward`, which runs the op under autograd and keeps its graph; the backward graph
calls `oomph::backward`, which runs that graph. What the op saves for backward is the same as without a
compiler, and it is freed with the handle that the compiled graph saves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from oomph.ops.common import no_compile
from oomph.torch_internals import AUTOGRAD_KEYS, SetExcludeDispatchKeyGuard, python_kernels, storage_id

P = ParamSpec("P")
R = TypeVar("R")
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype)
_functions: dict[str, Callable[..., Any]] = {}
_calls: list[Any] = []  # a call's function, its arguments with "tensor" in place of each tensor, and autocast
_graphs: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # by handle: outputs and inputs of a forward
_handles = itertools.count()


def opaque_op(function: Callable[P, R]) -> Callable[P, R]:
    """Make the op opaque to torch.compile: one node of the graph.

    The op returns one tensor or a tuple of several. Calls with functions or modules as arguments break
    the graph.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    _functions[name] = function
    parameters = tuple(inspect.signature(function).parameters)
    breaks_graph = no_compile(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_dynamo_compiling():
            return breaks_graph(*args, **kwargs)
        tensors: list[Tensor] = []
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        if not _is_supported(tuple(given.values())):
            return breaks_graph(*args, **kwargs)
        spec = tuple([(key, _spec(value, tensors)) for key, value in given.items()])
        device = tensors[0].device.type
        autocast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        grad = torch.is_grad_enabled()
        needed = tuple([grad and tensor.requires_grad for tensor in tensors])
        dtypes = tuple([tensor.dtype for tensor, needs in zip(tensors, needed, strict=True) if needs])
        call = _call_id(name, spec, autocast, needed, dtypes)
        outputs = _Call.apply(call, needed, *tensors)  # type: ignore[no-untyped-call]
        return outputs[0] if len(outputs) == 1 else outputs

    return run


def _is_supported(value: Any) -> bool:
    items = _items(value)
    if items is None:
        return isinstance(value, (Tensor, *_CONSTANTS))
    return all(map(_is_supported, items))


def _items(value: Any) -> tuple[Any, ...] | None:
    """Of a tuple, or of a dataclass."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, (Tensor, *_CONSTANTS)) or not hasattr(type(value), "__dataclass_fields__"):
        return None
    return tuple([getattr(value, name) for name in type(value).__dataclass_fields__])


def _spec(value: Any, tensors: list[Tensor]) -> Any:
    """The argument, with its tensors moved to the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("tensor",)
    items = _items(value)
    if items is not None:
        return ("items", type(value), tuple([_spec(item, tensors) for item in items]))
    return ("constant", value)


def _argument(spec: Any, tensors: Iterator[Tensor]) -> Any:
    if spec[0] == "tensor":
        return next(tensors)
    if spec[0] == "items":
        items = [_argument(item, tensors) for item in spec[2]]
        return spec[1](items) if spec[1] is tuple else spec[1](*items)
    return spec[1]


def _call_id(*call: Any) -> int:
    if call not in _calls:
        _calls.append(call)
    return _calls.index(call)


_call_id._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch.compiler.assume_constant_result


def _outputs(call: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    name, spec, (device, enabled, dtype), *_ = _calls[call]
    given = iter(tensors)
    arguments = {key: _argument(value, given) for key, value in spec}
    with torch.autocast(device, dtype, enabled) if enabled else contextlib.nullcontext():
        outputs = _functions[name](**arguments)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """A compiled graph runs below autograd."""
    with contextlib.ExitStack() as stack:
        for key in AUTOGRAD_KEYS:
            stack.enter_context(SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


def _forward(tensors: Sequence[Tensor], call: int) -> list[Tensor]:
    """The op's outputs, and a handle of the graph for backward."""
    needed = _calls[call][3]
    with _autograd():
        inputs = [each.detach().requires_grad_(needs) for each, needs in zip(tensors, needed, strict=True)]
        outputs = _outputs(call, inputs)
    handle = torch.tensor(next(_handles))
    if any(needed):
        _graphs[int(handle)] = outputs, [each for each in inputs if each.requires_grad]
        weakref.finalize(handle.untyped_storage(), _graphs.pop, int(handle), None)
    return [*_without_aliases([each.detach() for each in outputs], tensors), handle]


def _without_aliases(results: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """An op must not return what it was given."""
    storages = {storage_id(each.untyped_storage()) for each in given}
    return [each.clone() if storage_id(each.untyped_storage()) in storages else each for each in results]


def _forward_shapes(tensors: Sequence[Tensor], call: int) -> list[Tensor]:
    with torch.no_grad():
        outputs = _outputs(call, tensors)
    return [*(torch.empty_like(each) for each in outputs), torch.empty((), dtype=torch.int64, device="cpu")]


def _backward(gradients: Sequence[Tensor], handle: Tensor, sizes: Sequence[int], call: int) -> list[Tensor]:
    outputs, inputs = _graphs[int(handle)]
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    with _autograd():
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            inputs,
            [gradient for _, gradient in pairs],
            retain_graph=True,  # of a graph that is run again; it is freed with the handle
            allow_unused=True,
        )
    made = zip(found, inputs, strict=True)
    dense = [torch.zeros_like(each) if grad is None else grad.contiguous() for grad, each in made]
    return _without_aliases(dense, gradients)


def _backward_shapes(
    gradients: Sequence[Tensor], handle: Tensor, sizes: Sequence[int], call: int
) -> list[Tensor]:
    made, at = [], 0
    for dtype in _calls[call][4]:
        dims = int(sizes[at])
        made.append(gradients[0].new_empty(list(sizes[at + 1 : at + 1 + dims]), dtype=dtype))
        at += 1 + dims
    return made


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: int, needed: Sequence[bool], *tensors: Tensor) -> tuple[Tensor, ...]:
        *outputs, handle = torch.ops.oomph.forward(list(tensors), call)
        ctx.save_for_backward(handle)
        ctx.call, ctx.needed = call, needed
        ctx.sizes = []
        for tensor, needs in zip(tensors, needed, strict=True):
            if needs:
                ctx.sizes += [tensor.dim(), *tensor.shape]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (handle,) = ctx.saved_tensors
        made = iter(torch.ops.oomph.backward(list(gradients), handle, ctx.sizes, ctx.call))
        return (None, None, *(next(made) if needs else None for needs in ctx.needed))


_library = torch.library.Library("oomph", "FRAGMENT")
_library.define("forward(Tensor[] tensors, int call) -> Tensor[]")
_library.define("backward(Tensor[] gradients, Tensor handle, SymInt[] sizes, int call) -> Tensor[]")
for _name, _kernel, _fake in (
    ("forward", _forward, _forward_shapes),
    ("backward", _backward, _backward_shapes),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"oomph::{_name}", _fake, lib=_library)
    python_kernels[f"oomph::{_name}"] = _kernel
