"""What the tests of autocast share: a log of the ops that arrive, and how a region is entered."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten = torch.ops.aten


class OpLog(TorchDispatchMode):
    """The ops that reach the bottom of the dispatcher; answers host reads of GPU values with zero."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, tuple[int, ...], torch.dtype | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return 0.0
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.ops.append((func, tuple(out.shape), out.dtype))
        return out

    @property
    def casts(self) -> list[tuple[tuple[int, ...], torch.dtype | None]]:
        return [(shape, dtype) for func, shape, dtype in self.ops if func is aten._to_copy.default]


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def on(dtype: torch.dtype = bf16, **options: Any) -> torch.autocast:
    return torch.autocast("cuda", dtype, **options)
