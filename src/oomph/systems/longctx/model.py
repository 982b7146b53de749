"""The long-context decoder of report 002: grouped-query attention, dense or NSA, one rotary table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from oomph.nn import GatedMLP, NativeSparseAttention, RotaryEmbedding
from oomph.ops.cross_entropy import compute_loss_chunked
from oomph.systems.blocks import Block, CausalAttention, CausalDecoder, Residual

if TYPE_CHECKING:
    from oomph.systems.longctx.config import LongContextConfig


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
