"""Report 000's model: Kimi delta attention with a spiking gate, every 4th layer attention without positions.

Legend: B batch, T tokens, D hidden size.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from oomph.models.blocks import (
    MLP,
    Block,
    CausalAttention,
    CausalDecoder,
    LanguageModelOutput,
    Residual,
    total_params,
)
from oomph.models.checks import checking
from oomph.nn import GatedMLP, KimiDeltaAttention, SpikingKDABlock

GATES = ("spiking", "kimi")
MODES = ("auto", "chunked", "sequential", "scan")


@dataclass(frozen=True)
class HatchlingConfig:
    """gate: "spiking" (the report's) or "kimi" (the published layer's, which has no neurons and drops none).

    lam, theta, surrogate: of the neurons. token_drop: in training, on layers `token_drop_layers`, first to
    last, both included, counted from 0. kda_memory_chunk_size: tokens between the states that are kept for
    backward (64 in the report); None: the op's own choice, which starts fewer kernels. kda_mode "scan" is the
    form that ran out of memory.
    """

    vocab_size: int = 32_000
    d_model: int = 512
    n_layers: int = 16
    n_heads: int = 8
    n_kv_heads: int = 2
    head_dim: int = 64
    d_ff: int = 2048
    gate: str = "spiking"
    gate_rank: int = 256
    lam: float = 0.92
    theta: float = 0.35
    surrogate: float = 9.0
    token_drop: float = 0.25
    token_drop_layers: tuple[int, int] = (4, 14)
    attention_every: int = 4
    kda_mode: str = "auto"
    kda_memory_chunk_size: int | None = None
    context_length: int = 1024
    predictive_weight: float = 0.1
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        with checking(self) as check:
            check.whole_numbers(
                *("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"),
                *("gate_rank", "attention_every", "context_length"),
            )
            check.multiple("n_heads", "n_kv_heads")
            check.one_of("gate", GATES)
            check.one_of("kda_mode", MODES)
            if self.kda_memory_chunk_size is not None:
                check.whole_numbers("kda_memory_chunk_size")
            check.number_from("token_drop", 0, below=1)
            for field in ("lam", "theta", "surrogate", "predictive_weight", "norm_eps"):
                check.number_from(field, 0)
            first, last = self.token_drop_layers
            if not 0 <= first <= last:
                check.refuse("token_drop_layers", "give the first and the last layer, 0 <= first <= last")

    def drops_tokens(self, layer: int) -> bool:
        return self.token_drop_layers[0] <= layer <= self.token_drop_layers[1]

    def is_attention(self, layer: int) -> bool:
        """Layers 3, 7, 11, ... of softmax attention; the others are delta attention."""
        return (layer + 1) % self.attention_every == 0

    def build(self) -> "Hatchling":
        return Hatchling(self)

    def get_total_params(self) -> int:
        return total_params(self.build)


class KDABlock(nn.Module):
    """x + delta attention(x), with the report's spiking gate or the published one.

    memory_chunk_size is the report's argument: kept for backward are the inputs and one state per so many
    tokens. (The report cut `transitions` into chunks of this size, and joined them again.)
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        gate: str = "spiking",
        gate_rank: int = 256,
        lam: float = 0.92,
        theta: float = 0.35,
        surrogate: float = 9.0,
        token_drop: float = 0.0,
        norm_eps: float = 1e-6,
        mode: str = "auto",
        memory_chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        # A loop over tokens has no chunks; a configuration may change the mode and leave the size.
        size = None if mode == "sequential" else memory_chunk_size
        self.norm: nn.Module | None = None
        if gate == "spiking":
            self.inner: nn.Module = SpikingKDABlock(
                hidden_size,
                num_heads,
                head_dim,
                gate_rank=gate_rank,
                decay=lam,
                threshold=theta,
                surrogate_beta=surrogate,
                token_drop=token_drop,
                norm_eps=norm_eps,
                mode=mode,
                memory_chunk_size=size,
            )
        else:
            self.norm = nn.RMSNorm(hidden_size, eps=norm_eps)
            self.inner = KimiDeltaAttention(
                hidden_size,
                num_heads,
                head_dim,
                gate_rank=gate_rank,
                norm_eps=norm_eps,
                mode=mode,
                memory_chunk_size=size,
            )

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.norm is None:  # it normalises and adds by itself
            return self.inner(x_BTD)[0]  # type: ignore[no-any-return]
        return x_BTD + self.inner(self.norm(x_BTD))[0]  # type: ignore[no-any-return]


class Hatchling(CausalDecoder):
    """`.loss` is cross-entropy, in training plus predictive_weight times `.auxiliary_loss`."""

    def __init__(self, config: HatchlingConfig) -> None:
        super().__init__(
            config.vocab_size,
            config.d_model,
            [_layer(config, number) for number in range(config.n_layers)],
            nn.RMSNorm(config.d_model, eps=config.norm_eps),
            tied=True,
        )
        self.config = config
        # Not there where its loss does not count: its parameters would never get a gradient.
        learns_ahead = config.predictive_weight > 0
        self.predictor = MLP(config.d_model, config.d_model, "gelu") if learns_ahead else None

    def output(self, hidden_BTD: Tensor, labels: Tensor | None) -> LanguageModelOutput:
        out = super().output(hidden_BTD, labels)
        learns = self.training and self.predictor is not None and hidden_BTD.shape[1] > 1
        if out.loss is None or self.predictor is None or not learns:
            return out
        ahead = F.mse_loss(self.predictor(hidden_BTD[:, :-1]), hidden_BTD[:, 1:].detach())
        return LanguageModelOutput(
            loss=out.loss + self.config.predictive_weight * ahead, auxiliary_loss=ahead
        )


def _layer(c: HatchlingConfig, number: int) -> Block:
    attention: nn.Module
    if c.is_attention(number):
        inner = CausalAttention(c.d_model, c.n_heads, c.n_kv_heads, c.head_dim)
        attention = Residual(nn.RMSNorm(c.d_model, eps=c.norm_eps), inner)
    else:
        attention = KDABlock(
            c.d_model,
            c.n_heads,
            c.head_dim,
            gate=c.gate,
            gate_rank=c.gate_rank,
            lam=c.lam,
            theta=c.theta,
            surrogate=c.surrogate,
            token_drop=c.token_drop if c.drops_tokens(number) else 0.0,
            norm_eps=c.norm_eps,
            mode=c.kda_mode,
            memory_chunk_size=c.kda_memory_chunk_size,
        )
    return Block(attention, Residual(nn.RMSNorm(c.d_model, eps=c.norm_eps), GatedMLP(c.d_model, c.d_ff)))


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
