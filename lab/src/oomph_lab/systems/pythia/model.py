"""Pythia-70M (report 001), with dense or block-sparse attention: its configuration, the presets `report` (the
report's model) and `pythia` (the published one), and the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from oomph.nn import RotaryEmbedding
from oomph.ops.softmax_attention import BlockPattern
from oomph_lab.systems.blocks import (
    ACTIVATIONS,
    MLP,
    Block,
    CausalAttention,
    CausalDecoder,
    Residual,
    total_params,
)
from oomph_lab.systems.config_checks import STRICT, Probability, check_multiple, invalid_if, one_of

# window: neighbouring blocks on either side; stride: every stride-th block of keys.
PATTERNS = {"local": {"window": 1}, "global": {"stride": 2}, "mixed": {"window": 1, "stride": 4}}


@dataclass(frozen=True, config=STRICT)
class PythiaConfig:
    """positions: "learned" (seq_len of them) or "rotary" (on `rotary_fraction` of each head; any length).
    sparse: a block pattern ("local", "global", "mixed"), or None. "local" equals dense attention up to two
        blocks: with block_size 64 it skips blocks from 129 tokens on.
    dropout: on the embeddings and the residual branches, not on attention weights.
    """

    vocab_size: PositiveInt = 10_000
    seq_len: PositiveInt = 128
    hidden_size: PositiveInt = 512
    num_layers: PositiveInt = 6
    num_heads: PositiveInt = 8
    intermediate_size: PositiveInt = 2048
    positions: Literal["learned", "rotary"] = "learned"
    rotary_fraction: NonNegativeFloat = 0.25
    parallel_residual: bool = False
    activation: Annotated[str, one_of(ACTIVATIONS)] = "relu"
    attention_bias: bool = False
    dropout: Probability = 0.1
    norm_eps: NonNegativeFloat = 1e-5
    sparse: Annotated[str, one_of(PATTERNS)] | None = None
    block_size: PositiveInt = 64

    def __post_init__(self) -> None:
        check_multiple(self, "hidden_size", of="num_heads")
        if self.positions == "rotary":
            turned = int(self.hidden_size // self.num_heads * self.rotary_fraction + 1e-6)
            wrong = not 0 < self.rotary_fraction <= 1 or turned < 2 or turned % 2 == 1
            invalid_if(wrong, "rotary_fraction", "give a fraction of the head that is an even number >= 2")

    @property
    def pattern(self) -> BlockPattern | None:
        if self.sparse is None:
            return None
        return BlockPattern(self.sparse, self.block_size, **PATTERNS[self.sparse])

    def build(self) -> Pythia:
        return Pythia(self)

    def get_total_params(self) -> int:
        """The number of parameters of the built model."""
        return total_params(self.build)


PRESETS: dict[str, PythiaConfig] = {
    "report": PythiaConfig(),
    "pythia": PythiaConfig(
        vocab_size=50_304,
        seq_len=2048,
        positions="rotary",
        parallel_residual=True,
        activation="gelu",
        attention_bias=True,
        dropout=0.0,
    ),
}


def create_pythia_70m(
    vocab_size: int = 10_000, use_sparse_attention: bool = False, device: torch.device | str | None = None
) -> tuple[Pythia, PythiaConfig]:
    """The report's function: the `report` preset; its sparse attention is the `local` pattern.

    The model has 29.2 million parameters with 10,000 words, and 70 million with 50,304.
    """
    config = replace(
        PRESETS["report"], vocab_size=vocab_size, sparse="local" if use_sparse_attention else None
    )
    with torch.device("cpu" if device is None else device):
        return config.build(), config


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
