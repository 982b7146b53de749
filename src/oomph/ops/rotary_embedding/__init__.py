"""Rotary position embedding: tables that are exact at a million positions, and the rotation."""

from oomph.ops.rotary_embedding.api import rotary
from oomph.ops.rotary_embedding.table import RotaryTable, rotary_table

__all__ = ["RotaryTable", "rotary", "rotary_table"]
