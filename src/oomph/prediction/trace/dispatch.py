"""Runs each aten op on fake tensors and books what it would allocate on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.prediction.cuda import kernels, workspaces
from oomph.prediction.cuda.temporaries import HOST_OUTPUTS, temporaries_of
from oomph.prediction.trace import estimates, fast_path
from oomph.prediction.trace.accumulation import Accumulation
from oomph.prediction.trace.tracer import Tracer

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_CPU = torch.device("cpu")

# Above this, a host tensor that the program asks for is not really made. Below it, host data is real,
# so that data loaders, seeds and `.item()` on the host work as they do outside a trace.
REAL_HOST_BYTES = 4 << 20
_MAY_GROW = 4 << 10  # two real inputs smaller than this cannot make a result that matters

# Ops that take tensors of two devices on purpose.
_CROSS_DEVICE = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
    aten.set_.source_Storage,
    aten._pack_padded_sequence.default,  # takes the lengths on the host
}
# Autograd's formulas scatter into fresh zeros in place, except when they see a tensor subclass such as ours.
_IN_PLACE_IN_BACKWARD = {
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.index_put.default,
    aten.index_add.default,
    aten.masked_scatter.default,
}
# Fused attention's backward is handed the random seed, which the forward may leave on the host.
_TAKES_HOST_SEED = {
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}


class DispatchMode(TorchDispatchMode):
    """Sits below autograd and autocast: sees exactly the aten ops that a GPU would run."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.workspaces = workspaces.Workspaces(tracer)
        self.accumulation = Accumulation(tracer.fake_mode)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # autograd asks this of fake tensors all the time
            return _CPU
        tracer = self.tracer
        with torch._C.DisableTorchFunction():
            tracer.inside += 1
            try:
                return self._run(func, types, args, dict(kwargs) if kwargs else {})
            finally:
                tracer.inside -= 1

    def _run(self, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tracer = self.tracer
        tensors = list(tensors_in(args, kwargs))
        gpu = [tensor for tensor in tensors if tracer.on_gpu(tensor)]
        if not gpu and tracer.place != "gpu" and not (not tensors and tracer.autograd_asks()):
            return self._run_on_host(func, types, args, kwargs, tensors)
        if gpu and len(gpu) < len(tensors) and func not in _CROSS_DEVICE and func not in _TAKES_HOST_SEED:
            self._check_devices(func, tensors)
        if func is aten._local_scalar_dense.default:
            return estimates.scalar(tracer, args[0])
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            return self._to_host(args[0], args[1])

        first_event = len(tracer.ledger.events)
        tracer.remember_origin()
        kernel = kernels.CUDA_KERNELS.get(func)
        if func in _IN_PLACE_IN_BACKWARD and tracer.autograd_asks() and self._is_fresh_zeros(args[0]):
            out = args[0]
        elif tracer.phase == "backward" and self.accumulation.reuses_first(func, args) and tracer.autograd_asks():
            out = args[0]
        elif kernel is not None:
            out = kernel(tracer, self._fake, func, types, args, kwargs)
        else:
            out = self._fake(func, types, args, kwargs)
        tracer.values.follow(func, args, kwargs, tensors, out)
        estimates.carry_over(tracer, func, args, out)
        on_gpu = tracer.place != "host"
        name = func.name().replace("::", ".")
        if on_gpu:
            results = out if isinstance(out, (list, tuple)) else (out,)
            if func in HOST_OUTPUTS:
                on_host = HOST_OUTPUTS[func](args, kwargs)
                results = [result for index, result in enumerate(results) if index not in on_host]
            for tensor in tensors_in(results, {}):
                if not any(tensor is given for given in tensors):  # written in place, wherever it is
                    tracer.book(tensor, name)
            self.workspaces.after(func, args)
            self._book_temporaries(name, temporaries_of(func, args, kwargs, tracer.gpu))
        if tracer.phase == "backward":
            tracer.notice_gradient(out)
        if tracer.log is not None:
            phase = f"step {tracer.step} {tracer.phase}" if tracer.step else "setup"
            tracer.log.add(func, out, phase, first_event, len(tracer.ledger.events))
        return out

    def _is_fresh_zeros(self, tensor: torch.Tensor) -> bool:
        draft = self.tracer.ledger.draft_of(tensor)
        return draft is not None and draft.op in ("aten.new_zeros", "aten.zeros", "aten.zeros_like")

    def _to_host(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """A copy into real host memory, which is not ours to count: values arrive if they are known."""
        value = self.tracer.values.of(source)
        return target if value is None else target.copy_(value)

    def _book_temporaries(self, name: str, sizes: list[int]) -> None:
        held = []
        for size in sizes:
            if size > 0:
                held.append(self.tracer.book_workspace(size, name))
            else:
                early = next(draft for draft in held if draft.bytes == -size)
                held.remove(early)
                self.tracer.ledger.release(early)
        for draft in held:
            self.tracer.ledger.release(draft)

    def _fake(self, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        mode = self.tracer.fake_mode
        result = fast_path.run(mode, func, args, kwargs)
        if result is not NotImplemented:
            return result
        try:
            return mode.__torch_dispatch__(func, types, args, kwargs)
        except DynamicOutputShapeException:
            return estimates.unknown_shape(self.tracer, self._fake, func, types, args, kwargs)

    def _run_on_host(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
    ) -> Any:
        """Real where it is small; fake, and not counted, where it is large or made of what is fake."""
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if func is aten._local_scalar_dense.default:
                return estimates.scalar(self.tracer, args[0])
            if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
                return self._to_host(args[0], args[1])
            out = self._fake(func, types, args, kwargs)
            self.tracer.values.follow(func, args, kwargs, tensors, out)
            return out
        if any(tensor.device.type == "meta" for tensor in tensors):
            return func(*args, **kwargs)
        if not tensors or max(map(_bytes_of, tensors)) > _MAY_GROW:
            if not tensors and "device" in kwargs and kwargs["device"] is not None and kwargs["device"].type == "meta":
                return func(*args, **kwargs)
            if func._schema.is_mutable or func.is_view or func is aten._local_scalar_dense.default:
                return func(*args, **kwargs)
            try:
                pretended = self._fake(func, types, args, kwargs)
            except Exception:  # real data may serve where fake data does not
                return func(*args, **kwargs)
            results = pretended if isinstance(pretended, (list, tuple)) else (pretended,)
            if any(_bytes_of(result) > REAL_HOST_BYTES for result in tensors_in(results, {})):
                return pretended
        return func(*args, **kwargs)

    def _check_devices(self, func: OpOverload, tensors: list[torch.Tensor]) -> None:
        """Raise as CUDA does when an op mixes devices. Host scalars are allowed, as on CUDA."""
        for index, tensor in enumerate(tensors):
            if tensor.dim() > 0 and not self.tracer.on_gpu(tensor):
                raise WrongDevice(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:0 and {tensor.device}! ({func.name().replace('::', '.')}: tensor argument {index + 1}, "
                    f"of shape {list(tensor.shape)}, is on {tensor.device})",
                    tensor,
                )


class WrongDevice(RuntimeError):
    """What CUDA raises when an op mixes devices; keeps the stray tensor to tell where it came from."""

    def __init__(self, message: str, tensor: torch.Tensor) -> None:
        super().__init__(message)
        self.tensor = tensor


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among an op's arguments: aten nests them at most one list deep."""
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                if isinstance(item, torch.Tensor):
                    yield item


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
