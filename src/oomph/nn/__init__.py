"""Thin modules over oomph.ops."""

from oomph.nn.delta_attention import KimiDeltaAttention, KimiDeltaState
from oomph.nn.loss import LinearCrossEntropyLoss
from oomph.nn.mamba import BidirectionalMamba
from oomph.nn.mlp import GatedMLP, TiledMLP
from oomph.nn.modulated import ModulatedLinear
from oomph.nn.rotary import RotaryEmbedding
from oomph.nn.sparse_attention import NativeSparseAttention
from oomph.nn.spiking_kda import SpikingKDABlock, SpikingKDAState

__all__ = [
    "BidirectionalMamba",
    "GatedMLP",
    "KimiDeltaAttention",
    "KimiDeltaState",
    "LinearCrossEntropyLoss",
    "ModulatedLinear",
    "NativeSparseAttention",
    "RotaryEmbedding",
    "SpikingKDABlock",
    "SpikingKDAState",
    "TiledMLP",
]
