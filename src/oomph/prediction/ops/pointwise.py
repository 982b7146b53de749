"""Ops that go over their tensors element by element.

Sources: native/TensorCompare.cpp of ATen, and FunctionsManual.cpp of autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oomph.gpus import GPU
from oomph.prediction.ops.registry import cuda_kernel, op, temporaries
from oomph.prediction.ops.rules import BoundArguments, Fake
from oomph.torch_internals import OpOverload

aten = torch.ops.aten

op(
    """
    eq.Scalar ne.Scalar gt.Scalar lt.Scalar ge.Scalar le.Scalar
    add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar sub.Scalar mul.Scalar div.Scalar
    add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor add_.Scalar sub_.Scalar mul_.Scalar div_.Scalar
    pow.Tensor_Scalar neg.default rsqrt.default sqrt.default exp.default cos.default sin.default
    tanh.default sigmoid.default silu.default gelu.default relu.default
    tanh_backward.default sigmoid_backward.default silu_backward.default gelu_backward.default
    threshold_backward.default
    """,
    is_plain=True,
)
# Formulas that write into what their node has just made, except for tensor subclasses (FunctionsManual.cpp).
op(
    "logical_and.default logical_or.default",
    reuses_first=("MaxBackward1", "MinBackward1", "MedianBackward0", "ClampBackward0"),
)
op("mul.Tensor", reuses_first=("BinaryCrossEntropyBackward0",))
op("add.Tensor", reuses_first=("sum of gradients",))


@cuda_kernel(aten.where.self)
def _where(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A condition of bytes is copied to one of bools first (native/TensorCompare.cpp); the fake kernel
    refuses it."""
    condition, *others = args
    if condition.dtype == torch.uint8:
        condition = fake(aten._to_copy.default, (condition,), {"dtype": torch.bool})
    return fake(func, (condition, *others), kwargs)


@temporaries(aten.where.self)
def _condition_of_bools(call: BoundArguments, gpu: GPU) -> list[int]:
    condition = call["condition"]
    return [condition.numel()] if condition.dtype == torch.uint8 else []
