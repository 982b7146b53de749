"""Native sparse attention: compressed, selected and sliding-window keys, in memory linear in the length."""

from oomph.ops.sparse_attention.api import nsa

__all__ = ["nsa"]
