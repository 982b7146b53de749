"""Calls that CUDA refuses and fake tensors let through: a prediction fails as the run would.

Dtypes: the rules and most of the words are those of torch 2.11 on an H200. Determinism: ops that call
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
# dtype -> its name as a scalar type, and as a type of C++; torch's messages use both
_NAMES = {
    torch.bfloat16: ("BFloat16", "c10::BFloat16"),
    torch.float16: ("Half", "c10::Half"),
    torch.float32: ("Float", "float"),
    torch.float64: ("Double", "double"),
    torch.complex64: ("ComplexFloat", "c10::complex<float>"),
    torch.complex128: ("ComplexDouble", "c10::complex<double>"),
    torch.int64: ("Long", "long int"),
    torch.int32: ("Int", "int"),
    torch.int16: ("Short", "short int"),
    torch.int8: ("Char", "signed char"),
    torch.uint8: ("Byte", "unsigned char"),
    torch.bool: ("Bool", "bool"),
}


def check_dtypes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise what the op's CUDA kernel would raise."""
    check = DTYPE_CHECKS.get(func)
    if check is not None:
        check(bind(func, args, kwargs))


def lacks_deterministic_kernel(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a run would raise at this call, because only deterministic kernels are allowed."""
    rule = NONDETERMINISTIC.get(func)
    return rule is not None and deterministic_required() and rule(bind(func, args, kwargs))


def _scalar_type(tensor: torch.Tensor) -> str:
    return _NAMES.get(tensor.dtype, (str(tensor.dtype),))[0]


def _cpp_type(tensor: torch.Tensor) -> str:
    return _NAMES.get(tensor.dtype, (str(tensor.dtype),))[-1]


def _refuse(message: str) -> Exception:
    return program_error(RuntimeError(message))


def _check_supported(tensor: torch.Tensor, kernel: str) -> None:
    if tensor.dtype not in _MULTIPLIED:
        message = f"\"{kernel}\" not implemented for '{_scalar_type(tensor)}'"
        raise program_error(NotImplementedError(message))


def _check_same(expected: torch.Tensor, found: torch.Tensor) -> None:
    if expected.dtype != found.dtype:
        raise _refuse(f"expected scalar type {_scalar_type(expected)} but found {_scalar_type(found)}")


def _mm(call: BoundArguments) -> None:
    left, right = call["self"], call["mat2"]
    if left.dtype != right.dtype:
        types = f"{_cpp_type(left)} != {_cpp_type(right)}"
        raise _refuse(f"expected mat1 and mat2 to have the same dtype, but got: {types}")
    _check_supported(left, "addmm_cuda")


def _addmm(call: BoundArguments) -> None:
    added, left, right = call["self"], call["mat1"], call["mat2"]
    # With a dtype of the result's own, what is added has that dtype rather than the matrices'.
    pairs = {"mat1": left} if call.get("out_dtype") is not None else {"self": added, "mat1": left}
    for name, tensor in pairs.items():
        if tensor.dtype != right.dtype:
            types = f"{_scalar_type(tensor)} and {_scalar_type(right)}"
            raise _refuse(f"{name} and mat2 must have the same dtype, but got {types}")
    _check_supported(right, "addmm_cuda")


def _addbmm(call: BoundArguments) -> None:
    right = call["batch2"]
    for tensor in (call["self"], call["batch1"]):
        if tensor.dtype != right.dtype:
            types = f"{_scalar_type(tensor)} and {_scalar_type(right)}"
            raise _refuse(f"self and mat2 must have the same dtype, but got {types}")
    _check_supported(right, "addmm_cuda")


def _bmm(call: BoundArguments) -> None:
    _check_same(call["self"], call["mat2"])
    _check_supported(call["self"], "baddbmm_cuda")


def _mv(call: BoundArguments) -> None:
    _check_same(call["self"], call["vec"])
    _check_supported(call["self"], "addmv_impl_cuda")


def _convolution(call: BoundArguments) -> None:
    for name in ("weight", "bias"):
        other = call[name]
        if other is not None and other.dtype != call["input"].dtype:
            types = f"Input type ({_cpp_type(call['input'])}) and {name} type ({_cpp_type(other)})"
            raise _refuse(f"{types} should be the same")


def _normalization(call: BoundArguments) -> None:
    for name in ("weight", "bias"):
        if call[name] is not None:
            _check_same(call["input"], call[name])


def _class_weight(call: BoundArguments) -> None:
    if call["weight"] is not None:
        _check_same(call["self"], call["weight"])


def _index_add(call: BoundArguments) -> None:
    target, source = call["self"], call["source"]
    if target.dtype != source.dtype:
        types = f"self ({_scalar_type(target)}) and source ({_scalar_type(source)})"
        raise _refuse(f"index_add_(): {types} must have the same scalar type")


def _index_put(call: BoundArguments) -> None:
    target, source = call["self"], call["values"]
    if target.dtype != source.dtype:
        raise _refuse(
            "Index put requires the source and destination dtypes match, "
            f"got {_scalar_type(target)} for the destination and {_scalar_type(source)} for the source."
        )


DTYPE_CHECKS: dict[OpOverload, Callable[[BoundArguments], None]] = {
    **dict.fromkeys((aten.mm.default, aten.mm.out, aten.mm.dtype, aten.mm.dtype_out), _mm),
    **dict.fromkeys((aten.addmm.default, aten.addmm_.default, aten.addmm.out), _addmm),
    **dict.fromkeys((aten.addmm.dtype, aten.addmm.dtype_out), _addmm),
    **dict.fromkeys((aten.addbmm.default, aten.addbmm_.default), _addbmm),
    **dict.fromkeys((aten.bmm.default, aten.bmm.out, aten.bmm.dtype, aten.bmm.dtype_out), _bmm),
    aten.mv.default: _mv,
    aten.convolution.default: _convolution,
    **dict.fromkeys((aten.native_layer_norm.default, aten.native_group_norm.default), _normalization),
    aten.nll_loss_forward.default: _class_weight,
    **dict.fromkeys((aten.index_add.default, aten.index_add_.default), _index_add),
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default), _index_put),
}

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
