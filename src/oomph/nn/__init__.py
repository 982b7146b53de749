"""Thin modules over oomph.ops."""

from typing import TYPE_CHECKING

from oomph import _attach

if TYPE_CHECKING:
    from oomph.nn.delta_attention import (
        KimiDeltaAttention as KimiDeltaAttention,
        KimiDeltaState as KimiDeltaState,
    )
    from oomph.nn.loss import LinearCrossEntropyLoss as LinearCrossEntropyLoss
    from oomph.nn.mamba import BidirectionalMamba as BidirectionalMamba
    from oomph.nn.mlp import GatedMLP as GatedMLP, TiledMLP as TiledMLP
    from oomph.nn.modulated import ModulatedLinear as ModulatedLinear
    from oomph.nn.rotary import RotaryEmbedding as RotaryEmbedding
    from oomph.nn.sparse_attention import NativeSparseAttention as NativeSparseAttention
    from oomph.nn.spiking_kda import SpikingKDABlock as SpikingKDABlock, SpikingKDAState as SpikingKDAState


__getattr__, __dir__, __all__ = _attach(
    __name__,
    {
        "delta_attention": ("KimiDeltaAttention", "KimiDeltaState"),
        "loss": ("LinearCrossEntropyLoss",),
        "mamba": ("BidirectionalMamba",),
        "mlp": ("GatedMLP", "TiledMLP"),
        "modulated": ("ModulatedLinear",),
        "rotary": ("RotaryEmbedding",),
        "sparse_attention": ("NativeSparseAttention",),
        "spiking_kda": ("SpikingKDABlock", "SpikingKDAState"),
    },
)
