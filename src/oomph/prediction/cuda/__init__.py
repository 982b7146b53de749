"""What CUDA does differently from the fake CPU kernels. Importing the modules registers their rules."""

from oomph.prediction.cuda import attention, kernels, workspaces

__all__ = ["attention", "kernels", "workspaces"]
