"""Rules: what CUDA does that fake CPU kernels do not show. How rules are registered, found and called.

Each table maps an op to a function. A rule is an estimate of ours: if it raises, `RuleGuard` notes the op and
the line, and a general estimate takes the rule's place. Importing the modules of this package fills the
tables.

At the end, the calls that CUDA refuses and fake tensors let through: a prediction fails as the run would.
Dtypes: the rules are those of torch 2.11 on an H200. Determinism: ops that call `alertNotDeterministic` in
ATen's native/cuda. (The list in torch's documentation is longer: it has ops that are deterministic by now,
such as cumsum.)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from oomph.errors import OomphError
from oomph.gpus import GPU
from oomph.torch_internals import OpOverload, deterministic_required

T = TypeVar("T")
BoundArguments = dict[str, Any]  # an op's arguments by name, defaults filled in
Fake = Callable[[OpOverload, Sequence[Any], dict[str, Any]], Any]  # runs an op on fake tensors
CudaKernel = Callable[[Fake, OpOverload, Sequence[Any], dict[str, Any]], Any]
TemporariesRule = Callable[[BoundArguments, GPU], Sequence["Temporary"]]
HostOutputsRule = Callable[[BoundArguments], frozenset[int]]
CompositeRule = Callable[["RuleContext", BoundArguments], Any]  # may return NotImplemented


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


Temporary = int | None | Search

# The op's results on CUDA, where the fake CPU kernel gives others.
CUDA_KERNELS: dict[OpOverload, CudaKernel] = {}
# Bytes that a kernel's host code allocates for itself, in order. A positive number is an allocation, freed
# when the kernel returns unless a negative number (the same size) frees it earlier. NEXT_RESULT is where the
# kernel allocates its next result; results without one come before all temporaries.
NEXT_RESULT = None
TEMPORARIES: dict[OpOverload, TemporariesRule] = {}
# Indices of results that the fake kernel makes, but that take no device memory on a GPU.
HOST_OUTPUTS: dict[OpOverload, HostOutputsRule] = {}
# The order in which a kernel allocates its results, where it is another than that of the results.
ALLOCATION_ORDER: dict[OpOverload, tuple[int, ...]] = {
    torch.ops.aten.native_dropout.default: (1, 0),  # native/cuda/Dropout.cu
    torch.ops.aten._embedding_bag.default: (2, 1, 0, 3),  # native/cuda/EmbeddingBag.cu
}
# Composite ops that decompose differently on CUDA.
COMPOSITES: dict[OpOverload, CompositeRule] = {}


def _register_in(table: dict[OpOverload, T]) -> Callable[..., Callable[[T], T]]:
    """A decorator that registers a rule for one or more ops."""

    def for_ops(*ops: OpOverload) -> Callable[[T], T]:
        def register(rule: T) -> T:
            table.update(dict.fromkeys(ops, rule))
            return rule

        return register

    return for_ops


cuda_kernel = _register_in(CUDA_KERNELS)
temporaries = _register_in(TEMPORARIES)
composite = _register_in(COMPOSITES)


def temporaries_of(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], gpu: GPU
) -> list[Temporary]:
    rule = temporaries_rule(func)
    return [size for size in rule(bind(func, args, kwargs), gpu) if size != 0] if rule is not None else []


def temporaries_rule(func: OpOverload) -> TemporariesRule | None:
    """An op that writes into `out` has the temporaries of the op that makes its result."""
    return TEMPORARIES.get(func) or TEMPORARIES.get(_without_out(func))


@functools.cache
def _without_out(func: OpOverload) -> OpOverload:
    """`aten.sum.dim_IntList` for `aten.sum.IntList_out`; the op itself if it takes no `out`."""
    arguments = func._schema.arguments
    names = [argument.name for argument in arguments if not argument.is_out]
    if len(names) < len(arguments):
        for overload in func.overloadpacket.overloads():
            other = getattr(func.overloadpacket, overload)
            if [argument.name for argument in other._schema.arguments] == names:
                return other
    return func


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


# ------------------------------------------------------------------------------------ calls that CUDA refuses

aten = torch.ops.aten

_MULTIPLIED = {
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}
_PRODUCTS: dict[OpOverload, tuple[str, ...]] = {
    **dict.fromkeys((aten.mm.default, aten.mm.out, aten.mm.dtype, aten.mm.dtype_out), ("self", "mat2")),
    **dict.fromkeys((aten.addmm.default, aten.addmm_.default, aten.addmm.out), ("self", "mat1", "mat2")),
    # What is added has the dtype of the result, not that of the matrices.
    **dict.fromkeys((aten.addmm.dtype, aten.addmm.dtype_out), ("mat1", "mat2")),
    **dict.fromkeys((aten.addbmm.default, aten.addbmm_.default), ("self", "batch1", "batch2")),
    **dict.fromkeys((aten.bmm.default, aten.bmm.out, aten.bmm.dtype, aten.bmm.dtype_out), ("self", "mat2")),
    aten.mv.default: ("self", "vec"),
}
DTYPE_CHECKS: dict[OpOverload, tuple[str, ...]] = {  # the arguments that must have one dtype
    **_PRODUCTS,
    aten.convolution.default: ("input", "weight", "bias"),
    aten.native_layer_norm.default: ("input", "weight", "bias"),
    aten.native_group_norm.default: ("input", "weight", "bias"),
    aten.nll_loss_forward.default: ("self", "weight"),
    **dict.fromkeys((aten.index_add.default, aten.index_add_.default), ("self", "source")),
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default), ("self", "values")),
}


def check_dtypes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise where the op's CUDA kernel would raise."""
    names = DTYPE_CHECKS.get(func)
    if names is None:
        return
    call = bind(func, args, kwargs)
    dtypes = {name: call[name].dtype for name in names if call[name] is not None}
    if len(set(dtypes.values())) > 1:
        raise program_error(RuntimeError(f"{func}: expected the same dtype, but {_shown(dtypes)}"))
    if func in _PRODUCTS and not _MULTIPLIED.issuperset(dtypes.values()):
        raise program_error(NotImplementedError(f"{func} is not implemented on CUDA: {_shown(dtypes)}"))


def _shown(dtypes: Mapping[str, torch.dtype]) -> str:
    return ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in dtypes.items())


def lacks_deterministic_kernel(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a run would raise at this call, because only deterministic kernels are allowed."""
    rule = NONDETERMINISTIC.get(func)
    return rule is not None and deterministic_required() and rule(bind(func, args, kwargs))


_BAG_OF_MAXIMA, _NOT_REDUCED = 2, 0
_ALWAYS = """
    median.dim nanmedian.dim put.default put_.default
    avg_pool3d_backward.default _adaptive_avg_pool2d_backward.default _adaptive_avg_pool3d_backward.default
    adaptive_max_pool2d_backward.default
    fractional_max_pool2d_backward.default fractional_max_pool3d_backward.default
    max_unpool2d.default max_unpool3d.default
    upsample_linear1d_backward.default upsample_bilinear2d_backward.default
    upsample_bicubic2d_backward.default upsample_trilinear3d_backward.default
    reflection_pad1d_backward.default reflection_pad2d_backward.default reflection_pad3d_backward.default
    _ctc_loss_backward.default
    grid_sampler_2d_backward.default grid_sampler_3d_backward.default
"""


def _takes_maxima(call: BoundArguments) -> bool:
    return bool(call["mode"] == _BAG_OF_MAXIMA)


NONDETERMINISTIC: dict[OpOverload, Callable[[BoundArguments], bool]] = {
    **dict.fromkeys(aten_ops(_ALWAYS), lambda call: True),
    aten.histc.default: lambda call: call["self"].dtype.is_floating_point,
    aten.bincount.default: lambda call: call["weights"] is not None,
    aten.nll_loss2d_forward.default: lambda call: call["reduction"] != _NOT_REDUCED,
    aten._embedding_bag_backward.default: _takes_maxima,
    aten._embedding_bag_dense_backward.default: _takes_maxima,
}
