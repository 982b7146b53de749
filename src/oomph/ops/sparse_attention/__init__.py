"""Native sparse attention: compressed, selected and nearby keys, gated, with memory linear in the length."""

from oomph.ops.sparse_attention.op import nsa

__all__ = ["nsa"]
