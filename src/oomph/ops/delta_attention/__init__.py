"""Kimi Delta Attention: linear attention with a decay per channel, memory linear in the length."""

from oomph.ops.delta_attention.api import kda, precompute_updates

__all__ = ["kda", "precompute_updates"]
