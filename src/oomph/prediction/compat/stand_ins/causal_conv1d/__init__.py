"""A stand-in for causal-conv1d."""

from oomph.prediction.compat.stand_ins import VERSIONS

from .causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update

__version__ = VERSIONS["causal_conv1d"]
__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]
