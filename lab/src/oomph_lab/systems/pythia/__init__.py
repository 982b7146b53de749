"""Pythia-70M with block-sparse attention, field report 001."""

from oomph_lab.systems.pythia.model import PRESETS, Pythia, PythiaConfig, create_pythia_70m

__all__ = ["PRESETS", "Pythia", "PythiaConfig", "create_pythia_70m"]
