"""Tensors whose value is computed only if something reads it.

Two fixes return a `LazyTensor` where a program computes a large intermediate: logits, or attention scores.
Its `Expression` records how to compute the value. Every call into torch that takes a LazyTensor is offered
to the expression (`handle_function`), which answers with another expression (still not computed), with a
tensor (the fused result), or NotImplemented. In the last case the value is computed by the program's own
calls, with the gradient mode and autocast of the time they were made, and the call runs on that value.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch

from oomph.errors import UserError
from oomph.ops.common import is_fake, no_compile, refuse_second_derivatives, version_of
from oomph.torch_internals import (
    DisableTorchFunctionSubclass,
    OpOverload,
    OpOverloadPacket,
    current_function_modes,
    make_wrapper_subclass,
    tree_map,
    tree_map_only,
    writes_arguments,
)

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


# Names of functions ----------------------------------------------------------------------------------

_OPERATORS = {
    **{f"__{prefix}{name}__": name for name in ("add", "mul") for prefix in ("", "r")},
    **{f"__{name}__": name for name in ("sub", "matmul", "pow", "eq", "ne", "lt", "le", "gt", "ge")},
    **{f"__i{name}__": f"{name}_" for name in ("add", "sub", "mul")},
    "__truediv__": "div",
    "__itruediv__": "div_",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "__rsub__": "rsub",
    "__neg__": "neg",
    "__invert__": "bitwise_not",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
}
_INPLACE_OPTION = frozenset(  # functions with an argument `inplace`, often positional
    "dropout alpha_dropout feature_alpha_dropout relu relu6 elu celu selu silu mish leaky_relu rrelu "
    "hardtanh hardswish hardsigmoid threshold".split()
)
_ATTRIBUTE_WRITES = frozenset(("__set__", "requires_grad_", "retain_grad", "register_hook"))


@lru_cache(4096)
def function_name(func: Any) -> str:
    """The function's name; operators have the name of their function: `+` is add, `*=` is mul_.

    Ops of torch.ops have their namespace's, since a custom op may be called as a function of torch is, and
    `_` at the end where they write.
    """
    if isinstance(func, OpOverload | OpOverloadPacket):
        return f"{func}_" if writes_arguments(func) else str(func)
    name = getattr(func, "__name__", "")
    return _OPERATORS.get(name, name)


@cache
def writes_by_name(name: str) -> bool:
    if name.startswith("__"):
        reads = ("__index__", "__invert__", "__int__", "__iter__")
        return name == "__setitem__" or (name.startswith("__i") and name not in reads)
    return name.endswith("_")


def may_write(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Whether a call may change one of its arguments in place."""
    if writes_by_name(name) or name in _ATTRIBUTE_WRITES or kwargs.get("out") is not None:
        return True
    return name in _INPLACE_OPTION and any(value is True for value in (*args, *kwargs.values()))


# Expressions -----------------------------------------------------------------------------------------


class RecordedCall(NamedTuple):
    """A call of the program. Its arguments hold tensors, other objects, and Expressions."""

    func: Callable[..., Any]
    args: Args
    kwargs: Kwargs = {}  # noqa: RUF012


class Expression:
    """A result that is not computed yet. Subclasses know what it is, and implement `handle_function`.

    Subclasses set their own attributes, then call `record`; `then` makes the expression of a following call.
    The inputs are kept as they are, not copied: changing one in place before the value is computed is an
    error that `value` raises.
    """

    subject: ClassVar[str] = "a deferred tensor"  # for error messages, with the fix that made it
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    program_view: Callable[[], contextlib.AbstractContextManager[Any]]
    _inputs: tuple[tuple[Tensor, int], ...]  # with their versions
    _value: Tensor | None

    def record(self, call: RecordedCall) -> Self:
        """Record the call that computes this, and the state of torch that it runs in."""
        self.call, self._value = call, None
        parents, own = [], []
        for leaf in (*call.args, *call.kwargs.values()):
            for each in leaf if isinstance(leaf, list | tuple) else (leaf,):
                if isinstance(each, Expression):
                    parents.append(each)
                elif isinstance(each, Tensor):
                    own.append(each)
        inputs = {id(tensor): (tensor, version) for parent in parents for tensor, version in parent._inputs}
        for tensor in own:
            inputs.setdefault(id(tensor), (tensor, version_of(tensor)))
        self._inputs = tuple(inputs.values())
        self._parents = tuple(parents)
        self.grad_enabled = torch.is_grad_enabled()
        self.requires_grad = self.grad_enabled and (
            any(parent.requires_grad for parent in parents) or any(tensor.requires_grad for tensor in own)
        )
        self.autocast = _autocast_dtype(self.device)
        # All expressions that descend from one recorded call: a write to one may be visible in others.
        self._family: weakref.WeakSet[Expression] = parents[0]._family if parents else weakref.WeakSet()
        self._family.add(self)
        self.program_view = parents[0].program_view if parents else _program_view()
        return self

    def then(self, call: RecordedCall, **changes: Any) -> Self:
        """This expression after one more call, with some attributes changed."""
        child = object.__new__(type(self))
        vars(child).update(vars(self), **changes)
        return child.record(call)

    def handle_function(self, name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """The result of `func(*args, **kwargs)`, with Expressions for LazyTensors that are not computed.

        Returns an Expression, a result, or NotImplemented.
        """
        return NotImplemented

    def handle_inplace(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """What this becomes by the call in place `args[0].name(...)`: an Expression, or NotImplemented."""
        return NotImplemented

    def before_materialize(self, name: str) -> None:
        """Called before the value is computed for a function that `handle_function` does not implement."""

    @property
    def device(self) -> torch.device:
        return self._inputs[0][0].device

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor, _ in self._inputs)

    @property
    def computed(self) -> bool:
        """Whether this, or what it is computed from, is in memory: then nothing is left to save."""
        return self._value is not None or any(parent.computed for parent in self._parents)

    def check_unchanged(self) -> None:
        if any(version_of(tensor) != version for tensor, version in self._inputs):
            raise UserError(
                f"{self.subject} is read after a tensor that it is computed from was changed in place "
                "(by an optimizer step?); read it before, or keep a clone"
            )

    def value(self) -> Tensor:
        """The value, computed once. Views share the memory of what they are views of, as in the program."""
        if self._value is None:
            self.check_unchanged()
            with modes_paused(), self.program_view():
                self._value = self._computed(
                    lambda leaf: leaf.value() if isinstance(leaf, Expression) else leaf
                )
        return self._value

    def materialize_aliases(self) -> None:
        """Before a write: compute everything that must not see it."""
        for member in tuple(self._family):
            member.value()

    def replay(self, substitutes: Mapping[int, Tensor]) -> Tensor:
        """The value computed from other tensors, given by the id of the input that each replaces."""

        def replaced(leaf: Any) -> Any:
            if isinstance(leaf, Expression):
                return leaf.replay(substitutes)
            return substitutes.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

        return self._computed(replaced)

    def _computed(self, argument: Callable[[Any], Any]) -> Tensor:
        """The result of the recorded call, with `argument(leaf)` for each leaf of its arguments."""
        args, kwargs = tree_map(argument, (tuple(self.call.args), dict(self.call.kwargs)))
        with self.settings():
            return self.call.func(*args, **kwargs)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Gradient mode and autocast as they were when the call was recorded."""
        with torch.set_grad_enabled(self.grad_enabled), autocast_as(self.device, self.autocast):
            yield

    def has_current_settings(self) -> bool:
        """Whether gradient mode and autocast are as they were when the call was recorded."""
        return torch.is_grad_enabled() == self.grad_enabled and _autocast_dtype(self.device) == self.autocast


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """None where autocast is off."""
    kind = device.type
    if kind not in ("cpu", "cuda") and not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def autocast_as(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast to `dtype`; None: off. Nothing is entered where it is so already."""
    if _autocast_dtype(device) == dtype:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype or torch.get_autocast_dtype(device.type), dtype is not None)


def _program_view() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A prediction sees the program's calls through a torch function mode, which is off while it handles one.

    What runs inside such a call is the program's work as well: `for_program` turns the mode on again.
    """
    for mode in current_function_modes():
        view: Callable[[], contextlib.AbstractContextManager[Any]] | None = getattr(mode, "for_program", None)
        if view is not None:
            return view
    return contextlib.nullcontext


# The tensor ------------------------------------------------------------------------------------------

# Answered by the wrapper itself, which has the right shape, dtype and place in the autograd graph.
_METADATA: set[Any] = {
    getattr(Tensor, name).__get__
    for name in (
        "shape ndim dtype layout requires_grad is_leaf grad_fn itemsize nbytes "
        "is_sparse is_meta is_quantized is_nested"
    ).split()
} | {
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}


class LazyTensor(Tensor):
    """A tensor without memory that stands for the value of `expression`."""

    expression: Expression
    node: Any  # its grad_fn when it was made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        return lazy_call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Below autograd: C++ code that does not ask __torch_function__ gets values."""
        with enable_reentrant_dispatch():
            args, kwargs = tree_map_only(
                LazyTensor, lambda lazy: lazy.expression.value().detach(), (tuple(args), kwargs or {})
            )
        return func(*args, **kwargs)

    # A prediction answers these for the tensors that it has seen, so they must not reach it.

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        value = self.expression._value
        return self.expression.device if value is None else value.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.device.type == "cpu"

    def get_device(self) -> int:
        return -1 if self.is_cpu else self.device.index or 0

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return lazy_call(Tensor.to, (self, *args), kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return (
            self
            if self.is_cuda and not args and not kwargs
            else lazy_call(Tensor.cuda, (self, *args), kwargs)
        )

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return lazy_call(Tensor.cpu, (self, *args), kwargs)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return lazy_call(Tensor.numpy, (self, *args), kwargs)

    def type(self, *args: Any, **kwargs: Any) -> Any:
        return lazy_call(Tensor.type, (self, *args), kwargs)


def lazy_tensor(expression: Expression, written: LazyTensor | None = None) -> LazyTensor:
    """The expression as a tensor; or `written`, which it becomes the value of, as after a call in place."""
    if expression.requires_grad:
        with torch.enable_grad():
            made: LazyTensor = _Recompute.apply(expression, written, *expression.inputs)
    else:
        made = _wrapper(expression) if written is None else written
    made.expression = expression
    with DisableTorchFunctionSubclass():
        made.node = made.grad_fn
    return made


def _wrapper(expression: Expression) -> LazyTensor:
    device = torch.device("cpu")
    for tensor in expression.inputs[:1]:  # autograd checks the device of gradients
        device = tensor.fake_device if is_fake(tensor) else tensor.device  # type: ignore[attr-defined]
    return make_wrapper_subclass(LazyTensor, expression.shape, dtype=expression.dtype, device=device)


class _Recompute(torch.autograd.Function):
    """The place of a LazyTensor in the autograd graph, for C++ code that does not ask __torch_function__.

    It refers to its inputs directly and not through save_for_backward: they are alive anyway, and hooks on
    saved tensors (offloading, checkpoints) have nothing to do here.
    """

    @staticmethod
    def forward(ctx: Any, expression: Expression, written: LazyTensor | None, *inputs: Tensor) -> LazyTensor:
        ctx.expression = expression
        if written is None:
            return _wrapper(expression)
        ctx.mark_dirty(written)
        return written

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        expression: Expression = ctx.expression
        refuse_second_derivatives(expression.subject, "undo the fix")
        expression.check_unchanged()
        needed = ctx.needs_input_grad[2:]
        inputs = [
            tensor.detach().requires_grad_(need)
            for tensor, need in zip(expression.inputs, needed, strict=True)
        ]
        substitutes = {id(old): new for old, new in zip(expression.inputs, inputs, strict=True)}
        with torch.enable_grad(), modes_paused(), expression.program_view():
            out = expression.replay(substitutes)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        grads = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
        return None, None, *(next(grads) if need else None for need in needed)


@no_compile
def lazy_call(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`func(*args, **kwargs)` with LazyTensors in the arguments."""
    if func in _METADATA:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    first = args[0] if args else kwargs.get("input")
    if isinstance(first, LazyTensor) and _grad_fn_replaced(first):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    name = function_name(func)
    given, options = _with_expressions(args, kwargs)
    if writes_by_name(name):
        written = _follow_write(name, first, given, options)
        if written is not None:
            return written
    else:
        result = _follow(name, func, given, options)
        if isinstance(result, Expression):
            return first if getattr(first, "expression", None) is result else lazy_tensor(result)
        if result is not NotImplemented:
            return result
    return _call_on_values(name, func, args, kwargs)


def _with_expressions(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments of `handle_function`: expressions, or the values of those that are computed."""
    if any(isinstance(arg, list | tuple) and LazyTensor in map(type, arg) for arg in args):
        return tree_map(_expression_or_value, (tuple(args), dict(kwargs)))
    return (
        [_expression_or_value(arg) for arg in args],
        {key: _expression_or_value(value) for key, value in kwargs.items()},
    )


def _expression_or_value(leaf: Any) -> Any:
    if not isinstance(leaf, LazyTensor):
        return leaf
    return value_of(leaf) if leaf.expression.computed or _grad_fn_replaced(leaf) else leaf.expression


def _follow(name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
    for arg in (*args, *kwargs.values()):
        for each in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(each, Expression):
                with modes_paused(), each.program_view():
                    result = each.handle_function(name, func, args, kwargs)
                if result is not NotImplemented:
                    return result
    return NotImplemented


def _follow_write(name: str, target: Any, args: Args, kwargs: Kwargs) -> LazyTensor | None:
    """`target` after a call in place that its expression follows; else None."""
    expression = args[0] if args else None
    if not isinstance(target, LazyTensor) or not isinstance(expression, Expression):
        return None
    with modes_paused(), expression.program_view():
        result = expression.handle_inplace(name, args, kwargs)
    if result is NotImplemented:
        return None
    return target if result is expression else lazy_tensor(result, target)


def _call_on_values(name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
    views = []

    def value(lazy: LazyTensor) -> Tensor:
        expression = lazy.expression
        views.append(expression.program_view)
        if not expression.computed:
            expression.before_materialize(name)
        if may_write(name, args, kwargs):
            expression.materialize_aliases()
        return value_of(lazy)

    args, kwargs = tree_map_only(LazyTensor, value, (tuple(args), dict(kwargs)))
    with modes_paused(), views[0]() if views else contextlib.nullcontext():
        return func(*args, **kwargs)


def _grad_fn_replaced(lazy: LazyTensor) -> bool:
    """Whether C++ code (a module's full backward hook) has given the tensor another grad_fn."""
    with DisableTorchFunctionSubclass():
        return lazy.grad_fn is not lazy.node or (lazy.node is None and lazy.requires_grad)


def value_of(lazy: LazyTensor) -> Tensor:
    if not _grad_fn_replaced(lazy):
        return lazy.expression.value()
    with DisableTorchFunctionSubclass():
        return Tensor.view_as(lazy, lazy)


class _Pauses(threading.local):
    depth = 0


_pauses = _Pauses()


class modes_paused:
    """Inside, the modes that make LazyTensors leave calls as they are."""

    @staticmethod
    def now() -> bool:
        return _pauses.depth > 0

    def __enter__(self) -> None:
        _pauses.depth += 1

    def __exit__(self, *_: object) -> None:
        _pauses.depth -= 1
