"""The memory of a training step: traced on fake tensors, replayed through a simulated allocator."""

from oomph.prediction.predict import built, predict

__all__ = ["built", "predict"]
