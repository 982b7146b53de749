"""One trace: what is in place while a program runs on the fake GPU. Afterwards torch is as it was."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from oomph.gpus import GPU
from oomph.prediction.cuda.autocast import cuda_autocast
from oomph.prediction.cuda.composites import cuda_composites
from oomph.prediction.cuda.workspaces import flatten_parameters
from oomph.prediction.isolation import restarted_without
from oomph.prediction.tracer.dispatch import DispatchMode, install_python_kernels
from oomph.prediction.tracer.fake_cuda import Patches, install_fake_cuda
from oomph.prediction.tracer.hooks import install_hooks
from oomph.prediction.tracer.placement import (
    PlacementMode,
    install_default_device,
    install_tensor_device,
)
from oomph.prediction.tracer.recorder import OpLog, inner_tensors
from oomph.prediction.tracer.saving import install_saving
from oomph.prediction.tracer.tracer import Tracer
from oomph.prediction.tracer.workers import install_workers
from oomph.torch_internals import (
    EXPORTED_FAKE_TENSOR,
    FakeTensor,
    compiled_frame_callback,
    deterministic_settings,
    disable_torch_function,
    set_deterministic_settings,
    tree_leaves,
)


@contextlib.contextmanager
def tracing(gpu: GPU, log: OpLog | None = None) -> Iterator[Tracer]:
    """Run the body on a fake `gpu`. Whatever happens in it, torch is afterwards as it was before."""
    tracer = Tracer(gpu)
    tracer.log = log
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [call() for call in tracer.after_trace])
        stack.callback(tracer.recorder.close)
        patches = stack.enter_context(Patches())
        # It logs the inner workings of every shape error; the error itself is enough.
        patches.set(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
        install_fake_cuda(patches, gpu, tracer.recorder)
        stack.enter_context(torch.inference_mode(False))  # the caller's own modes are not the program's
        stack.enter_context(torch.enable_grad())
        placement = PlacementMode(tracer)
        dispatch = DispatchMode(tracer, placement)
        install_hooks(patches, stack, tracer, placement)
        install_default_device(patches, placement)
        install_tensor_device(patches, tracer)
        _deepcopy_without_data(patches)
        _hide_fake_tensor(patches)
        _format_scalars(patches)
        _run_inference_mode_as_no_grad(patches)
        install_saving(patches)
        install_python_kernels(patches)
        _make_generators_on_host(patches)
        _follow_resized_storages(patches, tracer)
        _run_compiled(patches, tracer, placement)
        patches.set(torch.nn.RNNBase, "flatten_parameters", flatten_parameters(tracer.on_gpu))
        _restore_settings(patches)
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(cuda_composites(tracer.rule_context))
        stack.enter_context(cuda_autocast(tracer.on_gpu))
        install_workers(patches, tracer, (placement, dispatch))
        stack.enter_context(placement)
        stack.enter_context(dispatch)
        yield tracer


def _restore_settings(patches: Patches) -> None:
    """Put back, at the end, what the program sets for the whole process and the random states it advances."""
    settings: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (deterministic_settings, set_deterministic_settings),
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


def _deepcopy_without_data(patches: Patches) -> None:
    """copy.deepcopy of a tensor copies its storage byte by byte; a fake one has none."""

    def deepcopy(tensor: FakeTensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        with torch.no_grad():
            copied: torch.Tensor = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, tensor.requires_grad)
        else:
            copied.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copied.grad = deepcopy(tensor.grad, memo)  # type: ignore[arg-type]
        memo[id(tensor)] = copied
        return copied

    patches.set(FakeTensor, "__deepcopy__", deepcopy)


def _run_inference_mode_as_no_grad(patches: Patches) -> None:
    """It allocates the same. In inference mode, composite ops reach the dispatch mode whole, and CUDA's
    decompositions, which are registered at autograd's key, are passed over."""

    def enter(context: Any) -> None:
        context.before = torch.is_grad_enabled()
        torch.set_grad_enabled(not context.mode)

    def leave(context: Any, *error: Any) -> None:
        torch.set_grad_enabled(context.before)

    patches.set(torch.inference_mode, "__enter__", enter)
    patches.set(torch.inference_mode, "__exit__", leave)


def _format_scalars(patches: Patches) -> None:
    """f"{loss:.3f}": torch formats a scalar by its value, but only of its own class."""

    def format(tensor: FakeTensor, spec: str) -> str:
        if tensor.dim() == 0:
            return tensor.detach().item().__format__(spec)
        return object.__format__(tensor, spec)

    patches.set(FakeTensor, "__format__", format)


def _hide_fake_tensor(patches: Patches) -> None:
    """Programs that check for FakeTensor take another path than in a real run: give them another class."""
    patches.set(*EXPORTED_FAKE_TENSOR, type("FakeTensor", (), {}))


def _run_compiled(patches: Patches, tracer: Tracer, placement: PlacementMode) -> None:
    """torch.compile and torch.jit."""
    compile_with_dynamo = torch.compile
    compilers: list[Any] = []  # the one of this trace, or None: programs are traced as eager

    def start_compiler() -> bool:
        """Loaded when first needed, which takes seconds, and without the patches, which it would copy."""
        if not compilers:
            try:
                if restarted_without("compiled programs"):
                    raise RuntimeError("a compiled graph did not run without a GPU")
                with patches.suspended(()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    from oomph.prediction.tracer.compiled import Compiler
                compilers.append(Compiler(patches, tracer, placement))
            except Exception as error:
                tracer.compiled_as_eager = True
                tracer.note(f"torch.compile is traced as eager, which may need more: {error}")
                compilers.append(None)
        return compilers[0] is not None

    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if model is None:
            return functools.partial(compile, **kwargs)
        if isinstance(getattr(model, "__self__", None), torch.optim.Optimizer) or not start_compiler():
            compiled = model
        else:
            with patches.suspended((torch.cuda,)):
                compiled = compile_with_dynamo(model, *args, **kwargs)
        return update_in_one_kernel(model, compiled) if inspect.isroutine(model) else compiled

    updates: set[tuple[Any, str]] = set()  # function and arguments with which it left nothing behind

    def update_in_one_kernel(function: Any, compiled: Any) -> Any:
        """An optimizer step fuses: it is not compiled, and stores no intermediate results."""
        of_optimizer = isinstance(getattr(function, "__self__", None), torch.optim.Optimizer)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not of_optimizer and tracer.phase != "optimizer":
                return compiled(*args, **kwargs)
            tracer.note_once("a compiled optimizer step is assumed to store no intermediate results")
            leaves = tree_leaves((args, kwargs))
            given = function, "; ".join(map(_described, leaves))
            if given in updates:
                tracer.count_kernel(*(each for leaf in leaves for each in inner_tensors(leaf)))
                return None
            live = tracer.recorder.live_bytes
            with tracer.recorder.fused():
                result = function(*args, **kwargs)
            if result is None and not of_optimizer and tracer.recorder.live_bytes == live:
                updates.add(given)
            return result

        return run

    compile_script = torch.jit.script

    def script(program: Any, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            return compile_script(program, *args, **kwargs)  # formulas of torch's forward-mode gradients
        tracer.note("torch.jit is traced as eager: fused kernels may need less memory")
        return program

    patches.set(torch, "compile", compile)
    patches.set(torch.jit, "script", script)
    patches.set(torch.jit, "trace", script)
    callback = compiled_frame_callback()  # of what was compiled before the trace
    if callback is not None:
        choose = getattr(*callback)

        def choose_callback(callback: Any) -> Any:
            return choose(callback) if not callable(callback) or start_compiler() else None

        patches.set(*callback, choose_callback)


def _described(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return f"{type(argument)} {argument.shape} {argument.dtype} {argument.device}"
    return repr(argument)


def _follow_resized_storages(patches: Patches, tracer: Tracer) -> None:
    """storage.resize_ is not an op: sharded training frees and refills parameters with it."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        with disable_torch_function():
            tracer.recorder.record_storage_resize(storage, size)
        return result

    patches.set(torch.UntypedStorage, "resize_", resize_)


def _make_generators_on_host(patches: Patches) -> None:
    """A random generator of the GPU needs a driver; its numbers are not drawn in a trace."""

    class Generator(torch.Generator):
        def __new__(cls, device: Any = None) -> Any:
            return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    patches.set(torch, "Generator", Generator)
