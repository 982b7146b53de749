"""What CUDA does differently from the fake CPU kernels. Importing the modules registers their rules."""

from oomph.prediction.cuda import (
    attention_memory,
    cublas,
    cudnn,
    indexing,
    normalization,
    reductions,
)

__all__ = ["attention_memory", "cublas", "cudnn", "indexing", "normalization", "reductions"]
