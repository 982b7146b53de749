"""The long-context 4B decoder of field report 002."""

from oomph.systems.longctx.config import PRESETS, LongContextConfig
from oomph.systems.longctx.model import LongContext

__all__ = ["PRESETS", "LongContext", "LongContextConfig"]
