"""The memory of a training step: traced on fake tensors, replayed through a simulated allocator."""

from oomph.prediction.api import predict
from oomph.prediction.child import call_on_fake_gpu, fake_model
from oomph.prediction.program import Script

__all__ = ["Script", "call_on_fake_gpu", "fake_model", "predict"]
