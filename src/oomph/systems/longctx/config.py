"""The configuration of the long-context decoder, and its sizes by name.

`4B` is the report's own shape; `0.6B`, `qwen3-4B` and `8B` are those of Qwen3; `tiny` is for tests.
"""

from dataclasses import dataclass, replace
from typing import Any

from oomph.systems.blocks import total_params
from oomph.systems.config_checks import checking, find_preset
from oomph.systems.longctx.model import LongContext

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
            check.integers(
                *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
                *("vocab_size", "nsa_block_size", "nsa_compress_block", "nsa_compress_stride", "nsa_top_n"),
                "nsa_window",
            )
            check.multiple("num_heads", "num_kv_heads")
            if check.valid("head_dim") and self.head_dim % 2:
                check.reject("head_dim", "rotary embedding needs an even number")
            check.booleans("tie_word_embeddings", "qk_norm")
            check.number("norm_eps", 0)
            check.number("rope_theta", 0)
            if check.valid("rope_theta") and self.rope_theta <= 1:
                check.reject("rope_theta", "give a number > 1, e.g. 10000")
            check.choice("attention", ATTENTIONS)

    @classmethod
    def of(cls, model_size: str, attention: str = "dense") -> "LongContextConfig":
        """By the report's names: `of("4B", "nsa")`."""
        return replace(find_preset(PRESETS, model_size, "longctx"), attention=attention)

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
