"""The memory of a training step: traced on fake tensors, replayed through a simulated allocator."""

from oomph.prediction.api import built, called, predict

__all__ = ["built", "called", "predict"]
