"""What all ops share: argument checks, the choice of an implementation, launches of Triton kernels, dtypes
under autocast, matrix products into existing memory, autograd, and ops inside compiled models.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from oomph import torch_internals
from oomph.errors import ArgumentError
from oomph.torch_internals import (
    AUTOGRAD_KEYS,
    FakeTensor,
    SetExcludeDispatchKeyGuard,
    python_kernels,
    storage_id,
)
from oomph.units import parse_bytes

P = ParamSpec("P")
R = TypeVar("R")

# Argument checks -------------------------------------------------------------------------------------

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_one_of(name: str, given: object, valid: Sequence[object]) -> None:
    if given not in valid:
        raise ArgumentError(f"{name}={given!r} is not valid; choose from {', '.join(map(repr, valid))}")


def check_flags(**flags: object) -> None:
    for name, given in flags.items():
        if not isinstance(given, bool):
            raise ArgumentError(f"{name}={given!r} is not valid; choose from False, True")


def is_number(given: Any) -> bool:
    """A finite number that torch takes: no boolean, and no integer of more than 64 bits."""
    largest = sys.float_info.max if isinstance(given, float) else 2**63 - 1
    return isinstance(given, Real) and not isinstance(given, bool) and abs(given) <= largest  # type: ignore[operator]


def version_of(tensor: Tensor) -> int:
    """How often its memory was written; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def check_whole(least: int = 1, why: str = "", **numbers: object) -> None:
    for name, given in numbers.items():
        if isinstance(given, bool) or not isinstance(given, int) or not least <= given < 2**31:
            raise ArgumentError(f"{name}={given!r} is not valid; give a whole number >= {least}{why}")


def not_none(**values: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def check_number(valid: str, is_valid: Callable[[float], bool], **numbers: Any) -> None:
    for name, number in numbers.items():
        if not is_number(number) or not is_valid(number):
            raise ArgumentError(f"{name}={number!r} is not valid; give {valid}")


def scale_or_default(scale: float | None, default: float) -> float:
    """The factor of attention scores."""
    if scale is None:
        return default
    check_number("a finite number, or None for 1/sqrt(head size)", lambda _: True, scale=scale)
    return float(scale)


def check_floating(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            given = "None" if tensor is None else f"a {type(tensor).__name__}"
            raise ArgumentError(f"{name} is {given}, not a tensor; valid: a tensor of floats")
        if tensor.dtype not in FLOATS:
            raise ArgumentError(
                f"{name} has dtype {tensor.dtype}; valid: float16, bfloat16, float32, float64"
            )


def check_shape(valid: Sequence[int], why: str = "", **tensors: Tensor | None) -> None:
    for name, tensor in not_none(**tensors).items():
        if list(tensor.shape) != list(valid):
            raise ArgumentError(f"{name} has shape {list(tensor.shape)}; valid: {list(valid)}{why}")


def check_same_device(**tensors: Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in not_none(**tensors).items()}
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ArgumentError(f"all tensors must be on one device; given: {found}")


def check_same_dtype(**tensors: Tensor | None) -> None:
    dtypes = {name: tensor.dtype for name, tensor in not_none(**tensors).items()}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ArgumentError(f"all tensors must have one dtype (or run under autocast); given: {found}")


def has_values(tensor: Tensor) -> bool:
    """Whether checks may read the tensor: not in a prediction, on meta, or inside torch.func."""
    return not (is_fake(tensor) or tensor.is_meta or torch_internals.current_functorch_transform())


def is_readable(tensor: Tensor) -> bool:
    """Whether checks may read the tensor without waiting for a device."""
    return tensor.device.type == "cpu" and has_values(tensor)


def parse_memory_budget(memory_budget: str | int | None) -> int | None:
    """The bytes of a `memory_budget`: None, a number of bytes, or a size such as "256MiB"."""
    if memory_budget is None:
        return None
    try:
        return parse_bytes(memory_budget)
    except ArgumentError as error:
        raise ArgumentError(f"memory_budget={memory_budget!r}: {error}; or a number of bytes") from None


# Choice of an implementation -------------------------------------------------------------------------

_LOG = logging.getLogger("oomph.ops")
_logged: set[tuple[str, str, str]] = set()
ASKED_FOR = "asked for"


@dataclass(frozen=True)
class Choice:
    """Which implementation runs (`impl`), why in one sentence, and the sizes chosen with it (`settings`)."""

    impl: str
    reason: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def explained_by(choose: Callable[..., Choice]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Attach the function that chooses an op's implementation, for `explain`.

    `choose` gets all of the op's arguments by name, with the op's defaults.
    """

    def attach(op: Callable[P, R]) -> Callable[P, R]:
        op.choose = choose  # type: ignore[attr-defined]
        return op

    return attach


def explain(op: Callable[..., Any], *arguments: Any, **options: Any) -> Choice:
    """Which implementation `op(*arguments, **options)` would run, and why. The op does not run.

    oomph.ops.explain(oomph.ops.attention, q, k, v, causal=True)
    # Choice(impl='cudnn', reason='...', settings={})
    """
    choose = getattr(op, "choose", None)
    if choose is None:
        raise ArgumentError(
            f"{getattr(op, '__name__', op)!r} makes no choice to explain; give an op of oomph.ops"
        )
    # A TypeError where the op itself would raise one.
    call = inspect.signature(op).bind(*arguments, **options)
    call.apply_defaults()
    choice = choose(**call.arguments)
    assert isinstance(choice, Choice)
    return choice


def choose_triton_or_torch(
    impl: str, tensor: Tensor, obstacle: str | None, *, kernels: str, plain: str = ""
) -> Choice:
    """The usual choice: what was asked for; else Triton on CUDA without an obstacle; else plain torch.

    kernels, plain: the reason to give for each.
    """
    if impl == "triton" and obstacle:
        raise ArgumentError(f"impl='triton' cannot run: {obstacle}; choose 'auto' or 'chunked'")
    if impl != "auto":
        return Choice(impl, ASKED_FOR)
    if tensor.device.type != "cuda":
        where = f"the tensors are on {tensor.device.type}"
        return Choice("chunked", f"{where}: {plain}" if plain else where)
    if obstacle:
        return Choice("chunked", obstacle)
    return Choice("triton", kernels)


def log_choice(op: str, choice: Choice) -> Choice:
    """Log a choice (logger "oomph.ops", level INFO) once per op, implementation and reason."""
    if torch.compiler.is_compiling():  # a call of a logger breaks the graph
        return choice
    key = (op, choice.impl, choice.reason)
    if _LOG.isEnabledFor(logging.INFO) and key not in _logged:
        _logged.add(key)
        _LOG.info("%s: %s (%s)", op, choice.impl, choice.reason)
    return choice


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape but no data, as in a prediction."""
    return isinstance(tensor, FakeTensor)


def why_not_triton(tensor: Tensor, products: torch.dtype | None = None) -> str | None:
    """Why kernels, with matrix products in `products`, cannot run on this tensor; None where they can."""
    if is_fake(tensor):
        return None if tensor.device.type == "cuda" else f"the tensors are on {tensor.device.type}"
    if not _triton_is_installed():
        return "Triton is not installed (pip install 'oomph[kernels]')"
    if tensor.device.type == "cpu" and interpreted() and products == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    if tensor.device.type == "cuda" or interpreted():
        return None
    return f"the tensors are on {tensor.device.type}"


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU. Slow; for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


# Triton kernels --------------------------------------------------------------------------------------
#
# A prediction runs the same Python code on fake tensors. Everything around a kernel (checks, allocations,
# matrix products) happens as in a run; in place of the kernel, an op without effect shows its tensors to the
# trace. So a trace makes the allocations of a real run, can estimate how long the kernel takes, and needs
# neither a GPU nor Triton.

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


class Kernels:
    """The Triton kernels of one module, which is imported when the first of them is launched on real data."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._imported: dict[str, Any] = {}

    def launch(
        self,
        name: str,
        grid: Grid,
        *arguments: Any,
        flops: float = 0.0,
        passes: float = 1.0,
        efficiency: float = 0.0,
        **constants: Any,
    ) -> None:
        """Launch kernel `name` on the device of its first argument; on fake tensors, show it to the trace.

        Arguments that the kernel will not read, given its constants, may be None. For predictions of its
        time: `flops` of its matrix products; their `efficiency` as a share of the GPU's nominal rate, where
        it was measured; the number of `passes` over its tensors, below 1 where it reads a part of them.
        """
        tensor = arguments[0]
        if isinstance(tensor, FakeTensor):
            tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
            costs = float(flops), float(passes), float(efficiency)
            _kernel_op()(tensors, f"{self._module}.{name}", *costs)
            return
        kernel = self._imported.get(name)
        if kernel is None:
            kernel = self._imported[name] = getattr(importlib.import_module(self._module), name)
        # Triton launches kernels on the current device, which may not be that of the tensors.
        if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
            with torch.cuda.device(tensor.device):
                kernel[grid](*arguments, **constants)
        else:
            kernel[grid](*arguments, **constants)


@functools.cache
def _kernel_op() -> Callable[..., None]:
    """oomph::kernel, an op without effect or result, which a trace sees as it sees every op."""
    library = torch.library.Library("oomph", "FRAGMENT")
    library.define("kernel(Tensor[] tensors, str name, float flops, float passes, float efficiency) -> ()")
    library.impl("kernel", lambda *arguments: None, "CompositeExplicitAutograd")
    _libraries.append(library)
    op: Callable[..., None] = torch.ops.oomph.kernel.default
    return op


_libraries: list[torch.library.Library] = []  # an op lives as long as the library that defines it


@dataclass(frozen=True)
class TileConfig:
    """Rows x columns that a program multiplies at a time, and its launch parameters."""

    rows: int
    columns: int
    warps: int
    stages: int

    @property
    def launch_options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest that is not below `size` and `least`."""
    return max(least, 1 << max(0, size - 1).bit_length())


def contiguous_rows(x: Tensor) -> Tensor:
    """A copy where the last dimension is not contiguous, as the gradient of a sum is not (it is expanded)."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strided(x: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor of four dimensions whose rows are contiguous, and its other strides."""
    return x, x.stride(0), x.stride(1), x.stride(2)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


# Autocast and dtypes ---------------------------------------------------------------------------------


def matmul_dtype(x: Tensor) -> torch.dtype:
    """x's dtype, or autocast's where it is enabled."""
    # Autocast leaves float64 alone, and so does this.
    if autocast_enabled(x) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Disables autocast for x's device; a null context where it is disabled already."""
    if not autocast_enabled(x):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def autocast_enabled(x: Tensor) -> bool:
    kind = x.device.type
    # Without autocast, meta raises an error. torch 2.11 cannot compile torch.amp.is_autocast_available.
    return kind != "meta" and torch.is_autocast_enabled(kind)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def state_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of recurrent states: float64 if any input is; else float32."""
    is_double = any(each is not None and each.dtype == torch.float64 for each in tensors)
    return torch.float64 if is_double else torch.float32


# Matrix products into existing memory ----------------------------------------------------------------


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out = a @ b, or out += a @ b. `out` may be wider than a and b: sums are then in its dtype."""
    if out.dtype == a.dtype:
        if add:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
    elif out.device.type == "cuda" and out.dtype == torch.float32:
        # cuBLAS multiplies half-precision matrices and sums in fp32 without a copy of either.
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif add:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


# Backward passes -------------------------------------------------------------------------------------


def has_hooks(weight: Tensor) -> bool:
    """Whether a hook waits for the tensor's next gradient."""
    return bool(weight._backward_hooks) or bool(getattr(weight, "_post_accumulate_grad_hooks", None))


def can_accumulate_into_grad(weight: Tensor) -> bool:
    """Whether weight.grad is a plain tensor to add to, and no hook waits. Callable before backward."""
    grad = weight.grad
    return (
        grad is not None
        and (type(grad) is Tensor or is_fake(grad))
        and grad.layout == torch.strided
        and grad.dtype == weight.dtype
        and grad.shape == weight.shape
        and not grad.requires_grad
        and not has_hooks(weight)
    )


def accumulates_into_grad(weight: Tensor) -> bool:
    """In backward: whether adding to weight.grad is the same as returning the gradient to autograd."""
    return can_accumulate_into_grad(weight) and weight.requires_grad and _autograd_would_add(weight)


def _autograd_would_add(weight: Tensor) -> bool:
    """loss.backward() adds to .grad; torch.autograd.grad() returns the gradient and leaves .grad alone."""
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return torch_internals.will_engine_execute_node(node)  # type: ignore[arg-type]
    except RuntimeError:  # raised inside torch.autograd.grad
        return False


def refuse_second_derivatives(op: str, others: str = "impl='reference' can") -> None:
    """Called by a backward, which runs with gradients enabled for create_graph=True only.

    torch's once_differentiable is not enough: where the incoming gradient has no graph, as from a sum, it
    returns gradients without one, and a penalty on them is silently a constant.
    """
    if torch.is_grad_enabled():
        raise ArgumentError(f"{op} cannot be differentiated twice (create_graph=True); {others}")


class OpFunction(torch.autograd.Function):
    """Base class of the ops' autograd functions. Refuses torch.func and forward-mode AD in one sentence."""

    op: str  # the public name
    instead = "impl='reference' can"

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        if torch_internals.current_functorch_transform() is not None:
            raise ArgumentError(
                f"{cls.op} cannot run inside torch.func transforms (grad, vmap, jvp, ...); {cls.instead}, "
                "and so can torch.autograd.grad outside of them"
            )
        return super().apply(*arguments)  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        function = ctx._forward_cls
        raise ArgumentError(f"{function.op} has no forward-mode derivative (jvp); {function.instead}")


def refuse_forward_mode(op: str, *tensors: Tensor) -> None:
    """Before a kernel of torch that has no forward-mode derivative."""
    if torch.compiler.is_compiling():
        return
    if any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ArgumentError(f"{op} has no forward-mode derivative (jvp); {OpFunction.instead}")


def depend_on(result: Tensor, *inputs: Tensor | None) -> Tensor:
    """`result` with the inputs in its graph, where it or they have no elements: their gradients are zeros."""
    for x in inputs:
        if x is not None:
            result = result - x.sum().to(result.dtype)  # not +, which would turn -0.0 into 0.0
    return result


# torch.compile ---------------------------------------------------------------------------------------


def no_compile(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.disable, applied only while something is being compiled: a graph break, same results.

    torch.compiler.disable itself loads the compiler, which takes seconds, and costs more at every call than
    the checks of most ops.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        nonlocal disabled
        # The first is True in code that the compiler traces. The second is set where the compiler is active
        # but does not trace this call: it would begin to trace inside of `function`.
        if not torch.compiler.is_dynamo_compiling() and torch_internals.get_eval_frame_callback() is None:
            return function(*arguments, **options)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*arguments, **options)

    return run


# Ops inside compiled models ---------------------------------------------------------------------------
#
# They are opaque to the compiler; forward and backward run as in eager mode. A compiler that traced into an
# op would unroll its loops over tiles and store what the op recomputes. Here the graph calls
# `oomph::forward`, which runs the op under autograd and keeps its graph; the backward graph calls
# `oomph::backward`, which runs that graph. What the op saves for backward is the same as without a compiler,
# and it is freed with the handle that the compiled graph saves.

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
    return ("constant", type(value), value)  # True == 1 == 1.0


def _argument(spec: Any, tensors: Iterator[Tensor]) -> Any:
    if spec[0] == "tensor":
        return next(tensors)
    if spec[0] == "items":
        items = [_argument(item, tensors) for item in spec[2]]
        return spec[1](items) if spec[1] is tuple else spec[1](*items)
    return spec[2]


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
