"""Pythia-70M (report 001), with dense or block-sparse attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from oomph.nn import RotaryEmbedding
from oomph.systems.blocks import MLP, Block, CausalAttention, CausalDecoder, Residual

if TYPE_CHECKING:
    from oomph.systems.pythia.config import PythiaConfig


class Pythia(CausalDecoder):
    def __init__(self, config: PythiaConfig) -> None:
        c = config
        rotary = None
        if c.positions == "rotary":
            head = c.hidden_size // c.num_heads
            rotary = RotaryEmbedding(head, fraction=c.rotary_fraction, heads_first=False)
        super().__init__(
            c.vocab_size,
            c.hidden_size,
            [_layer(c, rotary) for _ in range(c.num_layers)],
            nn.LayerNorm(c.hidden_size, eps=c.norm_eps),
            tied=False,
            rotary=rotary,
            learned_positions=c.seq_len if c.positions == "learned" else None,
            dropout=c.dropout,
        )
        self.config = config


def _layer(c: PythiaConfig, rotary: RotaryEmbedding | None) -> Block:
    attention = CausalAttention(
        c.hidden_size,
        c.num_heads,
        rotary=rotary,
        bias=c.attention_bias,
        pattern=c.pattern,
        fused_projection=True,  # as in the published model; small layers are bound by kernel launches
    )
    mlp = MLP(c.hidden_size, c.intermediate_size, c.activation)
    return Block(
        Residual(nn.LayerNorm(c.hidden_size, eps=c.norm_eps), attention, c.dropout),
        Residual(nn.LayerNorm(c.hidden_size, eps=c.norm_eps), mlp, c.dropout),
        parallel=c.parallel_residual,
    )
