"""A torch.cuda that answers for the fake GPU, on builds with and without CUDA alike.

torch.cuda's own Python functions stay, with their names, signatures and errors: what they call in torch._C is
replaced. Nothing here reaches a driver: on a machine with a real GPU, a trace leaves it alone. Streams and
events do nothing but report who waits for whom: a trace runs one op after the other, and what would run
concurrently on a GPU follows from the stream of each op and from the waits between streams, in program order.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from oomph import torch_internals as internals
from oomph.gpus import GPU
from oomph.prediction.ops.attention import SHIPPED_CUDNN
from oomph.prediction.patches import Patches
from oomph.prediction.tracer.streams import (
    DEVICE,
    AnyEvent,
    AnyStream,
    Event,
    ExternalStream,
    Stream,
    Streams,
    current_streams,
    named,
    numbers,
)

if TYPE_CHECKING:
    from oomph.prediction.tracer.recorder import AllocationRecorder, PinnedMemory

# ---------------------------------------------------------------------------------------------- torch.cuda


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class NullContext(contextlib.ContextDecorator):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


@named("torch.cuda.graphs", "CUDAGraph")
class CudaGraph:
    """Stands for torch.cuda.CUDAGraph. What it captures runs once, as it would outside of a graph."""

    def __init__(self, keep_graph: bool = False) -> None:
        pass

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def raw_cuda_graph(self) -> int:
        return 1

    raw_cuda_graph_exec = raw_cuda_graph
    register_generator_state = capture_begin = capture_end = instantiate = replay = reset = (
        enable_debug_mode
    ) = debug_dump = _nothing


@named("torch.cuda.memory", "MemPool")
class MemoryPool:
    """Stands for torch.cuda.MemPool, whose allocations are those of the program here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.id = (0, next(numbers))
        self.allocator = None

    def use_count(self) -> int:
        return 1

    def snapshot(self, include_traces: bool = True) -> list[Any]:
        return []


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def gpus_of_node(ranks: int) -> int:
    """As many as a node has, eight at most, if all nodes have the same number."""
    return next(number for number in range(8, 0, -1) if ranks % number == 0)


def show_devices(number: int) -> None:
    """What a program sees of the GPUs of its node: `number` of them, each with a generator."""
    current_streams().devices = number
    torch.cuda.default_generators = tuple(  # type: ignore[assignment]
        torch.Generator(torch.device("cuda", index)) for index in range(number)
    )


def install_fake_cuda(patches: Patches, gpu: GPU, recorder: AllocationRecorder, pinned: PinnedMemory) -> None:
    """Answer torch.cuda's questions from the catalogue for as long as `patches` last."""
    own = Streams()
    own.on_synchronize = recorder.synchronize
    patches.set(sys.modules[Streams.__module__], "streams", own)
    _make_generators_on_host(patches)
    for name, function in _driver_answers(gpu, recorder, own).items():
        patches.set(internals.CUDA_DRIVER, name, function, missing_ok=True)
        if hasattr(torch.cuda.memory, name):
            patches.set(torch.cuda.memory, name, function)
    for name, value in _cuda_answers(gpu, recorder, own).items():
        if not hasattr(torch.cuda, name):  # of a later torch
            continue
        before = getattr(torch.cuda, name)
        for module in _CUDA_MODULES:
            if vars(module).get(name, own) is before:
                patches.set(module, name, value)
    patches.set(torch, "Stream", AnyStream)
    patches.set(torch, "Event", AnyEvent)
    patches.set(torch.cuda, "default_generators", ())
    show_devices(1)
    patches.set(torch.cuda.nvtx, "_nvtx", _Nvtx())
    patches.set(torch, "device", _Device)
    patches.set(torch.version, "cuda", _CUDA_VERSION)
    patches.set(torch.backends.cuda, "is_built", _answer(True))
    patches.set(torch.backends.cudnn, "is_available", _answer(True))
    patches.set(torch.backends.cudnn, "version", _answer(_CUDNN_VERSION))
    patches.set(torch.backends.cudnn, "is_acceptable", _is_acceptable_to_cudnn)
    patches.set(torch.backends.cuda, "cufft_plan_cache", _PlanCache())
    for name in _LEGACY_TYPES:
        made = LegacyTensorType(name, (), {"dtype": _LEGACY_TYPES[name], "__module__": "torch.cuda"})
        patches.set(torch.cuda, name, made)
    patches.set(*internals.ACCELERATOR, _answer(torch.device("cuda")))  # of device meshes
    activities = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    patches.set(*internals.PROFILER_ACTIVITIES, _answer(activities))
    _load_no_cuda_library(patches)
    patches.set(*internals.CUDA_RECORD_MEMORY_HISTORY, _nothing)

    def record_stream(tensor: torch.Tensor, s: Any) -> None:
        with internals.disable_torch_function():
            recorder.record_stream(tensor, own.number(s))

    patches.set(torch.Tensor, "record_stream", record_stream)
    patches.set(torch.Tensor, "pin_memory", lambda tensor, device=None: pinned.add(tensor))
    # Checkpointing asks this when no argument is a tensor, and remembers the answer for the process.
    patches.set(*internals.CHECKPOINT_DEFAULT_DEVICE, "cuda")


def _make_generators_on_host(patches: Patches) -> None:
    """A random generator of the GPU needs a driver; its numbers are not drawn in a trace."""

    made_by_torch = torch.Generator

    class AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:  # also what torch.manual_seed returns
            return isinstance(value, made_by_torch)

    @named("torch._C", "Generator")
    class Generator(torch.Generator, metaclass=AnyGenerator):
        def __new__(cls, device: Any = "cpu") -> Any:
            made: Any = super().__new__(cls, "cpu")  # type: ignore[call-arg]
            asked = torch.device("cpu" if device is None else device)
            if asked.type == "cuda":
                made.__class__ = GpuGenerator
                made.offset = 0
            made.asked = asked
            return made

        device = property(lambda self: self.asked)

    @named("torch._C", "Generator")
    class GpuGenerator(Generator):
        """Its state is a seed and an offset."""

        def get_state(self) -> torch.Tensor:
            given = self.initial_seed().to_bytes(8, "little") + self.offset.to_bytes(8, "little")
            with internals.disable_dispatch_modes(), internals.disable_torch_function():
                return torch.tensor(list(given), dtype=torch.uint8, device="cpu")

        def set_state(self, new_state: torch.Tensor) -> Generator:
            if not isinstance(new_state, internals.FakeTensor):
                with internals.disable_dispatch_modes(), internals.disable_torch_function():
                    given = bytes(new_state.tolist())
                self.manual_seed(int.from_bytes(given[:8], "little"))
                self.offset = int.from_bytes(given[8:], "little")
            return self

        def get_offset(self) -> int:
            return self.offset  # type: ignore[no-any-return]

        def set_offset(self, offset: int) -> Generator:
            self.offset = offset
            return self

        def clone_state(self) -> Any:
            made: Any = torch.Generator(self.device)
            made.manual_seed(self.initial_seed())
            return made.set_offset(self.offset)

        graphsafe_get_state = clone_state

        def graphsafe_set_state(self, _new_state: torch.Generator) -> Generator:
            return self

    patches.set(torch, "Generator", Generator)


class CudaLibrary:
    """Stands for a shared library of CUDA kernels, loaded with ctypes: its functions do nothing."""

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> int:
            return 0

        setattr(self, name, function)  # its signature is set on it
        return function

    __getitem__ = __getattr__


def _load_no_cuda_library(patches: Patches) -> None:
    load = ctypes.LibraryLoader.LoadLibrary

    def load_library(loader: Any, name: Any) -> Any:
        return CudaLibrary() if "_cuda" in Path(str(name)).name else load(loader, name)

    patches.set(ctypes.LibraryLoader, "LoadLibrary", load_library)


class _DeviceType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _torch_device)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("device")
        if isinstance(given, int) and not isinstance(given, bool):
            return _torch_device("cuda", given)
        return _torch_device(*args, **kwargs)


@named("torch", "device")
class _Device(metaclass=_DeviceType):
    """torch.device, to which a bare number is a GPU, whether torch sees one or not."""


_torch_device = torch.device
_CUDA_VERSION = torch.version.cuda or "13.0"  # of a build for CPUs: as of the builds for CUDA
_CUDNN_VERSION = internals.cudnn_version() or SHIPPED_CUDNN
_NCCL_VERSION = 2 << 32 | 28 << 16 | 9  # that torch 2.11 comes with
_LEGACY_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


def _is_acceptable_to_cudnn(tensor: torch.Tensor) -> bool:
    dtypes = (torch.half, torch.bfloat16, torch.float, torch.double)
    return torch.backends.cudnn.enabled and tensor.is_cuda and tensor.dtype in dtypes


@named("torch", "tensortype")
class LegacyTensorType(type):
    """torch.cuda.FloatTensor(2, 3), torch.cuda.LongTensor([1, 2]), x.type(torch.cuda.FloatTensor)"""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> torch.Tensor:  # type: ignore[override]
        if args and isinstance(args[0], torch.Size):
            return torch.empty(args[0], dtype=cls.dtype, device=DEVICE)
        if args and not isinstance(args[0], int):
            return torch.as_tensor(args[0], dtype=cls.dtype, device=DEVICE)
        return torch.empty(args or (0,), dtype=cls.dtype, device=DEVICE)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype == cls.dtype


_SHARED_MEMORY = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448}
_LESS_SHARED_MEMORY = 101376


L2_CACHE = 60 << 20  # bytes of an H200's


def shared_memory(gpu: GPU) -> int:
    """Bytes that a block can have at most."""
    return _SHARED_MEMORY.get(gpu.capability, _LESS_SHARED_MEMORY)


@named("torch._C", "_CudaDeviceProperties")
class _DeviceProperties(SimpleNamespace):
    def __repr__(self) -> str:
        size, cache = self.total_memory >> 20, self.L2_cache_size >> 20
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={size}MB, multi_processor_count={self.multi_processor_count}, uuid={self.uuid}, "
            f"pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={cache}MB)"
        )


class _CudaError(enum.IntEnum):
    """Of the CUDA runtime."""

    success = 0


class _Runtime:
    """Stands for torch.cuda.cudart(): its functions succeed."""

    cudaError = _CudaError

    def __init__(self, memory: Callable[[], tuple[int, int]]) -> None:
        self._memory = memory

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        return self._memory()

    def cudaGetErrorString(self, error: Any) -> str:
        return "no error"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return _answer(_CudaError.success)


class _PlanCache:
    """Stands for torch.backends.cuda.cufft_plan_cache, which is empty."""

    size, max_size, clear = 0, 4096, _nothing

    def __getitem__(self, device: Any) -> _PlanCache:
        return self


class _Nvtx:
    """Stands for the module behind torch.cuda.nvtx, where no profiler listens."""

    def rangeStartA(self, message: str) -> int:
        return next(numbers)

    rangePushA = rangePop = _answer(-2)
    deviceRangeStart = _answer(0)
    markA = rangeEnd = deviceRangeEnd = _nothing


_CUDA_MODULES = [torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs]


def _cuda_answers(gpu: GPU, recorder: AllocationRecorder, own: Streams) -> dict[str, Any]:
    """What is replaced in torch.cuda itself: classes of torch._C, and what asks the machine beside it."""
    major, minor = gpu.capability
    properties = _DeviceProperties(
        name=gpu.title,
        total_memory=gpu.memory,
        major=major,
        minor=minor,
        multi_processor_count=gpu.multiprocessors,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared_memory(gpu),
        shared_memory_per_multiprocessor=shared_memory(gpu) + 1024,
        L2_cache_size=L2_CACHE,
        clock_rate=1_500_000,  # kHz, as the next
        memory_clock_rate=(gpu.bandwidth or 10**12) // (5120 // 4 * 1000),
        memory_bus_width=5120,  # lines, with two bits each a clock
        uuid="00000000-0000-0000-0000-000000000000",
        pci_domain_id=0,
        pci_bus_id=1,
        pci_device_id=0,
        gcnArchName="",
    )

    @named("torch.cuda.graphs", "graph")
    class Graph(NullContext):
        """Stands for torch.cuda.graph."""

        def __init__(self, cuda_graph: Any, pool: Any = None, stream: Any = None, **kwargs: Any) -> None:
            self.cuda_graph, self.capture_stream = cuda_graph, stream
            note_graph()

    def note_graph() -> None:
        recorder.note_once("CUDA graphs are traced as eager: a graph keeps all memory of its capture", None)

    def graphed(callables: Any, *args: Any, **kwargs: Any) -> Any:
        note_graph()
        return callables

    def device_properties(device: Any = None) -> _DeviceProperties:
        """Also of a GPU that this node does not have."""
        torch.cuda.device(device)  # an error where it is none
        return properties

    def free_and_total() -> tuple[int, int]:
        return max(gpu.memory - recorder.live_bytes, 0), gpu.memory

    asked_of_nvml = "utilization memory_usage temperature power_draw clock_rate".split()
    return {
        "_initialized": True,
        "_is_in_bad_fork": _answer(False),
        "_lazy_init": _nothing,
        "_cudart": _Runtime(free_and_total),
        "_CudaDeviceProperties": _DeviceProperties,
        "_exchange_device": lambda device: 0 if device >= 0 else -1,
        "_maybe_exchange_device": lambda device: 0 if device >= 0 else -1,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        "device_count": lambda: own.devices,
        "get_device_properties": device_properties,
        "has_magma": True,
        "device_memory_used": lambda *args, **kwargs: recorder.live_bytes,
        "reset_max_memory_allocated": lambda device=None: torch.cuda.reset_peak_memory_stats(device),
        "CUDAGraph": CudaGraph,
        "graph": Graph,
        "graph_pool_handle": _answer((0, 0)),
        "make_graphed_callables": graphed,
        "MemPool": MemoryPool,
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "is_current_stream_capturing": _answer(False),
        **dict.fromkeys(asked_of_nvml, _answer(0)),
    }


def _driver_answers(gpu: GPU, recorder: AllocationRecorder, own: Streams) -> dict[str, Callable[..., Any]]:
    """What torch.cuda and torch.accelerator call in torch._C. A build for CPUs has the latter alone."""
    major, minor = gpu.capability
    state = SimpleNamespace(fraction=1.0, sync_debug_mode=0, caching=True)
    raw: dict[int, torch.Tensor] = {}  # of caching_allocator_alloc

    def of_stream(stream: Any) -> tuple[int, int, int]:
        return stream.stream_id, 0, 1

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        own.set_current(Stream(stream_id=stream_id))

    def memory_stats(*args: Any) -> dict[str, Any]:
        sizes = {"current": recorder.live_bytes, "peak": recorder.peak_bytes}
        allocated = {**sizes, "allocated": recorder.peak_bytes}
        allocated["freed"] = allocated["allocated"] - allocated["current"]
        none = dict.fromkeys(allocated, 0)
        stats: dict[str, Any] = dict.fromkeys(_COUNTS, 0)
        stats |= {kind: {"all": none, "small_pool": none, "large_pool": none} for kind in _NUMBERS}
        large = {"all": allocated, "small_pool": none, "large_pool": allocated}
        stats |= {f"{kind}_bytes": large for kind in ("allocated", "active", "requested", "reserved")}
        return stats | dict.fromkeys(("oversize_allocations", "oversize_segments"), none)

    def reset_peak(*args: Any) -> None:
        recorder.peak_bytes = recorder.live_bytes

    def raw_alloc(size: int, stream: int = 0) -> int:
        made = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        return raw.setdefault(made.data_ptr(), made).data_ptr()

    def raw_delete(pointer: int) -> None:
        raw.pop(pointer, None)

    def free_and_total(*args: Any) -> tuple[int, int]:
        return max(gpu.memory - recorder.live_bytes, 0), gpu.memory

    def run_jiterator(
        code: str, name: str, by_ref: bool, outputs: int, tensors: Any, options: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        made = [torch.empty_like(torch.broadcast_tensors(*tensors)[0]) for _ in range(outputs)]
        return made[0] if outputs == 1 else tuple(made)

    def exchange(device: int) -> int:
        return 0 if device >= 0 else -1

    def snapshot(pool: Any = None) -> dict[str, Any]:
        """All that is allocated as one block of one segment."""
        size = recorder.live_bytes
        sizes = {"total_size": size, "allocated_size": size, "active_size": size, "requested_size": size}
        block = {
            "address": 0,
            "size": size,
            "requested_size": size,
            "state": "active_allocated",
            "frames": [],
        }
        place = {"device": 0, "address": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0)}
        segment = {**place, **sizes, "is_expandable": False, "frames": [], "blocks": [block]}
        return {"segments": [segment] if size else [], "device_traces": [[]], **_NOT_RECORDED}

    cuda: dict[str, Callable[..., Any]] = {
        "init": _nothing,
        "isInBadFork": _answer(False),
        "getDeviceCount": lambda: own.devices,
        "getDevice": _answer(0),
        "setDevice": _nothing,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "canDeviceAccessPeer": _answer(False),
        "getCompiledVersion": _answer(int(float(_CUDA_VERSION) * 1000)),
        "getArchFlags": _answer(f"sm_{major}{minor}"),
        "synchronize": lambda: own.report("synchronize device"),
        "getCurrentStream": lambda device=0: of_stream(own.current),
        "getDefaultStream": lambda device=0: of_stream(own.default),
        "getStreamFromExternal": lambda pointer, device=0: (pointer, 0, 1),
        "getCurrentRawStream": _answer(0),
        "setStream": set_stream,
        "isCurrentStreamCapturing": _answer(False),
        "getCurrentBlasHandle": _answer(1),
        "getCurrentSolverHandle": _answer(1),
        "memoryStats": memory_stats,
        "resetPeakMemoryStats": reset_peak,
        "resetAccumulatedMemoryStats": _nothing,
        "hostMemoryStats": _answer(_HOST_STATS),
        "resetPeakHostMemoryStats": _nothing,
        "resetAccumulatedHostMemoryStats": _nothing,
        "memorySnapshot": snapshot,
        "getAllocatorBackend": _answer("native"),
        "getMemoryFraction": lambda device=0: state.fraction,
        "setMemoryFraction": lambda fraction, device=0: setattr(state, "fraction", fraction),
        "emptyCache": lambda *pool: recorder.mark("empty_cache"),
        "ipc_collect": _nothing,
        "get_sync_debug_mode": lambda: state.sync_debug_mode,
        "set_sync_debug_mode": lambda mode: setattr(state, "sync_debug_mode", mode),
        "sleep": _nothing,
        "cudaCachingAllocator_raw_alloc": raw_alloc,
        "cudaCachingAllocator_raw_delete": raw_delete,
        "cudaCachingAllocator_enable": lambda value: setattr(state, "caching", value),
        "cudaCachingAllocator_is_enabled": lambda: state.caching,
        "cudaHostAllocator": _answer(1),
        "lock_mutex": _nothing,
        "unlock_mutex": _nothing,
        "hasPrimaryContext": _answer(True),
        "beginAllocateToPool": _nothing,
        "beginAllocateCurrentThreadToPool": _nothing,
        "beginAllocateCurrentStreamToPool": _nothing,
        "endAllocateToPool": _nothing,
        "endAllocateCurrentStreamToPool": _nothing,
        "releasePool": _nothing,
        "tunableop_is_enabled": _answer(False),
        "tunableop_get_max_tuning_iterations": _answer(100),
        "jiterator_compile_and_launch_kernel": run_jiterator,
    }
    accelerator: dict[str, Callable[..., Any]] = {
        "getAccelerator": _answer(torch.device("cuda")),
        "getDeviceIndex": _answer(0),
        "setDeviceIndex": _nothing,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "getDeviceCapability": _answer({"supported_dtypes": set(_LEGACY_TYPES.values())}),
        "getStream": lambda device=0: AnyStream(stream_id=own.current.stream_id),
        "setStream": own.set_current,
        "synchronizeDevice": lambda device=0: own.report("synchronize device"),
        "isAllocatorInitialized": _answer(True),
        "emptyCache": lambda *pool: recorder.mark("empty_cache"),
        "emptyHostCache": _nothing,
        "getDeviceStats": memory_stats,
        "resetAccumulatedStats": _nothing,
        "resetPeakStats": reset_peak,
        "getMemoryInfo": free_and_total,
        "setAllocatorSettings": _nothing,
    }
    nccl = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send", "recv")
    return {
        **{f"_nccl_{name}": _nothing for name in nccl},
        **_COPIES_BETWEEN_GPUS,
        **dict.fromkeys(("_set_linalg_preferred_backend", "_set_blas_preferred_backend"), _nothing),
        "_nccl_version": _answer(_NCCL_VERSION),
        "_nccl_version_suffix": _answer(b""),
        "_nccl_unique_id": _answer(bytes(128)),
        "_is_flash_attention_available": _answer(True),
        **{f"_cuda_{name}": function for name, function in cuda.items()},
        **{f"_accelerator_{name}": function for name, function in accelerator.items()},
    }


def _scatter(tensor: torch.Tensor, devices: Any, sizes: Any = None, dim: int = 0, streams: Any = None) -> Any:
    return [part.to(DEVICE) for part in tensor.split(sizes or -(-tensor.size(dim) // len(devices)), dim)]


def _gather(tensors: Any, dim: int = 0, device: Any = None) -> torch.Tensor:
    return torch.cat(tuple(tensors), dim).to("cpu" if device == -1 else DEVICE)


_COPIES_BETWEEN_GPUS: dict[str, Callable[..., Any]] = {
    "_scatter": _scatter,
    "_gather": _gather,
    "_broadcast": lambda tensor, devices: [tensor.to(DEVICE) for _ in devices],
    "_broadcast_coalesced": lambda tensors, devices, size: [[*tensors] for _ in devices],
}
_HOST_STATS: dict[str, Any] = {
    **{
        name: dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
        for name in ("allocations", "allocated_bytes", "active_requests", "active_bytes")
    },
    **{
        name: dict.fromkeys(("total", "max", "min", "count", "avg"), 0)
        for name in ("host_alloc_time", "host_free_time")
    },
    "num_host_alloc": 0,
    "num_host_free": 0,
}
_NOT_RECORDED: dict[str, Any] = {
    "allocator_settings": {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "roundup_power2_divisions": {},
        "graph_capture_record_stream_reuse": False,
    },
    "external_annotations": [],
}
_COUNTS = (
    *("num_alloc_retries", "num_ooms", "max_split_size", "num_sync_all_streams"),
    *("num_device_alloc", "num_device_free"),
)
_NUMBERS = ("allocation", "segment", "active", "inactive_split", "inactive_split_bytes")
