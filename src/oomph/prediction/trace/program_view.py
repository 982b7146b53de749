"""What the program sees: a torch on whose GPU it seems to run. Afterwards all of it is as it was."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from oomph import deterministic
from oomph.prediction.trace.patching import Patches
from oomph.prediction.trace.placement import PlacementMode, device_of
from oomph.prediction.trace.sites import find_site
from oomph.prediction.trace.tracer import Tracer


def keep_default_device(patches: Patches, placement: PlacementMode) -> None:
    """torch's own default device stands below our mode and would reach for CUDA."""
    set_default = torch.set_default_device
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    before = context.device if context is not None else None

    def set_default_device(device: Any) -> None:
        placement.default = None if device is None else torch.device(device)

    def get_default_device() -> torch.device:
        return torch.empty(0).device  # asked of the mode, so that `with torch.device(...)` counts too

    set_default(None)
    patches.callback(lambda: set_default(before))
    set_default_device(before)
    patches.set(torch, "set_default_device", set_default_device)
    patches.set(torch, "get_default_device", get_default_device)


def keep_defaults(patches: Patches) -> None:
    """What the program sets for the whole process, and the random numbers it draws, end with the trace."""
    settings: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (deterministic.settings, deterministic.set_settings),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
        (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
        (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
        (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
        (_autocast_depth, _leave_autocast),
        (random.getstate, random.setstate),
    ]
    for device in ("cuda", "cpu"):
        for of_device, set_for in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        ):
            settings.append((functools.partial(of_device, device), functools.partial(set_for, device)))
    for owner, name in (
        (torch.backends.cuda.matmul, "allow_tf32"),
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cudnn, "benchmark"),
    ):
        settings.append((functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)))
    if "numpy" in sys.modules:
        import numpy

        settings.append((numpy.random.get_state, numpy.random.set_state))
    for read, write in settings:
        patches.callback(functools.partial(write, read()))


def _autocast_depth() -> int:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _leave_autocast(depth: int) -> None:
    """Regions that were entered and never left would keep casts of weights for good."""
    while _autocast_depth() > depth:
        torch.autocast_decrement_nesting()
    if depth == 0:
        torch.clear_autocast_cache()


def answer_device(patches: Patches, tracer: Tracer) -> None:
    """`tensor.device` gives the pretend device to the program, the true one to torch's own fake kernels."""

    def device(tensor: FakeTensor) -> torch.device:
        if tensor.fake_mode.in_kernel_invocation:
            return torch.device("meta")
        if tracer.inside:
            return tensor.fake_device
        return device_of(tracer, tensor)

    patches.set(FakeTensor, "device", property(device))


def copy_without_data(patches: Patches) -> None:
    """copy.deepcopy of a tensor copies its storage byte by byte; a fake one has none."""

    def deepcopy(tensor: FakeTensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        with torch.no_grad():
            twin: torch.Tensor = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, tensor.requires_grad)
        else:
            twin.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            twin.grad = deepcopy(tensor.grad, memo)  # type: ignore[arg-type]
        memo[id(tensor)] = twin
        return twin

    patches.set(FakeTensor, "__deepcopy__", deepcopy)


def format_scalars(patches: Patches) -> None:
    """f"{loss:.3f}": torch formats a scalar by its value, but only of its own class."""

    def format(tensor: FakeTensor, spec: str) -> str:
        if tensor.dim() == 0:
            return tensor.detach().item().__format__(spec)
        return object.__format__(tensor, spec)

    patches.set(FakeTensor, "__format__", format)


def hide_the_trace(patches: Patches) -> None:
    """Programs that ask whether they are traced take another path than in a real run; they are told no."""
    patches.set(torch._subclasses, "FakeTensor", type("FakeTensor", (), {}))


def run_compiled_as_eager(patches: Patches, tracer: Tracer) -> None:
    def note() -> None:
        site, _ = find_site(tracer.boundary)
        tracer.ledger.note("torch.compile is traced as eager: the compiled step may need less memory", site)

    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        note()
        return model if model is not None else (lambda function: function)

    def compile_module(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        note()

    patches.set(torch, "compile", compile)
    patches.set(torch.nn.Module, "compile", compile_module)
    if "torch._dynamo" in sys.modules:  # something may have been compiled before the trace
        from torch._dynamo import eval_frame

        if not hasattr(eval_frame, "_callback_from_stance"):
            return

        def run_eagerly(callback: Any) -> Any:
            if callable(callback):
                note()
            return None

        patches.set(eval_frame, "_callback_from_stance", run_eagerly)


def save_nothing(patches: Patches, tracer: Tracer) -> None:
    """A checkpoint of fake tensors has no bytes to write."""

    def save(*args: Any, **kwargs: Any) -> None:
        tracer.ledger.note("torch.save writes nothing during a trace", find_site(tracer.boundary)[0])

    patches.set(torch, "save", save)


def follow_resized_storages(patches: Patches, tracer: Tracer) -> None:
    """storage.resize_ is not an op: sharded training frees and refills parameters with it."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        with torch._C.DisableTorchFunction():
            tracer.ledger.resized(storage, size)
        return result

    patches.set(torch.UntypedStorage, "resize_", resize_)


def make_generators_on_the_host(patches: Patches) -> None:
    """A random generator of the GPU needs a driver; its numbers are not drawn in a trace."""

    class Generator(torch.Generator):
        def __new__(cls, device: Any = None) -> Any:
            return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    patches.set(torch, "Generator", Generator)
