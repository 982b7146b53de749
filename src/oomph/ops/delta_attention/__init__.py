"""Kimi delta attention: a decaying associative memory per head, with memory linear in the length."""

from oomph.ops.delta_attention.op import kda
from oomph.ops.delta_attention.scan import precompute_updates

__all__ = ["kda", "precompute_updates"]
