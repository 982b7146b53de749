"""Hatchling, field report 000: a decoder with spiking Kimi delta attention."""

from oomph.systems.hatchling.config import PRESETS, HatchlingConfig
from oomph.systems.hatchling.model import Hatchling, KDABlock

__all__ = ["PRESETS", "Hatchling", "HatchlingConfig", "KDABlock"]
