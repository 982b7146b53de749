"""A leaky integrate-and-fire gate over time, with a surrogate gradient."""

from oomph.ops.spiking.op import lif_gate

__all__ = ["lif_gate"]
