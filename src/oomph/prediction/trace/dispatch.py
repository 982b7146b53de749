"""Runs each aten op on fake tensors and books what it would allocate on the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.deterministic import NO_KERNEL
from oomph.errors import UserError
from oomph.prediction.cuda import kernels, workspaces
from oomph.prediction.cuda.dtypes import check_dtypes
from oomph.prediction.cuda.refused import is_refused
from oomph.prediction.cuda.temporaries import HOST_OUTPUTS, temporaries_of
from oomph.prediction.trace import estimates
from oomph.prediction.trace.arguments import tensors_in
from oomph.prediction.trace.fast_path import VIEWS, FastPath
from oomph.prediction.trace.host import Host
from oomph.prediction.trace.reuse import Reuse
from oomph.prediction.trace.tracer import Tracer
from oomph.prediction.trace.work import KERNEL_MARK

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_CPU = torch.device("cpu")

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
# Fused attention's backward is handed the random seed, which the forward may leave on the host.
_TAKES_HOST_SEED = {
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}


_FEW_TENSORS = 4  # an op on more of them goes through a list


class DispatchMode(TorchDispatchMode):
    """Sits below autograd and autocast: sees exactly the aten ops that a GPU would run."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.workspaces = workspaces.Workspaces(tracer)
        self.fast_path = FastPath(tracer.fake_mode)
        self.reuse = Reuse(tracer.fake_mode, tracer.ledger)
        self.host = Host(tracer, self._fake)

    def _dispatch(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE:  # autograd asks this of fake tensors all the time
            return _CPU
        tracer = self.tracer
        with torch._C.DisableTorchFunction():
            tracer.inside += 1
            try:
                return self._run(func, args, dict(kwargs) if kwargs else {})
            finally:
                tracer.inside -= 1

    def _run(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tracer = self.tracer
        if func in VIEWS and isinstance(args[0], FakeTensor) and args[0].dtype.is_floating_point:
            tracer.remember_origin()  # nothing is allocated, nothing is known of the values
            tracer.work.on_host()
            out = self._fake(func, args, kwargs)
            if tracer.phase == "backward":
                tracer.notice_gradient(out)
            return out
        if func._schema.name == KERNEL_MARK:
            return self._count_kernel(*args)
        tensors = list(tensors_in(args, kwargs))
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise UserError(
                    f"{tensor.layout} tensors cannot be traced yet; make them dense (sparse=False)"
                )
        gpu = [tensor for tensor in tensors if tracer.on_gpu(tensor)]
        if not gpu and tracer.place != "gpu" and not (not tensors and tracer.autograd_asks()):
            if not tracer.work.counting:
                return self.host.run(func, args, kwargs, tensors)
            tracer.work.on_host(len(tensors) if len(tensors) > _FEW_TENSORS else 0)
            out = self.host.run(func, args, kwargs, tensors)
            tracer.work.host_op(func, args, tensors, out, tracer.phase)
            return out
        if gpu and len(gpu) < len(tensors) and func not in _CROSS_DEVICE and func not in _TAKES_HOST_SEED:
            self._check_devices(func, tensors)
        if func is aten._local_scalar_dense.default:
            tracer.work.wait(tracer.phase)
            return estimates.scalar(tracer, args[0])
        if func is aten.equal.default:
            tracer.work.wait(tracer.phase)
            return estimates.equality(tracer, *args[:2])
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            self._count_copy(func, args, kwargs, tensors)
            return self.host.copy_in(args[0], args[1])

        check_dtypes(func, args, kwargs)
        first_event = len(tracer.ledger.events)
        tracer.remember_origin()
        kernel = kernels.CUDA_KERNELS.get(func)
        if tracer.phase == "backward" and self.reuse.of_first(func, args) and tracer.autograd_asks():
            out = args[0]
        elif kernel is not None:
            out = kernel(self._fake, func, args, kwargs)
        else:
            out = self._fake(func, args, kwargs)
        tracer.values.follow(func, args, kwargs, tensors, out)
        estimates.carry_over(tracer, func, args, out)
        if tracer.place != "host":
            self._book(func, args, kwargs, tensors, out)
        if tracer.work.counting and not self._count_copy(func, args, kwargs, gpu):
            tracer.work.op(func, args, kwargs, tensors, out, tracer.phase)
        if tracer.phase == "backward":
            tracer.notice_gradient(out)
        if tracer.log is not None:
            phase = f"step {tracer.step} {tracer.phase}" if tracer.step else "setup"
            tracer.log.add(func, out, phase, first_event, len(tracer.ledger.events))
        return out

    def _count_copy(
        self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], gpu: Sequence[torch.Tensor]
    ) -> bool:
        """Count the op if it is a copy between host and GPU."""
        if func is aten.copy_.default:
            target, source = args[:2]
            to_gpu, from_gpu = self.tracer.on_gpu(target), self.tracer.on_gpu(source)
            beside = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
        elif func is aten._to_copy.default:
            source, from_gpu = args[0], bool(gpu)
            to_gpu = self.tracer.place == "gpu" or (self.tracer.place is None and from_gpu)
            beside = bool(kwargs.get("non_blocking"))
        else:
            return False
        if to_gpu == from_gpu:
            return False
        self.tracer.work.copy(source, "device" if to_gpu else "host", self.tracer.phase, beside)
        return True

    def _count_kernel(
        self, tensors: Sequence[torch.Tensor], name: str, flops: float, passes: float, efficiency: float
    ) -> None:
        if self.tracer.work.counting:
            self.tracer.work.kernel(tensors, self.tracer.phase, flops, passes, efficiency)

    def _book(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        given: Sequence[torch.Tensor],
        out: Any,
    ) -> None:
        name = func.name().replace("::", ".")
        results = out if isinstance(out, (list, tuple)) else (out,)
        if func in HOST_OUTPUTS:
            on_host = HOST_OUTPUTS[func](args, kwargs)
            results = [result for index, result in enumerate(results) if index not in on_host]
        for tensor in tensors_in(results, {}):
            if any(tensor is known for known in given):  # written in place, wherever it is
                self.tracer.rebook(tensor, name)
            else:
                self.tracer.book(tensor, name)
        self.workspaces.after(func, args)
        self._book_temporaries(name, temporaries_of(func, args, kwargs, self.tracer.gpu))
        if is_refused(func, args, kwargs):
            site = self.tracer.who()[0]
            where = "" if site is None else f" of {site.file}:{site.line}"
            raise RuntimeError(f"{func.overloadpacket.__name__}{where}{NO_KERNEL}")

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

    def _fake(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = self.fast_path.run(func, args, kwargs)
        if result is not NotImplemented:
            return result
        try:
            return self.tracer.fake_mode.__torch_dispatch__(func, (), args, kwargs)
        except DynamicOutputShapeException:
            return estimates.unknown_shape(self.tracer, self._fake, func, args, kwargs)

    def _check_devices(self, func: OpOverload, tensors: list[torch.Tensor]) -> None:
        """Raise as CUDA does when an op mixes devices. Host scalars are allowed, as on CUDA."""
        for index, tensor in enumerate(tensors):
            if tensor.dim() > 0 and not self.tracer.on_gpu(tensor):
                raise WrongDevice(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:0 and {tensor.device}! ({func.name().replace('::', '.')}: tensor argument "
                    f"{index + 1}, of shape {list(tensor.shape)}, is on {tensor.device})",
                    tensor,
                )


# Set after the class is made: TorchDispatchMode wraps the method of a class body to keep the compiler out, at
# a price for every op. There is no compiler to keep out of a trace.
DispatchMode.__torch_dispatch__ = DispatchMode._dispatch  # type: ignore[method-assign,assignment]


class WrongDevice(RuntimeError):
    """What CUDA raises when an op mixes devices; keeps the stray tensor to tell where it came from."""

    def __init__(self, message: str, tensor: torch.Tensor) -> None:
        super().__init__(message)
        self.tensor = tensor


# In a traceback it is what the program would have met on a GPU.
WrongDevice.__name__ = WrongDevice.__qualname__ = "RuntimeError"
WrongDevice.__module__ = "builtins"
