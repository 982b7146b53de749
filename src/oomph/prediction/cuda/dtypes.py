"""Dtypes that CUDA's kernels refuse and fake tensors let through: a prediction fails as the run would.

The rules and most of the words are those of torch 2.11 on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from oomph.prediction.cuda.temporaries import Bound, bind

aten = torch.ops.aten
Check = Callable[[Bound], None]

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
    check = _CHECKS.get(func)
    if check is not None:
        check(bind(func, args, kwargs))


def _scalar(tensor: torch.Tensor) -> str:
    return _NAMES.get(tensor.dtype, (str(tensor.dtype),))[0]


def _cpp(tensor: torch.Tensor) -> str:
    return _NAMES.get(tensor.dtype, (str(tensor.dtype),))[-1]


def _check_multiplied(tensor: torch.Tensor, kernel: str) -> None:
    if tensor.dtype not in _MULTIPLIED:
        raise NotImplementedError(f"\"{kernel}\" not implemented for '{_scalar(tensor)}'")


def _mm(call: Bound) -> None:
    left, right = call["self"], call["mat2"]
    if left.dtype != right.dtype:
        raise RuntimeError(
            f"expected mat1 and mat2 to have the same dtype, but got: {_cpp(left)} != {_cpp(right)}"
        )
    _check_multiplied(left, "addmm_cuda")


def _addmm(call: Bound) -> None:
    added, left, right = call["self"], call["mat1"], call["mat2"]
    # With a dtype of the result's own, what is added has that dtype rather than the matrices'.
    pairs = {"mat1": left} if call.get("out_dtype") is not None else {"self": added, "mat1": left}
    for name, tensor in pairs.items():
        if tensor.dtype != right.dtype:
            raise RuntimeError(
                f"{name} and mat2 must have the same dtype, but got {_scalar(tensor)} and {_scalar(right)}"
            )
    _check_multiplied(right, "addmm_cuda")


def _addbmm(call: Bound) -> None:
    for name in ("self", "batch1"):
        if call[name].dtype != call["batch2"].dtype:
            raise RuntimeError(
                "self and mat2 must have the same dtype, but got "
                f"{_scalar(call[name])} and {_scalar(call['batch2'])}"
            )
    _check_multiplied(call["batch2"], "addmm_cuda")


def _bmm(call: Bound) -> None:
    _check_found(call["self"], call["mat2"])
    _check_multiplied(call["self"], "baddbmm_cuda")


def _mv(call: Bound) -> None:
    _check_found(call["self"], call["vec"])
    _check_multiplied(call["self"], "addmv_impl_cuda")


def _convolution(call: Bound) -> None:
    for name in ("weight", "bias"):
        other = call[name]
        if other is not None and other.dtype != call["input"].dtype:
            raise RuntimeError(
                f"Input type ({_cpp(call['input'])}) and {name} type ({_cpp(other)}) should be the same"
            )


def _normalisation(call: Bound) -> None:
    for name in ("weight", "bias"):
        if call[name] is not None:
            _check_found(call["input"], call[name])


def _class_weight(call: Bound) -> None:
    if call["weight"] is not None:
        _check_found(call["self"], call["weight"])


def _check_found(expected: torch.Tensor, found: torch.Tensor) -> None:
    if expected.dtype != found.dtype:
        raise RuntimeError(f"expected scalar type {_scalar(expected)} but found {_scalar(found)}")


def _index_add(call: Bound) -> None:
    target, source = call["self"], call["source"]
    if target.dtype != source.dtype:
        raise RuntimeError(
            f"index_add_(): self ({_scalar(target)}) and source ({_scalar(source)}) must have the same "
            "scalar type"
        )


def _index_put(call: Bound) -> None:
    target, source = call["self"], call["values"]
    if target.dtype != source.dtype:
        raise RuntimeError(
            "Index put requires the source and destination dtypes match, "
            f"got {_scalar(target)} for the destination and {_scalar(source)} for the source."
        )


_CHECKS: dict[OpOverload, Check] = {
    **dict.fromkeys((aten.mm.default, aten.mm.out, aten.mm.dtype, aten.mm.dtype_out), _mm),
    **dict.fromkeys((aten.addmm.default, aten.addmm_.default, aten.addmm.out), _addmm),
    **dict.fromkeys((aten.addmm.dtype, aten.addmm.dtype_out), _addmm),
    **dict.fromkeys((aten.addbmm.default, aten.addbmm_.default), _addbmm),
    **dict.fromkeys((aten.bmm.default, aten.bmm.out), _bmm),
    aten.mv.default: _mv,
    aten.convolution.default: _convolution,
    **dict.fromkeys((aten.native_layer_norm.default, aten.native_group_norm.default), _normalisation),
    aten.nll_loss_forward.default: _class_weight,
    **dict.fromkeys((aten.index_add.default, aten.index_add_.default), _index_add),
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default), _index_put),
}
