"""Triton: kernels that the program launches itself. Those of Inductor are compiled.py's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from oomph.prediction.compat.library import Library
from oomph.prediction.patches import Patches
from oomph.prediction.tracer.work import tensors_in
from oomph.torch_internals import FakeTensor

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer

TUNING_BYTES = 256 << 20  # get_empty_cache_for_benchmark in triton/backends/nvidia/driver.py, for any GPU


def _skip_kernels(patches: Patches, tracer: Tracer) -> None:
    """They allocate nothing and need a driver. What they write is unknown.

    The autotuner, for arguments that are new to it, overwrites the L2 cache with a buffer between its runs.
    """
    from triton.runtime import autotuner, jit

    tuned: set[tuple[Any, ...]] = set()

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [tensor for tensor in tensors_in(args, kwargs) if isinstance(tensor, FakeTensor)]
        for tensor in tensors:
            tracer.values.forget(tensor)
        tracer.count_kernel(*tensors)

    def launch_tuned(kernel: Any, *args: Any, **kwargs: Any) -> None:
        named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        dtypes = [str(each.dtype) for each in named.values() if isinstance(each, torch.Tensor)]
        key = (id(kernel), *map(named.get, kernel.keys), *dtypes)
        if len(kernel.configs) > 1 and key not in tuned:
            tuned.add(key)
            torch.empty(TUNING_BYTES, dtype=torch.uint8, device="cuda")
        launch(kernel, *args, **kwargs)

    patches.set(jit.JITFunction, "run", launch)
    patches.set(autotuner.Autotuner, "run", launch_tuned)


LIBRARY = Library("Triton", "triton.runtime.autotuner", in_trace=_skip_kernels)
