"""Leaky integrate-and-fire gate over time, with a surrogate gradient."""

from oomph.ops.spiking.api import lif_gate

__all__ = ["lif_gate"]
