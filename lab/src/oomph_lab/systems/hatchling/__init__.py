"""Hatchling, field report 000: a decoder with spiking Kimi delta attention."""

from oomph_lab.systems.hatchling.model import PRESETS, Hatchling, HatchlingConfig, KDABlock

__all__ = ["PRESETS", "Hatchling", "HatchlingConfig", "KDABlock"]
