"""Tells the tracer when backward and the optimizer run, and who made which tensor."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as optim

from oomph.prediction.trace.patching import Patches
from oomph.prediction.trace.placement import PlacementMode
from oomph.prediction.trace.sites import find_site
from oomph.prediction.trace.tracer import Tracer


def follow_backward(patches: Patches, tracer: Tracer) -> None:
    """Everything inside autograd's engine is the backward pass."""
    engine = torch.autograd.graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if tracer.phase == "backward":  # reentrant checkpointing calls the engine from inside
            return engine(*args, **kwargs)
        tracer.label_parameters()
        with tracer.doing("backward"):
            return engine(*args, **kwargs)

    tracer.boundary.engine.add(run_backward.__code__)
    for module in (torch.autograd.graph, torch.autograd):
        patches.set(module, "_engine_run_backward", run_backward)


def run_saved_tensor_hooks_as_program(patches: Patches, placement: PlacementMode) -> None:
    """Pack and unpack hooks are called from inside torch's C++, but they are the program's own code."""
    push = torch._C._autograd._push_saved_tensors_default_hooks

    def as_program(hook: Any) -> Any:
        def called(*args: Any) -> Any:
            with placement.for_program():
                return hook(*args)

        return called

    def push_hooks(pack: Any, unpack: Any) -> Any:
        return push(as_program(pack), as_program(unpack))

    patches.set(torch._C._autograd, "_push_saved_tensors_default_hooks", push_hooks)


def follow_optimizers(patches: Patches, stack: contextlib.ExitStack, tracer: Tracer) -> None:
    """Everything inside an optimizer's step is the optimizer step; what it keeps is its state."""
    # torch takes the foreach path on CUDA for plain tensors only; ours stand for such.
    patches.set(optim, "_foreach_supported_types", [*optim._foreach_supported_types, FakeTensor])
    running: list[contextlib.AbstractContextManager[None]] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        _use_twins(patches, tracer, optimizer)
        running.append(tracer.doing("optimizer"))
        running[-1].__enter__()

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        running.pop().__exit__(None, None, None)
        _mark_state(tracer, optimizer)
        tracer.optimizer_steps += 1
        if tracer.on_optimizer_step is not None:
            tracer.on_optimizer_step()

    for handle in (
        optim.register_optimizer_step_pre_hook(before),
        optim.register_optimizer_step_post_hook(after),
    ):
        stack.callback(handle.remove)


def _use_twins(patches: Patches, tracer: Tracer, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer made before its model was moved steps what the model has become, as on CUDA."""
    for group in optimizer.param_groups:
        own = group["params"]
        if any(id(parameter) in tracer.twins for parameter in own):
            patches.callback(functools.partial(group.update, params=own))
            patches.callback(functools.partial(_forget_twins, tracer, optimizer))
            group["params"] = [tracer.twins.get(id(p), (p, p))[1] for p in own]


def _forget_twins(tracer: Tracer, optimizer: torch.optim.Optimizer) -> None:
    for _, twin in tracer.twins.values():
        optimizer.state.pop(twin, None)


def _mark_state(tracer: Tracer, optimizer: torch.optim.Optimizer) -> None:
    names = tracer.parameter_names
    for parameter, state in optimizer.state.items():
        if not isinstance(state, dict):
            continue
        for value in state.values():
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, FakeTensor):
                    draft = tracer.ledger.draft_of(tensor)
                    if draft is not None and draft.kind == "temporary":
                        draft.kind = "optimizer state"
                        draft.module = names.get(id(parameter), draft.module)


def remember_parameters(patches: Patches, tracer: Tracer) -> None:
    """Parameters are fake from birth, and remember the line that made them."""
    make = torch.nn.Parameter.__new__

    def new(cls: type, data: torch.Tensor | None = None, requires_grad: bool = True) -> Any:
        if threading.get_ident() != tracer.thread:
            return make(cls, data, requires_grad)
        if (
            data is not None
            and not isinstance(data, FakeTensor)
            and data.device.type == "cpu"
            and type(data)
            in (
                torch.Tensor,
                torch.nn.Parameter,
            )
        ):
            with torch._C.DisableTorchFunction():
                data = tracer.fake_mode.from_tensor(data.detach())
        parameter: torch.nn.Parameter = make(cls, data, requires_grad)
        tracer.parameter_sites[parameter] = find_site(tracer.boundary)[0]
        return parameter

    patches.set(torch.nn.Parameter, "__new__", new)
    register = torch.nn.Module.register_buffer

    def register_buffer(
        self: torch.nn.Module, name: str, tensor: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> None:
        register(self, name, tensor, *args, **kwargs)
        if tensor is not None and threading.get_ident() == tracer.thread:
            tracer.buffer_sites[tensor] = find_site(tracer.boundary)[0]

    patches.set(torch.nn.Module, "register_buffer", register_buffer)


def keep_function_mode_on(patches: Patches) -> None:
    """Run the bodies of torch's Python functions under the placement mode, not inside its handler.

    A torch function mode is off inside its own handler. Functions such as F.multi_head_attention_forward
    would be handed to it whole, and the calls they make would go unseen. With these checks answering no,
    only calls into C reach the mode.
    """
    import torch.functional
    import torch.nn.functional

    ours = (torch.Tensor, torch.nn.Parameter, FakeTensor)
    plain = torch._C._disabled_torch_function_impl

    def overridden(values: Iterable[Any]) -> bool:
        for value in values:
            kind = type(value)
            if isinstance(value, (tuple, list)):
                if overridden(value):
                    return True
            elif kind not in ours and not isinstance(value, type):
                override = getattr(kind, "__torch_function__", plain)
                if override is not plain:
                    return True
        return False

    modules = [torch.nn.functional, torch.functional, torch._tensor, torch.autograd, torch.nn.init]
    for module in modules:
        for name in ("has_torch_function_unary", "has_torch_function_variadic"):
            if hasattr(module, name):
                patches.set(module, name, lambda *values: overridden(values))
        if hasattr(module, "has_torch_function"):
            patches.set(module, "has_torch_function", overridden)
