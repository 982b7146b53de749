"""Pythia-70M in two forms: `report` (report 001's) and `pythia` (published); dense or block-sparse."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from oomph.models.blocks import (
    ACTIVATIONS,
    MLP,
    Block,
    CausalAttention,
    CausalDecoder,
    Residual,
    total_params,
)
from oomph.models.checks import checking
from oomph.nn import RotaryEmbedding
from oomph.ops.softmax_attention import BlockPattern

# The report's patterns: blocks to either side, and every how many-th block of the keys.
PATTERNS = {
    "local": {"window": 1},
    "global": {"stride": 2},
    "mixed": {"window": 1, "stride": 4},
}


@dataclass(frozen=True)
class PythiaConfig:
    """positions: "learned" (seq_len of them) or "rotary" (of `rotary_fraction` of each head; any length).

    sparse: a pattern of blocks ("local", "global", "mixed"), or None. Where two blocks hold the sequence,
    "local" is dense attention: at block_size 64 it begins to leave blocks out at 129 tokens.
    dropout is that of the embeddings and of what attention and MLP add, not of attention's weights.
    """

    vocab_size: int = 10_000
    seq_len: int = 128
    hidden_size: int = 512
    num_layers: int = 6
    num_heads: int = 8
    intermediate_size: int = 2048
    positions: str = "learned"
    rotary_fraction: float = 0.25
    parallel_residual: bool = False
    activation: str = "relu"
    attention_bias: bool = False
    dropout: float = 0.1
    norm_eps: float = 1e-5
    sparse: str | None = None
    block_size: int = 64

    def __post_init__(self) -> None:
        with checking(self) as check:
            check.whole_numbers(
                *("vocab_size", "seq_len", "hidden_size", "num_layers", "num_heads", "intermediate_size"),
                "block_size",
            )
            check.multiple("hidden_size", "num_heads")
            check.booleans("parallel_residual", "attention_bias")
            check.one_of("positions", ("learned", "rotary"))
            check.one_of("activation", tuple(ACTIVATIONS))
            check.one_of("sparse", (None, *PATTERNS))
            check.number_from("dropout", 0, below=1)
            check.number_from("norm_eps", 0)
            check.number_from("rotary_fraction", 0)
            if self.positions == "rotary" and check.fine("hidden_size", "num_heads", "rotary_fraction"):
                turned = int(self.hidden_size // self.num_heads * self.rotary_fraction + 1e-6)
                if not 0 < self.rotary_fraction <= 1 or turned < 2 or turned % 2:
                    check.refuse("rotary_fraction", "give a fraction of the head that is an even number >= 2")

    @property
    def pattern(self) -> BlockPattern | None:
        if self.sparse is None:
            return None
        return BlockPattern(self.sparse, self.block_size, **PATTERNS[self.sparse])

    def build(self) -> "Pythia":
        return Pythia(self)

    def get_total_params(self) -> int:
        """The parameters of the built model, counted."""
        return total_params(self.build)


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
        fused_projection=True,  # as the published model has it; the host has little to launch and little time
    )
    mlp = MLP(c.hidden_size, c.intermediate_size, c.activation)
    return Block(
        Residual(nn.LayerNorm(c.hidden_size, eps=c.norm_eps), attention, c.dropout),
        Residual(nn.LayerNorm(c.hidden_size, eps=c.norm_eps), mlp, c.dropout),
        parallel=c.parallel_residual,
    )


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
    vocab_size: int = 10_000,
    use_sparse_attention: bool = False,
    device: torch.device | str | None = None,
) -> tuple[Pythia, PythiaConfig]:
    """Report 001's function: the `report` preset, its sparse attention being the `local` pattern.

    With 10,000 words it has 29.2 million parameters; 70 million are those of 50,304 words.
    """
    config = replace(
        PRESETS["report"], vocab_size=vocab_size, sparse="local" if use_sparse_attention else None
    )
    with torch.device("cpu" if device is None else device):
        return config.build(), config
