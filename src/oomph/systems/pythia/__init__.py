"""Pythia-70M with block-sparse attention, field report 001."""

from oomph.systems.pythia.config import PRESETS, PythiaConfig, create_pythia_70m
from oomph.systems.pythia.model import Pythia

__all__ = ["PRESETS", "Pythia", "PythiaConfig", "create_pythia_70m"]
