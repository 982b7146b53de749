"""Hatchling (report 000): Kimi delta attention with a spiking gate; every 4th layer is NoPE attention.

Legend: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from oomph.nn import GatedMLP, KimiDeltaAttention, SpikingKDABlock
from oomph.systems.blocks import MLP, Block, CausalAttention, CausalDecoder, LanguageModelOutput, Residual

if TYPE_CHECKING:
    from oomph.systems.hatchling.config import HatchlingConfig


class KDABlock(nn.Module):
    """x + delta attention(x), with the report's spiking gate or the published one.

    memory_chunk_size: the report's argument. Saved for backward are the inputs and one state per
    memory_chunk_size tokens. (The report computed `transitions` in chunks of this size.)
    """

    def __init__(
        self, config: HatchlingConfig, *, token_drop: float = 0.0, memory_chunk_size: int | None = None
    ) -> None:
        super().__init__()
        c = config
        shape = (c.d_model, c.n_heads, c.head_dim)
        # The sequential mode has no chunks; a config may change the mode and leave the size.
        size = None if c.kda_mode == "sequential" else memory_chunk_size
        shared: dict[str, Any] = {
            "gate_rank": c.gate_rank,
            "norm_eps": c.norm_eps,
            "mode": c.kda_mode,
            "memory_chunk_size": size,
        }
        self.norm: nn.Module | None = None
        self.inner: nn.Module
        if c.gate == "spiking":
            self.inner = SpikingKDABlock(
                *shape,
                decay=c.lam,
                threshold=c.theta,
                surrogate_beta=c.surrogate,
                token_drop=token_drop,
                **shared,
            )
        else:
            self.norm = nn.RMSNorm(c.d_model, eps=c.norm_eps)
            self.inner = KimiDeltaAttention(*shape, **shared)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.norm is None:  # SpikingKDABlock has its own norm and residual connection
            return self.inner(x_BTD)[0]  # type: ignore[no-any-return]
        return x_BTD + self.inner(self.norm(x_BTD))[0]  # type: ignore[no-any-return]


class Hatchling(CausalDecoder):
    """`.loss` is the cross-entropy, in training plus predictive_weight * `.auxiliary_loss`."""

    def __init__(self, config: HatchlingConfig) -> None:
        super().__init__(
            config.vocab_size,
            config.d_model,
            [_layer(config, number) for number in range(config.n_layers)],
            nn.RMSNorm(config.d_model, eps=config.norm_eps),
            tied=True,
        )
        self.config = config
        # With weight 0 its parameters would never get a gradient.
        has_predictor = config.predictive_weight > 0
        self.predictor = MLP(config.d_model, config.d_model, "gelu") if has_predictor else None

    def output(self, hidden_BTD: Tensor, labels: Tensor | None) -> LanguageModelOutput:
        out = super().output(hidden_BTD, labels)
        if out.loss is None or self.predictor is None or not self.training or hidden_BTD.shape[1] == 1:
            return out
        predictive = F.mse_loss(self.predictor(hidden_BTD[:, :-1]), hidden_BTD[:, 1:].detach())
        return LanguageModelOutput(
            loss=out.loss + self.config.predictive_weight * predictive, auxiliary_loss=predictive
        )


def _layer(c: HatchlingConfig, number: int) -> Block:
    attention: nn.Module
    if c.is_attention(number):
        inner = CausalAttention(c.d_model, c.n_heads, c.n_kv_heads, c.head_dim)
        attention = Residual(nn.RMSNorm(c.d_model, eps=c.norm_eps), inner)
    else:
        token_drop = c.token_drop if c.drops_tokens(number) else 0.0
        attention = KDABlock(c, token_drop=token_drop, memory_chunk_size=c.kda_memory_chunk_size)
    return Block(attention, Residual(nn.RMSNorm(c.d_model, eps=c.norm_eps), GatedMLP(c.d_model, c.d_ff)))
