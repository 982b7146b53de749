"""Prediction: the memory of a training step, traced on fake tensors and replayed through a simulated allocator."""

from oomph.prediction.predict import predict

__all__ = ["predict"]
