"""The long-context decoder of report 002: grouped-query attention, dense or NSA, one rotary table.

Its sizes by name: `4B` is the report's own shape; `0.6B`, `qwen3-4B` and `8B` are Qwen3's.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from oomph.errors import UserError
from oomph.nn import GatedMLP, NativeSparseAttention, RotaryEmbedding
from oomph.ops.cross_entropy import compute_loss_chunked
from oomph_lab.systems.blocks import Block, CausalAttention, CausalDecoder, Residual, total_params
from oomph_lab.systems.config_checks import STRICT, check_multiple, valid_if


@dataclass(frozen=True, config=STRICT)
class LongContextConfig:
    """attention: "dense" or "nsa"; the nsa_ fields are those of oomph.nn.NativeSparseAttention."""

    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: Annotated[
        PositiveInt, valid_if(lambda size: size % 2 == 0, "rotary embedding needs an even number")
    ]
    intermediate_size: PositiveInt
    vocab_size: PositiveInt = 151_936
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    norm_eps: NonNegativeFloat = 1e-6
    rope_theta: Annotated[
        NonNegativeFloat, valid_if(lambda theta: theta > 1, "give a number > 1, e.g. 10000")
    ] = 1e4
    attention: Literal["dense", "nsa"] = "dense"
    nsa_block_size: PositiveInt = 64
    nsa_compress_block: PositiveInt = 32
    nsa_compress_stride: PositiveInt = 16
    nsa_top_n: PositiveInt = 16
    nsa_window: PositiveInt = 512

    def __post_init__(self) -> None:
        check_multiple(self, "num_heads", of="num_kv_heads")

    @classmethod
    def of(cls, model_size: str, attention: Literal["dense", "nsa"] = "dense") -> "LongContextConfig":
        """By the report's names: `of("4B", "nsa")`."""
        if model_size not in PRESETS:
            raise UserError(f"longctx has no size {model_size!r}; choose from {', '.join(PRESETS)}")
        return replace(PRESETS[model_size], attention=attention)

    def build(self) -> "LongContext":
        return LongContext(self)

    def get_total_params(self) -> int:
        return total_params(self.build)


_QWEN3: dict[str, Any] = {"qk_norm": True, "rope_theta": 1e6}
# hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size
PRESETS: dict[str, LongContextConfig] = {
    "tiny": LongContextConfig(
        *(64, 2, 4, 2, 16, 128),
        vocab_size=256,
        nsa_block_size=16,
        nsa_compress_block=8,
        nsa_compress_stride=4,
        nsa_top_n=4,
        nsa_window=16,
    ),
    "0.6B": LongContextConfig(1024, 28, 16, 8, 128, 3072, tie_word_embeddings=True, **_QWEN3),
    "4B": LongContextConfig(2560, 36, 32, 8, 80, 9216),
    "qwen3-4B": LongContextConfig(2560, 36, 32, 8, 128, 9728, tie_word_embeddings=True, **_QWEN3),
    "8B": LongContextConfig(4096, 36, 32, 8, 128, 12288, **_QWEN3),
}


class LongContext(CausalDecoder):
    def __init__(self, config: LongContextConfig) -> None:
        rotary = RotaryEmbedding(config.head_dim, config.rope_theta, heads_first=False)
        super().__init__(
            config.vocab_size,
            config.hidden_size,
            [_layer(config, rotary) for _ in range(config.num_layers)],
            nn.RMSNorm(config.hidden_size, eps=config.norm_eps),
            tied=config.tie_word_embeddings,
            rotary=rotary,
        )
        self.config = config

    def _compute_loss_chunked(self, hidden_states: Tensor, labels: Tensor, chunk_size: int = 4096) -> Tensor:
        """The report's function: next-token loss of hidden_states [B, T, D] in chunks of chunk_size tokens.

        Nothing of a chunk is saved for backward. `forward` does not need it: its loss never holds logits.
        """
        head = self.embedding if self.lm_head is None else self.lm_head
        return compute_loss_chunked(hidden_states, labels, head, chunk_size)


def _layer(config: LongContextConfig, rotary: RotaryEmbedding) -> Block:
    c = config
    shape = (c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim)
    if c.attention == "dense":
        inner: nn.Module = CausalAttention(*shape, rotary=rotary, qk_norm=c.qk_norm, norm_eps=c.norm_eps)
    else:
        inner = NativeSparseAttention(
            *shape,
            block_size=c.nsa_block_size,
            compress_block=c.nsa_compress_block,
            compress_stride=c.nsa_compress_stride,
            top_n=c.nsa_top_n,
            window=c.nsa_window,
            rotary=rotary,
            qk_norm=c.qk_norm,
            norm_eps=c.norm_eps,
        )
    attention = Residual(nn.RMSNorm(c.hidden_size, eps=c.norm_eps), inner)
    mlp = Residual(nn.RMSNorm(c.hidden_size, eps=c.norm_eps), GatedMLP(c.hidden_size, c.intermediate_size))
    return Block(attention, mlp)
