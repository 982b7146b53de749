"""The naive form of report 001: one-hot vectors from a V x V identity, matrix products by broadcasting.

Legend: B batch, H heads, T and S tokens, E head size, V vocabulary.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.ops.softmax_attention import BlockPattern
from oomph_lab.systems.blocks import CausalAttention, LanguageModelOutput, Residual
from oomph_lab.systems.pythia.model import Pythia, PythiaConfig
from oomph_lab.systems.reports import ReportedRun

REPORT = ReportedRun("a100-80gb", "report", batch=8, tokens=512)
REPORT_VOCAB_SIZE = 50_304  # every word of the data
WIKITEXT_2_WORDS = 2_088_628  # of its training split


def one_hot(ids: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[..., size], through a size x size identity matrix: 10 GB for 50,304 words in fp32."""
    return torch.eye(size, dtype=dtype, device=ids.device)[ids]


class OneHotEmbedding(nn.Embedding):
    """An embedding as a product with one-hot vectors, which autograd saves."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return one_hot(input_ids, self.num_embeddings, self.weight.dtype) @ self.weight


def broadcast_matmul(left_BHTX: Tensor, right_BHXS: Tensor) -> Tensor:
    """left @ right [B, H, T, S], as the sum of an elementwise product [B, H, T, S, X].

    Both operands are first copied to that shape, because the report's elementwise kernels need contiguous
    arrays; autograd saves the two copies.
    """
    rows, columns = left_BHTX.unsqueeze(-2), right_BHXS.transpose(-2, -1).unsqueeze(-3)
    shape = (*left_BHTX.shape[:-1], right_BHXS.shape[-1], left_BHTX.shape[-1])
    return (rows.expand(shape).contiguous() * columns.expand(shape).contiguous()).sum(-1)


def broadcast_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, pattern: BlockPattern | None
) -> Tensor:
    """Eager attention with both matrix products by broadcasting: two tensors [B, H, T, T, E] per layer.

    A pattern is only a mask: the report's sparse attention computed all blocks.
    """
    tokens, keys = q.shape[-2], k.shape[-2]
    mask_TS = torch.ones(tokens, keys, dtype=torch.bool, device=q.device)
    if causal:
        mask_TS = mask_TS.tril(keys - tokens)
    if pattern is not None:
        mask_TS = mask_TS & _block_mask(pattern, keys, q.device)
    scores = broadcast_matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask_TS, float("-inf")).softmax(-1)
    return broadcast_matmul(weights, v)


def _block_mask(pattern: BlockPattern, tokens: int, device: torch.device) -> Tensor:
    total = -(-tokens // pattern.block)
    kept = [[key in pattern.key_blocks(query, total) for key in range(total)] for query in range(total)]
    blocks = torch.tensor(kept, device=device)
    number = torch.arange(tokens, device=device) // pattern.block
    return blocks[number[:, None], number]


class NaivePythia(Pythia):
    """The same parameters and outputs as Pythia, computed with the report's operations."""

    def __init__(self, config: PythiaConfig) -> None:
        super().__init__(config)
        self.embedding = OneHotEmbedding(config.vocab_size, config.hidden_size)
        self.reset_parameters()
        for layer in self.layers:
            attention = layer.attention
            assert isinstance(attention, Residual)
            assert isinstance(attention.inner, CausalAttention)
            attention.inner.attention_function = broadcast_attention

    def output(self, hidden_BTD: Tensor, labels: Tensor | None) -> LanguageModelOutput:
        logits = F.linear(hidden_BTD, self.head_weight)
        if labels is None:
            return LanguageModelOutput(logits=logits)
        logits_BTV, next_BT = logits[:, :-1], labels[:, 1:]
        counted_BT = next_BT != -100
        wanted = one_hot(next_BT.clamp(min=0), self.config.vocab_size, logits.dtype)
        losses_BT = logits_BTV.logsumexp(-1) - (logits_BTV * wanted).sum(-1)
        return LanguageModelOutput(loss=(losses_BT * counted_BT).sum() / counted_BT.sum())


class ResidentBatches(Pythia):
    """Pythia with all batches of the data set on the GPU, as the report's program had them before its fix."""

    def __init__(self, config: PythiaConfig) -> None:
        super().__init__(config)
        self.register_buffer(
            "batches",
            torch.zeros(WIKITEXT_2_WORDS // config.seq_len, config.seq_len, dtype=torch.long),
            persistent=False,
        )


def build(config: PythiaConfig, form: str = "naive", *, seq_len: int | None = None) -> Pythia:
    """Two causes that the report names, each by itself in a model without the others.

    form "all_words": the vocabulary of every word. "all_batches": the data set on the GPU.
    """
    if form == "all_words":
        return Pythia(replace(config, vocab_size=max(config.vocab_size, REPORT_VOCAB_SIZE)))
    return ResidentBatches(config) if form == "all_batches" else NaivePythia(config)
