"""Shared by the language models: attention, MLP, pre-norm residual block, decoder with its loss.

Legend: B batch, T tokens, D hidden size, H query heads, G key/value heads, E head size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.nn.common import head_norm
from oomph.nn.rotary import RotaryEmbedding
from oomph.ops.cross_entropy import linear_cross_entropy
from oomph.ops.rotary_embedding import RotaryTable
from oomph.ops.softmax_attention import BlockPattern, attention
from oomph.torch_internals import register_dataclass

# Of token and position embeddings. Small, so that a tied head starts near a uniform distribution.
_EMBEDDING_STD = 0.02
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


@dataclass(frozen=True, eq=False)
class LanguageModelOutput:
    """`loss` if labels were given, otherwise `logits` [B, T, V]; never both.

    auxiliary_loss: the part of `loss` that is not cross-entropy, before weighting.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    auxiliary_loss: Tensor | None = None


register_dataclass(LanguageModelOutput)


class CausalAttention(nn.Module):
    """W_o attention(W_q x, W_k x, W_v x): causal, grouped-query, memory linear in T.

    rotary: the RotaryEmbedding of the model, with heads_first=False; forward takes its table. None: no
        position encoding (NoPE).
    pattern: a BlockPattern, for block-sparse attention.
    fused_projection: one matrix [W_q; W_k; W_v], so fewer kernel launches. For small models only: queries,
        keys and values are views of one tensor, which stays alive as a whole and has one gradient. Without
        qk_norm.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rotary: RotaryEmbedding | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        bias: bool = False,
        pattern: BlockPattern | None = None,
        fused_projection: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.pattern = pattern
        self.attention_function: Callable[..., Tensor] = attention
        # A bound method: the RotaryEmbedding itself is a submodule of the model, not of this layer.
        self._rotate: Callable[..., Any] | None = None
        if rotary is not None:
            self._rotate = rotary.rotate_first if fused_projection else rotary.rotate
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj: nn.Linear | None = None
        if fused_projection:
            self.qkv_proj = nn.Linear(hidden_size, queries + 2 * keys, bias=bias)
        else:
            self.q_proj = nn.Linear(hidden_size, queries, bias=bias)
            self.k_proj = nn.Linear(hidden_size, keys, bias=bias)
            self.v_proj = nn.Linear(hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else None

    def forward(self, x_BTD: Tensor, table: RotaryTable | None = None) -> Tensor:
        project = self._project if self.qkv_proj is None else self._project_fused
        o_BHTE = self.attention_function(*project(x_BTD, table), causal=True, pattern=self.pattern)
        return self.o_proj(o_BHTE.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def _project(self, x_BTD: Tensor, table: RotaryTable | None) -> tuple[Tensor, ...]:
        """Rotated queries [B, H, T, E] and keys [B, G, T, E], and values [B, G, T, E]."""
        q_BTHE = self.q_proj(x_BTD).unflatten(-1, (self.num_heads, self.head_dim))
        k_BTGE = self.k_proj(x_BTD).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v_BTGE = self.v_proj(x_BTD).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTGE = head_norm(q_BTHE, self.q_norm), head_norm(k_BTGE, self.k_norm)
        if self._rotate is not None:
            q_BTHE, k_BTGE = self._rotate(q_BTHE, k_BTGE, table)
        return tuple(x.transpose(1, 2) for x in (q_BTHE, k_BTGE, v_BTGE))

    def _project_fused(self, x_BTD: Tensor, table: RotaryTable | None) -> tuple[Tensor, ...]:
        assert self.qkv_proj is not None
        heads, groups = self.num_heads, self.num_kv_heads
        all_BTNE = self.qkv_proj(x_BTD).unflatten(-1, (heads + 2 * groups, self.head_dim))
        if self._rotate is not None:
            # This copies the values as well: a view of them would keep the whole projection alive.
            all_BTNE = self._rotate(all_BTNE, heads + groups, table)
        return all_BTNE.transpose(1, 2).split((heads, groups, groups), 1)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(act(up x)). oomph.nn.GatedMLP is the gated one."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x)))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """x + dropout(inner(norm(x), ...))."""

    def __init__(self, norm: nn.Module, inner: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.inner, self.dropout = norm, inner, dropout

    def forward(self, x: Tensor, *arguments: Any) -> Tensor:
        return x + self.branch(x, *arguments)

    def branch(self, x: Tensor, *arguments: Any) -> Tensor:
        return F.dropout(self.inner(self.norm(x), *arguments), self.dropout, self.training)


class Block(nn.Module):
    """One layer: mlp(attention(x)); parallel: x + attention(x) + mlp(x), as in GPT-J and Pythia.

    attention: a Residual, or (not if parallel) a module with its own residual connection.
    """

    def __init__(self, attention: nn.Module, mlp: Residual, *, parallel: bool = False) -> None:
        super().__init__()
        self.attention, self.mlp, self.parallel = attention, mlp, parallel

    def forward(self, x_BTD: Tensor, table: RotaryTable | None = None) -> Tensor:
        rotary = () if table is None else (table,)
        if isinstance(self.attention, Residual) and self.parallel:
            return x_BTD + self.attention.branch(x_BTD, *rotary) + self.mlp.branch(x_BTD)
        return self.mlp(self.attention(x_BTD, *rotary))  # type: ignore[no-any-return]


class CausalDecoder(nn.Module):
    """Token embedding, blocks, norm, head. `model(input_ids, labels)` returns the next-token loss.

    One rotary table per forward is shared by all blocks.
    tied: the head uses the embedding's weight. There is no lm_head module then, so nothing can untie them.
    learned_positions: the number of learned position embeddings, or None.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        layers: Sequence[Block],
        norm: nn.Module,
        *,
        tied: bool,
        rotary: RotaryEmbedding | None = None,
        learned_positions: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding: nn.Module = nn.Embedding(vocab_size, hidden_size)
        self.positions = None if learned_positions is None else nn.Embedding(learned_positions, hidden_size)
        self.rotary = rotary
        self.dropout = dropout
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.lm_head = None if tied else nn.Linear(hidden_size, vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the embeddings; the other modules initialise themselves."""
        for embedding in (self.embedding, self.positions):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=_EMBEDDING_STD)  # type: ignore[arg-type]

    @property
    def head_weight(self) -> Tensor:
        """[V, D]"""
        head = self.embedding if self.lm_head is None else self.lm_head
        return head.weight  # type: ignore[return-value]

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, positions: Tensor | None = None
    ) -> LanguageModelOutput:
        """input_ids [B, T]; labels [B, T], not shifted, -100 is ignored; positions [T] or [B, T].

        With labels, the result has `.loss` (position t predicts label t + 1) and logits are never
        materialised; without labels it has `.logits`.
        """
        return self.output(self.hidden_states(input_ids, positions), labels)

    def hidden_states(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """[B, T, D], after the final norm."""
        if input_ids.dim() != 2:
            raise ArgumentError(f"input_ids has shape {list(input_ids.shape)}; valid: [B, T]")
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x_BTD = self.embedding(input_ids)
        if self.positions is not None:
            if input_ids.shape[1] > self.positions.num_embeddings:
                raise ArgumentError(
                    f"input_ids has {input_ids.shape[1]} tokens; the model has "
                    f"{self.positions.num_embeddings} learned positions"
                )
            x_BTD = x_BTD + self.positions(positions)
        x_BTD = F.dropout(x_BTD, self.dropout, self.training)
        table = None
        if self.rotary is not None:
            double = x_BTD.dtype == torch.float64
            table = self.rotary(positions, dtype=torch.float64 if double else torch.float32)
        for layer in self.layers:
            x_BTD = layer(x_BTD, table)
        return self.norm(x_BTD)  # type: ignore[no-any-return]

    def output(self, hidden_BTD: Tensor, labels: Tensor | None) -> LanguageModelOutput:
        """Apply the head, or with labels the loss. hidden_BTD: after the final norm."""
        if labels is None:
            weight: Any = self.head_weight
            # Over ranks that share a vocabulary, the loss needs the shard alone.
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            return LanguageModelOutput(logits=F.linear(hidden_BTD, weight))
        loss = linear_cross_entropy(hidden_BTD, self.head_weight, labels, shift=True)
        assert isinstance(loss, Tensor)
        return LanguageModelOutput(loss=loss)


def total_params(build: Callable[[], nn.Module]) -> int:
    """The number of parameters of `build()`, counted on the meta device; shared ones count once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())
