"""A torch.cuda that answers for the pretend GPU, on builds with and without CUDA alike.

Nothing here reaches a driver: on a machine with a real GPU, a trace leaves it alone.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import DefaultDeviceType

from oomph.gpus import GPU
from oomph.prediction.trace import streams
from oomph.prediction.trace.ledger import Ledger
from oomph.prediction.trace.patching import Patches

DEVICE = streams.DEVICE


class _Nothing(contextlib.ContextDecorator):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def pretend(patches: Patches, gpu: GPU, ledger: Ledger) -> None:
    """Answer torch.cuda's questions from the catalogue for as long as `patches` last."""
    cuda = torch.cuda
    mark = ledger.mark
    own = streams.Streams()
    patches.set(streams, "now", own)
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
        regs_per_multiprocessor=65536,
        gcnArchName="",
    )

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def reset_peak(*args: Any, **kwargs: Any) -> None:
        ledger.peak_bytes = ledger.live_bytes

    def synchronize(*args: Any, **kwargs: Any) -> None:
        own.tell("wait for all")

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    def rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    answers: dict[str, Callable[..., Any]] = {
        "is_available": answer(True),
        "is_initialized": answer(True),
        "is_bf16_supported": answer(major >= 8),
        "is_tf32_supported": answer(major >= 8),
        "device_count": answer(1),
        "current_device": answer(0),
        "get_device_name": answer(gpu.title),
        "get_device_capability": answer(gpu.capability),
        "get_device_properties": answer(properties),
        "get_arch_list": answer([f"sm_{major}{minor}"]),
        "memory_allocated": lambda *a, **k: ledger.live_bytes,
        "max_memory_allocated": lambda *a, **k: ledger.peak_bytes,
        "memory_reserved": lambda *a, **k: ledger.live_bytes,
        "max_memory_reserved": lambda *a, **k: ledger.peak_bytes,
        "mem_get_info": lambda *a, **k: (max(gpu.memory - ledger.live_bytes, 0), gpu.memory),
        "memory_stats": lambda *a, **k: defaultdict(
            int,
            {
                "allocated_bytes.all.current": ledger.live_bytes,
                "allocated_bytes.all.peak": ledger.peak_bytes,
                "reserved_bytes.all.current": ledger.live_bytes,
                "reserved_bytes.all.peak": ledger.peak_bytes,
            },
        ),
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
        "memory_summary": answer(""),
        "empty_cache": lambda *a, **k: mark("empty_cache"),
        "get_rng_state": rng_state,
        "get_rng_state_all": lambda *a, **k: [rng_state()],
        "current_stream": lambda *a, **k: own.current,
        "default_stream": lambda *a, **k: own.default,
        "set_stream": own.set_current,
        "stream": streams.UseStream,
        "synchronize": synchronize,
        "device": _Nothing,
        "device_of": _Nothing,
        "is_current_stream_capturing": answer(False),
        "Stream": streams.Stream,
        "Event": streams.Event,
        "can_device_access_peer": answer(False),
        "utilization": answer(0),
    }
    silent = (
        "init _lazy_init set_device reset_accumulated_memory_stats "
        "reset_max_memory_cached manual_seed manual_seed_all seed seed_all "
        "set_rng_state set_rng_state_all ipc_collect set_per_process_memory_fraction"
    ).split()
    answers |= dict.fromkeys(silent, nothing)
    for name, function in answers.items():
        if hasattr(cuda, name):
            patches.set(cuda, name, function)
    for name in ("range_push", "range_pop", "mark"):
        patches.set(cuda.nvtx, name, nothing)
    patches.set(cuda.nvtx, "range", _Nothing)
    patches.set(cuda.memory, "_record_memory_history", nothing)
    patches.set(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)
    of_accelerator: dict[str, Callable[..., Any]] = {
        "is_available": answer(True),
        "device_count": answer(1),
        "current_accelerator": answer(torch.device("cuda")),
        "current_device_index": answer(0),
        "set_device_index": nothing,
        "current_stream": lambda *a, **k: own.current,
        "set_stream": own.set_current,
        "empty_cache": lambda *a, **k: mark("empty_cache"),
        "memory_allocated": lambda *a, **k: ledger.live_bytes,
        "synchronize": synchronize,
    }
    for name, function in of_accelerator.items():
        if hasattr(torch.accelerator, name):
            patches.set(torch.accelerator, name, function)
    # Checkpointing asks this when no argument is a tensor, and remembers the answer for good.
    patches.set(DefaultDeviceType, "_default_device_type", "cuda")
