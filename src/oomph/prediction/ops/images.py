"""Fold and unfold, pooling, resizing and padding of images.

Sources, in ATen's native/cuda: Col2Im.cu, Im2Col.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oomph.prediction.ops.registry import always, cuda_kernel, op
from oomph.prediction.ops.rules import Fake, shrunk
from oomph.torch_internals import OpOverload

aten = torch.ops.aten


op("upsample_nearest2d.default upsample_bilinear2d.default upsample_bicubic2d.default", keeps_values=True)


@cuda_kernel(aten.col2im.default, aten.im2col.default)
def _fold(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """As large as the input first, then shrunk."""
    result = fake(func, args, kwargs)
    if args[0].numel() <= result.numel():
        return result
    return shrunk(fake, args[0].numel(), result.shape, result.dtype)


op(
    """
    avg_pool3d_backward.default _adaptive_avg_pool2d_backward.default _adaptive_avg_pool3d_backward.default
    adaptive_max_pool2d_backward.default
    fractional_max_pool2d_backward.default fractional_max_pool3d_backward.default
    max_unpool2d.default max_unpool3d.default
    upsample_linear1d_backward.default upsample_bilinear2d_backward.default
    upsample_bicubic2d_backward.default upsample_trilinear3d_backward.default
    reflection_pad1d_backward.default reflection_pad2d_backward.default reflection_pad3d_backward.default
    grid_sampler_2d_backward.default grid_sampler_3d_backward.default
    """,
    nondeterministic=always,
)
