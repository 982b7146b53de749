"""Hatchling (report 000): Kimi delta attention with a spiking gate; every 4th layer is NoPE attention.

Its presets are the report's two, and `tiny` for tests.

Legend: B batch, T tokens, D hidden size.
"""

from typing import Annotated, Any, Literal

import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from oomph.nn import GatedMLP, KimiDeltaAttention, SpikingKDABlock
from oomph.ops.delta_attention.api import MODES
from oomph_lab.systems.blocks import (
    MLP,
    Block,
    CausalAttention,
    CausalDecoder,
    LanguageModelOutput,
    Residual,
    total_params,
)
from oomph_lab.systems.config_checks import STRICT, Probability, check_multiple, one_of, valid_if


@dataclass(frozen=True, config=STRICT)
class HatchlingConfig:
    """gate: "spiking" (the report's) or "kimi" (the published KDA gate, without spikes and token drop).
    lam, theta, surrogate: decay, threshold and surrogate-gradient slope of the spiking neurons.
    token_drop: probability in training, on the layers token_drop_layers = (first, last), inclusive, from 0.
    kda_mode: "scan" is the implementation that ran out of memory.
    kda_memory_chunk_size: tokens between the states saved for backward; None: chosen by the op.
    predictive_weight: of the auxiliary loss that predicts the next hidden state.
    """

    vocab_size: PositiveInt = 32_000
    d_model: PositiveInt = 512
    n_layers: PositiveInt = 16
    n_heads: PositiveInt = 8
    n_kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 64
    d_ff: PositiveInt = 2048
    gate: Literal["spiking", "kimi"] = "spiking"
    gate_rank: PositiveInt = 256
    lam: NonNegativeFloat = 0.92
    theta: NonNegativeFloat = 0.35
    surrogate: NonNegativeFloat = 9.0
    token_drop: Probability = 0.25
    token_drop_layers: Annotated[
        tuple[int, int],
        valid_if(
            lambda ends: 0 <= ends[0] <= ends[1], "give the first and the last layer, 0 <= first <= last"
        ),
    ] = (4, 14)
    attention_every: PositiveInt = 4
    kda_mode: Annotated[str, one_of(MODES)] = "auto"
    kda_memory_chunk_size: PositiveInt | None = None
    context_length: PositiveInt = 1024
    predictive_weight: NonNegativeFloat = 0.1
    norm_eps: NonNegativeFloat = 1e-6

    def __post_init__(self) -> None:
        check_multiple(self, "n_heads", of="n_kv_heads")

    def drops_tokens(self, layer: int) -> bool:
        return self.token_drop_layers[0] <= layer <= self.token_drop_layers[1]

    def is_attention(self, layer: int) -> bool:
        """Whether the layer is softmax attention (3, 7, 11, ...); the others are delta attention."""
        return (layer + 1) % self.attention_every == 0

    def build(self) -> "Hatchling":
        return Hatchling(self)

    def get_total_params(self) -> int:
        return total_params(self.build)


PRESETS: dict[str, HatchlingConfig] = {
    "hn_xs": HatchlingConfig(),
    "hn_s": HatchlingConfig(
        d_model=768,
        n_layers=32,
        n_heads=12,
        n_kv_heads=3,
        d_ff=3072,
        token_drop_layers=(4, 30),
        context_length=4096,
    ),
    "tiny": HatchlingConfig(
        vocab_size=64,
        d_model=32,
        n_layers=4,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        d_ff=64,
        gate_rank=16,
        token_drop_layers=(1, 2),
        kda_memory_chunk_size=16,
        context_length=64,
    ),
}


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
