"""CUDA ops that torch refuses where only deterministic kernels are wanted.

Those that call `alertNotDeterministic` in ATen's native/cuda. (The list in torch's documentation is longer:
it has ops that are deterministic by now, such as cumsum.) The step ends there, as a run would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from oomph.prediction.cuda.temporaries import bind

aten = torch.ops.aten
_BAG_OF_MAXIMA, _NOT_REDUCED = 2, 0
_NAMES = """
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


def _op(name: str) -> OpOverload:
    packet, overload = name.split(".")
    found: OpOverload = getattr(getattr(aten, packet), overload)
    return found


_ALWAYS = {_op(name) for name in _NAMES.split()}
_FLOATS_ONLY = {aten.histc.default}
_REDUCED_ONLY = {aten.nll_loss2d_forward.default}
_WITH_WEIGHTS = {aten.bincount.default}
_MAXIMA_ONLY = {aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default}


def is_refused(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a run would raise at this call."""
    if not torch.are_deterministic_algorithms_enabled():
        return False
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if func in _FLOATS_ONLY:
        return bool(args[0].dtype.is_floating_point)
    if func in _WITH_WEIGHTS:
        return bind(func, args, kwargs)["weights"] is not None
    if func in _REDUCED_ONLY:
        return bool(bind(func, args, kwargs)["reduction"] != _NOT_REDUCED)
    if func in _MAXIMA_ONLY:
        return bool(bind(func, args, kwargs)["mode"] == _BAG_OF_MAXIMA)
    return func in _ALWAYS
