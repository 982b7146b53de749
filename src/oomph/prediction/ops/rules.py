"""Rules: what CUDA does that fake CPU kernels do not show. What they are given, and how they are called.

A rule is an estimate of ours: if it raises, `RuleGuard` notes the op and the line, and a general estimate
takes the rule's place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from oomph.errors import OomphError
from oomph.gpus import GPU
from oomph.torch_internals import OpOverload

T = TypeVar("T")
BoundArguments = dict[str, Any]  # an op's arguments by name, defaults filled in
Fake = Callable[[OpOverload, Sequence[Any], dict[str, Any]], Any]  # runs an op on fake tensors
CudaKernel = Callable[[Fake, OpOverload, Sequence[Any], dict[str, Any]], Any]
TemporariesRule = Callable[[BoundArguments, GPU], Sequence["Temporary"]]
HostOutputsRule = Callable[[BoundArguments], frozenset[int]]
CompositeRule = Callable[["RuleContext", BoundArguments], Any]  # may return NotImplemented
FlopsRule = Callable[[OpOverload, Sequence[Any], Mapping[str, Any], Any], "Flops"]


class Search(NamedTuple):
    """cuDNN tries algorithms at the first call of a convolution (torch.backends.cudnn.benchmark)."""

    convolution: Hashable
    workspaces: tuple[int, ...]  # of the algorithms; the largest that is free is allocated


class Estimated(int):
    """Bytes, where the library that chooses them was not asked. `most`: what they may be."""

    most: int

    def __new__(cls, bytes: int, most: int) -> Estimated:
        found = super().__new__(cls, bytes)
        found.most = max(bytes, most)
        return found


class Flops(NamedTuple):
    """The arithmetic of one op, and how it can be spread over a GPU."""

    flops: float
    dtype: torch.dtype
    kind: (
        str  # "product", "unaligned product", "convolution", "depthwise convolution", "cudnn attention", ...
    )
    tiles: int = 0  # of the result, each a multiprocessor's work; 0: enough of them
    depth: int = 0  # the length of a product's sums, which may be split too; the width of attention's heads


# Bytes that a kernel's host code allocates for itself, in order. A positive number is an allocation, freed
# when the kernel returns unless a negative number (the same size) frees it earlier. NEXT_RESULT is where the
# kernel allocates its next result; results without one come before all temporaries.
Temporary = int | None | Search
NEXT_RESULT = None

HALF = (torch.float16, torch.bfloat16)


def bind(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundArguments:
    bound: BoundArguments = {}
    for position, parameter in enumerate(op._schema.arguments):
        if position < len(args):
            bound[parameter.name] = args[position]
        else:
            bound[parameter.name] = kwargs.get(parameter.name, parameter.default_value)
    return bound


def aten_ops(names: str) -> set[OpOverload]:
    """The overloads that a list of names stands for: `mm.default sum.dim_IntList`."""
    pairs = (name.split(".") for name in names.split())
    return {getattr(getattr(torch.ops.aten, packet), overload) for packet, overload in pairs}


def op_name(func: OpOverload) -> str:
    """`aten.mm`, `aten.sum.dim_IntList`"""
    return func.name().replace("::", ".")


def contiguous_copy_bytes(
    tensor: torch.Tensor | None, format: torch.memory_format = torch.contiguous_format
) -> int:
    """The bytes of the copy that `tensor.contiguous()` makes; 0 where it makes none."""
    return 0 if tensor is None or tensor.is_contiguous(memory_format=format) else tensor.nbytes


def contiguous_copies(*names: str) -> TemporariesRule:
    """A rule: these arguments are made contiguous."""
    return lambda call, gpu: [contiguous_copy_bytes(call[name]) for name in names]


def freed(sizes: Sequence[int]) -> list[int]:
    """Events that free these temporaries."""
    return [-size for size in sizes]


def in_memory_format(fake: Fake, out: Any, format: torch.memory_format) -> Any:
    """The result in that memory format; None (a gradient that is not needed) stays None."""
    if out is None or out.is_contiguous(memory_format=format):
        return out
    return fake(torch.ops.aten.empty_like.default, (out,), {"memory_format": format})


def contiguous_result(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA copies a strided input first and writes a contiguous result; the fake kernel keeps the strides."""
    return in_memory_format(fake, fake(func, args, kwargs), torch.contiguous_format)


def shrunk(fake: Fake, elements: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A tensor of `shape` in a storage of so many elements, or of its own size if that is larger: what a
    kernel makes large and then shrinks looks small, and holds its first storage."""
    empty, options = torch.ops.aten.empty.memory_format, {"dtype": dtype, "device": torch.device("cpu")}
    whole = fake(empty, ([elements],), options)
    return fake(torch.ops.aten.resize_.default, (whole, list(shape)), {})


_RAISED_BY_PROGRAM = "_oomph_raised_by_program"


def program_error(error: Exception) -> Exception:
    """Mark an exception as caused by the program: torch's own kernel raised it, or CUDA would."""
    setattr(error, _RAISED_BY_PROGRAM, True)
    return error


def is_program_error(error: Exception) -> bool:
    return isinstance(error, OomphError) or hasattr(error, _RAISED_BY_PROGRAM)


class RuleGuard:
    """Calls rules, so that a mistake in one is never reported as the program's.

    `note` receives a sentence that names the op; `strict` raises instead, for tests.
    """

    strict = False

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def call(self, subject: str, op: OpOverload | str, rule: Callable[[], T], fallback: Callable[[], T]) -> T:
        try:
            return rule()
        except Exception as error:
            if is_program_error(error) or self.strict:
                raise
            name = op if isinstance(op, str) else op_name(op)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._note(
                f"{name}: oomph's estimate of its {subject} failed ({reason}); a general estimate is used"
            )
        return fallback()  # outside the handler: the traceback would keep tensors alive


class RuleContext(NamedTuple):
    """What rules above autograd need of a trace."""

    gpu: GPU
    on_gpu: Callable[[Any], bool]
    guard: RuleGuard
    count_kernel: Callable[..., None]  # (*tensors, flops=, kind=): a CUDA kernel that no traced op stands for
    workspace: Callable[[int, str], contextlib.AbstractContextManager[None]]  # (bytes, op), while it runs
    count_classes: Callable[[torch.Tensor, str], int]  # (ids, op): one more than the largest id
    has_zeros: Callable[[torch.Tensor], bool]
    held: list[torch.Tensor]  # device memory that a library keeps until the process ends
    compiling: Callable[[], bool]  # the composites of torch.compile's decompositions are not CUDA's
