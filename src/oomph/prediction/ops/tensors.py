"""Views, factories, copies and random numbers.

Sources, in ATen: native/cuda/Dropout.cu, native/cuda/TensorTransformations.cu (roll).
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.gpus import GPU
from oomph.prediction.ops.registry import composite, op, temporaries
from oomph.prediction.ops.rules import BoundArguments, RuleContext, contiguous_copy_bytes, contiguous_result

aten = torch.ops.aten

op(
    """
    view.default _unsafe_view.default detach.default alias.default transpose.int t.default permute.default
    expand.default slice.Tensor select.int unsqueeze.default squeeze.dim squeeze.dims as_strided.default
    split.Tensor split_with_sizes.default unbind.int
    """,
    is_view=True,
    is_plain=True,
)
op(
    """
    empty.memory_format zeros.default ones.default new_empty.default new_zeros.default new_ones.default
    empty_like.default zeros_like.default ones_like.default zero_.default fill_.Scalar
    clone.default cat.default _to_copy.default copy_.default
    """,
    is_plain=True,
)
op("normal_.default uniform_.default bernoulli_.float random_.default", initialises=True)
op(
    """
    arange.default arange.start arange.start_step zeros.default ones.default full.default eye.default
    scalar_tensor.default tril_indices.default triu_indices.default linspace.default logspace.default
    """,
    makes_known=True,
)
op(
    """
    zeros_like.default ones_like.default full_like.default new_zeros.default new_ones.default
    new_full.default zero_.default fill_.Scalar
    """,
    ignores_values=True,
)
op("zeros.default zeros_like.default new_zeros.default zero_.default", constant=0)
op("ones.default ones_like.default new_ones.default", constant=1)
op("full.default full_like.default fill_.Scalar", filled_with=1)
op("new_full.default", filled_with=2)
op("empty.memory_format empty_like.default new_empty.default", leaves_unset=True)
op("empty_strided.default new_empty_strided.default", leaves_unset=True)
op(
    """
    clone.default _to_copy.default cat.default stack.default repeat.default squeeze.default flip.default
    roll.default tril.default triu.default contiguous.default constant_pad_nd.default reshape.default
    """,
    keeps_values=True,
)
op("randint.default randint.generator", random="integers", random_between=(None, 0))
op("randint.low randint.low_generator", random="integers", random_between=(0, 1))
op("randint_like.default random_.to", random="integers", random_between=(None, 1))
op("randint_like.low_dtype random_.from", random="integers", random_between=(1, 2))
op("randn.default randn.generator randn_like.default normal_.default", random="normal")
op("rand.default rand.generator rand_like.default uniform_.default", random="uniform")
op("bernoulli.default bernoulli.p bernoulli_.float bernoulli_.Tensor", random="flags")
op("copy_.default _to_copy.default set_.source_Storage", takes_two_devices=True)
# Nothing runs on the GPU.
op("empty empty_like empty_strided new_empty new_empty_strided set_ resize_", is_free=True)
op("_unsafe_view detach alias lift_fresh _reshape_alias sym_size sym_numel", is_free=True)
op("zeros_like ones_like full_like new_zeros new_ones new_full zero_ fill_", reads_first=False)
op("rand_like randn_like randint_like", reads_first=False)
op("bernoulli_ random_ normal_ uniform_ exponential_", reads_first=False)
op("clone _to_copy", elementwise=True)
op("copy_", elementwise=True, reads_first=False)
op("roll.default", results=contiguous_result)
op("slice_backward select_backward", launches=2)
op("native_dropout.default", allocation_order=(1, 0))  # native/cuda/Dropout.cu


@temporaries(aten.roll.default)
def _roll(call: BoundArguments, gpu: GPU) -> list[int]:
    """Several dimensions are rolled one after the other."""
    tensor = call["self"]
    return [contiguous_copy_bytes(tensor), tensor.nbytes if len(call["dims"]) > 1 else 0]


@composite(aten.dropout.default)
def _dropout(context: RuleContext, call: BoundArguments) -> Any:
    """CUDA fuses: a bool mask is kept, not a float one."""
    input, p, train = call["input"], call["p"], call["train"]
    if train and 0 < p < 1 and input.numel() > 0:
        return aten.native_dropout.default(input, p, train)[0]
    return input if p == 0 or not train else NotImplemented
