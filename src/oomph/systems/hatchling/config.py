"""The configuration of Hatchling and its presets: the report's two, and `tiny` for tests."""

from dataclasses import dataclass

from oomph.systems.blocks import total_params
from oomph.systems.config_checks import checking
from oomph.systems.hatchling.model import Hatchling

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
