"""NPT, the neuro-plastic transformer of field report 003: attention changes the MLP's weights, per token."""

from oomph.systems.npt.config import PRESETS, NPTConfig, NPTOptimization
from oomph.systems.npt.model import NPComponent, NPTLayer, NPTModel, NPTOutput, convert

__all__ = [
    "PRESETS",
    "NPComponent",
    "NPTConfig",
    "NPTLayer",
    "NPTModel",
    "NPTOptimization",
    "NPTOutput",
    "convert",
]
