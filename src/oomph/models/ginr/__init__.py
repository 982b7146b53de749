"""GINR, field report 004: images as functions of position, from a Mamba encoder and a SCENT-style decoder."""

from oomph.models.ginr.blocks import Attention, FeedForward, MixingBlock, PreNorm, ResidualBlock
from oomph.models.ginr.config import PRESETS, GINRConfig
from oomph.models.ginr.decoder import Decoder, FourierFeatures
from oomph.models.ginr.model import GINR, GINROutput

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
