"""What CUDA does differently from the fake CPU kernels. Importing the modules registers their rules."""

from oomph.prediction.cuda import (
    attention_memory,
    copies,
    cudnn,
    indexing,
    normalization,
    reductions,
    shrunk_results,
)

__all__ = [
    "attention_memory",
    "copies",
    "cudnn",
    "indexing",
    "normalization",
    "reductions",
    "shrunk_results",
]
