"""Depthwise causal convolution over a few tokens with SiLU, and optionally unit-norm heads."""

from oomph.ops.short_convolution.api import short_convolution, unit_vectors

__all__ = ["short_convolution", "unit_vectors"]
