"""Every private function, class and module of torch that oomph uses; and torch's deterministic kernels.

No other file imports them (but prediction/compiler_internals.py, which loads the compiler), so this file is
the one to read when a torch release moves something. (Private
attributes of objects, such as a module's `_buffers` or hook tables, are used where they are needed.) A name
that moved is reported in one sentence: by `self_test`, and by every import of the name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from oomph.errors import UserError

SUPPORTED = "2.11 to 2.15"
_moved: list[str] = []
# Of nn.Module; the names of the hooks of all modules begin with _global.
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class UnsupportedTorch(UserError):
    """The installed torch lacks a private API that oomph relies on, or the API behaves differently."""

    def __init__(self, name: str) -> None:
        version = torch.__version__.partition("+")[0]
        super().__init__(
            f"torch {version} moved {name}; this oomph supports torch {SUPPORTED}; "
            "install one of those releases or a newer oomph"
        )


@contextlib.contextmanager
def _section() -> Iterator[None]:
    """Names that are found or missed together. The others stay usable."""
    try:
        yield
    except AttributeError as error:
        _moved.append(f"{getattr(error.obj, '__name__', error.obj)}.{error.name}")
    except ImportError as error:
        _moved.append(str(error).partition(" (")[0].removeprefix("cannot import name "))


def __getattr__(name: str) -> Any:
    if _moved and not name.startswith("__"):  # its section failed
        raise UnsupportedTorch(_moved[0])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---------------------------------------------------------------------------------------------- several users

with _section():  # the activation-memory budget of torch.compile
    import torch._functorch.config as functorch_config

with _section():  # nested batches, and the path of a tensor inside one
    from torch.utils._pytree import (
        keystr,
        tree_flatten,
        tree_flatten_with_path,
        tree_leaves,
        tree_map,
        tree_map_only,
        tree_unflatten,
    )

with _section():  # a model's output dataclass, in which FSDP finds the tensors that need gradients
    from torch.utils._pytree import register_dataclass

with _section():  # sees every aten op below autograd and autocast
    from torch.utils._python_dispatch import TorchDispatchMode

# ---------------------------------------------------------------------------------------------- ops

with _section():  # whether a backward pass will reach a node
    will_engine_execute_node: Any = torch._C._will_engine_execute_node

with _section():  # whether the caller runs inside a transform of torch.func; the tensors that it sees there
    current_functorch_transform: Any = torch._C._functorch.peek_interpreter_stack
    is_functorch_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor
    functorch_unwrapped: Any = torch._C._functorch.get_unwrapped

with _section():  # autograd inside of an op of a compiled graph
    AUTOGRAD_KEYS: tuple[Any, ...] = (
        torch._C.DispatchKey.AutogradFunctionality,
        torch._C.DispatchKey.AutogradOther,
        torch._C.DispatchKey.ADInplaceOrView,
    )
    SetExcludeDispatchKeyGuard: Any = torch._C._SetExcludeDispatchKeyGuard

with _section():  # whether Dynamo is tracing the caller
    from torch._C._dynamo.eval_frame import get_eval_frame_callback


# ---------------------------------------------------------------------------------------------- fixes

with _section():  # whether a selective checkpoint counts ops
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_dispatch_modes
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    SELECTIVE_CHECKPOINT: tuple[type, ...] = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)

with _section():  # questions that a lazy tensor's wrapper answers
    DisableTorchFunctionSubclass: Any = torch._C.DisableTorchFunctionSubclass

with _section():  # a wrapper with a shape, a dtype and a place in the autograd graph, and no memory
    make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    MAKE_WRAPPER_SUBCLASS: tuple[Any, str] = (torch.Tensor, "_make_wrapper_subclass")

with _section():  # whether a tensor names the tensors that hold its data
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

with _section():  # the function modes around a call
    current_function_modes: Any = torch.overrides._get_current_function_mode_stack

# ---------------------------------------------------------------------------------------------- prediction
# A pair (owner, name) is an attribute that a trace replaces for its duration.

with _section():  # the type of `torch.ops.aten.mm.default`, the key of every rule
    from torch._ops import OpOverload, OpOverloadPacket

with _section():  # tensors without data
    from torch._subclasses.fake_tensor import (
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
        in_kernel_invocation_manager,
    )

with _section():  # the fake mode that a program has entered
    get_dispatch_mode: Any = torch._C._get_dispatch_mode  # type: ignore[attr-defined]
    FAKE_MODE_KEY: Any = torch._C._TorchDispatchModeKey.FAKE  # type: ignore[attr-defined]

with _section():  # the lengths of a jagged tensor
    from torch.nested._internal import sdpa as _jagged_sdpa
    from torch.nested._internal.nested_tensor import get_tensor_symint

    JAGGED_SDPA_BACKEND: tuple[Any, str] = (_jagged_sdpa, "_select_sdp_backend")

with _section():  # the memory format that a convolution takes from its input
    from torch._prims_common import make_contiguous_strides_for, suggest_memory_format

with _section():  # functions whose `device` the default device fills in
    from torch.utils._device import _device_constructors as device_constructors

with _section():  # real tensors inside a trace
    from torch.utils._python_dispatch import _disable_current_modes as disable_dispatch_modes

with _section():  # what the caller set with torch.set_default_device
    GLOBAL_DEVICE_CONTEXT: Any = torch._GLOBAL_DEVICE_CONTEXT

with _section():  # code of a trace that must not see its own torch function mode
    disable_torch_function: Any = torch._C.DisableTorchFunction

with _section():  # a meta kernel called directly, without FakeTensorMode's checks
    DisableTorchDispatch: Any = torch._C._DisableTorchDispatch
    PreserveDispatchKeyGuard: Any = torch._C._PreserveDispatchKeyGuard
    set_meta_in_tls_dispatch_include: Any = torch._C._set_meta_in_tls_dispatch_include
    make_subclass: Any = torch.Tensor._make_subclass

with _section():  # tensors of a class without data of its own, such as a quantized parameter
    MAKE_SUBCLASS: tuple[tuple[Any, str], ...] = (
        (torch.Tensor, "_make_subclass"),
        (torch.Tensor, "as_subclass"),
    )

with _section():  # the graph of a model, for counters of FLOPs
    GET_TRACE_GRAPH: tuple[Any, str] = (torch.jit, "_get_trace_graph")

with _section():  # tensors that become others
    swap_tensor_impl: Any = torch._C._swap_tensor_impl

with _section():  # parameters and buffers of lazy modules
    UninitializedTensorMixin: Any = torch.nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]

with _section():  # what `.to` and nn.Module.to make of their arguments
    parse_to: Any = torch._C._nn._parse_to

with _section():  # FlexAttention's operator, which takes Python functions
    from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop

with _section():  # which autograd node allocates, and which forward op made the node
    current_autograd_node: Any = torch._C._current_autograd_node
    get_sequence_nr: Any = torch._C._autograd._get_sequence_nr
    current_graph_task_id: Any = torch._C._current_graph_task_id

with _section():  # whether autograd holds the only reference to a gradient
    storage_use_count: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]
    tensor_use_count: Any = torch.Tensor._use_count  # type: ignore[attr-defined]

with _section():  # CUDA autocast for tensors that are not really on CUDA
    AUTOCAST_CUDA: Any = torch._C.DispatchKey.AutocastCUDA
    DispatchKeySet: Any = torch._C.DispatchKeySet
    ExcludeDispatchKeyGuard: Any = torch._C._ExcludeDispatchKeyGuard
    dispatch_call_boxed: Any = torch._C._dispatch_call_boxed
    dispatch_get_all_op_names: Any = torch._C._dispatch_get_all_op_names
    dispatch_has_kernel_for_dispatch_key: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    dispatch_tls_set_dispatch_key_included: Any = torch._C._dispatch_tls_set_dispatch_key_included

with _section():  # the compiler's own decompositions
    from torch._decomp import decomposition_table

with _section():  # the order in which scaled_dot_product_attention tries its backends
    get_sdp_priority_order: Any = torch._C._get_sdp_priority_order

with _section():  # the base class of torch's losses
    Loss: Any = torch.nn.modules.loss._Loss

with _section():  # the calls that run autograd's engine
    ENGINE_RUN_BACKWARD: tuple[tuple[Any, str], ...] = (
        (torch.autograd.graph, "_engine_run_backward"),
        (torch.autograd, "_engine_run_backward"),
    )

with _section():  # pack and unpack hooks are registered here
    PUSH_SAVED_TENSORS_HOOKS: tuple[Any, str] = (torch._C._autograd, "_push_saved_tensors_default_hooks")

with _section():  # tensor types for which optimizers take the foreach path
    FOREACH_SUPPORTED_TYPES: tuple[Any, str] = (
        sys.modules["torch.optim.optimizer"],
        "_foreach_supported_types",
    )

with _section():  # the devices by which a weight average chooses the foreach path
    AVERAGE_GROUP_TENSORS: tuple[Any, str] = (
        sys.modules["torch.optim.swa_utils"],
        "_group_tensors_by_device_and_dtype",
    )

with _section():  # nn.Module.to and its kin
    MODULE_APPLY: tuple[Any, str] = (torch.nn.Module, "_apply")

with _section():  # nn.init.trunc_normal_
    TRUNC_NORMAL: tuple[Any, str] = (torch.nn.init, "_no_grad_trunc_normal_")

with _section():  # whether torch's Python functions hand a call to a torch function mode
    disabled_torch_function_impl: Any = torch._C._disabled_torch_function_impl
    torch_function_enabled: Any = torch._C._is_torch_function_enabled
    HAS_TORCH_FUNCTION: tuple[tuple[Any, str], ...] = (
        (torch.nn.functional, "has_torch_function"),
        (torch.functional, "has_torch_function"),
        (torch._tensor, "has_torch_function"),
        (torch.autograd, "has_torch_function"),
    )
    HAS_TORCH_FUNCTION_OF_ARGUMENTS: tuple[tuple[Any, str], ...] = tuple(
        (module, name)
        for module in (torch.nn.functional, torch.functional, torch._tensor)
        for name in ("has_torch_function_unary", "has_torch_function_variadic")
    )

with _section():  # programs that ask whether they are traced look here
    EXPORTED_FAKE_TENSOR: tuple[Any, str] = (torch._subclasses, "FakeTensor")

with _section():  # torch.cuda without a driver
    ACCELERATOR: tuple[Any, str] = (torch._C, "_get_accelerator")
    CUDA_DRIVER: Any = torch._C  # what torch.cuda calls; builds for CPUs have little of it
    CUDA_STATE: tuple[tuple[Any, str], ...] = tuple(
        (torch.cuda, name)
        for name in (
            *("_initialized", "_lazy_init", "_is_in_bad_fork", "_cudart"),
            *("_exchange_device", "_maybe_exchange_device"),
        )
    )
    # Without CUDA among these, torch.profiler records an event per op, which fails with a warning.
    PROFILER_ACTIVITIES: tuple[Any, str] = (torch.autograd.profiler, "_supported_activities")
    DATA_LOADER_ITERATOR: tuple[Any, str] = (torch.utils.data.DataLoader, "_get_iterator")
    CUDA_RECORD_MEMORY_HISTORY: tuple[Any, str] = (torch.cuda.memory, "_record_memory_history")
    REBUILT_TENSOR_DEVICE: tuple[Any, str] = (torch._utils, "_restore_device_fake_mode")  # of torch.load

with _section():  # the device that checkpointing falls back on, remembered for the process
    from torch.utils.checkpoint import DefaultDeviceType

    CHECKPOINT_DEFAULT_DEVICE: tuple[Any, str] = (DefaultDeviceType, "_default_device_type")


def compiled_frame_callback() -> tuple[Any, str] | None:
    """Where Dynamo looks up what to do with a compiled function; None: Dynamo was never loaded."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return None if dynamo is None else (dynamo, "_callback_from_stance")


def find_dynamo_rules() -> None:
    """Have Dynamo, where it is loaded, look up torch's functions now: it keeps what it finds."""
    module = sys.modules.get("torch._dynamo.trace_rules")
    find = getattr(module, "get_torch_obj_rule_map", None)
    if find is not None:
        find()


def checkpoint_validation() -> tuple[Any, str]:
    """Where torch.distributed.checkpoint looks up what checks that the parts of all ranks cover a tensor."""
    return importlib.import_module("torch.distributed.checkpoint.default_planner"), "_validate_global_plan"


def fsdp_functions() -> tuple[tuple[Any, str], ...]:
    """Where FSDP2 looks up what cuts a parameter into shards, what finds parameters and buffers of modules,
    and what moves these to a device."""
    package = "torch.distributed.fsdp._fully_shard"
    init = importlib.import_module(f"{package}._fsdp_init")
    return (
        (importlib.import_module(f"{package}._fsdp_param"), "_chunk_with_empty"),
        (init, "_get_managed_states"),
        (init, "_move_states_to_device"),
    )


# Kernels for CUDA that are written in Python, by the name of their op: a trace runs them to see what they
# allocate.
python_kernels: dict[str, Any] = {}


def is_dtensor(kind: type) -> bool:
    """Whether it is the class DTensor, whose ops are dispatched in C++, not by its Python method."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


@functools.cache
def is_composite(op: OpOverload) -> bool:
    """Whether the op only calls others; autograd sees those, not the op."""
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def writes_arguments(op: OpOverload | OpOverloadPacket) -> bool:
    """Whether the op, or one of its overloads but for those with out=, changes an argument in place."""
    if isinstance(op, OpOverload):
        return op._schema.is_mutable
    overloads = (getattr(op, name) for name in op.overloads() if not name.endswith("out"))
    return any(map(writes_arguments, overloads))


def sequence_nr(node: Any) -> int:
    """Of a node of autograd: nodes are numbered in the order in which their thread makes them."""
    number: int = node._sequence_nr()
    return number


def running_sequence_nr() -> int | None:
    """Of the node that autograd's engine runs now; None outside of a backward pass."""
    node = current_autograd_node()
    return None if node is None else sequence_nr(node)


def storage_id(storage: torch.UntypedStorage) -> int:
    """The C++ identity of a storage, which two Python objects of one storage share."""
    return storage._cdata


# ---------------------------------------------------------------------------------------------- measurement

with _section():  # "bf16"
    from torch.utils._dtype_abbrs import dtype_abbrs

with _section():  # the size of every request to the allocator
    cuda_lazy_call: Any = torch.cuda._lazy_call  # run when CUDA is first used
    out_of_memory_observer: Any = getattr(
        torch._C, "_cuda_attach_out_of_memory_observer", None
    )  # CUDA builds
    record_memory_history: Any = torch.cuda.memory._record_memory_history
    memory_snapshot: Any = torch.cuda.memory._snapshot

with _section():  # the caching allocator's settings, changed in a running process
    set_allocator_settings: Any = torch._C._accelerator_setAllocatorSettings


def cuda_device_count() -> int:
    """As CUDA counts them, once in a process. torch.cuda.device_count() may ask NVML, which hides none."""
    count = getattr(torch._C, "_cuda_getDeviceCount", None)  # not in builds for CPUs
    return 0 if count is None else int(count())


def cudnn_version() -> int | None:
    """As torch.backends.cudnn.version(), which starts CUDA: forks of such a process could not use it."""
    library = getattr(torch._C, "_cudnn", None)
    if library is None or torch.version.cuda is None:
        return None
    major, minor, patch = library.getRuntimeVersion()
    return int(major * 10000 + minor * 100 + patch)


def clear_cublas_workspaces() -> None:
    """Free the workspaces of cuBLAS, which live in the caching allocator. CPU builds have none."""
    if torch.version.cuda is not None:
        torch._C._cuda_clearCublasWorkspaces()


# ---------------------------------------------------------------------------------------------- training
SIGCHLD_HANDLER = (torch.utils.data._utils.signal_handling, "_set_SIGCHLD_handler")


@contextlib.contextmanager
def without_sigchld_handler() -> Iterator[None]:
    """A data loader opened here does not raise in the main thread when its worker process ends."""
    owner, name = SIGCHLD_HANDLER
    original = getattr(owner, name)
    setattr(owner, name, lambda: None)
    try:
        yield
    finally:
        setattr(owner, name, original)


# ---------------------------------------------------------------------------------------------- command line


with _section():  # process groups
    if torch.distributed.is_available():
        import torch.distributed._meta_registrations
        from torch.distributed import distributed_c10d

        NEW_PROCESS_GROUP: tuple[Any, str] = (distributed_c10d, "_new_process_group_helper")
        PROCESS_GROUP_TIMEOUT: tuple[Any, str] = (distributed_c10d, "_set_pg_timeout")
        PROCESS_GROUP_WRAPPER: tuple[Any, str] = (distributed_c10d, "_create_process_group_wrapper")
        WORK_NUMBER: tuple[Any, str] = (torch.distributed._meta_registrations, "generate_unique_id")


def load_fake_backend() -> Any:
    """Registers the backend "fake", whose collectives do nothing."""
    import torch.testing._internal.distributed.fake_pg as module

    return module


def init_fake_process_group(ranks: int = 1, rank: int = 0) -> None:
    """A process group whose collectives do nothing."""
    store = load_fake_backend().FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=ranks)


def symmetric_memory() -> Any:
    import torch.distributed._symmetric_memory as module

    return module


def process_group_of(name: Any) -> Any:
    """A group by the name that torch gave it."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def set_default_backend_of_fake(group: Any) -> None:
    """To the one that a group has; also for the host, where torch runs collectives on constants."""
    kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
    backend = group._get_backend(group._device_types[0])
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)


@functools.cache
def add_meta_collectives() -> Any:
    """Those of coalesced tensors, which torch leaves out: tensors stay as they are."""
    library = torch.library.Library("c10d", "IMPL")
    work = torch.distributed._meta_registrations.create_fakework
    for name in ("allreduce", "allgather", "allgather_into_tensor", "reduce_scatter_tensor"):
        op = f"{name}_coalesced_"
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{op}", "Meta"):
            library.impl(op, lambda *args: work(args, return_first_arg=False), "Meta")
    return library


def group_size(arguments: Sequence[Any]) -> int:
    """The ranks of the process group among the arguments of a collective op."""
    for each in arguments:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return torch.distributed.ProcessGroup.unbox(each).size()
        if isinstance(each, str):
            with contextlib.suppress(RuntimeError, ValueError):
                name: Any = each
                return process_group_of(name).size()
    return torch.distributed.get_world_size()


def has_triton() -> bool:
    """Cached for the process by torch."""
    from torch.utils._triton import has_triton

    return has_triton()


def batches_drawn(iterator: Any) -> int:
    """From an iterator of a DataLoader."""
    return int(iterator._num_yielded)


# ---------------------------------------------------------------------------------------------- self-test


def self_test() -> None:
    """Raise UnsupportedTorch if a private API is missing or does not behave as a trace assumes."""
    if _moved:
        raise UnsupportedTorch(_moved[0])
    pairs = [
        *ENGINE_RUN_BACKWARD,
        PUSH_SAVED_TENSORS_HOOKS,
        AVERAGE_GROUP_TENSORS,
        FOREACH_SUPPORTED_TYPES,
        *MAKE_SUBCLASS,
        MAKE_WRAPPER_SUBCLASS,
        MODULE_APPLY,
        *HAS_TORCH_FUNCTION,
        *HAS_TORCH_FUNCTION_OF_ARGUMENTS,
        EXPORTED_FAKE_TENSOR,
        ACCELERATOR,
        JAGGED_SDPA_BACKEND,
        *CUDA_STATE,
        PROFILER_ACTIVITIES,
        DATA_LOADER_ITERATOR,
        CUDA_RECORD_MEMORY_HISTORY,
        REBUILT_TENSOR_DEVICE,
        CHECKPOINT_DEFAULT_DEVICE,
        SIGCHLD_HANDLER,
        *filter(None, [compiled_frame_callback()]),
    ]
    for owner, name in pairs:
        check_attribute(owner, name)
    _check_data_loaders()
    _check_schemas()
    _check_fake_tensors()
    _check_autograd_nodes()


def check_attribute(owner: Any, name: str) -> None:
    """Raise UnsupportedTorch unless `owner` has the attribute: a trace never skips a patch."""
    if not hasattr(owner, name):
        raise UnsupportedTorch(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")


def _check_data_loaders() -> None:
    counts = torch.utils.data.dataloader._BaseDataLoaderIter.__next__.__code__.co_names
    if "_num_yielded" not in counts:
        raise UnsupportedTorch("_BaseDataLoaderIter._num_yielded")


def _check_schemas() -> None:
    op = torch.ops.aten.add_.Tensor
    for name in ("_schema", "_opname", "_handle", "decompose", "is_view"):
        check_attribute(op, name)
    written = op._schema.arguments[0].alias_info
    if not (op._schema.is_mutable and written is not None and written.is_write):
        raise UnsupportedTorch("OpOverload._schema")


def _check_fake_tensors() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    check_attribute(mode, "in_kernel_invocation")
    with mode:
        made = torch.empty(2, 3, device="cpu")  # also under another default device
    if type(made) is not FakeTensor or made.fake_device.type != "cpu":
        raise UnsupportedTorch("FakeTensorMode")
    if storage_id(made.untyped_storage()) != storage_id(made.view(6).untyped_storage()):
        raise UnsupportedTorch("UntypedStorage._cdata")


def _check_autograd_nodes() -> None:
    """An op's node gets the newest sequence number, and the engine says which node runs."""
    running = []

    class RecordNodes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            running.append(current_autograd_node())
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(False), torch.enable_grad():
        loss = torch.ones(2, device="cpu", requires_grad=True).exp().sum()
        newest = get_sequence_nr() - 1
        node: Any = loss.grad_fn
        if sequence_nr(node) != newest:
            raise UnsupportedTorch("torch._C._autograd._get_sequence_nr")
        with RecordNodes():
            loss.backward()
    if current_autograd_node() is not None or not any(each is not None for each in running):
        raise UnsupportedTorch("torch._C._current_autograd_node")


# -------------------------------------------------------------------------------------- deterministic kernels

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_ACCEPTED = (":4096:8", ":16:8")  # with another, torch refuses matrix products: cuBLAS is not deterministic
NO_KERNEL = " does not have a deterministic implementation"  # torch's words
_TOO_LATE = "not deterministic because it uses CuBLAS"
_new_memory: Any = torch.utils.deterministic
DeterministicSettings = tuple[int, bool, str | None]


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool = True) -> Iterator[None]:
    """Allow only kernels that give the same bits at every run. An op without one raises UserError."""
    if not enabled:
        yield
        return
    before = deterministic_settings()
    try:
        workspace = before[2] if before[2] in _ACCEPTED else _ACCEPTED[0]
        set_deterministic_settings((2, False, workspace))  # filling new memory would write every result twice
        with deterministic_errors():
            yield
    finally:
        set_deterministic_settings(before)


def deterministic_settings() -> DeterministicSettings:
    """torch's deterministic debug mode (0: off, 1: warn, 2: error), whether new memory is filled then, and
    CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads at its first matrix product."""
    mode = torch.get_deterministic_debug_mode()
    return mode, _new_memory.fill_uninitialized_memory, os.environ.get(_WORKSPACE)


def set_deterministic_settings(settings: DeterministicSettings) -> None:
    mode, _new_memory.fill_uninitialized_memory, workspace = settings
    if mode != torch.get_deterministic_debug_mode():
        # Not by its debug mode: this sets Inductor's too (and imports it, so only where something changes).
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
    if workspace is None:
        os.environ.pop(_WORKSPACE, None)
    else:
        os.environ[_WORKSPACE] = workspace


def deterministic_required() -> bool:
    """Whether a nondeterministic kernel is an error, not only a warning."""
    return torch.are_deterministic_algorithms_enabled() and (
        not torch.is_deterministic_algorithms_warn_only_enabled()
    )


@contextlib.contextmanager
def deterministic_errors() -> Iterator[None]:
    """Turn torch's errors about nondeterministic kernels into a UserError of one line."""
    try:
        yield
    except RuntimeError as error:
        op, refused, _ = str(error).partition(NO_KERNEL)
        if refused:
            message = f"only deterministic kernels are allowed, and torch has none for {op}"
        elif _TOO_LATE in str(error):
            message = (
                "cuBLAS ran before deterministic kernels were required; start the process with "
                f"{_WORKSPACE}={_ACCEPTED[0]}"
            )
        else:
            raise
        raise UserError(message) from error
