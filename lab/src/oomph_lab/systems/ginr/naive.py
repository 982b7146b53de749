"""The naive form of report 004: eager self-attention over all positions in nine layers, for every image.

Parameters and outputs equal those of the model. Queries, which are the same for all images, are repeated for
each, every attention materialises its N x N matrix, and feed-forwards save their wide features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.ops.softmax_attention.arguments import LocalityBias
from oomph_lab.systems.ginr.model import GINR, Attention, Decoder, FeedForward, GINRConfig, LayerClasses


class EagerAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: LocalityBias | None) -> Tensor:
        scores_BHNK = torch.einsum("bhne,bhke->bhnk", q, k) * self.dim_head**-0.5
        if bias is not None:
            apart_NK = bias.query_points.unsqueeze(2) - bias.key_points.unsqueeze(1)
            scores_BHNK = scores_BHNK - bias.strength * apart_NK.square().sum(dim=0)
        return torch.einsum("bhnk,bhke->bhne", scores_BHNK.softmax(dim=-1), v)


class EagerFeedForward(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))
        return out


class RepeatingDecoder(Decoder):
    """Repeats for every image what depends on positions alone."""

    def features(self, t_N2: Tensor, batch: int) -> list[Tensor]:
        return [gamma.repeat(batch, 1, 1) for gamma in super().features(t_N2, batch)]


class NaiveGINR(GINR):
    decoder_class = RepeatingDecoder
    layer_classes = LayerClasses(EagerAttention, EagerFeedForward)


def build(config: GINRConfig, form: str = "naive", *, seq_len: int | None = None) -> NaiveGINR:
    return NaiveGINR(config)
