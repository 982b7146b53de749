"""The private names of Dynamo, AOTAutograd and Inductor that predictions of compiled programs use.

Imported by the first torch.compile of a trace: loading the compiler takes seconds. A name that a torch
release moved fails here, and the program is traced as eager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.convert_frame
import torch._dynamo.guards
import torch._dynamo.repro.after_aot
import torch._dynamo.trace_rules
import torch._dynamo.utils
import torch._functorch.config
import torch._inductor.async_compile
import torch._inductor.compile_fx
import torch._inductor.config
import torch._inductor.constant_folding
import torch._inductor.fx_passes.pad_mm
import torch._inductor.graph
import torch._subclasses.fake_tensor
import torch.fx.experimental.proxy_tensor
import torch.utils._triton
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch._dynamo.types import ConvertFrameReturn
from torch._guards import TracingContext
from torch._inductor.utils import BoxedBool
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from triton.backends.compiler import GPUTarget

vars(torch._dynamo.utils).setdefault("triton", triton)  # whose version it writes down after compiling

# Patches of these stay while the compiler runs; all others would be traced as a part of the program.
FAKE_CUDA: tuple[Any, ...] = (
    torch.cuda,
    torch.cuda.memory,
    torch.cuda.random,
    torch.accelerator,
    torch.version,
    torch.backends.cuda,
    torch.backends.cudnn,
    torch._C,
)

# A pair (owner, name) is an attribute that is replaced.
ASYNC_COMPILE: tuple[Any, str] = (torch._inductor.async_compile, "AsyncCompile")
CACHING_ALLOCATOR: tuple[Any, str] = (torch._C, "_cuda_cudaCachingAllocator_is_enabled")  # not on CPUs
CLEAR_RULES: tuple[Any, str] = (torch._dynamo.trace_rules, "clear_lru_cache")
COMPILE_FX: tuple[Any, str] = (torch._inductor.compile_fx, "compile_fx")
COMPILE_TO_MODULE: tuple[Any, str] = (torch._inductor.graph.GraphLowering, "_compile_to_module_lines")
CONVERT_FRAME: tuple[Any, str] = (torch._dynamo.convert_frame.CatchErrorsWrapper, "__call__")
SET_FUNCTION_MODES: tuple[Any, str] = (torch._dynamo.utils, "set_torch_function_mode_stack")
CUDA_DEVICE_GUARD: tuple[Any, str] = (torch.cuda, "_DeviceGuard")
CUDA_SYSTEM_INFO: tuple[Any, str] = (torch._dynamo.repro.after_aot, "_cuda_system_info_comment")
CONSTANT_LIMIT: tuple[Any, str] = (torch.fx.experimental.proxy_tensor, "CONSTANT_NUMEL_LIMIT")
FOLD_CONSTANTS: tuple[Any, str] = (torch._inductor.constant_folding.ConstantFolder, "run")
ID_GUARD: tuple[Any, str] = (torch._dynamo.guards.GuardBuilder, "id_match_unchecked")
INIT_GPU_CONTEXT: tuple[Any, str] = (torch._subclasses.fake_tensor, "init_gpu_context")
MODE_STACK_GUARD: tuple[Any, str] = (torch._dynamo.guards.GuardBuilder, "TORCH_FUNCTION_STATE")
SHOULD_PAD: tuple[Any, str] = (torch._inductor.fx_passes.pad_mm, "_should_pad")
TRITON_DRIVER: tuple[Any, str] = (triton.runtime.driver, "_active")
TRITON_HASH: tuple[Any, str] = (torch.utils._triton, "triton_hash_with_backend")

compile_fx_inner: Any = torch._inductor.compile_fx.compile_fx_inner
dispatch_meta_handlers: dict[Any, Any] = torch._subclasses.fake_tensor._DISPATCH_META_HANDLERS
from_functional_tensor: Any = torch._from_functional_tensor
reset_dynamo: Any = torch._dynamo.reset
skip_in_dynamo: Any = torch._dynamo.trace_rules.add


def without_caches() -> contextlib.AbstractContextManager[Any]:
    """Nothing of a trace is kept, and nothing that needs a driver is used."""
    stack = contextlib.ExitStack()
    options = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1}
    stack.enter_context(torch._inductor.config.patch(options))
    options = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
    options["graphsafe_rng_functionalization"] = False  # it takes CUDA's random generators
    stack.enter_context(torch._functorch.config.patch(options))
    return stack


def without_autotuning() -> contextlib.AbstractContextManager[Any]:
    """Autotuning runs candidates on the GPU. Without it, matrix products are cuBLAS's. A graph is not divided
    into several CUDA graphs: the parts would have no line numbers."""
    options = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
    off: Any = dict.fromkeys((*options, "triton.autotune_at_compile_time", "graph_partition"), False)
    return torch._inductor.config.patch(off)


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Dynamo would trace torch function modes as a part of the program."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def keep_function_mode(mode: Any, real: Callable[[list[Any]], None], stack: list[Any]) -> None:
    """Compiled code of a function that enters torch function modes sets the modes that Dynamo saw: no others
    were there (`without_function_modes`)."""
    modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    real([each for each in modes if each is mode] + [each for each in stack if each is not mode])


def forget_triton() -> None:
    """Whether there is a GPU for Triton is answered again: a compilation on the host keeps the answer."""
    for function in vars(torch.utils._triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def triton_driver(capability: tuple[int, int], shared_memory: int) -> Any:
    """Answers Inductor's questions about the GPU; kernels are not compiled."""
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    properties = {"max_shared_mem": shared_memory}
    return SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: properties),
    )


def autotunes() -> bool:
    """Whether the program's options ask for autotuning."""
    config = torch._inductor.config
    return bool(config.max_autotune or config.max_autotune_gemm)
