"""What a program sees of torch.cuda, torch.distributed and Python's own modules: names, types, signatures.

python benchmarks/accuracy/attributes.py record PART... --out F    # an ordinary run; cuda and distributed need a GPU
oomph predict benchmarks/accuracy/attributes.py -- record PART... > G     # the same, inside a prediction
python -m benchmarks.accuracy.attributes compare F G ...                  # writes results/attributes_h200.csv

A prediction stands in for a GPU and for other ranks. Where an attribute looks different inside than outside,
some program fails that works outside. `record` writes {part: {name: description}}; a test compares the record
of a machine with CUDA, committed in tests/prediction/data/, with what a prediction shows.

Imports nothing of oomph: an ordinary program must see what it would see without it.
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PARTS = ("python", "cuda", "distributed", "cuda_calls", "distributed_calls")
_MODULES = {
    "python": "builtins os io sys posixpath shutil tempfile subprocess threading pathlib sqlite3".split(),
    "cuda": [
        "torch.cuda",
        *(
            f"torch.cuda.{name}"
            for name in (
                "memory random streams graphs nvtx amp comm nccl profiler jiterator sparse _utils "
                "amp.autocast_mode amp.grad_scaler amp.common"
            ).split()
        ),
        *("torch.accelerator", "torch.version", "torch.random", "torch.amp"),
        *("torch.backends.cuda", "torch.backends.cudnn", "torch.cuda.gds", "torch.cuda.tunable"),
    ],
    "distributed": [
        "torch.distributed",
        *(
            f"torch.distributed.{name}"
            for name in (
                "distributed_c10d device_mesh _functional_collectives _symmetric_memory fsdp tensor nn.functional "
                "constants rendezvous checkpoint algorithms.join"
            ).split()
        ),
        "torch.nn.parallel",
    ],
}
_REPEATED = (bool, int, float, str, type(None))  # attributes whose value is recorded
_VARYING = {  # of them, those that differ between machines or runs, not because of a prediction
    *("sys.argv", "sys.path", "sys.executable", "sys.prefix", "sys.exec_prefix", "sys.base_prefix"),
}


def _describe(value: Any, name: str = "") -> dict[str, Any]:
    """What does not depend on where it is stored: the type, and what identifies the thing."""
    kind = type(value)
    found: dict[str, Any] = {"type": f"{kind.__module__}.{kind.__qualname__}"}
    if isinstance(value, types.ModuleType):
        return {**found, "is": value.__name__}
    if isinstance(value, type):
        members = sorted(each for each in dir(value) if not each.startswith("_"))
        return {**found, "is": f"{value.__module__}.{value.__qualname__}", "members": members}
    if callable(value):
        found["is"] = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', None)}"
        try:
            found["signature"] = str(inspect.signature(value))
        except (TypeError, ValueError):
            found["signature"] = None
        return found
    if isinstance(value, _REPEATED) and name not in _VARYING:
        found["value"] = value
    elif isinstance(value, (list, tuple, dict, set, frozenset)) and not name.startswith("sys."):
        found["len"] = len(value)
    return found


def modules(names: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for module_name in names:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        for name in sorted(dir(module)):
            if not name.startswith("__"):
                full = f"{module_name}.{name}"
                try:
                    found[full] = _describe(getattr(module, name), full)
                except Exception as error:  # a property of the module
                    found[full] = {"raises": type(error).__name__}
    return found


# Expressions and statements, each run by itself; what they give is described. A "=" in front: also its value.
_PYTHON = """
type(open) == type(print)
open is io.open
open is __import__("_io").open
open.__self__.__name__
isinstance(open, types.BuiltinFunctionType)
inspect.isbuiltin(os.open)
inspect.isfunction(os.stat)
inspect.isroutine(open)
callable(open)
pickle.loads(pickle.dumps(open)) is open
pickle.loads(pickle.dumps(os.stat)) is os.stat
pickle.loads(pickle.dumps(os.listdir)) is os.listdir
copy.deepcopy(open) is open
copy.copy(os.rename) is os.rename
repr(open)
repr(os.stat)
repr(os.remove)
repr(os.getcwd)
open.__name__, open.__qualname__, open.__module__
open.__doc__ is not None, os.stat.__text_signature__
os.stat in os.supports_dir_fd, os.stat in os.supports_follow_symlinks, os.listdir in os.supports_fd
os.unlink in os.supports_dir_fd, os.open in os.supports_dir_fd, os.rename in os.supports_dir_fd
os.scandir in os.supports_fd, os.chdir in os.supports_fd, os.access in os.supports_effective_ids
os.remove is os.unlink, os.rename is os.replace
os.open is __import__("posix").open, os.stat is __import__("posix").stat
type(sys.stdout).__name__, type(sys.stderr).__name__, type(sys.stdin).__name__
sys.stdout.write.__name__, type(sys.stdout.write).__name__
sys.stdout is sys.__stdout__, hasattr(sys.stdout, "buffer")
sys.gettrace() is None, sys.getprofile() is None
type(os.environ).__name__, "PATH" in os.environ
isinstance(print, types.FunctionType)
type(os.system).__name__, type(os.getpid).__name__, os.system.__name__
type(tempfile.mkdtemp).__name__, str(inspect.signature(tempfile.mkdtemp))
type(subprocess.Popen.__init__).__name__, subprocess.Popen.__init__.__qualname__
type(threading.Thread.start).__name__, threading.Thread.start.__qualname__, threading.Thread.start.__module__
str(inspect.signature(threading.Thread.start)), str(inspect.signature(open)), str(inspect.signature(os.mkdir))
str(inspect.signature(os.open)), str(inspect.signature(os.rename)), str(inspect.signature(os.scandir))
type(multiprocessing.get_start_method).__name__, type(multiprocessing.Process.start).__name__
type(os.scandir(".")).__name__, type(next(os.scandir("/"))).__name__
type(open(os.devnull)).__name__, open(os.devnull).name, open(os.devnull, "rb").name
type(os.stat(".")).__name__, type(os.getcwd()).__name__
len(set(map(type, [open, print, len, os.open, os.stat, os.listdir])))
io.open_code.__name__, type(io.FileIO).__name__, io.FileIO.__module__
type(random.seed).__name__, type(random.getstate).__name__
sys.flags.optimize == 0, sys.flags.dev_mode
list(warnings.filters) == list(warnings.filters)
"""
_CUDA = """
torch.cuda.is_available(), torch.cuda.is_initialized(), torch.cuda.device_count(), torch.cuda.current_device()
type(torch.cuda.get_device_name()), type(torch.cuda.get_device_capability())
type(torch.cuda.default_generators), len(torch.cuda.default_generators)
[type(g) for g in torch.cuda.default_generators], [str(g.device) for g in torch.cuda.default_generators]
type(torch.cuda.default_generators[0].initial_seed()), torch.cuda.default_generators[0].get_state().shape
torch.cuda.default_generators[0].get_state().dtype, torch.cuda.default_generators[0].get_state().device
isinstance(torch.cuda.default_generators[0], torch.Generator), type(torch.cuda.default_generators[0].seed())
torch.cuda.default_generators[0].set_state(torch.cuda.default_generators[0].get_state()) is None
torch.cuda.manual_seed(3), torch.cuda.initial_seed(), torch.cuda.default_generators[0].initial_seed()
torch.manual_seed(7).initial_seed(), torch.cuda.initial_seed()
torch.cuda.seed(), torch.cuda.seed_all(), type(torch.cuda.initial_seed())
torch.cuda.get_rng_state().shape, torch.cuda.get_rng_state().dtype, torch.cuda.get_rng_state().device
torch.cuda.get_rng_state(torch.device("cuda", 0)).shape, len(torch.cuda.get_rng_state_all())
torch.cuda.set_rng_state(torch.cuda.get_rng_state()), torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
(torch.cuda.manual_seed(5), torch.equal(torch.cuda.get_rng_state(), torch.cuda.get_rng_state()))[1]
(torch.cuda.manual_seed(1), a := torch.cuda.get_rng_state(), torch.cuda.manual_seed(2), torch.equal(a, torch.cuda.get_rng_state()))[3]
torch.Generator("cuda").device, type(torch.Generator("cuda")), torch.Generator("cuda").manual_seed(3).initial_seed()
torch.Generator("cuda").get_state().shape, torch.Generator(device="cuda:0").device.index
torch.Generator("cuda").clone_state().device, torch.Generator("cuda").get_offset(), torch.Generator("cuda").set_offset(8)
torch.rand(3, device="cuda", generator=torch.cuda.default_generators[0]).shape
torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).shape
torch.rand(3, device="cuda", generator=torch.Generator())
type(torch.cuda.get_device_properties(0)), type(torch.cuda.get_device_properties(torch.cuda.current_device()))
{n: type(getattr(torch.cuda.get_device_properties(0), n)) for n in dir(torch.cuda.get_device_properties(0)) if n[0] != "_"}
torch.cuda.get_device_properties("cuda").major == torch.cuda.get_device_capability("cuda:0")[0]
"_CudaDeviceProperties(" in repr(torch.cuda.get_device_properties(0))
type(torch.cuda.get_arch_list()), type(torch.cuda.get_arch_list()[0]), type(torch.cuda.get_gencode_flags())
[type(n) for n in torch.cuda.mem_get_info()], [type(n) for n in torch.cuda.mem_get_info("cuda:0")]
[type(f()) for f in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated, torch.cuda.memory_reserved, torch.cuda.max_memory_reserved)]
[type(f(0)) for f in (torch.cuda.memory_cached, torch.cuda.max_memory_cached, torch.cuda.device_memory_used)]
type(torch.cuda.memory_stats()), sorted(torch.cuda.memory_stats())
{type(v) for v in torch.cuda.memory_stats().values()}
sorted(torch.cuda.memory_stats_as_nested_dict()), sorted(torch.cuda.memory_stats_as_nested_dict()["allocation"])
torch.cuda.memory_stats()["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] == torch.cuda.memory_allocated()
sorted(torch.cuda.host_memory_stats()), sorted(torch.cuda.host_memory_stats_as_nested_dict())
torch.cuda.memory_summary().count("\\n"), torch.cuda.memory_summary(abbreviated=True).count("\\n")
"Allocated memory" in torch.cuda.memory_summary()
type(torch.cuda.memory_snapshot()), sorted(torch.cuda.memory_snapshot()[0]), sorted(torch.cuda.memory_snapshot()[0]["blocks"][0])
sorted(torch.cuda.memory._snapshot()), sorted(torch.cuda.memory._snapshot()["allocator_settings"])
torch.cuda.memory._record_memory_history(), torch.cuda.memory._record_memory_history(enabled=None)
type(torch.cuda.list_gpu_processes())
torch.cuda.get_allocator_backend(), torch.cuda.get_per_process_memory_fraction()
torch.cuda.reset_peak_memory_stats(), torch.cuda.reset_accumulated_memory_stats(), torch.cuda.empty_cache(), torch.cuda.ipc_collect()
torch.cuda.reset_max_memory_allocated(), torch.cuda.reset_max_memory_cached(), torch.cuda.init()
torch.cuda.set_per_process_memory_fraction(0.9), torch.cuda.get_per_process_memory_fraction(), torch.cuda.set_per_process_memory_fraction(1.0)
torch.cuda.set_per_process_memory_fraction(2.0)
torch.cuda.caching_allocator_enable(True)
type(torch.cuda.caching_allocator_alloc(1 << 20)), torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(1 << 20))
torch.cuda.get_sync_debug_mode(), torch.cuda.set_sync_debug_mode("warn"), torch.cuda.get_sync_debug_mode(), torch.cuda.set_sync_debug_mode(0)
torch.cuda.synchronize(), torch.cuda.synchronize("cuda"), torch.cuda.synchronize(0)
torch.cuda.set_device(0), torch.cuda.set_device("cuda:0"), torch.cuda.set_device(torch.device("cuda", 0))
torch.cuda.device(0).idx, torch.cuda.device("cuda:0").idx, torch.cuda.device(torch.device("cuda:0")).idx, torch.cuda.device(0).prev_idx
torch.cuda.device_of(torch.zeros(1)).idx, torch.cuda.device_of(torch.zeros(1, device="cuda")).idx
torch.cuda.device(0).__enter__(), isinstance(torch.cuda.device(0), torch.cuda.device)
torch.cuda.can_device_access_peer(0, 0), torch.cuda.is_current_stream_capturing(), torch.cuda.is_bf16_supported(), torch.cuda.is_tf32_supported()
type(torch.cuda.current_blas_handle()), torch.cuda.has_half, torch.cuda.has_magma
type(torch.cuda.cudart()).__name__, torch.cuda.cudart().cudaProfilerStart(), torch.cuda.cudart().cudaProfilerStop()
torch.cuda.check_error(0), torch.cuda.cudart().cudaMemGetInfo(0)[1] == torch.cuda.mem_get_info()[1]
torch.cuda.cudart().cudaError.success, type(torch.cuda.cudaStatus), torch.cuda.cudaStatus.SUCCESS
torch.cuda.profiler.start(), torch.cuda.profiler.stop(), torch.cuda.profiler.profile
torch.cuda.nvtx.range_push("a"), torch.cuda.nvtx.range_push("b"), torch.cuda.nvtx.range_pop(), torch.cuda.nvtx.range_pop()
torch.cuda.nvtx.mark("a"), type(torch.cuda.nvtx.range_start("a")), torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("b"))
torch.cuda.nvtx.range("x").__enter__(), callable(torch.cuda.nvtx.range("step")(lambda: 1))
type(torch.cuda.Stream()), torch.cuda.Stream.__mro__, isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
sorted(n for n in dir(torch.cuda.Stream()) if n[0] != "_")
isinstance(torch.cuda.Stream(), torch.Stream), torch.cuda.Stream().device, torch.cuda.Stream().device_index, torch.cuda.Stream().device_type
torch.cuda.Stream(priority=-1).priority, torch.cuda.Stream(device=0).priority, torch.cuda.Stream.priority_range()
type(torch.cuda.Stream().cuda_stream), torch.cuda.default_stream().cuda_stream, torch.cuda.current_stream().stream_id
torch.cuda.current_stream() == torch.cuda.default_stream(), torch.cuda.Stream() == torch.cuda.Stream()
hash(torch.cuda.current_stream()) == hash(torch.cuda.default_stream()), torch.cuda.Stream() in {torch.cuda.default_stream(): 1}
repr(torch.cuda.default_stream())
torch.cuda.Stream().query(), torch.cuda.Stream().synchronize(), torch.cuda.Stream().wait_stream(torch.cuda.current_stream()), torch.cuda.Stream().wait_event(torch.cuda.Event())
type(torch.cuda.Stream().record_event()), torch.cuda.current_stream(0).device, torch.cuda.current_stream("cuda").device
(s := torch.cuda.Stream(), torch.cuda.set_stream(s), torch.cuda.current_stream() == s, torch.cuda.set_stream(torch.cuda.default_stream()))[2]
torch.cuda.stream(torch.cuda.Stream()).__enter__(), torch.cuda.stream(None).__enter__()
type(torch.cuda.stream(torch.cuda.Stream())), torch.cuda.StreamContext is type(torch.cuda.stream(None)), type(torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream))
torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream).device, issubclass(torch.cuda.ExternalStream, torch.cuda.Stream)
type(torch.cuda.get_stream_from_external(torch.cuda.Stream().cuda_stream, 0))
torch.cuda.Event.__mro__, isinstance(torch.cuda.Event(), torch.Event), sorted(n for n in dir(torch.cuda.Event()) if n[0] != "_")
torch.cuda.Event().query(), torch.cuda.Event(enable_timing=True, blocking=True, interprocess=False).record(), torch.cuda.Event().synchronize(), torch.cuda.Event().wait()
(a := torch.cuda.Event(enable_timing=True), b := torch.cuda.Event(enable_timing=True), a.record(), b.record(), torch.cuda.synchronize(), type(a.elapsed_time(b)))[5]
torch.cuda.Event().elapsed_time(torch.cuda.Event())
(e := torch.cuda.Event(), e.record(torch.cuda.current_stream()), torch.cuda.synchronize(), e.query(), type(e.cuda_event), e.device)[3:]
torch.cuda.Event(True, True), repr(torch.cuda.Event())[:24]
type(torch.cuda.CUDAGraph()), torch.cuda.CUDAGraph.__mro__, sorted(n for n in dir(torch.cuda.CUDAGraph()) if n[0] != "_")
type(torch.cuda.graph_pool_handle()), len(torch.cuda.graph_pool_handle()), isinstance(torch.cuda.graph(torch.cuda.CUDAGraph()), torch.cuda.graph)
type(torch.cuda.make_graphed_callables).__name__, torch.cuda.graphs.graph is torch.cuda.graph, torch.cuda.graphs.CUDAGraph is torch.cuda.CUDAGraph
torch.cuda.streams.Stream is torch.cuda.Stream, torch.cuda.streams.Event is torch.cuda.Event, torch.cuda.memory.memory_stats is torch.cuda.memory_stats
torch.cuda.random.manual_seed is torch.cuda.manual_seed, torch.cuda.random.get_rng_state is torch.cuda.get_rng_state
torch.cuda.memory.empty_cache is torch.cuda.empty_cache, torch.cuda.memory.mem_get_info is torch.cuda.mem_get_info
type(torch.cuda.MemPool()), torch.cuda.MemPool().id, torch.cuda.MemPool().use_count(), type(torch.cuda.use_mem_pool(torch.cuda.MemPool()))
type(torch.cuda.MemPool().snapshot()), torch.cuda.use_mem_pool(torch.cuda.MemPool()).__enter__()
type(torch.cuda.amp.GradScaler()), torch.cuda.amp.GradScaler().is_enabled(), torch.amp.GradScaler("cuda").get_scale(), torch.amp.GradScaler("cuda").state_dict()
torch.cuda.amp.autocast().fast_dtype, torch.cuda.amp.autocast().device, torch.amp.autocast("cuda").fast_dtype, torch.is_autocast_cache_enabled()
torch.amp.is_autocast_available("cuda"), torch.get_autocast_dtype("cuda"), torch.get_autocast_gpu_dtype(), torch.is_autocast_enabled("cuda")
[str(t.device) for t in torch.cuda.comm.broadcast(torch.ones(2, device="cuda"), [0])], torch.cuda.comm.reduce_add([torch.ones(2, device="cuda")]).shape
[t.shape for t in torch.cuda.comm.scatter(torch.ones(4, 2, device="cuda"), [0])], torch.cuda.comm.gather([torch.ones(4, 2, device="cuda")]).shape
[t.shape for ts in torch.cuda.comm.broadcast_coalesced([torch.ones(4, device="cuda")], [0]) for t in ts]
[t.shape for t in torch.cuda.comm.reduce_add_coalesced([[torch.ones(4, device="cuda")]])]
type(torch.cuda.nccl.version()), len(torch.cuda.nccl.version()), torch.cuda.nccl.is_available([torch.ones(1, device="cuda")])
torch.cuda.nccl.all_reduce([torch.ones(3, device="cuda")])
type(torch.version.cuda), torch.version.hip, torch.version.git_version is not None
torch.backends.cuda.is_built(), torch.backends.cudnn.is_available(), type(torch.backends.cudnn.version()), torch.backends.cudnn.enabled
torch.backends.cudnn.is_acceptable(torch.ones(2, 2, device="cuda")), torch.backends.cudnn.is_acceptable(torch.ones(2))
torch.backends.cuda.preferred_linalg_library(), torch.backends.cuda.preferred_blas_library(), torch.backends.cuda.matmul.allow_tf32
torch.backends.cuda.cufft_plan_cache.max_size, torch.backends.cuda.cufft_plan_cache[0].size, torch.backends.cuda.cufft_plan_cache.clear()
torch.backends.cuda.is_flash_attention_available(), torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.is_ck_sdpa_available()
type(torch.backends.cuda.SDPAParams).__name__, torch.backends.mps.is_available(), torch.backends.mkldnn.is_available() in (True, False)
torch.cuda._is_compiled(), torch.cuda._is_in_bad_fork(), torch.cuda._initialized, torch.cuda._get_device_index("cuda:0"), torch.cuda._lazy_init()
torch._C._cuda_getDeviceCount(), torch._C._cuda_getDevice(), type(torch._C._cuda_getCompiledVersion()), torch._C._cuda_getCurrentRawStream(0)
torch._C._has_cuda, torch._C._cuda_isCurrentStreamCapturing(), torch._C._cuda_setDevice(0), torch._C._cuda_synchronize()
torch._C._cuda_getCurrentStream(0), torch._C._cuda_getDefaultStream(0), torch._C._cuda_init()
torch._C._cuda_getCurrentBlasHandle() is not None, torch._C._cuda_emptyCache(), torch._C._cuda_getAllocatorBackend()
type(torch._C._cuda_memoryStats(0)), torch._C._cuda_resetPeakMemoryStats(0)
torch._C._cuda_canDeviceAccessPeer(0, 0), torch._C._cuda_cudaHostAllocator() is not None
torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")(torch.ones(2, device="cuda")).shape
torch.cuda.utils if hasattr(torch.cuda, "utils") else None
torch.device("cuda"), torch.device(0), torch.device("cuda", 0), type(torch.device("cuda")), isinstance(torch.device("cuda"), torch.device), torch.device.__name__
torch.device("cuda:0") == torch.ones(1, device="cuda").device, torch.device("cuda") == torch.device("cuda:0"), repr(torch.device("cuda", 0))
pickle.loads(pickle.dumps(torch.device("cuda:0"))), copy.deepcopy(torch.device("cuda")), type(torch.device), issubclass(torch.device, object)
torch.get_device_module("cuda") is torch.cuda, torch.get_device_module().__name__, torch._utils._get_device_module("cuda").__name__
torch.accelerator.is_available(), torch.accelerator.current_accelerator(), torch.accelerator.device_count(), torch.accelerator.current_device_index()
type(torch.accelerator.current_stream()), torch.accelerator.synchronize(), torch.accelerator.set_device_index(0), torch.accelerator.device_index(0).__enter__()
torch.accelerator.memory_allocated() == torch.cuda.memory_allocated(), type(torch.accelerator.memory_stats()), torch.accelerator.empty_cache()
type(torch.Stream("cuda")), torch.Stream("cuda").device, type(torch.Event("cuda")), torch.Event(device="cuda").record(), torch.Stream(device="cuda:0").query()
torch.Event("cuda", enable_timing=True).device, torch.Stream("cuda").wait_stream(torch.cuda.current_stream()), torch.Stream("cuda").__enter__()
torch.cuda.FloatTensor(2, 3).shape, type(torch.cuda.FloatTensor).__name__, torch.cuda.LongTensor([1, 2]).dtype, torch.cuda.FloatTensor.__name__, torch.cuda.FloatTensor.dtype
isinstance(torch.ones(1, device="cuda"), torch.cuda.FloatTensor), torch.ones(1, device="cuda").type(), torch.ones(1, device="cuda").type(torch.cuda.HalfTensor).dtype
type(torch.ones(1, device="cuda")), type(torch.ones(1, device="cuda")) is torch.Tensor, torch.ones(1, device="cuda").__class__ is torch.Tensor
type(torch.nn.Parameter(torch.ones(1, device="cuda"))), torch.nn.Parameter(torch.ones(1, device="cuda")).__class__.__name__
repr(torch.ones(2, device="cuda")), str(torch.ones((), device="cuda")), f"{torch.ones((), device='cuda'):.2f}", format(torch.ones(2, device="cuda"))
torch.ones(2).pin_memory().is_pinned(), torch.ones(2, pin_memory=True).is_pinned(), torch.ones(2, device="cuda").is_pinned(), torch.ones(2).is_pinned()
torch.ones(2, device="cuda").data_ptr() > 0, torch.ones(2, device="cuda").data_ptr() % 512, torch.ones(2, device="cuda").untyped_storage().device
type(torch.ones(2, device="cuda").untyped_storage()), type(torch.ones(2, device="cuda").storage()), torch.ones(2, device="cuda").storage().device
torch.ones(2, device="cuda").__cuda_array_interface__["typestr"], hasattr(torch.ones(2), "__cuda_array_interface__"), torch.ones(2, device="cuda").__dlpack_device__()
torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(torch.ones(2, device="cuda"))).shape
torch.ones(2, device="cuda").is_shared(), torch.ones(2, device="cuda").share_memory_().is_shared(), torch.ones(2, device="cuda").get_device(), torch.ones(2, device="cuda").is_cuda
torch.ones(2, device="cuda").numpy()
torch.ones(2, device="cuda").cuda() is not None, torch.ones(2, device="cuda").to("cuda").device, torch.ones(2).cuda("cuda:0").device, torch.ones(2).cuda(0, non_blocking=True).device
torch.ones(2, device="cuda:1")
torch.cuda.set_device(7)
torch.cuda.get_device_properties(3)
torch.cuda.memory_allocated("cpu")
torch.cuda.get_device_name("cpu")
torch.ones(2, device="cuda") + torch.ones(2)
torch.cuda.OutOfMemoryError is torch.OutOfMemoryError, torch.cuda.OutOfMemoryError.__mro__, torch.cuda.DeferredCudaCallError, issubclass(torch.cuda.CudaError, RuntimeError)
torch.AcceleratorError, torch.cuda.BFloat16Storage.__name__, torch.cuda.FloatStorage.dtype, torch.cuda.FloatStorage(3).device
torch.utils.data.get_worker_info(), torch.utils.collect_env.get_env_info() is not None
torch.cuda.temperature(), torch.cuda.power_draw(), torch.cuda.clock_rate(), torch.cuda.utilization(), torch.cuda.memory_usage()
torch.profiler.supported_activities() >= {torch.profiler.ProfilerActivity.CUDA}
torch.nn.modules.linear.Linear(2, 2, device="cuda").weight.device, torch.nn.Linear(2, 2).cuda().weight.is_cuda
torch.cuda.comm.__name__, torch.cuda._sleep(10), torch.cuda._host_allocator() is not None if hasattr(torch.cuda, "_host_allocator") else None
torch.cuda.memory.CUDAPluggableAllocator.__name__, torch.cuda.memory._set_allocator_settings("expandable_segments:False") if hasattr(torch.cuda.memory, "_set_allocator_settings") else None
torch.cuda.current_stream().is_capturing() if hasattr(torch.cuda.current_stream(), "is_capturing") else None, torch.cuda.current_stream().native_handle == torch.cuda.current_stream().cuda_stream
torch.cuda.gds.GdsFile.__name__, torch.cuda.tunable.is_enabled(), torch.cuda.tunable.get_max_tuning_iterations()
torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.get_default_device(), torch.tensor([1.0]).cuda().device
"""
_DISTRIBUTED = """
dist.is_available(), dist.is_initialized(), dist.is_nccl_available(), dist.is_gloo_available(), dist.is_mpi_available(), dist.is_torchelastic_launched()
dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.get_backend(dist.group.WORLD), dist.get_backend_config(), dist.get_node_local_rank(0)
type(dist.group.WORLD), dist.group.WORLD is dist.GroupMember.WORLD, dist.group.WORLD is c10d._get_default_group(), dist.group.WORLD.size(), dist.group.WORLD.rank(), dist.group.WORLD.name()
dist.group.WORLD.group_name, dist.group.WORLD.group_desc, dist.group.WORLD.bound_device_id, [str(d) for d in dist.group.WORLD._device_types]
type(dist.group.WORLD._get_backend(torch.device("cuda"))), isinstance(dist.group.WORLD._get_backend(torch.device("cuda")), dist.ProcessGroupNCCL)
type(dist.ProcessGroupNCCL), dist.ProcessGroupNCCL.__mro__, type(dist.ProcessGroupNCCL.Options()), dist.ProcessGroupNCCL.Options().is_high_priority_stream
dist.ProcessGroupNCCL.Options(is_high_priority_stream=True).is_high_priority_stream, dist.ProcessGroupNCCL.Options()._timeout, dist.ProcessGroupNCCL.Options().config.cga_cluster_size
dist.ProcessGroup.__name__, type(dist.ProcessGroupGloo), dist.Backend.NCCL, dist.Backend("nccl"), dist.Backend.default_device_backend_map, dist.Backend.backend_list
c10d._get_default_store().__class__.__name__, type(c10d._get_default_timeout("nccl")), c10d._get_pg_default_device(), c10d._world.pg_map[dist.group.WORLD][0], c10d.get_pg_count()
dist.get_process_group_ranks(dist.group.WORLD), dist.get_global_rank(dist.group.WORLD, 0), dist.get_group_rank(dist.group.WORLD, 0), dist.get_rank(dist.group.WORLD)
dist.get_default_backend_for_device("cuda"), dist.get_default_backend_for_device("cpu"), c10d._rank_not_in_group(dist.group.WORLD), c10d.is_backend_available("nccl")
type(dist.new_group()), dist.new_group().size(), dist.get_backend(dist.new_group()), dist.new_group([0]).rank()
dist.get_backend(dist.new_group(backend="gloo")), type(dist.new_group(backend="gloo")._get_backend(torch.device("cpu"))), dist.get_backend(dist.new_group([0], backend="gloo"))
dist.get_backend(dist.new_group(backend="nccl")), type(dist.new_group(backend="nccl")._get_backend(torch.device("cuda")))
dist.get_backend(dist.new_group(backend="cpu:gloo,cuda:nccl")), dist.new_group(ranks=[0], timeout=datetime.timedelta(seconds=60), pg_options=dist.ProcessGroupNCCL.Options(), group_desc="mine").group_desc
dist.new_group([0], use_local_synchronization=True).size(), len(dist.new_subgroups(1)), dist.new_subgroups(1)[0].size(), dist.new_subgroups_by_enumeration([[0]])[0].size()
dist.new_group([5])
dist.new_group(backend="nonsense")
t.fill_(2) is not None, dist.all_reduce(t), type(dist.all_reduce(t, async_op=True)).__mro__[-2], dist.all_reduce(t, async_op=True).wait(), dist.all_reduce(t, async_op=True).is_completed() in (True, False)
sorted(n for n in dir(dist.all_reduce(t, async_op=True)) if n[0] != "_")
type(dist.all_reduce(t, async_op=True).get_future()), dist.all_reduce(t, async_op=True).get_future().wait()[0].shape, dist.all_reduce(t, async_op=True).is_success(), dist.all_reduce(t, async_op=True).result()
dist.all_reduce(t, dist.ReduceOp.AVG), dist.all_reduce(t, op=dist.ReduceOp.MAX, group=dist.group.WORLD), dist.all_reduce(t, op=dist.ReduceOp.PREMUL_SUM if False else dist.ReduceOp.SUM)
dist.reduce(t, 0), dist.broadcast(t, 0), dist.broadcast(t, src=0, async_op=True).wait(), dist.broadcast(t, group_src=0), dist.reduce(t, dst=0, async_op=True).wait()
dist.all_gather([torch.empty_like(t)], t), dist.all_gather([torch.empty_like(t)], t, async_op=True).wait(), dist.all_gather_into_tensor(torch.empty(4, device="cuda"), t)
dist.all_gather_into_tensor(torch.empty(4, device="cuda"), t, async_op=True).wait(), dist._all_gather_base(torch.empty(4, device="cuda"), t), dist.all_gather_coalesced([[torch.empty_like(t)]], [t])
dist.gather(t, [torch.empty_like(t)], 0), dist.gather(t, [torch.empty_like(t)], dst=0, async_op=True).wait(), dist.scatter(t, [t.clone()], 0), dist.scatter(t, [t.clone()], src=0, async_op=True).wait()
dist.reduce_scatter(t, [t.clone()]), dist.reduce_scatter_tensor(t, t.clone()), dist.reduce_scatter_tensor(t, t.clone(), async_op=True).wait(), dist._reduce_scatter_base(t, t.clone()), dist.reduce_scatter(t, [t.clone()], async_op=True).wait()
dist.all_to_all([torch.empty_like(t)], [t]), dist.all_to_all_single(torch.empty_like(t), t), dist.all_to_all_single(torch.empty_like(t), t, [4], [4], async_op=True).wait()
dist.barrier(), dist.barrier(async_op=True).wait(), dist.barrier(device_ids=[0]), dist.barrier(group=dist.new_group(backend="gloo")), dist.monitored_barrier(dist.new_group(backend="gloo"))
dist.monitored_barrier()
dist.all_reduce_coalesced([t, t.clone()]), dist.all_reduce_coalesced([t], async_op=True).wait()
cm_sync(), cm_async(), cm_gather(), cm_scatter()
objects(), dist.broadcast_object_list([{"a": 1}], src=0), dist.broadcast_object_list([1], 0, device=torch.device("cuda")), dist.broadcast_object_list([1], 0, group=dist.new_group(backend="gloo"))
gathered(), scattered()
[type(w).__mro__[-2] for w in p2p([])]
dist.P2POp(dist.isend, t, 0)
isinstance(dist.all_reduce(t, async_op=True), dist.Work), torch.distributed.distributed_c10d.Work is dist.Work
dist.all_reduce(torch.ones(2))
dist.all_reduce(torch.ones(2), group=dist.new_group(backend="gloo")), dist.all_gather([torch.ones(2)], torch.ones(2), group=dist.new_group(backend="gloo")), dist.broadcast(torch.ones(2), 0, group=dist.new_group(backend="gloo"))
dist.all_reduce(torch.ones(2, device="cuda"), group=dist.new_group(backend="cpu:gloo,cuda:nccl")), dist.all_reduce(torch.ones(2), group=dist.new_group(backend="cpu:gloo,cuda:nccl"))
funcol.all_reduce(t, "sum", dist.group.WORLD).shape, funcol.all_gather_tensor(t, 0, dist.group.WORLD).shape, funcol.reduce_scatter_tensor(t, "avg", 0, dist.group.WORLD).shape, funcol.broadcast(t, 0, dist.group.WORLD).shape
funcol.wait_tensor(funcol.all_reduce(t, "sum", [0])).shape, funcol.all_to_all_single(t, [4], [4], dist.group.WORLD).shape, funcol.all_reduce_coalesced([t], "sum", dist.group.WORLD)[0].shape, type(funcol.all_reduce(t, "sum", dist.group.WORLD))
funcol.all_gather_into_tensor_coalesced([t], dist.group.WORLD)[0].shape, funcol.reduce_scatter_tensor_coalesced([t], "sum", [0], dist.group.WORLD)[0].shape, funcol.all_gather_tensor_autograd(t, 0, dist.group.WORLD).shape, funcol.permute_tensor(t, [0], dist.group.WORLD).shape
torch.ops._c10d_functional.all_reduce(t, "sum", dist.group.WORLD.group_name).shape, torch.ops._c10d_functional.wait_tensor(t).shape, torch.ops.c10d.allreduce_ is not None
dnn.all_reduce(t.clone().requires_grad_()).requires_grad, len(dnn.all_gather(t)), dnn.all_to_all_single(torch.empty_like(t), t).shape, dnn.reduce_scatter(torch.empty_like(t), [t]).shape, dnn.broadcast(t, 0).shape, dnn.gather(t)[0].shape
mesh := dist.device_mesh.init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)), mesh.size(), mesh.ndim, mesh.shape, mesh.get_rank(), mesh.get_local_rank(), mesh.get_coordinate(), mesh.device_type, mesh.mesh_dim_names
type(mesh.get_group()), mesh.get_group("dp").size(), mesh["dp"].size(), len(mesh.get_all_groups()), mesh.mesh.tolist(), repr(mesh)
dist.init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))["tp"].get_local_rank(), dist.init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))["dp", "tp"]._flatten("all").size(), dist.DeviceMesh.from_group(dist.group.WORLD, "cuda").size(), dist.DeviceMesh("cuda", [0]).size()
dist.tensor.distribute_tensor(torch.ones(4, 4), mesh, [dist.tensor.Shard(0)]).to_local().shape, dist.tensor.DTensor.from_local(t, mesh, [dist.tensor.Replicate()]).full_tensor().shape, dist.tensor.zeros(4, device_mesh=mesh).sum().item()
symm.is_symm_mem_enabled_for_group(dist.group.WORLD.group_name), symm.enable_symm_mem_for_group(dist.group.WORLD.group_name), symm.get_symm_mem_workspace is not None
symm.empty(4, device="cuda").shape, type(symm.rendezvous(symm.empty(4, device="cuda"), dist.group.WORLD))
dist.TCPStore.__name__, type(dist.HashStore()), dist.HashStore().set("a", "b"), dist.PrefixStore("x", dist.HashStore()).num_keys(), type(dist.FileStore)
c10d._get_default_store().set("k", "v"), c10d._get_default_store().get("k"), c10d._get_default_store().add("n", 2), c10d._get_default_store().wait(["k"]), c10d._get_default_store().check(["k", "nothing"])
c10d._get_group_tag(dist.group.WORLD), c10d._resolve_process_group(dist.group.WORLD.group_name) is dist.group.WORLD, c10d.GroupMember.NON_GROUP_MEMBER, c10d._get_object_coll_device(), c10d._find_pg_by_ranks_and_tag("", [0]) is not None
dist.get_debug_level(), dist.DebugLevel.OFF, dist.set_debug_level(dist.DebugLevel.OFF), dist.supports_complex(dist.ReduceOp.SUM), c10d.PG_WRAPPER_STORE_PREFIX
torch.nn.SyncBatchNorm(4).cuda()(torch.ones(2, 4, 3, device="cuda")).shape, sync_batch_norm()
ddp().require_backward_grad_sync, ddp().module.weight.device, ddp().no_sync().__enter__(), ddp().bucket_bytes_cap, ddp().find_unused_parameters, ddp().broadcast_buffers, ddp().process_group is dist.group.WORLD
ddp().gradient_as_bucket_view, ddp().static_graph, ddp().device_ids, ddp().output_device, ddp().device, ddp().device_type, ddp().dim, sorted(ddp().state_dict()), ddp().logger is not None, ddp().reducer is not None
ddp_steps(), type(ddp()._get_ddp_logging_data()), ddp().register_comm_hook(None, lambda s, b: None), ddp().train().training, [n for n, _ in ddp().named_parameters()], ddp().join is not None, ddp().will_sync_module_buffers()
copy.deepcopy(ddp()).module.weight.shape, pickle.loads(pickle.dumps(ddp())).module.weight.shape
zero().step(), isinstance(zero(), torch.optim.Optimizer), torch.distributed.optim.ZeroRedundancyOptimizer.__mro__
fsdp1().weight.shape, dist.fsdp.FullyShardedDataParallel.__name__
type(dist.fsdp.fully_shard(torch.nn.Linear(4, 4).cuda())).__name__, type(dist.fsdp.fully_shard(torch.nn.Linear(4, 4).cuda(), mesh=mesh).weight).__name__
type(torch.utils.data.DistributedSampler(range(4))).__name__, len(torch.utils.data.DistributedSampler(range(4))), dist.fsdp.StateDictType.FULL_STATE_DICT
dist.checkpoint.state_dict.get_model_state_dict(torch.nn.Linear(2, 2).cuda())["weight"].shape, c10d._object_to_tensor([1], torch.device("cuda"), dist.group.WORLD)[0].device
dist.destroy_process_group(dist.new_group()), dist.destroy_process_group(), dist.is_initialized()
dist.get_rank()
dist.get_world_size()
dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore()), dist.get_backend(), dist.destroy_process_group()
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore()), dist.get_backend(), type(dist.group.WORLD._get_backend(torch.device("cpu"))), dist.destroy_process_group()
dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=dist.HashStore()), dist.get_backend(), dist.get_backend_config(), dist.destroy_process_group()
dist.init_process_group(rank=0, world_size=1, store=dist.HashStore(), device_id=torch.device("cuda:0")), dist.get_backend(), dist.group.WORLD.bound_device_id, dist.destroy_process_group()
dist.init_process_group("nonsense", rank=0, world_size=1, store=dist.HashStore())
"""


def _given(value: Any) -> Any:
    """The value itself where it is plain, for its JSON; else what describes it."""
    if isinstance(value, _REPEATED):
        return value
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, (list, tuple)) and type(value).__module__ in ("builtins", "torch"):
        return [type(value).__name__, *map(_given, value)]
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, *sorted(str(_given(each)) for each in value)]
    if type(value) is dict:
        return {str(key): _given(each) for key, each in value.items()}
    kind = type(value)
    text = repr(value)
    return text if "0x" not in text and len(text) < 80 else f"a {kind.__module__}.{kind.__qualname__}"


def calls(lines: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Each line is an expression; where it is a tuple at the top, each element is one of its own."""
    found: dict[str, Any] = {}
    for line in filter(None, lines.splitlines()):
        tree = ast.parse(f"({line})" if ":=" in line[:12] else line, mode="eval").body
        parts = tree.elts if isinstance(tree, ast.Tuple) else [tree]
        for part in parts:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    value = _given(eval(compile(ast.Expression(part), line, "eval"), namespace))
                except Exception as error:
                    value = {"raises": type(error).__name__, "message": str(error).split("\n")[0][:120]}
            found[_unique(ast.unparse(part), found)] = value
            print(".", end="", file=sys.stderr, flush=True)
    return found


def _unique(name: str, found: dict[str, Any]) -> str:
    while name in found:
        name += " "
    return name


def _imported(names: str) -> dict[str, Any]:
    """The outermost package of each, as `import` binds it."""
    for name in names.split():
        importlib.import_module(name)
    return {name.partition(".")[0]: sys.modules[name.partition(".")[0]] for name in names.split()}


def python_calls() -> dict[str, Any]:
    names = (
        "builtins copy inspect io multiprocessing os pickle random shutil subprocess sys tempfile threading "
        "types warnings"
    )
    return calls(_PYTHON, _imported(names))


def cuda_calls() -> dict[str, Any]:
    import torch

    kept = torch.ones(1 << 20, device="cuda")  # the allocator has a segment and a block
    names = "torch.cuda.comm torch.utils.dlpack torch.utils.collect_env copy pickle"
    return calls(_CUDA, {**_imported(names), "kept": kept})


def distributed_calls() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.optim import ZeroRedundancyOptimizer

    namespace = _imported(
        "torch.distributed.checkpoint.state_dict torch.distributed.fsdp torch.distributed.tensor copy datetime "
        "pickle tempfile"
    )
    for short, name in (
        ("dist", "torch.distributed"),
        ("c10d", "torch.distributed.distributed_c10d"),
        ("funcol", "torch.distributed._functional_collectives"),
        ("symm", "torch.distributed._symmetric_memory"),
        ("dnn", "torch.distributed.nn.functional"),
    ):
        namespace[short] = importlib.import_module(name)
    if os.environ.get("RANK") is None:
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29571"
        )
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    t = torch.ones(4, device="cuda")

    def coalesced(call: Callable[[], object], **options: Any) -> Any:
        with dist._coalescing_manager(device=torch.device("cuda"), **options) as manager:
            call()
            call()
        return [type(manager).__name__, manager.wait() if options else None, len(manager.works)]

    def objects() -> Any:
        given: list[Any] = [None]
        dist.all_gather_object(given, {"a": 1})
        return given

    def gathered() -> Any:
        given: list[Any] = [None]
        dist.gather_object((1, 2), given, dst=0)
        return given

    def scattered() -> Any:
        given: list[Any] = [None]
        dist.scatter_object_list(given, ["a"], src=0)
        return given

    def sync_batch_norm() -> Any:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        ).cuda()
        return module(torch.ones(2, 3, 8, 8, device="cuda")).sum().backward()

    def ddp() -> Any:
        return nn.parallel.DistributedDataParallel(nn.Linear(4, 2).cuda(), device_ids=[0])

    def ddp_steps() -> Any:
        model = ddp()
        for _ in range(3):
            model(torch.ones(2, 4, device="cuda")).sum().backward()
        return model.module.weight.grad.shape

    def zero() -> Any:
        made = nn.Linear(4, 2).cuda()
        made(torch.ones(2, 4, device="cuda")).sum().backward()
        return ZeroRedundancyOptimizer(made.parameters(), torch.optim.Adam, lr=1e-3)

    def fsdp1() -> Any:
        return dist.fsdp.FullyShardedDataParallel(nn.Linear(4, 4).cuda(), use_orig_params=True)

    def p2p(operations: list[Any]) -> Any:
        return dist.batch_isend_irecv(operations) if operations else []

    def cm_sync() -> Any:
        return coalesced(lambda: dist.all_reduce(t))

    def cm_async() -> Any:
        return coalesced(lambda: dist.all_reduce(t), async_ops=True)

    def cm_gather() -> Any:
        return coalesced(
            lambda: dist.all_gather_into_tensor(torch.empty(4, device="cuda"), t), async_ops=True
        )

    def cm_scatter() -> Any:
        return coalesced(lambda: dist.reduce_scatter_tensor(torch.empty(4, device="cuda"), t), async_ops=True)

    return calls(_DISTRIBUTED, {**namespace, **locals()})


def record(parts: list[str]) -> dict[str, Any]:
    own: dict[str, Callable[[], dict[str, Any]]] = {
        "python": lambda: modules(_MODULES["python"]) | python_calls(),
        "cuda": lambda: modules(_MODULES["cuda"]),
        "distributed": lambda: modules(_MODULES["distributed"]),
        "cuda_calls": cuda_calls,
        "distributed_calls": distributed_calls,
    }
    return {part: own[part]() for part in parts}


# What may differ, and why.
ALLOWED = {
    r"(repr|str|format)\(torch\.ones": "values of tensors on the GPU are not known",
    r"__class__|^type\(torch\.(ones|nn\.Parameter|_?funcol)|type\(funcol": "tensors are torch's FakeTensor",
    r"storage\(|FloatStorage|data_ptr\(\) %": "storages have no memory on a device",
    r"is_pinned": "pinned memory is the host's",
    r"set_device\(7\)|get_device_properties\(3\)|cuda:1": "another GPU of a node is taken for the first",
    r"supported_activities": "torch.profiler has no events of a GPU to record",
    r"generator=torch\.Generator\(\)": "the generator of the host is taken",
    r"__mro__|type\((torch\.device|torch\.cuda\.cudart|dist\.ProcessGroupNCCL)": "classes have no base in C",
    r"_get_backend\(torch|symm\.rendezvous|WORLD\.name": "groups are torch's fake ones",
    r"_device_types|_default_device|_coll_device|all_reduce\(torch\.ones\(2\)\)$": "which the host has, too",
    r"cudaError|cudaProfiler|Event\(True|repr\(torch\.cuda\.Event|torch\.Event\('cuda'": "how it is printed",
    r"getCurrent(Raw)?Stream|MemPool\(\)\.id|__enter__|priority_range": "numbers of streams and pools",
    r"power_draw|temperature|clock_rate|_has_cuda$": "of the machine and the build",
    r"get_future\(\)\.wait|is_success|\.result\(\)|coalesced": "works of the fake group are done at once",
    r"register_comm_hook": "hooks of DDP are not called",
    r"_device_properties\(0\), n\)": "the type of an id",
    r"mesh|is_capturing|new_group\(\[5|dir\((torch\.cuda\.Stream|dist\.all_reduce)": "another torch release",
    r"(CUDAGraph|MemPool|_CudaDeviceProperties|ProcessGroupNCCL)$": "the class of a class in C",
    r"torch\.cuda\.(_cudart|nvtx\._nvtx|memory\._cuda_)|cufft_plan_cache$": "objects in C",
    r"torch\.cuda\.(_initialized|default_generators)$": "CUDA is in use from the start",
    r"tempfile\.tempdir$": "the folder is known already",
    r"os\.scandir\(|sys\.stdout|get_start_method": "os.DirEntry cannot be made; output is watched",
}


def why_different(name: str) -> str:
    """Empty: it should not be."""
    return next((why for pattern, why in ALLOWED.items() if re.search(pattern, name)), "")


def comparable(found: Any) -> Any:
    """Without what differs from process to process."""
    if not isinstance(found, dict):
        return found
    left_out = ("members", "message")
    return {
        name: value for name, value in found.items() if name not in left_out and " at 0x" not in str(value)
    }


def _read(path: Path) -> dict[str, Any]:
    """A record in a file of its own, or among what a program printed."""
    text = path.read_text()
    lines = [line for line in text.splitlines() if line.startswith("ATTRIBUTES ")]
    return json.loads(lines[0].removeprefix("ATTRIBUTES ") if lines else text)  # type: ignore[no-any-return]


def compare(outside: Path, inside: Path) -> Iterator[dict[str, Any]]:
    """A row for the names that are the same, and for each reason why others are not."""
    found, expected = _read(inside), _read(outside)
    for part in PARTS:
        if part not in found or part not in expected:
            continue
        groups: dict[str, list[str]] = {"": []}
        for name in sorted(found[part].keys() | expected[part].keys()):
            why = ""
            if comparable(found[part].get(name)) != comparable(expected[part].get(name)):
                private = re.search(r"\._(?!_)\w+$", name) and "a private name"
                only_inside = "a module or an attribute that only the prediction has"
                missing = only_inside if name not in expected[part] else ""
                why = why_different(name) or missing or private or "not explained"
            groups.setdefault(why, []).append(name)
        for why, names in groups.items():
            which = "; ".join(names) if why else ""
            yield {
                "part": part,
                "different": why,
                "count": len(names),
                "names": which,
                "gpu": "NVIDIA H200",
                **expected["versions"],
            }


def _versions() -> Iterator[tuple[str, str]]:
    import torch

    yield "torch", torch.__version__
    yield "python", ".".join(map(str, sys.version_info[:2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("parts", nargs="*", default=PARTS, help="of compare: files, OUTSIDE INSIDE ...")
    parser.add_argument("--out")
    parser.add_argument("--commit", help="of compare: at which the files were recorded")
    parser.add_argument("--date")
    given = parser.parse_args()
    if given.command == "compare":
        from benchmarks import RESULTS, rows  # not before: see above

        when = rows.revision()
        when = {"commit": given.commit or when["commit"], "date": given.date or when["date"]}
        pairs = zip(map(Path, given.parts[::2]), map(Path, given.parts[1::2]), strict=True)
        found = [{**row, **when} for outside, inside in pairs for row in compare(outside, inside)]
        rows.write(Path(given.out or RESULTS / "attributes_h200.csv"), found)
        for row in found:
            print(f"{row['part']:18} {row['count']:5}  {row['different'] or 'the same'}")
        return
    found = {"versions": dict(_versions()), **record(list(given.parts))}
    text = json.dumps(found, indent=0, sort_keys=True, default=str)
    if given.out:
        with open(given.out, "w") as file:
            file.write(text)
    print(f"\nATTRIBUTES {json.dumps(found, default=str)}" if not given.out else given.out)
    # A prediction wants a step.
    import torch

    if torch.cuda.is_available():
        model = torch.nn.Linear(8, 8).cuda()
        model(torch.ones(2, 8, device="cuda")).sum().backward()


if __name__ == "__main__":
    main()
