"""GINR, field report 004: images as functions of position, from a Mamba encoder and a SCENT-style decoder."""

from oomph_lab.systems.ginr.model import GINR, PRESETS, GINRConfig

__all__ = ["GINR", "PRESETS", "GINRConfig"]
