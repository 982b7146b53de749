"""A tensor of logits without memory, which most training code only hands on to its loss.

Questions of shape and dtype are answered, a few functions are noted down (`functions`), and
F.cross_entropy becomes linear_cross_entropy (`loss`). Everything else computes the logits exactly as
the head would have, and goes on with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from oomph.fixes.logits.functions import FUNCTIONS, cast, only_dtype
from oomph.fixes.logits.loss import LOSSES
from oomph.fixes.logits.record import Later
from oomph.ops.common import no_compile, refuse_second_derivatives
from oomph.ops.launch import is_fake

_T = Tensor
# Answered from the outside of the tensor, which is right.
_PROPERTIES = (
    "shape ndim dtype layout requires_grad is_leaf grad_fn itemsize nbytes "
    "is_sparse is_meta is_quantized is_nested"
).split()
_QUESTIONS: set[Any] = {getattr(_T, name).__get__ for name in _PROPERTIES} | {
    _T.size,
    _T.dim,
    _T.ndimension,
    _T.numel,
    _T.nelement,
    _T.element_size,
    _T.is_floating_point,
    _T.is_complex,
    _T.__len__,
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
}
_WRITES = {"__setitem__", "__set__", "requires_grad_", "retain_grad", "register_hook", "__ior__", "__iand__"}


class DeferredLogits(torch.Tensor):
    """See the module. `deferred` says what it stands for; `node` is its place in the autograd graph."""

    deferred: Later
    node: Any

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Below autograd, whose graph is `_Node`'s: custom functions, reentrant checkpoints."""
        args, kwargs = tree_map_only(DeferredLogits, _bare_value, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _defer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The answer without logits; None where there is none."""
        rest = tuple(args[1:])
        others = {name: value for name, value in kwargs.items() if name != "input"}
        if any(isinstance(value, DeferredLogits) for value in (*rest, *others.values())):
            return None
        deferred = self.deferred
        if func in LOSSES:
            deferred.source.check_unchanged()
            with deferred.source.as_program():
                return LOSSES[func](deferred, *rest, **others)
        understood = FUNCTIONS.get(func)
        if understood is None:
            return None
        with deferred.source.as_program(), torch.set_grad_enabled(deferred.recording):
            meaning = understood(deferred.meaning, deferred.shape, *rest, **others)
        return None if meaning is None else logits_of(deferred.followed_by(meaning, (func, rest, others)))

    # A prediction answers these itself for the tensors it knows; asked here, they never reach it.

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.deferred.source.hidden.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.deferred.source.hidden.is_cuda

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.deferred.source.hidden.is_cpu

    def get_device(self) -> int:
        return self.deferred.source.hidden.get_device()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        if not (_taken_over(self) or self.deferred.source.computed):
            dtype = only_dtype(self.deferred.meaning, args, kwargs)
            meaning = None if dtype is None else cast(self.deferred.meaning, self.shape, dtype)
            if meaning is not None:
                return logits_of(self.deferred.followed_by(meaning, (_T.to, (dtype,), {})))
        return _value(self).to(*args, **kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return self if self.is_cuda and not args and not kwargs else _value(self).cuda(*args, **kwargs)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return _value(self).cpu(*args, **kwargs)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return _value(self).numpy(*args, **kwargs)

    def type(self, *args: Any, **kwargs: Any) -> Any:
        return _value(self).type(*args, **kwargs)


@no_compile
def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, by the logits or without them."""
    if func in _QUESTIONS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    first = args[0] if args else kwargs.get("input")
    if isinstance(first, DeferredLogits):
        if _taken_over(first):
            # Some code that knows only C++ made another tensor of it; autograd finds the way.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not first.deferred.source.computed:
            made = first._defer(func, args, kwargs)
            if made is not None:
                return made
    return _with_values(func, args, kwargs)


def logits_of(deferred: Later) -> DeferredLogits:
    """The record as a tensor of the right shape, dtype and place in the autograd graph."""
    inputs = deferred.source.inputs
    if deferred.recording and any(tensor.requires_grad for tensor in inputs):
        with torch.enable_grad():
            made: DeferredLogits = _Node.apply(deferred, *inputs)
    else:
        made = _dressed(deferred)
    with torch._C.DisableTorchFunctionSubclass():
        made.node = made.grad_fn
    return made


def _dressed(deferred: Later) -> DeferredLogits:
    hidden = deferred.source.hidden
    device = hidden.fake_device if is_fake(hidden) else hidden.device  # type: ignore[attr-defined]
    made: DeferredLogits = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        DeferredLogits, deferred.shape, dtype=deferred.meaning.dtype, device=device
    )
    made.deferred = deferred
    return made


class _Node(torch.autograd.Function):
    """So that a gradient finds its way even from code that never asks __torch_function__.

    It keeps its inputs as they are, not through save_for_backward: nothing is kept that is not alive anyway,
    and what treats saved tensors (offloading, checkpoints) has nothing to do here.
    """

    @staticmethod
    def forward(ctx: Any, deferred: Later, *inputs: Tensor) -> DeferredLogits:
        ctx.deferred = deferred
        return _dressed(deferred)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        refuse_second_derivatives("a head with fix 'fused_linear_cross_entropy'", "undo the fix")
        deferred: Later = ctx.deferred
        deferred.source.check_unchanged()
        needed = ctx.needs_input_grad[1:]
        inputs = [
            tensor.detach().requires_grad_(need)
            for tensor, need in zip(deferred.source.inputs, needed, strict=True)
        ]
        with torch.enable_grad(), deferred.source.as_program():
            out = deferred.computed_from(*inputs)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, grad))
        return None, *(next(found) if need else None for need in needed)


def _taken_over(logits: DeferredLogits) -> bool:
    """Has C++ given the tensor another place in the graph since it was made?"""
    with torch._C.DisableTorchFunctionSubclass():
        return logits.grad_fn is not logits.node or (logits.node is None and logits.requires_grad)


def _value(logits: DeferredLogits) -> Tensor:
    if not _taken_over(logits):
        return logits.deferred.value()
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.view_as(logits, logits)


def _bare_value(logits: DeferredLogits) -> Tensor:
    deferred = logits.deferred
    deferred.source.check_unchanged()
    with torch.no_grad():
        return deferred.computed_from(*(tensor.detach() for tensor in deferred.source.inputs))


def _with_values(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """As if the logits had been there all the time."""
    sources = []

    def value(logits: DeferredLogits) -> Tensor:
        sources.append(logits.deferred.source)
        if _writes(func, kwargs):
            logits.deferred.source.compute_all()
        return _value(logits)

    args, kwargs = tree_map_only(DeferredLogits, value, (tuple(args), dict(kwargs)))
    if not (inspect.isfunction(func) and sources):
        return func(*args, **kwargs)
    with sources[0].as_program():
        return func(*args, **kwargs)


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    augmented = name.startswith("__i") and name not in ("__invert__", "__int__", "__index__", "__iter__")
    return in_place or augmented or name in _WRITES or kwargs.get("out") is not None
