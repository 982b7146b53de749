"""What CUDA does differently from the fake CPU kernels. Importing the modules registers their rules."""

from oomph.prediction.cuda import attention, indexing, reductions, workspaces

__all__ = ["attention", "indexing", "reductions", "workspaces"]
