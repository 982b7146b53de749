"""The memory of a training step: traced on fake tensors, replayed through a simulated allocator."""

from oomph.prediction.api import built, called, predict
from oomph.prediction.program import Script

__all__ = ["Script", "built", "called", "predict"]
