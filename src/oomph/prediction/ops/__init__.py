"""What CUDA does for each op. Importing the modules enters their rules."""

from oomph.prediction.convolution import workspaces
from oomph.prediction.ops import (
    attention,
    convolution,
    images,
    indexing,
    linalg,
    losses,
    matmul,
    normalization,
    optimizer,
    pointwise,
    recurrent,
    reductions,
    sorting,
    sparse,
    tensors,
)

__all__ = [
    "attention",
    "convolution",
    "images",
    "indexing",
    "linalg",
    "losses",
    "matmul",
    "normalization",
    "optimizer",
    "pointwise",
    "recurrent",
    "reductions",
    "sorting",
    "sparse",
    "tensors",
    "workspaces",
]
