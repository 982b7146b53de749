"""CUDA ops that torch refuses where only deterministic kernels are wanted.

Those that call `alertNotDeterministic` in ATen's native/cuda. (The list in torch's documentation is longer:
it has ops that are deterministic by now, such as cumsum.) The step ends there, as a run would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from oomph.deterministic import alone_wanted
from oomph.prediction.cuda.temporaries import Bound, bind

aten = torch.ops.aten
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


def _op(name: str) -> OpOverload:
    packet, overload = name.split(".")
    found: OpOverload = getattr(getattr(aten, packet), overload)
    return found


def _maxima(call: Bound) -> bool:
    return bool(call["mode"] == _BAG_OF_MAXIMA)


_REFUSED: dict[OpOverload, Callable[[Bound], bool]] = {
    **dict.fromkeys(map(_op, _ALWAYS.split()), lambda call: True),
    aten.histc.default: lambda call: call["self"].dtype.is_floating_point,
    aten.bincount.default: lambda call: call["weights"] is not None,
    aten.nll_loss2d_forward.default: lambda call: call["reduction"] != _NOT_REDUCED,
    aten._embedding_bag_backward.default: _maxima,
    aten._embedding_bag_dense_backward.default: _maxima,
}


def is_refused(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a run would raise at this call."""
    rule = _REFUSED.get(func)
    return rule is not None and alone_wanted() and rule(bind(func, args, kwargs))
