"""torchvision's ops. Up to 0.27 their kernels for autocast cast nothing that is not really CUDA's."""

from __future__ import annotations

from oomph.prediction.compat.library import Library

_OPS = "nms roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d"

LIBRARY = Library(
    "torchvision",
    "torchvision",
    float32_ops=tuple(f"torchvision::{op}" for op in _OPS.split()),
    result_rows={"torchvision::nms": lambda boxes: -(-boxes // 2)},
)
