"""A torch.cuda that answers for the fake GPU, on builds with and without CUDA alike.

Nothing here reaches a driver: on a machine with a real GPU, a trace leaves it alone. Streams and events do
nothing but report who waits for whom: a trace runs one op after the other, and what would run concurrently on
a GPU follows from the stream of each op and from the waits between streams, in program order.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import mmap
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from oomph import torch_internals as internals
from oomph.gpus import GPU
from oomph.prediction.cuda.attention import SHIPPED_CUDNN

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import AllocationRecorder

DEVICE = torch.device("cuda:0")


_INHERITED = object()


class _ReplacedAttribute(NamedTuple):
    owner: Any
    name: str
    before: Any
    value: Any

    def undo(self) -> None:
        if self.before is _INHERITED:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class _ImportHook(MetaPathFinder):
    """Calls `imported` as soon as the program has imported a module."""

    def __init__(self, module: str, imported: Callable[[], None]) -> None:
        self._module, self._imported = module, imported
        self._asks_others = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Also called by programs that only ask whether the module is installed."""
        if name != self._module or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asks_others = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: Any) -> None:
            self.remove()
            execute(module)
            self._imported()

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


class Patches(contextlib.ExitStack):
    """Attributes replaced one after the other, and put back in reverse order, whatever happened between."""

    def __init__(self) -> None:
        super().__init__()
        self._replaced: list[_ReplacedAttribute] = []

    def set(self, owner: Any, name: str, value: Any, missing_ok: bool = False) -> None:
        """Replace `owner.name`, which must exist. An inherited attribute is removed again, not frozen in."""
        if not missing_ok:
            internals.check_attribute(owner, name)
        replaced = _ReplacedAttribute(owner, name, vars(owner).get(name, _INHERITED), value)
        self.callback(replaced.undo)
        self._replaced.append(replaced)
        setattr(owner, name, value)

    def when_imported(self, module: str, imported: Callable[[], None]) -> None:
        """Call `imported` now, or once the program has imported a module that few programs use."""
        if module in sys.modules:
            imported()
        else:
            hook = _ImportHook(module, imported)
            sys.meta_path.insert(0, hook)
            self.callback(hook.remove)

    def has_replaced(self, value: Any) -> bool:
        """Whether a function, its code or a class is what an attribute was before."""
        before = [each.before for each in self._replaced]
        if isinstance(value, CodeType):
            return any(getattr(each, "__code__", None) is value for each in before)
        return callable(value) and any(each is value for each in before)

    @contextlib.contextmanager
    def suspended(self, keep: Collection[Any]) -> Iterator[None]:
        """Put the attributes of all owners but `keep` back for the duration."""
        suspended = [each for each in self._replaced if each.owner not in keep]
        for each in reversed(suspended):
            each.undo()
        try:
            yield
        finally:
            for each in suspended:
                setattr(each.owner, each.name, each.value)


# ---------------------------------------------------------------------------------------------- streams

_numbers = itertools.count(1)  # 0 is the default stream, or no event
# Receives "record event", "wait event", "synchronize" and "synchronize device", with the stream and the
# event.
StreamListener = Callable[[str, int, int], None]


class Stream:
    """Has memory pools and a timeline of its own."""

    device = DEVICE
    device_index = 0
    device_type = 1  # of CUDA
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = next(_numbers)
        self._contexts: list[StreamContext] = []

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id

    def __enter__(self) -> Stream:
        self._contexts.append(StreamContext(self))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        streams.report("synchronize", self.stream_id)

    def wait_stream(self, stream: Any) -> None:
        event = StreamEvent()
        event.record(stream)
        event.wait(self)

    def wait_event(self, event: Any) -> None:
        if isinstance(event, StreamEvent):  # else one of a real GPU, from before the trace
            event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or StreamEvent()
        event.record(self)
        return event


class StreamEvent:
    """Stands for torch.cuda.Event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.event_id = next(_numbers)

    def record(self, stream: Any = None) -> None:
        streams.report("record event", (stream or streams.current).stream_id, self.event_id)

    def wait(self, stream: Any = None) -> None:
        streams.report("wait event", (stream or streams.current).stream_id, self.event_id)

    def synchronize(self) -> None:
        streams.report("synchronize", 0, self.event_id)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class StreamContext:
    """Stands for torch.cuda.stream. With None the current stream stays.

    A stream of a real GPU, from before the trace, works too: only its number is read.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = streams.current
        streams.set_current(self._stream)

    def __exit__(self, *error: Any) -> None:
        streams.current = self._before


class Streams:
    """The streams of one trace."""

    def __init__(self) -> None:
        self.default = Stream()
        self.default.stream_id = 0
        self.current: Any = self.default
        self.listener: StreamListener | None = None
        self.on_synchronize: Callable[[], None] | None = None
        self._numbers = {0: 0}  # stream id -> in the order of first use

    @property
    def several(self) -> bool:
        """Whether the program has used a stream beside the default one."""
        return len(self._numbers) > 1

    def number(self, stream: Any) -> int:
        return self._numbers.setdefault(stream.stream_id, len(self._numbers))

    def report(self, what: str, stream: int = 0, event: int = 0) -> None:
        if self.listener is not None:
            self.listener(what, stream, event)
        if self.on_synchronize is not None and what.startswith("synchronize"):
            self.on_synchronize()

    def set_current(self, stream: Any) -> None:
        if stream is not None:
            self.number(stream)
            self.current = stream


streams = Streams()  # of the trace that runs; replaced for its duration


def current_streams() -> Streams:
    return streams


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


class CudaGraph:
    """Stands for torch.cuda.CUDAGraph. What it captures runs once, as it would outside of a graph."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    capture_begin = capture_end = instantiate = replay = reset = enable_debug_mode = debug_dump = _nothing


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def install_fake_cuda(patches: Patches, gpu: GPU, recorder: AllocationRecorder) -> None:
    """Answer torch.cuda's questions from the catalogue for as long as `patches` last."""
    own = Streams()
    own.on_synchronize = recorder.synchronize
    patches.set(sys.modules[__name__], "streams", own)
    for owner, answers in (
        (torch.cuda, cuda := _cuda_answers(gpu, recorder, own)),
        (torch.accelerator, _accelerator_answers(cuda, own)),
        (torch.cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark"), _nothing)),
    ):
        for name, function in answers.items():
            if not hasattr(owner, name):  # of a later torch
                continue
            patches.set(owner, name, function)
            for module in (torch.cuda.memory, torch.cuda.random) if owner is torch.cuda else ():
                if hasattr(module, name):
                    patches.set(module, name, function)
    patches.set(torch.cuda.nvtx, "range", NullContext)
    patches.set(torch, "device", _Device)
    patches.set(torch.version, "cuda", _CUDA_VERSION)
    patches.set(torch.backends.cuda, "is_built", _answer(True))
    patches.set(torch.backends.cudnn, "is_available", _answer(True))
    patches.set(torch.backends.cudnn, "version", _answer(_CUDNN_VERSION))
    for name in _LEGACY_TYPES:
        patches.set(torch.cuda, name, LegacyTensorType(name, (), {"dtype": _LEGACY_TYPES[name]}))
    patches.set(*internals.ACCELERATOR, _answer(torch.device("cuda")))  # of device meshes
    patches.set(*internals.CUDA_LAZY_INIT, _nothing)
    patches.set(*internals.CUDA_RAW_STREAM, _answer(0), missing_ok=True)
    activities = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    patches.set(*internals.PROFILER_ACTIVITIES, _answer(activities))
    _load_no_cuda_library(patches, gpu, recorder)
    patches.set(*internals.CUDA_RECORD_MEMORY_HISTORY, _nothing)

    def record_stream(tensor: torch.Tensor, s: Any) -> None:
        with internals.disable_torch_function():
            recorder.record_stream(tensor, own.number(s))

    patches.set(torch.Tensor, "record_stream", record_stream)
    patches.set(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)
    # Checkpointing asks this when no argument is a tensor, and remembers the answer for the process.
    patches.set(*internals.CHECKPOINT_DEFAULT_DEVICE, "cuda")


class CudaLibrary:
    """Stands for a shared library of CUDA kernels, loaded with ctypes: its functions do nothing."""

    def __init__(self, recorder: AllocationRecorder) -> None:
        mapped: list[Any] = []

        def cget_managed_ptr(size: Any) -> int:
            """Unified memory for bitsandbytes' paged optimizers. The host takes a page once it is written."""
            recorder.note_once(
                "paged optimizer states are in unified memory, outside of torch's allocator: none of it is "
                "counted",
                None,
            )
            mapped.append(mmap.mmap(-1, size.value))
            return ctypes.addressof(ctypes.c_char.from_buffer(mapped[-1]))

        self.cget_managed_ptr = cget_managed_ptr

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> int:
            return 0

        setattr(self, name, function)  # its signature is set on it
        return function

    __getitem__ = __getattr__


class ManagementLibrary(ctypes.CDLL):
    """Stands for NVML, the library behind nvidia-smi that programs ask with pynvml for the memory in use."""

    gpu: GPU
    recorder: AllocationRecorder

    def __getitem__(self, name: str) -> Any:
        def function(*args: Any) -> int:
            """Writes its answer to what its last arguments refer to. Where it has none, zeros stay there."""
            out: Any = getattr(args[-1], "_obj", None) if args else None
            if name.startswith("nvmlDeviceGetCount"):
                out.value = 1
            elif name.startswith("nvmlDeviceGetMemoryInfo"):
                out.total, out.used = self.gpu.memory, self.recorder.live_bytes
                out.free = max(out.total - out.used, 0)
            elif name == "nvmlDeviceGetName":
                args[1].value = self.gpu.title.encode()
            elif name == "nvmlDeviceGetCudaComputeCapability":
                args[1]._obj.value, out.value = self.gpu.capability
            return 0  # success

        return function


def _load_no_cuda_library(patches: Patches, gpu: GPU, recorder: AllocationRecorder) -> None:
    load, init = ctypes.LibraryLoader.LoadLibrary, ctypes.CDLL.__init__

    def init_library(library: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        if str(name).startswith("libnvidia-ml.so"):
            library.__class__, library.gpu, library.recorder = ManagementLibrary, gpu, recorder
        else:
            init(library, name, *args, **kwargs)

    patches.set(ctypes.CDLL, "__init__", init_library)

    def load_library(loader: Any, name: Any) -> Any:
        return CudaLibrary(recorder) if "_cuda" in Path(str(name)).name else load(loader, name)

    patches.set(ctypes.LibraryLoader, "LoadLibrary", load_library)


class _DeviceType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _torch_device)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("device")
        if isinstance(given, int) and not isinstance(given, bool):
            return _torch_device("cuda", given)
        return _torch_device(*args, **kwargs)


class _Device(metaclass=_DeviceType):
    """torch.device, to which a bare number is a GPU, whether torch sees one or not."""


_torch_device = torch.device
_CUDA_VERSION = torch.version.cuda or "13.0"  # of a build for CPUs: as of the builds for CUDA
_CUDNN_VERSION = internals.cudnn_version() or SHIPPED_CUDNN
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


def shared_memory(gpu: GPU) -> int:
    """Bytes that a block can have at most."""
    return _SHARED_MEMORY.get(gpu.capability, _LESS_SHARED_MEMORY)


def _cuda_answers(gpu: GPU, recorder: AllocationRecorder, own: Streams) -> dict[str, Callable[..., Any]]:
    major, minor = gpu.capability
    properties = SimpleNamespace(
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
        L2_cache_size=50 << 20,
        clock_rate=1_500_000,  # kHz, as the next
        memory_clock_rate=(gpu.bandwidth or 10**12) // (5120 // 4 * 1000),
        memory_bus_width=5120,  # lines, with two bits each a clock
        uuid="00000000-0000-0000-0000-000000000000",
        pci_domain_id=0,
        pci_bus_id=1,
        pci_device_id=0,
        gcnArchName="",
    )

    def reset_peak(*args: Any, **kwargs: Any) -> None:
        recorder.peak_bytes = recorder.live_bytes

    def rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def memory_stats(*args: Any, **kwargs: Any) -> dict[str, int]:
        kinds = ("allocated", "active", "requested", "reserved")
        sizes = {"current": recorder.live_bytes, "peak": recorder.peak_bytes}
        return defaultdict(
            int, {f"{kind}_bytes.all.{when}": size for kind in kinds for when, size in sizes.items()}
        )

    def graph(*args: Any, **kwargs: Any) -> NullContext:
        recorder.note_once("CUDA graphs are traced as eager: a graph keeps all memory of its capture", None)
        return NullContext()

    def graphed(callables: Any, *args: Any, **kwargs: Any) -> Any:
        graph()
        return callables

    silent = (
        "init set_device reset_accumulated_memory_stats reset_max_memory_cached manual_seed manual_seed_all "
        "seed seed_all set_rng_state set_rng_state_all ipc_collect set_per_process_memory_fraction "
        "set_sync_debug_mode caching_allocator_enable reset_accumulated_host_memory_stats "
        "reset_peak_host_memory_stats"
    ).split()
    zero = (
        "utilization memory_usage temperature power_draw clock_rate initial_seed get_sync_debug_mode".split()
    )
    return {
        "is_available": _answer(True),
        "is_initialized": _answer(True),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        "is_tf32_supported": _answer(major >= 8),
        "device_count": _answer(1),
        "current_device": _answer(0),
        "get_device_name": _answer(gpu.title),
        "get_device_capability": _answer(gpu.capability),
        "get_device_properties": _answer(properties),
        "get_arch_list": _answer([f"sm_{major}{minor}"]),
        "memory_allocated": lambda *a, **k: recorder.live_bytes,
        "max_memory_allocated": lambda *a, **k: recorder.peak_bytes,
        "memory_reserved": lambda *a, **k: recorder.live_bytes,
        "max_memory_reserved": lambda *a, **k: recorder.peak_bytes,
        "mem_get_info": lambda *a, **k: (max(gpu.memory - recorder.live_bytes, 0), gpu.memory),
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
        "memory_stats_as_nested_dict": _answer({}),
        "host_memory_stats": _answer(defaultdict(int)),
        "memory_snapshot": _answer([]),
        "device_memory_used": lambda *a, **k: recorder.live_bytes,
        "get_allocator_backend": _answer("native"),
        "get_per_process_memory_fraction": _answer(1.0),
        "memory_summary": _answer(""),
        "empty_cache": lambda *a, **k: recorder.mark("empty_cache"),
        "get_rng_state": rng_state,
        "get_rng_state_all": lambda *a, **k: [rng_state()],
        "current_stream": lambda *a, **k: own.current,
        "default_stream": lambda *a, **k: own.default,
        "set_stream": own.set_current,
        "stream": StreamContext,
        "synchronize": lambda *a, **k: own.report("synchronize device"),
        "device": NullContext,
        "device_of": NullContext,
        "is_current_stream_capturing": _answer(False),
        "CUDAGraph": CudaGraph,
        "graph": graph,
        "graph_pool_handle": _answer((0, 0)),
        "make_graphed_callables": graphed,
        "Stream": Stream,
        "Event": StreamEvent,
        "can_device_access_peer": _answer(False),
        **dict.fromkeys(zero, _answer(0)),
        **dict.fromkeys(silent, _nothing),
    }


def _accelerator_answers(cuda: dict[str, Callable[..., Any]], own: Streams) -> dict[str, Callable[..., Any]]:
    """Other functions than those of torch.cuda: Dynamo has a handler for each, by its identity."""
    same = (
        "is_available device_count current_stream empty_cache memory_allocated max_memory_allocated "
        "memory_reserved max_memory_reserved memory_stats reset_peak_memory_stats synchronize "
        "reset_accumulated_memory_stats"
    ).split()
    answers = {name: functools.partial(cuda[name]) for name in same}
    return {
        **answers,
        "get_memory_info": functools.partial(cuda["mem_get_info"]),
        "get_device_capability": _answer({"supported_dtypes": set(_LEGACY_TYPES.values())}),
        "set_stream": lambda stream: own.set_current(stream),
        "current_accelerator": _answer(torch.device("cuda")),
        "current_device_index": _answer(0),
        "current_device_idx": _answer(0),
        "set_device_index": _nothing,
        "set_device_idx": _nothing,
        "empty_host_cache": _nothing,
    }
