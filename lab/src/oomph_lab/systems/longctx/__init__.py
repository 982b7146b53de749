"""The long-context 4B decoder of field report 002."""

from oomph_lab.systems.longctx.model import PRESETS, LongContext, LongContextConfig

__all__ = ["PRESETS", "LongContext", "LongContextConfig"]
