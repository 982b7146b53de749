"""NPT, the neuro-plastic transformer of field report 003: attention changes the MLP's weights, per token."""

from oomph_lab.systems.npt.model import PRESETS, NPComponent, NPTConfig, NPTModel, NPTOptimization, convert

__all__ = ["PRESETS", "NPComponent", "NPTConfig", "NPTModel", "NPTOptimization", "convert"]
