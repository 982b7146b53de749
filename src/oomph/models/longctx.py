"""Report 002's long-context decoder: grouped-query attention, dense or native sparse, one rotary table.

The sizes are the report's own 4B, Qwen3's (0.6B, qwen3-4B, 8B) and a `tiny` one for tests.
"""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from oomph.models.blocks import Block, CausalAttention, CausalDecoder, Residual, total_params
from oomph.models.checks import checking, preset
from oomph.nn import GatedMLP, NativeSparseAttention, RotaryEmbedding
from oomph.ops.cross_entropy import compute_loss_chunked

ATTENTIONS = ("dense", "nsa")


@dataclass(frozen=True)
class LongContextConfig:
    """attention: "dense" or "nsa"; the nsa_ fields are those of oomph.nn.NativeSparseAttention."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = 151_936
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 1e4
    attention: str = "dense"
    nsa_block_size: int = 64
    nsa_compress_block: int = 32
    nsa_compress_stride: int = 16
    nsa_top_n: int = 16
    nsa_window: int = 512

    def __post_init__(self) -> None:
        with checking(self) as check:
            check.whole_numbers(
                *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
                *("vocab_size", "nsa_block_size", "nsa_compress_block", "nsa_compress_stride", "nsa_top_n"),
                "nsa_window",
            )
            check.multiple("num_heads", "num_kv_heads")
            if check.fine("head_dim") and self.head_dim % 2:
                check.refuse("head_dim", "rotary turns pairs: give an even number")
            check.booleans("tie_word_embeddings", "qk_norm")
            check.number_from("norm_eps", 0)
            check.number_from("rope_theta", 0)
            if check.fine("rope_theta") and self.rope_theta <= 1:
                check.refuse("rope_theta", "give a number > 1, e.g. 10000")
            check.one_of("attention", ATTENTIONS)

    @classmethod
    def of(cls, model_size: str, attention: str = "dense") -> "LongContextConfig":
        """By the report's names: `of("4B", "nsa")`."""
        return replace(preset(PRESETS, model_size, "longctx"), attention=attention)

    def build(self) -> "LongContext":
        return LongContext(self)

    def get_total_params(self) -> int:
        return total_params(self.build)


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
        """The report's function: next-token loss of hidden_states [B, T, D] in blocks of chunk_size tokens.

        Nothing of a block is kept for backward. forward needs no such choice: its loss never holds logits.
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


PRESETS: dict[str, LongContextConfig] = {
    "tiny": LongContextConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=256,
        nsa_block_size=16,
        nsa_compress_block=8,
        nsa_compress_stride=4,
        nsa_top_n=4,
        nsa_window=16,
    ),
    "0.6B": LongContextConfig(
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
        qk_norm=True,
        rope_theta=1e6,
    ),
    "4B": LongContextConfig(
        hidden_size=2560,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=80,
        intermediate_size=9216,
    ),
    "qwen3-4B": LongContextConfig(
        hidden_size=2560,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=9728,
        tie_word_embeddings=True,
        qk_norm=True,
        rope_theta=1e6,
    ),
    "8B": LongContextConfig(
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
        qk_norm=True,
        rope_theta=1e6,
    ),
}
