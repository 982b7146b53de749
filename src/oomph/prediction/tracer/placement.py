"""Which device the program sees: `device=` arguments, `.to`, `.cuda`, `tensor.device`, the default device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from oomph import torch_internals as internals
from oomph.prediction.ops.rules import program_error
from oomph.prediction.patches import Patches
from oomph.prediction.tracer.fake_cuda import LegacyTensorType
from oomph.prediction.tracer.streams import DEVICE
from oomph.prediction.tracer.tracer import Place, Tracer
from oomph.torch_internals import (
    FakeTensor,
    device_constructors,
    disable_torch_function,
    is_traceable_wrapper_subclass,
)

Handler = Callable[[Any, Any, Sequence[Any], dict[str, Any]], Any]
_HOST = torch.device("cpu")
_ATTRIBUTES = vars(torch.Tensor)["__dict__"]
_MOST_COPIED = 1 << 20  # elements
_MOST_FILLED = 1 << 30  # bytes; a larger array of one number is not contiguous: files cannot be read into it


class PlacementMode(TorchFunctionMode):
    """Sees the program's own calls into torch, above autograd."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.default: torch.device | None = None  # what torch.set_default_device was given

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _GETTERS and not kwargs:
            return func(*args)
        given = dict(kwargs) if kwargs else {}
        call = self.tracer.call
        call.handling += 1
        try:
            for kind in types:
                if not issubclass(kind, torch.Tensor):  # the program's own class, as for lazy loading
                    with self.for_program():
                        result = kind.__torch_function__(func, types, args, given)
                    if result is not NotImplemented:
                        return result
            if self.default is not None and given.get("device") is None and func in device_constructors():
                given["device"] = self.default
            handler = _HANDLERS.get(func)
            if handler is not None:
                return handler(self.tracer, func, args, given)
            return self._call(func, args, given)
        except (RuntimeError, IndexError) as error:
            self.tracer.estimates.call_failed(error, args, given)
            raise
        finally:
            call.handling -= 1

    def _call(self, func: Any, args: Sequence[Any], given: dict[str, Any]) -> Any:
        call = self.tracer.call
        if given.pop("pin_memory", False):
            return self.tracer.pinned.add(self._call(func, args, given))
        device = given.get("device")
        place = place_of(device) if device is not None else None
        if place is not None:
            if not any(map(is_traceable_wrapper_subclass, args)):  # one makes its inner tensors there itself
                given["device"] = _HOST
        elif call.place is None and self._takes_gpu_tensor(args):
            # Tensors that torch's C++ makes on the way (an arange inside one_hot) are there too.
            place = "gpu"
        if place is None:
            return func(*args, **given)
        before, call.place = call.place, place
        try:
            return func(*args, **given)
        finally:
            call.place = before

    @contextlib.contextmanager
    def for_program(self) -> Iterator[None]:
        """The program's own code runs from inside a call (a hook): see its calls again."""
        if not self.tracer.call.handling:
            yield
            return
        before, self.tracer.call.handling = self.tracer.call.handling, 0
        try:
            with self, self.tracer.placing(None):
                yield
        finally:
            self.tracer.call.handling = before

    def _takes_gpu_tensor(self, args: Sequence[Any]) -> bool:
        for arg in args:
            if isinstance(arg, (list, tuple)):
                if arg and _is_fake(arg[0]) and self.tracer.on_gpu(arg[0]):
                    return True
            elif _is_fake(arg) and self.tracer.on_gpu(arg):
                return True
        return False


def _is_fake(arg: Any) -> bool:
    """Also inside of a transform of torch.func, where a wrapper hides it."""
    return isinstance(arg, FakeTensor) or (type(arg) is torch.Tensor and internals.is_functorch_wrapped(arg))


def place_of(device: Any) -> Place | None:
    """The place a device argument names; None for one that is neither (meta)."""
    asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    kind = asked.type
    if kind == "cuda" and asked.index:
        message = f"CUDA error: invalid device ordinal ({asked} was asked for; one GPU is traced)"
        raise program_error(torch.AcceleratorError(message))
    return {"cuda": "gpu", "cpu": "host"}.get(kind)  # type: ignore[return-value]


def device_of(tracer: Tracer, tensor: torch.Tensor) -> torch.device:
    """The device the program believes the tensor to be on."""
    with disable_torch_function():
        return DEVICE if tracer.on_gpu(tensor) else _true_device(tensor)


def _true_device(tensor: torch.Tensor) -> torch.device:
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


class _DeviceCopy(torch.autograd.Function):
    """A copy to another device, whose gradient is copied back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, tracer: Tracer, place: Place, dtype: torch.dtype, non_blocking: bool
    ) -> torch.Tensor:
        ctx.tracer, ctx.dtype = tracer, tensor.dtype
        ctx.back = "gpu" if tracer.on_gpu(tensor) else "host"
        with tracer.placing(place):
            return torch.ops.aten._to_copy.default(tensor, dtype=dtype, non_blocking=non_blocking)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        with ctx.tracer.placing(ctx.back):
            return torch.ops.aten._to_copy.default(grad, dtype=ctx.dtype), None, None, None, None


def move(
    tracer: Tracer,
    tensor: torch.Tensor,
    place: Place,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
) -> torch.Tensor:
    """A copy of the tensor on the other device; `non_blocking`: the program does not wait for it."""
    dtype = dtype or tensor.dtype
    if tracer.batch_sizes is not None and place == "gpu" and tracer.is_batch(tensor):
        tensor = tracer.batch_sizes.resize(tensor)
    if is_traceable_wrapper_subclass(tensor):  # its own code moves its inner tensors
        device = DEVICE if place == "gpu" else _HOST
        with tracer.placing(place):
            return torch.ops.aten._to_copy.default(
                tensor, dtype=dtype, device=device, non_blocking=non_blocking
            )
    if tensor.requires_grad and torch.is_grad_enabled():
        return _DeviceCopy.apply(tensor, tracer, place, dtype, non_blocking)
    with tracer.placing(place):
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype, non_blocking=non_blocking)


def _to(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    rest, kwargs = _like_tensor(tracer, args[1:], kwargs)
    copy = kwargs.pop("copy", False) or (len(rest) > 3 and rest.pop(3)) or False
    device, dtype, non_blocking, memory_format = _parse_to(tracer, internals.parse_to, rest, kwargs)
    plain: dict[str, Any] = {"dtype": dtype or tensor.dtype}
    if copy:  # which some tensor subclasses do not take
        plain["copy"] = True
    if memory_format is not None:
        plain["memory_format"] = memory_format
    place = place_of(device) if device is not None else None
    if device is not None and place is None:
        return func(tensor, device, **plain)
    if place is None or place == ("gpu" if tracer.on_gpu(tensor) else "host"):
        return func(tensor, **plain)
    moved = move(tracer, tensor, place, dtype, bool(non_blocking))
    return moved if memory_format is None else moved.contiguous(memory_format=memory_format)


def _like_tensor(
    tracer: Tracer, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The device and dtype of the other tensor in tensor.to(other) and module.to(other)."""
    if args and isinstance(args[0], torch.Tensor):
        args = [device_of(tracer, args[0]), args[0].dtype, *args[1:]]
    if isinstance(other := kwargs.get("tensor"), torch.Tensor):
        kwargs = {**kwargs, "device": device_of(tracer, other), "dtype": other.dtype}
        del kwargs["tensor"]
    return list(args), kwargs


def _parse_to(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What nn.Module.to makes of its arguments. A bare number is a GPU, whether torch sees one or not."""
    args, kwargs = _like_tensor(tracer, args, kwargs)
    if args and isinstance(args[0], int):
        args = [torch.device("cuda", args[0]), *args[1:]]
    if isinstance(kwargs.get("device"), int):
        kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
    return func(*args, **kwargs)


def _cuda(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    non_blocking = bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    return args[0] if tracer.on_gpu(args[0]) else move(tracer, args[0], "gpu", non_blocking=non_blocking)


def _cpu(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return move(tracer, args[0], "host") if tracer.on_gpu(args[0]) else args[0]


def _type(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`tensor.type()` and `tensor.type(torch.cuda.FloatTensor)`, or its name: the old spelling of `.to`."""
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if wanted is None:
        name = func(args[0])
        return name.replace("torch.", "torch.cuda.") if tracer.on_gpu(args[0]) else name
    if isinstance(wanted, LegacyTensorType):
        return _cuda(tracer, func, args, {}).to(wanted.dtype)
    if isinstance(wanted, str) and wanted.startswith("torch.cuda."):
        moved = _cuda(tracer, func, args, {})
        return moved.type(wanted.replace("torch.cuda.", "torch."))
    return func(*args, **kwargs)


def _from_data(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """torch.tensor, torch.as_tensor: made on the host from real data, then moved."""
    device = kwargs.pop("device", None)
    kwargs.pop("pin_memory", None)
    if isinstance(args[0] if args else None, FakeTensor):
        made = args[0].clone() if func is torch.tensor else args[0]
        if kwargs.get("dtype") is not None:
            made = made.to(kwargs["dtype"])
    else:
        gradient = kwargs.pop("requires_grad", False)
        made = func(*map(_with_numbers, args), **kwargs)
        place = place_of(device) if device is not None else "host"
        if place == "gpu":
            made = move(tracer, made, "gpu")
        elif place is None:
            made = made.to(device)
        return made.requires_grad_() if gradient else made
    return made if device is None else _to(tracer, torch.Tensor.to, (made, device), {})


def _new_tensor(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """tensor.new_tensor(data): torch.tensor of the same dtype and on the same device."""
    tensor, *data = args
    options = {"dtype": tensor.dtype, "device": device_of(tracer, tensor)}
    given = {name: value for name, value in kwargs.items() if value is not None}
    return _from_data(tracer, torch.tensor, data, options | given)


def _with_numbers(data: Any) -> Any:
    """Nested lists with numbers in place of fake tensors, which torch would read element by element."""
    if isinstance(data, (list, tuple)):
        return [_with_numbers(part) for part in data]
    return data.item() if isinstance(data, FakeTensor) else data


def _numpy(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not isinstance(tensor, FakeTensor):
        return func(*args, **kwargs)
    if tracer.on_gpu(tensor):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )
    with internals.disable_dispatch_modes(), disable_torch_function():
        tracer.values.resolve(tensor)
    if tracer.values.known(tensor) is None:
        tracer.note("values read on the host as a NumPy array are representative")
        if not tensor.dtype.is_floating_point:
            tracer.estimates.read_integers()
    values = tracer.values.whole(tensor)
    values = values.float() if values.dtype == torch.bfloat16 else values
    array = values.numpy()
    filled = 0 in values.stride() and values.nbytes <= _MOST_FILLED
    return array.copy("K") if filled or values.numel() <= _MOST_COPIED else array


def _property(on_gpu: Any, otherwise: Callable[[torch.Tensor], Any]) -> Handler:
    def handle(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return on_gpu if tracer.on_gpu(args[0]) else otherwise(args[0])

    return handle


class _FlexAttention(torch.autograd.Function):
    """FlexAttention as its compiled kernels run it: no scores are stored, one number of each row is kept."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.mark_non_differentiable(sums)
        return out, sums

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:  # type: ignore[override]
        query, key, value, _, sums = ctx.saved_tensors
        products = torch.empty_like(sums)  # of each row of the result and its gradient
        gradients = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
        del products
        return gradients


def _flex_attention(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tracer.note("FlexAttention is assumed to be compiled; without torch.compile it stores all scores")
    with tracer.placing("gpu" if tracer.on_gpu(args[0]) else "host"):
        out, sums = _FlexAttention.apply(*args[:3])
    return out, sums, sums


_T = torch.Tensor


def _setitem(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A number that is assigned to a tensor of the GPU stays on the host; masks are then filled in place."""
    target, index, value = args
    index = _with_number_lists(index)
    parts = index if isinstance(index, tuple) else (index,)
    masked = any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)
    if tracer.on_gpu(target) and masked and isinstance(value, (bool, int, float, complex)):
        with tracer.placing("host"):
            value = torch.full((), value, dtype=target.dtype)
    value = _at_place_of(tracer, target, value)
    with tracer.placing("gpu" if tracer.on_gpu(target) and tracer.call.place is None else tracer.call.place):
        return func(target, index, value)


def _copy(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target, source, *rest = args
    return func(target, _at_place_of(tracer, target, source), *rest, **kwargs)


def _at_place_of(tracer: Tracer, target: torch.Tensor, source: Any) -> Any:
    """A source that needs a gradient is copied to the host by itself: its gradient comes back to the GPU."""
    needs_gradient = isinstance(source, torch.Tensor) and source.requires_grad and torch.is_grad_enabled()
    if needs_gradient and tracer.on_gpu(source) and not tracer.on_gpu(target):
        return move(tracer, source, "host")
    return source


def _getitem(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target, index = args
    with tracer.placing("gpu" if tracer.on_gpu(target) and tracer.call.place is None else tracer.call.place):
        return func(target, _with_number_lists(index))


def _with_number_lists(index: Any) -> Any:
    """Of an index for several dimensions: lists of tensors, as in x[rows, columns], become numbers."""
    if not isinstance(index, tuple):
        return index
    return tuple(_with_numbers(part) if isinstance(part, (list, tuple)) else part for part in index)


def _set_data(tracer: Tracer, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    tensor, data = args
    if isinstance(data, FakeTensor) and not isinstance(tensor, FakeTensor):  # a tensor with values
        # torch.utils.swap_tensors refuses tensors with weak references, such as a trace has.
        made = data.detach()
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, tensor.requires_grad)
        else:
            made.__class__ = _fake_class(tensor.__class__)
        tensor.__class__ = type(made)
        tensor.__dict__.update(made.__dict__)
        internals.swap_tensor_impl(tensor, made)
    else:
        func(tensor, data)
    tracer.values.take(tensor, data)


# What programs ask most often, and what needs no handling.
_GETTERS = {
    *(
        getattr(_T, name).__get__
        for name in ("shape", "dtype", "ndim", "layout", "requires_grad", "grad", "grad_fn", "is_leaf")
    ),
    *(_T.is_sparse.__get__, _T.stride, _T.size, _T.dim, _T.numel, _T.element_size),  # type: ignore[attr-defined]
    *(_T.is_contiguous, _T.is_floating_point, _T.is_complex, _T.untyped_storage, _T.storage_offset),
    *(torch.is_complex, torch.is_floating_point),
}

_HANDLERS: dict[Any, Handler] = {
    _T.__setitem__: _setitem,
    _T.__getitem__: _getitem,
    _T.copy_: _copy,
    _T.to: _to,
    _T.cuda: _cuda,
    _T.cpu: _cpu,
    _T.type: _type,
    _T.type_as: lambda tracer, func, args, kwargs: _to(tracer, _T.to, args, kwargs),
    _T.numpy: _numpy,
    _T.data.__set__: _set_data,  # type: ignore[attr-defined]
    internals.parse_to: _parse_to,
    internals.flex_attention_hop: _flex_attention,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    _T.new_tensor: _new_tensor,
    torch.asarray: _from_data,
    _T.device.__get__: lambda tracer, func, args, kwargs: device_of(tracer, args[0]),  # type: ignore[attr-defined]
    _T.is_cuda.__get__: _property(True, lambda tensor: False),  # type: ignore[attr-defined]
    _T.is_cpu.__get__: _property(False, lambda tensor: tensor.is_cpu),  # type: ignore[attr-defined]
    _T.get_device: _property(0, lambda tensor: -1),
    _T.is_pinned: _property(False, lambda tensor: False),
}


def without_cuda(argument: Any) -> Any:
    """The host for a device of CUDA, any other argument as it is."""
    return _HOST if isinstance(argument, torch.device) and argument.type == "cuda" else argument


def install_tensor_device(patches: Patches, tracer: Tracer) -> None:
    """`tensor.device` gives the fake device to the program, the true one to torch's own fake kernels.

    A wrapper subclass is where its inner tensors are; to torch it is on the host, as they are.
    """

    def device(tensor: FakeTensor) -> torch.device:
        if tensor.fake_mode.in_kernel_invocation:
            return torch.device("meta")
        if tracer.call.inside_dispatch:
            return tensor.fake_device
        return device_of(tracer, tensor)

    def tolist(tensor: FakeTensor) -> Any:
        if tensor.fake_mode is not tracer.fake_mode:
            return list_elements(tensor)
        tracer.reads += 1
        return tracer.guard.call(
            "value",
            torch.ops.aten._local_scalar_dense.default,
            lambda: tracer.estimates.numbers(tensor),
            lambda: list_elements(tensor),
        )

    list_elements, is_shared = FakeTensor.tolist, torch.Tensor.is_shared
    patches.set(torch.Tensor, "is_shared", lambda tensor: tracer.on_gpu(tensor) or is_shared(tensor))
    patches.set(FakeTensor, "tolist", tolist)
    patches.set(FakeTensor, "device", property(device))
    make_wrapper = getattr(*internals.MAKE_WRAPPER_SUBCLASS)

    def make_wrapper_on_host(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = {name: without_cuda(value) for name, value in kwargs.items()}
        return make_wrapper(*map(without_cuda, args), **given)

    patches.set(*internals.MAKE_WRAPPER_SUBCLASS, staticmethod(make_wrapper_on_host))
    make_subclass, as_subclass = (getattr(*pair) for pair in internals.MAKE_SUBCLASS)

    def make_fake_subclass(
        cls: Any, data: torch.Tensor, require_grad: bool = False, **options: Any
    ) -> torch.Tensor:
        if not isinstance(data, FakeTensor) or issubclass(cls, FakeTensor):
            return make_subclass(cls, data, require_grad, **options)
        if issubclass(cls, internals.UninitializedTensorMixin):
            with internals.disable_dispatch_modes(), disable_torch_function():
                lazy = make_subclass(cls, torch.empty(0), require_grad)
            return make_lazy_like(tracer, lazy, data)
        with torch.no_grad(), disable_torch_function():
            made = data.detach()
        made.__class__ = _fake_class(cls)
        return made.requires_grad_(require_grad)

    def as_fake_subclass(data: torch.Tensor, cls: Any) -> torch.Tensor:
        if not isinstance(data, FakeTensor) or issubclass(cls, FakeTensor):
            return as_subclass(data, cls)
        made = data.view_as(data)
        made.__class__ = _fake_class(cls)
        return made

    make = torch.Tensor.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if cls is torch.Tensor:
            return make(cls, *args, **kwargs)
        # torch's way calls an op, whose result has a class already.
        is_given = len(args) == 1 and isinstance(args[0], torch.Tensor)
        return as_fake_subclass(args[0] if is_given else make(torch.Tensor, *args, **kwargs), cls)

    patches.set(torch.Tensor, "__new__", new)
    patches.set(FakeTensor, "get_nested_int", _nested_int)
    select_backend = getattr(*internals.JAGGED_SDPA_BACKEND)

    def jagged_backend(query: torch.Tensor, *args: Any) -> SDPBackend:
        """Of scaled_dot_product_attention on jagged tensors of the GPU, in torch's order."""
        if not tracer.on_gpu(query):
            return select_backend(query, *args)
        if query.dtype in (torch.float16, torch.bfloat16) and torch.backends.cuda.flash_sdp_enabled():
            return SDPBackend.FLASH_ATTENTION
        efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
        return SDPBackend.EFFICIENT_ATTENTION if efficient else SDPBackend.MATH

    patches.set(*internals.JAGGED_SDPA_BACKEND, jagged_backend)
    patches.set(*internals.MAKE_SUBCLASS[0], staticmethod(make_fake_subclass))
    patches.set(*internals.MAKE_SUBCLASS[1], as_fake_subclass)


def make_lazy_like(tracer: Tracer, lazy: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialized parameters and buffers are real and empty: give one the dtype and place of a tensor."""
    with internals.disable_dispatch_modes(), disable_torch_function():
        lazy.data = torch.empty(0, dtype=tensor.dtype)
    lazy.is_on_traced_gpu = tracer.on_gpu(tensor)  # type: ignore[attr-defined]
    return lazy


def _nested_int(tensor: FakeTensor, *, coeff: int = 1) -> Any:
    """The length of a jagged dimension, one for each tensor of offsets; as torch makes it for real ones."""
    if tensor.nested_int_memo is None:
        tensor.nested_int_memo = internals.get_tensor_symint(torch.empty(0, device="meta"))
    length: Any = tensor.nested_int_memo
    return length * coeff


class _FakeBase(FakeTensor):
    """What the __torch_function__ of a class of the program's calls last. `kwargs` may be None."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return internals.disabled_torch_function_impl(func, types, args, kwargs or {})


@functools.cache
def _fake_class(cls: type) -> Any:
    """A class of the program's for tensors that are fake."""
    if issubclass(FakeTensor, cls):  # torch.Tensor
        return FakeTensor
    above = cls.__mro__[: cls.__mro__.index(torch.Tensor)]
    base = _FakeBase if any("__torch_function__" in vars(each) for each in above) else FakeTensor
    attributes = property(_ATTRIBUTES.__get__, _set_attributes)
    return type(cls.__name__, (cls, base), {"__module__": cls.__module__, "__dict__": attributes})


def _set_attributes(tensor: FakeTensor, given: dict[str, Any]) -> None:
    """Programs may replace the attributes of a tensor as a whole, but not those that make it fake."""
    own = vars(tensor)
    _ATTRIBUTES.__set__(tensor, given | {name: own[name] for name in _fake_attributes()})


@functools.cache
def _fake_attributes() -> tuple[str, ...]:
    with internals.disable_dispatch_modes(), disable_torch_function():
        return tuple(vars(FakeTensor(internals.FakeTensorMode(), torch.empty(0, device="meta"), _HOST)))


def install_default_device(patches: Patches, placement: PlacementMode) -> None:
    """Keep the default device in our mode: torch's mode for it is below ours and would initialize CUDA."""
    set_default, set_default_type = torch.set_default_device, torch.set_default_tensor_type
    make = torch.Tensor.__new__
    context = getattr(internals.GLOBAL_DEVICE_CONTEXT, "device_context", None)
    before = context.device if context is not None else None
    of_gpu: LegacyTensorType | None = None  # what torch.Tensor(...) makes

    def new(cls: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if of_gpu is not None and cls is torch.Tensor:
            return of_gpu(*args)
        try:
            return make(cls, *args, **kwargs)  # type: ignore[no-any-return]
        except RuntimeError:
            if not args or not isinstance(args[0], (list, tuple)):
                raise
            return make(cls, _with_numbers(args[0]), *args[1:], **kwargs)  # type: ignore[no-any-return]

    def set_default_device(device: Any) -> None:
        placement.default = None if device is None else torch.device(device)

    def set_default_tensor_type(kind: Any) -> None:
        """Also of torch.Tensor(...), to which a default device means nothing."""
        if isinstance(kind, str):
            kind = functools.reduce(getattr, kind.split(".")[1:], torch)
        nonlocal of_gpu
        of_gpu = kind if isinstance(kind, LegacyTensorType) else None
        set_default_type(getattr(torch, kind.__name__) if of_gpu is not None else kind)
        set_default_device(DEVICE if of_gpu is not None else None)

    def get_default_device() -> torch.device:
        return torch.empty(0).device  # asked of the mode, so that `with torch.device(...)` counts too

    set_default(None)
    patches.callback(lambda: set_default(before))
    set_default_device(before)
    patches.set(torch.Tensor, "__new__", new)
    patches.set(torch, "set_default_device", set_default_device)
    patches.set(torch, "get_default_device", get_default_device)
    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)
