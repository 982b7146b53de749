"""The configuration of Hatchling and its presets: the report's two, and `tiny` for tests."""

from dataclasses import dataclass

from oomph.systems.blocks import total_params
from oomph.systems.config_checks import checking
from oomph.systems.hatchling.model import Hatchling

GATES = ("spiking", "kimi")
MODES = ("auto", "chunked", "sequential", "scan")


@dataclass(frozen=True)
class HatchlingConfig:
    """gate: "spiking" (the report's) or "kimi" (the published KDA gate, without spikes and token drop).
    lam, theta, surrogate: decay, threshold and surrogate-gradient slope of the spiking neurons.
    token_drop: probability in training, on the layers token_drop_layers = (first, last), inclusive, from 0.
    kda_mode: "scan" is the implementation that ran out of memory.
    kda_memory_chunk_size: tokens between the states saved for backward; None: chosen by the op.
    predictive_weight: of the auxiliary loss that predicts the next hidden state.
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
            check.integers(
                *("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"),
                *("gate_rank", "attention_every", "context_length"),
            )
            check.multiple("n_heads", "n_kv_heads")
            check.choice("gate", GATES)
            check.choice("kda_mode", MODES)
            if self.kda_memory_chunk_size is not None:
                check.integers("kda_memory_chunk_size")
            check.number("token_drop", 0, below=1)
            for field in ("lam", "theta", "surrogate", "predictive_weight", "norm_eps"):
                check.number(field, 0)
            first, last = self.token_drop_layers
            if not 0 <= first <= last:
                check.reject("token_drop_layers", "give the first and the last layer, 0 <= first <= last")

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
