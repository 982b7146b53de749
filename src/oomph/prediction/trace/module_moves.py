"""nn.Module.to and its kin on fake parameters: in place, as on CUDA, so that ties and optimizers hold."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from oomph.prediction.trace.patching import Patches
from oomph.prediction.trace.tracer import Tracer

Convert = Callable[[torch.Tensor], torch.Tensor]


def move_modules_in_place(patches: Patches, tracer: Tracer) -> None:
    """torch swaps fake parameters for new ones, which fails once anything refers to them."""
    twins, buffer_sites = tracer.twins, tracer.buffer_sites
    undo: list[Callable[[], object]] = []

    original = nn.Module._apply

    def apply(module: nn.Module, fn: Convert, recurse: bool = True) -> nn.Module:
        if threading.get_ident() != tracer.thread:
            return original(module, fn, recurse)
        if recurse:
            for child in module.children():
                child._apply(fn)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _convert(module, name, parameter, fn, twins, undo)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                converted = fn(buffer)
                if converted is not buffer and buffer in buffer_sites:
                    buffer_sites[converted] = buffer_sites[buffer]
                if not isinstance(buffer, FakeTensor) and isinstance(converted, FakeTensor):
                    undo.append(functools.partial(module._buffers.update, {name: buffer}))
                module._buffers[name] = converted
        return module

    patches.set(nn.Module, "_apply", apply)
    patches.callback(lambda: [put_back() for put_back in reversed(undo)])


def _convert(
    module: nn.Module,
    name: str,
    parameter: nn.Parameter,
    fn: Convert,
    twins: dict[int, tuple[nn.Parameter, nn.Parameter]],
    undo: list[Callable[[], object]],
) -> nn.Parameter:
    with torch.no_grad():
        known = twins.get(id(parameter))
        converted: Any = known[1] if known else fn(parameter)
    if converted is parameter or known:
        return converted
    if not isinstance(parameter, FakeTensor) and isinstance(converted, FakeTensor):
        # The model is the user's and real: it gets its own parameters back after the trace.
        twin = nn.Parameter(converted, parameter.requires_grad)
        twins[id(parameter)] = (parameter, twin)
        undo.append(functools.partial(setattr, module, name, parameter))
        return twin
    parameter.data = converted
    if parameter.grad is not None:
        with torch.no_grad():
            parameter.grad = fn(parameter.grad)
    return parameter
