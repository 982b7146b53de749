"""Shortcuts through FakeTensorMode for the ops that make up most of a training step.

FakeTensorMode's general path costs several times the meta kernel itself. These ops have plain meta kernels
written in C++, take their device from their inputs, and need nothing else that the mode does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten = torch.ops.aten
_CPU = torch.device("cpu")

_PLAIN_NAMES = """
    view.default _unsafe_view.default detach.default alias.default transpose.int t.default permute.default
    expand.default slice.Tensor select.int unsqueeze.default squeeze.dim squeeze.dims as_strided.default
    split.Tensor split_with_sizes.default unbind.int
    mm.default addmm.default bmm.default baddbmm.default
    add.Tensor sub.Tensor mul.Tensor div.Tensor add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor
    neg.default rsqrt.default sqrt.default exp.default tanh.default sigmoid.default silu.default
    pow.Tensor_Scalar cos.default sin.default gelu.default gelu_backward.default silu_backward.default
    tanh_backward.default sigmoid_backward.default threshold_backward.default relu.default
    mean.dim sum.dim_IntList sum.default clone.default copy_.default cat.default
    _softmax.default _softmax_backward_data.default _log_softmax.default _log_softmax_backward_data.default
    empty_like.default zeros_like.default ones_like.default zero_.default fill_.Scalar
    eq.Scalar ne.Scalar gt.Scalar lt.Scalar ge.Scalar le.Scalar
"""


def _find(name: str) -> OpOverload:
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


_PLAIN = {_find(name) for name in _PLAIN_NAMES.split()}
# Results are thrown away or known: nothing to compute.
_INITIALISERS = {aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.random_.default}


def run(mode: FakeTensorMode, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The op's result on fake tensors, or NotImplemented when it has to go the general way."""
    if func in _PLAIN:
        if not _all_fake(args):
            return NotImplemented
        with in_kernel_invocation_manager(mode):
            result = func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0]
        if isinstance(result, torch.Tensor):
            return FakeTensor(mode, result, _CPU)
        return [FakeTensor(mode, item, _CPU) for item in result]
    if func in _INITIALISERS:
        return args[0]
    if func.namespace == "aten" and func._opname.startswith("_foreach_"):
        return _foreach(mode, func, args, kwargs)
    return NotImplemented


def _foreach(mode: FakeTensorMode, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place: nothing new. Otherwise one result like each tensor of the first list (norms are scalars)."""
    if func._schema.is_mutable:
        return None
    tensors = args[0] if isinstance(args[0], (list, tuple)) else args[1]
    if "norm" in func._opname or "max" in func._opname or not _all_fake([tensors]):
        return NotImplemented
    return [run(mode, aten.empty_like.default, (tensor,), {}) for tensor in tensors]


def _all_fake(args: Sequence[Any]) -> bool:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            if not isinstance(arg, FakeTensor):
                return False
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                if isinstance(item, torch.Tensor) and not isinstance(item, FakeTensor):
                    return False
    return True
