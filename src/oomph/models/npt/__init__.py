"""NPT, the neuro-plastic transformer of field report 003: attention changes the MLP's weights, per token."""

from oomph.models.npt.component import NPComponent
from oomph.models.npt.config import PRESETS, NPTConfig, NPTOptimization
from oomph.models.npt.layer import NPTLayer
from oomph.models.npt.model import NPTModel, NPTOutput, convert

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
