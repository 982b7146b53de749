"""The configuration of the long-context decoder, and its sizes by name.

`4B` is the report's own shape; `0.6B`, `qwen3-4B` and `8B` are those of Qwen3; `tiny` is for tests.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from oomph.systems.blocks import total_params
from oomph.systems.config_checks import STRICT, check_multiple, find_preset, valid_if
from oomph.systems.longctx.model import LongContext


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
