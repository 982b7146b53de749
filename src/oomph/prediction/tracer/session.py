"""One trace: what is in place while a program runs on the fake GPU. Afterwards torch is as it was.

`tracing` installs everything, much of it from other files of this folder. Here are replacements of single
functions of torch, and hooks that follow the program outside aten ops: backward passes, optimizer steps,
parameters, nn.Module.to.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from oomph import torch_internals as internals
from oomph.gpus import GPU
from oomph.prediction.compat import registry
from oomph.prediction.compat.triton_stand_in import triton_importable
from oomph.prediction.isolation import restarted_without
from oomph.prediction.ops.autocast import cuda_autocast
from oomph.prediction.ops.composites import cuda_composites
from oomph.prediction.ops.recurrent import flatten_parameters
from oomph.prediction.ops.rules import program_error
from oomph.prediction.patches import Patches
from oomph.prediction.saving import install_saving
from oomph.prediction.tracer.attribution import find_site
from oomph.prediction.tracer.dispatch import DispatchMode, install_python_kernels
from oomph.prediction.tracer.fake_cuda import install_fake_cuda
from oomph.prediction.tracer.placement import (
    PlacementMode,
    device_of,
    install_default_device,
    install_tensor_device,
    make_lazy_like,
)
from oomph.prediction.tracer.recorder import inner_tensors
from oomph.prediction.tracer.repeats import RepeatedBlocks, RepeatedCalls
from oomph.prediction.tracer.streams import DEVICE
from oomph.prediction.tracer.tracer import OpLog, Tracer
from oomph.prediction.tracer.values import is_small
from oomph.prediction.tracer.work import (
    CHECKPOINT_COST,
    FUNCTION_COST,
    OOMPH_OP_COST,
    OPTIMIZER_STEP_COST,
)
from oomph.prediction.tracer.workers import install_workers
from oomph.records import Kind
from oomph.torch_internals import (
    FakeTensor,
    disable_torch_function,
    get_sequence_nr,
    is_traceable_wrapper_subclass,
    tree_leaves,
)

_READ_EACH = 4096  # elements of a list


@contextlib.contextmanager
def tracing(gpu: GPU, log: OpLog | None = None) -> Iterator[Tracer]:
    """Run the body on a fake `gpu`. Whatever happens in it, torch is afterwards as it was before."""
    internals.find_dynamo_rules()  # while torch's functions are its own
    tracer = Tracer(gpu)
    tracer.log = log
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [call() for call in tracer.after_trace])
        stack.callback(tracer.recorder.close)
        patches = stack.enter_context(Patches())
        # It logs the inner workings of every shape error; the error itself is enough.
        patches.set(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
        install_fake_cuda(patches, gpu, tracer.recorder, tracer.pinned)
        stack.enter_context(torch.inference_mode(False))  # the caller's own modes are not the program's
        stack.enter_context(torch.enable_grad())
        placement = PlacementMode(tracer)
        dispatch = DispatchMode(tracer, placement)
        install_hooks(patches, tracer, placement)
        install_default_device(patches, placement)
        install_tensor_device(patches, tracer)
        _deepcopy_without_data(patches)
        _hide_fake_tensor(patches)
        _format_scalars(patches)
        _list_values_at_once(patches, tracer)
        _run_inference_mode_as_no_grad(patches)
        install_saving(patches)
        install_python_kernels(patches)
        _notice_seeds(patches, tracer)
        _draw_truncated_normals_once(patches, tracer)
        registry.in_trace(patches, tracer)
        _follow_resized_storages(patches, tracer)
        _run_compiled(patches, tracer, placement)
        patches.set(torch.nn.RNNBase, "flatten_parameters", flatten_parameters(tracer.on_gpu))
        _restore_settings(patches)
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(cuda_composites(tracer.rule_context))
        stack.enter_context(cuda_autocast(tracer.on_gpu, registry.FLOAT32_OPS))
        tracer.estimates.result_rows = registry.RESULT_ROWS
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
        (internals.deterministic_settings, internals.set_deterministic_settings),
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
        (torch.backends.cudnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
        (torch.backends.cudnn.rnn, "fp32_precision"),
        (torch.backends.cuda.matmul, "fp32_precision"),
        (torch.backends.cuda.matmul, "allow_tf32"),  # restored before the three above, which it sets
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cudnn, "benchmark"),
        (internals.functorch_config, "activation_memory_budget"),
    ):
        settings.append((functools.partial(_flag, owner, name), functools.partial(_set_flag, owner, name)))
    if "numpy" in sys.modules:
        import numpy

        settings.append((numpy.random.get_state, numpy.random.set_state))
    for read, write in settings:
        patches.callback(functools.partial(write, read()))


def _flag(owner: Any, name: str) -> Any:
    """None for allow_tf32 where fp32_precision was set: torch does not read it then."""
    try:
        return getattr(owner, name)
    except RuntimeError:
        return None


def _set_flag(owner: Any, name: str, value: Any) -> None:
    if value is not None:
        setattr(owner, name, value)


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


def _list_values_at_once(patches: Patches, tracer: Tracer) -> None:
    """FakeTensor.tolist reads element by element; a sampler lists the order of all samples."""
    tolist = FakeTensor.tolist

    def list_values(tensor: FakeTensor) -> Any:
        if tensor.numel() <= _READ_EACH:
            return tolist(tensor)
        if tracer.on_gpu(tensor):
            tracer.synchronize()
        tracer.reads += 1
        tracer.note("values of large tensors that are read as a list are representative")
        return tracer.values.whole(tensor).tolist()

    patches.set(FakeTensor, "tolist", list_values)


def _hide_fake_tensor(patches: Patches) -> None:
    """Programs that check for FakeTensor take another path than in a real run: give them another class."""
    patches.set(*internals.EXPORTED_FAKE_TENSOR, type("FakeTensor", (), {}))


def _run_compiled(patches: Patches, tracer: Tracer, placement: PlacementMode) -> None:
    compile_with_dynamo = torch.compile
    compilers: list[Any] = []  # the one of this trace, or None: programs are traced as eager
    waiting: list[
        Callable[[], None]
    ] = []  # until it is loaded: functions to compile, which Dynamo may inline

    def start_compiler() -> bool:
        """Loaded when first needed, which takes seconds, and without the patches, which it would copy."""
        if not compilers:
            began = time.perf_counter()
            tracer.progress("loading the compiler", None)
            try:
                if restarted_without("compiled programs"):
                    raise RuntimeError("a compiled graph did not run without a GPU")
                with patches.suspended(()), triton_importable(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    from oomph.prediction.tracer.compiled import Compiler

                    internals.find_dynamo_rules()  # the program itself may have loaded Dynamo
                compilers.append(Compiler(patches, tracer, placement))
                tracer.compile_seconds += time.perf_counter() - began
            except Exception as error:
                tracer.compiled_as_eager = True
                tracer.note(f"torch.compile is traced as eager, which may need more: {error}")
                compilers.append(None)
            while waiting:
                waiting.pop(0)()
        return compilers[0] is not None

    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if model is None:
            return functools.partial(compile, **kwargs)
        if inspect.isfunction(model) and not compilers:  # libraries decorate what a program may never call
            return compile_when_called(model, args, kwargs)
        if isinstance(getattr(model, "__self__", None), torch.optim.Optimizer) or not start_compiler():
            compiled = model
        else:
            with patches.suspended((torch.cuda,)):
                compiled = compile_with_dynamo(model, *args, **kwargs)
        return update_in_one_kernel(model, compiled) if inspect.isroutine(model) else compiled

    def compile_when_called(function: Any, args: Any, kwargs: Any) -> Any:
        made: list[Any] = []

        @functools.wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            start_compiler()
            return made[0](*given, **named)

        def complete() -> None:
            made.append(compile(function, *args, **kwargs))
            functools.update_wrapper(run, made[0])

        waiting.append(complete)
        return run

    updates: set[tuple[Any, str]] = set()  # function and arguments with which it left nothing behind

    def update_in_one_kernel(function: Any, compiled: Any) -> Any:
        """An optimizer step fuses: it is not compiled, and stores no intermediate results."""
        of_optimizer = isinstance(getattr(function, "__self__", None), torch.optim.Optimizer)

        @functools.wraps(compiled)  # with the attributes by which Dynamo inlines it where it is called
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

    patches.set(torch, "compile", compile)
    callback = internals.compiled_frame_callback()  # of what was compiled before the trace
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


def _draw_truncated_normals_once(patches: Patches, tracer: Tracer) -> None:
    """From torch 2.13 on, it draws until all values are in bounds: forever, if they are unknown."""
    if torch.__version__ < "2.13":
        return
    trunc_normal = getattr(*internals.TRUNC_NORMAL)

    def draw(tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        wraps = is_traceable_wrapper_subclass(tensor)  # a DTensor, whose inner tensors are fake
        if not isinstance(tensor, FakeTensor) and not wraps:
            return trunc_normal(tensor, mean, std, a, b, generator)
        if not tracer.on_gpu(tensor) and not wraps:
            tracer.draw_on_host(tensor, lambda real: trunc_normal(real, mean, std, a, b, generator))
            return tensor
        with torch.no_grad():
            tensor.normal_(mean, std, generator=generator)
            outside = (tensor < a) | (tensor > b)
            again = torch.empty_like(tensor).normal_(mean, std, generator=generator)
            return tensor.copy_(torch.where(outside, again, tensor))

    patches.set(*internals.TRUNC_NORMAL, draw)


def _notice_seeds(patches: Patches, tracer: Tracer) -> None:
    seed = torch.manual_seed

    @functools.wraps(seed)
    def manual_seed(number: Any) -> torch.Generator:
        tracer.seeded = True
        return seed(number)

    for module in (torch, torch.random):
        patches.set(module, "manual_seed", manual_seed)


# ------------------------------------------------------------------------------------------------------ hooks

Convert = Callable[[torch.Tensor], torch.Tensor]
_MOST_NODES = 100_000  # a tenth of a second


def install_hooks(patches: Patches, tracer: Tracer, placement: PlacementMode) -> None:
    """Install all of this file's hooks for as long as `patches` last."""
    _run_saved_tensor_hooks_as_program(patches, placement, tracer)
    _count_python_functions(patches, tracer)
    _follow_optimizers(patches, tracer)
    _follow_parameters(patches, tracer)
    _move_modules_in_place(patches, tracer)
    _swap_tensors(patches, tracer)
    _materialize_lazy_parameters(patches, tracer)
    _keep_function_mode_on(patches)
    repeated = RepeatedCalls(tracer)
    _follow_backward(patches, tracer, repeated)
    tracer.modules.follow(
        patches,
        tracer.boundary,
        tracer.guard,
        tracer.threads,
        repeated.call,
        RepeatedBlocks(tracer).call,
        tracer.before_root_call,
    )


def _follow_backward(patches: Patches, tracer: Tracer, repeated: RepeatedCalls) -> None:
    """Everything inside autograd's engine is the backward pass.

    On a GPU it runs in a thread of the engine's own, on the host in the caller's. That matters if it makes a
    graph: autograd runs the newest nodes first, and every thread numbers its own. So such a pass gets a
    thread here, too; not inside a transform of torch.func, which holds for its own thread.
    """
    engine = getattr(*internals.ENGINE_RUN_BACKWARD[0])
    device_thread = ThreadPoolExecutor(1, initializer=_make_nodes, initargs=(get_sequence_nr(),))
    patches.callback(device_thread.shutdown)

    def run_engine(*args: Any, **kwargs: Any) -> Any:
        return engine(*args, **kwargs)

    def run_backward(
        tensors: Any, gradients: Any, keep: bool, create: bool, *args: Any, **kwargs: Any
    ) -> Any:
        if tracer.phase == "backward":  # reentrant checkpointing calls the engine from inside
            return engine(tensors, gradients, keep, create, *args, **kwargs)
        tracer.label_parameters()
        tracer.holders()
        accumulates = kwargs.get("accumulate_grad", True)
        repeated.graph_is_read |= create or not accumulates
        # Gradients that autograd.grad makes a graph of are part of a loss, whose backward pass comes later.
        with tracer.in_phase("backward", marked=not create or accumulates):
            kernels = len(tracer.work.kernels)
            call = functools.partial(run_engine, tensors, gradients, keep, create, *args, **kwargs)
            in_thread = create and internals.current_functorch_transform() is None
            result = device_thread.submit(call).result() if in_thread else call()
            repeated.after_backward(kernels)
        tracer.training.gradients_are_new = True
        tracer.training.backward_passes += 1
        return result

    tracer.boundary.engine.update({run_backward.__code__, run_engine.__code__})
    for owner, name in internals.ENGINE_RUN_BACKWARD:
        patches.set(owner, name, run_backward)


def _make_nodes(count: int) -> None:
    """Number this thread's nodes from where the program's begin, as if both threads were new."""
    with internals.disable_dispatch_modes(), disable_torch_function(), torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
        while get_sequence_nr() < min(count, _MOST_NODES):
            leaf.view(())


def _run_saved_tensor_hooks_as_program(patches: Patches, placement: PlacementMode, tracer: Tracer) -> None:
    """Pack and unpack hooks are called from inside torch's C++, but they are the program's own code."""
    push = getattr(*internals.PUSH_SAVED_TENSORS_HOOKS)

    def as_program(hook: Any) -> Any:
        def called(*args: Any) -> Any:
            tracer.work.count_hooks()
            try:
                with placement.for_program():
                    return hook(*args)
            except Exception as error:  # such as the one that ends checkpointing's recomputation early
                raise program_error(error)  # noqa: B904 (the same exception)

        return called

    def push_hooks(pack: Any, unpack: Any) -> Any:
        of_checkpoint = getattr(pack, "__module__", "") == "torch.utils.checkpoint"
        if of_checkpoint and not tracer.in_autograd_thread():
            tracer.work.count_hooks(CHECKPOINT_COST)
        return push(as_program(pack), as_program(unpack))

    patches.set(*internals.PUSH_SAVED_TENSORS_HOOKS, push_hooks)


# Modules whose functions stand for nodes in C++, or for a compiled graph.
_NOT_PYTHON = ("oomph.prediction.", "torch._functorch.")


def _count_python_functions(patches: Patches, tracer: Tracer) -> None:
    """Autograd's engine calls the backward of a torch.autograd.Function by this method."""
    apply, work = BackwardCFunction.apply, tracer.work

    def counted(function: Any, *args: Any) -> Any:
        module = function._forward_cls.__module__
        if module.startswith(_NOT_PYTHON):
            return apply(function, *args)
        work.count_hooks(OOMPH_OP_COST if module.startswith("oomph.ops.") else FUNCTION_COST)
        outer, work.in_function = work.in_function, True
        try:
            return apply(function, *args)
        finally:
            work.in_function = outer

    patches.set(BackwardCFunction, "apply", counted)


# ---------------------------------------------------------------------------------------------- optimizers


def _follow_optimizers(patches: Patches, tracer: Tracer) -> None:
    """Everything inside an optimizer's step is the optimizer step; what it keeps is its state."""
    # torch takes the foreach path on CUDA for plain tensors only; ours stand for such.
    patches.set(
        *internals.FOREACH_SUPPORTED_TYPES, [*getattr(*internals.FOREACH_SUPPORTED_TYPES), FakeTensor]
    )
    group_tensors = getattr(*internals.AVERAGE_GROUP_TENSORS)

    def group_by_fake_device(tensors: Any, *args: Any) -> Any:
        return {
            (DEVICE if tracer.on_gpu(group[0][0][0]) else device, dtype): group
            for (device, dtype), group in group_tensors(tensors, *args).items()
        }

    patches.set(*internals.AVERAGE_GROUP_TENSORS, group_by_fake_device)
    running: list[contextlib.AbstractContextManager[None]] = []

    def as_forward(value: Any) -> Any:
        """A closure runs the forward and backward passes again, from inside the step."""
        if not callable(value):
            return value

        def closure() -> Any:
            with tracer.in_phase("forward"):
                return value()

        return closure

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        _use_fake_parameters(patches, tracer, optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):  # it would stop at once: losses do not change here
            optimizer.param_groups[0]["tolerance_change"] = -math.inf
        name = type(optimizer).__name__
        with disable_torch_function():
            label = functools.partial(_label_updated, tracer, optimizer)
            tracer.guard.call("parameters' label", name, label, lambda: None)
        running.append(tracer.in_phase("optimizer"))
        running[-1].__enter__()
        if len(running) == 1:  # not that of an optimizer inside another
            tracer.work.count_hooks(OPTIMIZER_STEP_COST)
        given = {**kwargs, "closure": as_forward(kwargs["closure"])} if "closure" in kwargs else kwargs
        return (*args[:1], *map(as_forward, args[1:2]), *args[2:]), given

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        running.pop().__exit__(None, None, None)
        name = type(optimizer).__name__
        with disable_torch_function():
            label = functools.partial(_label_state, tracer, optimizer)
            tracer.guard.call("state's label", name, label, lambda: None)
        tracer.holders()
        tracer.training.stepped(optimizer, tracer.modules.completed)

    make = torch.optim.Optimizer.__init__

    @functools.wraps(make)
    def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        tracer.training.optimizers += 1
        if tracer.training.on_optimizer_made is not None:
            tracer.training.on_optimizer_made(optimizer)

    patches.set(torch.optim.Optimizer, "__init__", init)
    for owner in (torch.optim.Optimizer, nn.Module):
        patches.set(owner, "load_state_dict", _marked_as_loading(tracer, owner.load_state_dict))
    for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
        patches.callback(handle.remove)


def _marked_as_loading(tracer: Tracer, load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        before, tracer.loads_state = tracer.loads_state, True
        try:
            return load(*args, **kwargs)
        finally:
            tracer.loads_state = before

    return load_state_dict


def _use_fake_parameters(patches: Patches, tracer: Tracer, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer made before its model was moved steps what the model has become, as on CUDA."""
    for group in optimizer.param_groups:
        own = group["params"]
        if any(id(parameter) in tracer.fake_parameters for parameter in own):
            patches.callback(functools.partial(group.update, params=own))
            patches.callback(functools.partial(_drop_fake_state, tracer, optimizer))
            group["params"] = [tracer.fake_parameters.get(id(p), (p, p))[1] for p in own]


def _drop_fake_state(tracer: Tracer, optimizer: torch.optim.Optimizer) -> None:
    for _, fake in tracer.fake_parameters.values():
        optimizer.state.pop(fake, None)


def _label_updated(tracer: Tracer, optimizer: torch.optim.Optimizer) -> None:
    """Parameters that are plain tensors; gradients that autograd did not accumulate itself: sharded ones,
    those of torch.func."""
    kinds: tuple[Kind, Kind] = "parameter", "gradient"
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        for tensor, kind in zip((parameter, parameter.grad), kinds, strict=True):
            for allocation in () if tensor is None else tracer.recorder.allocations_of(tensor):
                if allocation.kind in ("temporary", "activation", "batch"):
                    allocation.kind = kind


def _label_state(tracer: Tracer, optimizer: torch.optim.Optimizer) -> None:
    """Of what this step has updated, which may be one parameter at a time."""
    updated = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for parameter, state in optimizer.state.items():
        if not isinstance(state, dict) or (
            isinstance(parameter, torch.Tensor) and id(parameter) not in updated
        ):
            continue
        for value in state.values():
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                for allocation in tracer.recorder.allocations_of(tensor):
                    if allocation.kind in ("temporary", "activation", "batch"):  # made by it, or loaded
                        allocation.kind = "optimizer state"
                        allocation.module = tracer.parameter_names.get(id(parameter), allocation.module)


# ---------------------------------------------------------------------------------------------- parameters


def _follow_parameters(patches: Patches, tracer: Tracer) -> None:
    """Parameters are fake from their construction, and remember the line that made them."""
    make = nn.Parameter.__new__

    def new(cls: type, data: torch.Tensor | None = None, requires_grad: bool = True) -> Any:
        if threading.get_ident() not in tracer.threads:
            return make(cls, data, requires_grad)
        plain = type(data) in (torch.Tensor, nn.Parameter)
        values = None
        if data is not None and plain and data.device.type == "cpu":
            with tracer.lock, disable_torch_function():
                values, data = data.detach(), tracer.fake_mode.from_tensor(data.detach())
        if cls is not nn.Parameter and type(data) is FakeTensor:
            parameter: Any = getattr(*internals.MAKE_SUBCLASS[0])(cls, data, requires_grad)
        else:
            parameter = make(cls, data, requires_grad)
        if values is not None and is_small(values) and (not requires_grad or _is_one_number(values)):
            tracer.values.set(parameter, values)
        tracer.parameter_sites[parameter] = find_site(tracer.boundary)[0]
        return parameter

    patches.set(nn.Parameter, "__new__", new)
    make_fake = FakeTensor.__new__

    def new_fake(cls: type, *args: Any, **kwargs: Any) -> Any:  # accelerate calls type(parameter)(value)
        if len(args) == 1 and isinstance(args[0], torch.Tensor) and "fake_mode" not in kwargs:
            return nn.Parameter(*args, **kwargs)
        return make_fake(cls, *args, **kwargs)

    patches.set(FakeTensor, "__new__", new_fake)
    register = nn.Module.register_buffer

    def register_buffer(
        self: nn.Module, name: str, tensor: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> None:
        register(self, name, tensor, *args, **kwargs)
        if tensor is not None and threading.get_ident() in tracer.threads:
            tracer.buffer_sites[tensor] = find_site(tracer.boundary)[0]

    patches.set(nn.Module, "register_buffer", register_buffer)


def _is_one_number(values: torch.Tensor) -> bool:
    """Whether a parameter starts with a number that the program chose, not with random or unwritten ones."""
    return values.numel() > 0 and bool((values == values.flatten()[0]).all())


def _move_modules_in_place(patches: Patches, tracer: Tracer) -> None:
    """nn.Module.to on fake parameters: in place, as on CUDA, so that ties and optimizers hold.

    torch swaps fake parameters for new ones, which fails once anything refers to them.
    """
    original = getattr(*internals.MODULE_APPLY)
    undo: list[Callable[[], object]] = []

    def apply(module: nn.Module, fn: Convert, recurse: bool = True) -> nn.Module:
        if threading.get_ident() not in tracer.threads:
            return original(module, fn, recurse)
        if recurse:
            for child in module.children():
                child._apply(fn)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and is_lazy(tensor):
                make_lazy_like(tracer, tensor, fn(_empty_like_lazy(tracer, tensor)))
        for name, parameter in module._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                module._parameters[name] = _convert_parameter(module, name, parameter, fn, tracer, undo)
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_lazy(buffer):
                converted = fn(buffer)
                if converted is not buffer and buffer in tracer.buffer_sites:
                    tracer.buffer_sites[converted] = tracer.buffer_sites[buffer]
                if not isinstance(buffer, FakeTensor) and isinstance(converted, FakeTensor):
                    undo.append(functools.partial(module._buffers.update, {name: buffer}))
                module._buffers[name] = converted
        return module

    patches.set(*internals.MODULE_APPLY, apply)
    patches.callback(lambda: [put_back() for put_back in reversed(undo)])


def _convert_parameter(
    module: nn.Module,
    name: str,
    parameter: nn.Parameter,
    fn: Convert,
    tracer: Tracer,
    undo: list[Callable[[], object]],
) -> nn.Parameter:
    with torch.no_grad():
        known = tracer.fake_parameters.get(id(parameter))
        converted: Any = known[1] if known else fn(parameter)
    if converted is parameter or known:
        return converted
    if not isinstance(parameter, FakeTensor) and isinstance(converted, FakeTensor):
        # The model is the user's and real: it gets its own parameters back after the trace.
        fake = nn.Parameter(converted, parameter.requires_grad)
        tracer.fake_parameters[id(parameter)] = (parameter, fake)
        undo.append(functools.partial(setattr, module, name, parameter))
        return fake
    if converted.device.type == "meta" != parameter.device.type:
        return nn.Parameter(converted, parameter.requires_grad)
    is_wrapper: bool = is_traceable_wrapper_subclass(converted)
    if is_wrapper:  # as torch does: `data` would change the wrapper, not its inner tensors
        swapped = nn.Parameter(converted, parameter.requires_grad)
        swapped.grad = parameter.grad
        torch.utils.swap_tensors(parameter, swapped)
    else:
        parameter.data = converted
    if parameter.grad is not None:
        with torch.no_grad():
            parameter.grad = fn(parameter.grad)
    return parameter


def _swap_tensors(patches: Patches, tracer: Tracer) -> None:
    """Tensors with weak references cannot be swapped: those of the trace are removed before."""
    swap = torch.utils.swap_tensors

    def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
        sites = [
            (known, known.pop(first, None), known.pop(second, None))
            for known in (tracer.parameter_sites, tracer.buffer_sites)
        ]
        for tensor in (first, second):
            tracer.values.release(tensor)
        swap(first, second)
        for known, site, other in sites:
            if site or other:
                known[first] = site or other

    patches.set(torch.utils, "swap_tensors", swap_tensors)


def _empty_like_lazy(
    tracer: Tracer, lazy: torch.Tensor, shape: Any = 0, device: Any = None, dtype: Any = None
) -> torch.Tensor:
    device = device_of(tracer, lazy) if device is None else device
    return torch.empty(shape, device=device, dtype=dtype or lazy.data.dtype)


def _materialize_lazy_parameters(patches: Patches, tracer: Tracer) -> None:
    """Parameters and buffers of lazy modules are real and empty until the first call."""
    original = internals.UninitializedTensorMixin.materialize

    def materialize(tensor: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        if threading.get_ident() not in tracer.threads:
            return original(tensor, shape, device, dtype)
        made = _empty_like_lazy(tracer, tensor, shape, device, dtype)
        made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        torch.utils.swap_tensors(tensor, made)

    patches.set(internals.UninitializedTensorMixin, "materialize", materialize)
    copied = nn.UninitializedParameter.__deepcopy__

    def deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
        return make_lazy_like(tracer, copied(tensor, memo), tensor)

    patches.set(nn.UninitializedParameter, "__deepcopy__", deepcopy)


def _keep_function_mode_on(patches: Patches) -> None:
    """Run the bodies of torch's Python functions under the placement mode, not inside its handler.

    A torch function mode is off inside its own handler. Functions such as F.multi_head_attention_forward
    would be handed to it whole, and the calls they make would not be seen. With these checks returning
    False, only calls into C reach the mode.
    """
    ours = (torch.Tensor, nn.Parameter, FakeTensor)

    def overridden(values: Iterable[Any]) -> bool:
        for value in values:
            kind = type(value)
            if kind not in ours and not isinstance(value, type):
                override = getattr(kind, "__torch_function__", internals.disabled_torch_function_impl)
                if override is not internals.disabled_torch_function_impl:
                    return internals.torch_function_enabled()
        return False

    for owner, name in internals.HAS_TORCH_FUNCTION:
        patches.set(owner, name, overridden)
    for owner, name in internals.HAS_TORCH_FUNCTION_OF_ARGUMENTS:
        patches.set(owner, name, lambda *values: overridden(values))
