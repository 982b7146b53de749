"""Calls that CUDA refuses and fake tensors let through: a prediction fails as the run would.

Dtypes: the rules are those of torch 2.11 on an H200. Determinism: ops that call
`alertNotDeterministic` in ATen's native/cuda. (The list in torch's documentation is longer: it has ops that
are deterministic by now, such as cumsum.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from oomph.prediction.cuda.rules import BoundArguments, aten_ops, bind, program_error
from oomph.torch_internals import OpOverload, deterministic_required

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
