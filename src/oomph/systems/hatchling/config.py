"""The configuration of Hatchling and its presets: the report's two, and `tiny` for tests."""

from typing import Annotated, Literal

from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from oomph.ops.delta_attention.api import MODES
from oomph.systems.blocks import total_params
from oomph.systems.config_checks import STRICT, Probability, check_multiple, one_of, valid_if
from oomph.systems.hatchling.model import Hatchling


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
