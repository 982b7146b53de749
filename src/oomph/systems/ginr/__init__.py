"""GINR, field report 004: images as functions of position, from a Mamba encoder and a SCENT-style decoder."""

from oomph.systems.ginr.config import PRESETS, GINRConfig
from oomph.systems.ginr.model import (
    GINR,
    Attention,
    Decoder,
    FeedForward,
    FourierFeatures,
    GINROutput,
    MixingBlock,
    PreNorm,
    ResidualBlock,
)

__all__ = [
    "GINR",
    "PRESETS",
    "Attention",
    "Decoder",
    "FeedForward",
    "FourierFeatures",
    "GINRConfig",
    "GINROutput",
    "MixingBlock",
    "PreNorm",
    "ResidualBlock",
]
