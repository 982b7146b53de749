"""The naive form of report 002: full logits copied and cast before the loss, a rotary cache per layer.

Legend: B batch, T tokens, H heads, E head size, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oomph_lab.systems.blocks import LanguageModelOutput
from oomph_lab.systems.longctx.model import LongContext, LongContextConfig
from oomph_lab.systems.reports import ReportedRun

REPORT = ReportedRun("rtx-pro-6000", "4B", batch=1, tokens=131_072)  # the card with 94.97 GiB
CHUNK = 4096  # tokens per chunk of the report's loss


class RopeCache(nn.Module):
    """Cosines and sines [tokens, E] of every position, one copy per layer, in the dtype of the model.

    bug: how the cache is rebuilt for a longer sequence.
        None: correctly.
        "wrong_device": with positions on the CPU, which fails when the model is on another device.
        "rounded_positions": the report's fix, with positions in the dtype of inv_freq. In bfloat16, 131,072
        positions have 1,409 distinct values, wrong from 257 on.
    """

    inv_freq: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, theta: float, tokens: int, bug: str | None = None) -> None:
        super().__init__()
        self.dim, self.theta, self.bug = dim, theta, bug
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)
        self._fill(torch.arange(tokens, dtype=torch.float32), self.inv_freq)

    def forward(self, tokens: int) -> tuple[Tensor, Tensor]:
        if tokens > self.cos.shape[0]:
            self._rebuild(tokens)
        return self.cos[:tokens], self.sin[:tokens]

    def rotate(self, q_BTHE: Tensor, k_BTGE: Tensor, table: Any = None) -> tuple[Tensor, Tensor]:
        """Replaces RotaryEmbedding.rotate; `table` is ignored."""
        cos_TE, sin_TE = self(q_BTHE.shape[1])
        return _rotated(q_BTHE, cos_TE, sin_TE), _rotated(k_BTGE, cos_TE, sin_TE)

    def _rebuild(self, tokens: int) -> None:
        device, dtype = self.inv_freq.device, self.inv_freq.dtype
        if self.bug == "wrong_device":
            self._fill(torch.arange(tokens, dtype=dtype, device="cpu"), self.inv_freq)
        elif self.bug == "rounded_positions":
            self._fill(torch.arange(tokens, device=device).to(dtype), self.inv_freq)
        else:
            positions = torch.arange(tokens, dtype=torch.float32, device=device)
            self._fill(positions, self._frequencies().to(device))

    def _frequencies(self) -> Tensor:
        return self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)

    def _fill(self, positions_T: Tensor, frequencies: Tensor) -> None:
        half = positions_T[:, None] * frequencies
        angles_TE = torch.cat((half, half), -1)
        dtype = self.inv_freq.dtype
        self.register_buffer("cos", angles_TE.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles_TE.sin().to(dtype), persistent=False)


def _rotated(x_BTHE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    first, second = x_BTHE.chunk(2, -1)
    return x_BTHE * cos_TE[:, None] + torch.cat((-second, first), -1) * sin_TE[:, None]


class NaiveLongContext(LongContext):
    """The same parameters and, without a rope_bug, the same outputs as LongContext."""

    def __init__(self, config: LongContextConfig, context_length: int, rope_bug: str | None = None) -> None:
        """context_length: of the caches; a longer sequence rebuilds them."""
        super().__init__(config)
        if config.attention == "dense":  # NSA layers need the table as well
            self.rotary = None
        for layer in self.layers:
            attention: Any = layer.attention
            cache = RopeCache(config.head_dim, config.rope_theta, context_length, rope_bug)
            attention.inner.rotary_cache = cache
            attention.inner._rotate = cache.rotate

    def output(self, hidden_BTD: Tensor, labels: Tensor | None) -> LanguageModelOutput:
        logits_BTV = F.linear(hidden_BTD, self.head_weight)
        if labels is None:
            return LanguageModelOutput(logits=logits_BTV)
        return LanguageModelOutput(loss=next_token_loss(logits_BTV, labels))


class ChunkedLoss(NaiveLongContext):
    """The report's fix: above "10 GB" of logits, the loss is computed in chunks of CHUNK tokens."""

    def output(self, hidden_BTD: Tensor, labels: Tensor | None) -> LanguageModelOutput:
        if labels is None or not should_chunk(hidden_BTD.shape[1], self.config.vocab_size):
            return super().output(hidden_BTD, labels)
        return LanguageModelOutput(loss=chunked_loss(self, hidden_BTD, labels))


_ROPE_FORMS = {"rope_on_cpu": "wrong_device", "rope_rounded": "rounded_positions"}


def build(config: LongContextConfig, form: str = "naive", *, seq_len: int | None = None) -> NaiveLongContext:
    """seq_len: the length of the rotary caches; without it they are built in the first forward.

    form "chunked_loss": the report's fix of the loss. "rope_on_cpu": the caches are rebuilt, with the
    report's bug. "rope_rounded": rebuilt with its fix.
    """
    if form in _ROPE_FORMS:
        return NaiveLongContext(config, 1, _ROPE_FORMS[form])
    return (ChunkedLoss if form == "chunked_loss" else NaiveLongContext)(config, seq_len or 0)


def next_token_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The report's loss before its fix: a contiguous copy of all but the last logits, then fp32."""
    return _cross_entropy(logits_BTV[..., :-1, :].contiguous(), labels_BT[..., 1:].contiguous(), "mean")


def chunked_loss(
    model: LongContext,
    hidden_BTD: Tensor,
    labels_BT: Tensor,
    chunk_size: int = CHUNK,
    recompute: bool = False,
) -> Tensor:
    """The report's fix: the sum over chunks of tokens. Autograd saves the log-softmax of every chunk.

    recompute: checkpoint each chunk, which the report left out.
    """
    hidden_BTD, labels_BT = hidden_BTD[:, :-1], labels_BT[:, 1:]

    def of_chunk(hidden: Tensor, labels: Tensor) -> Tensor:
        return _cross_entropy(F.linear(hidden, model.head_weight), labels, "sum")

    total = hidden_BTD.new_zeros((), dtype=_at_least_float32(hidden_BTD))
    for start in range(0, hidden_BTD.shape[1], chunk_size):
        chunk = hidden_BTD[:, start : start + chunk_size], labels_BT[:, start : start + chunk_size]
        total = total + (checkpoint(of_chunk, *chunk, use_reentrant=False) if recompute else of_chunk(*chunk))
    return total / (labels_BT != -100).sum()


def should_chunk(seq_len: int, vocab_size: int) -> bool:
    """The report's rule: above "10 GB" of bf16 logits. `model.py` needs none: it never holds all logits."""
    return seq_len * vocab_size * 2 > 10 * 2**30


def _cross_entropy(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    wide = logits.flatten(0, -2).to(_at_least_float32(logits))
    return F.cross_entropy(wide, labels.flatten(), ignore_index=-100, reduction=reduction)


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
