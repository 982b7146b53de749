"""A depthwise causal convolution over a few tokens, with SiLU and, if asked for, heads of length one."""

from oomph.ops.short_convolution.op import short_convolution

__all__ = ["short_convolution"]
