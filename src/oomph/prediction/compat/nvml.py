"""NVML, the library behind nvidia-smi, which programs ask with pynvml for the memory in use."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from oomph.gpus import GPU
from oomph.prediction.compat.library import Library
from oomph.prediction.patches import Patches

if TYPE_CHECKING:
    from oomph.prediction.tracer.recorder import AllocationRecorder
    from oomph.prediction.tracer.tracer import Tracer


class _ManagementLibrary(ctypes.CDLL):
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


def _answer_for_the_fake_gpu(patches: Patches, tracer: Tracer) -> None:
    init = ctypes.CDLL.__init__

    def init_library(library: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        if str(name).startswith("libnvidia-ml.so"):
            library.__class__, library.gpu, library.recorder = _ManagementLibrary, tracer.gpu, tracer.recorder
        else:
            init(library, name, *args, **kwargs)

    patches.set(ctypes.CDLL, "__init__", init_library)


LIBRARY = Library("NVML", None, in_trace=_answer_for_the_fake_gpu)
