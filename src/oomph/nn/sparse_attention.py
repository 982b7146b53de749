"""Native sparse attention as a layer: projections, gates, a learned compression, around `oomph.ops` nsa."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.nn.arguments import positive
from oomph.nn.block_compression import BlockCompression
from oomph.nn.rotary import RotaryEmbedding
from oomph.nn.token_functions import head_norm
from oomph.ops import common
from oomph.ops.rotary_embedding import RotaryTable
from oomph.ops.sparse_attention import nsa
from oomph.ops.sparse_attention.problem import IMPLS, make_sizes


class NativeSparseAttention(nn.Module):
    """Causal attention to compressed, selected and nearby tokens, summed by gates that each token sets.

        q, k, v = W x, with QK-norm and rotary embedding if asked for
        gates = sigmoid(linear(x)), one of each branch per query head
        y = W_o nsa(q, k, v, gates)

    compression: "mlp" (a BlockCompression for keys and one for values) or "mean". It sees keys as the other
    branches do, after norm and rotary embedding, because all branches have one query.

    rotary: the model's own RotaryEmbedding, made with heads_first=False; the table it makes once a step is
    given to forward.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        block_size: int = 64,
        compress_block: int = 32,
        compress_stride: int = 16,
        top_n: int = 16,
        window: int = 512,
        compression: str = "mlp",
        rotary: RotaryEmbedding | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        bias: bool = False,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        # For the errors that wrong sizes raise, now and not at the first token.
        make_sizes(head_dim, block_size, compress_block, compress_stride, top_n, window, scale=None)
        common.check_one_of("impl", impl, IMPLS)
        common.check_one_of("compression", compression, ("mlp", "mean"))
        if num_heads % num_kv_heads:
            raise ArgumentError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
        _check_rotary(rotary, head_dim)
        self.hidden_size, self.head_dim = hidden_size, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.sizes: dict[str, Any] = {
            "block_size": block_size,
            "compress_block": compress_block,
            "compress_stride": compress_stride,
            "top_n": top_n,
            "window": window,
        }
        self.impl = impl
        # Not a child of this layer: there is one for the model.
        self._rotate: Callable[..., tuple[Tensor, Tensor]] | None = None if rotary is None else rotary.rotate
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, queries, bias=bias, **made)
        self.k_proj = nn.Linear(hidden_size, keys, bias=bias, **made)
        self.v_proj = nn.Linear(hidden_size, keys, bias=bias, **made)
        self.gate_proj = nn.Linear(hidden_size, 3 * num_heads, **made)
        self.o_proj = nn.Linear(queries, hidden_size, bias=bias, **made)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps, **made) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps, **made) if qk_norm else None
        learned = compression == "mlp"
        shape = (head_dim, compress_block, compress_stride)
        self.compress_keys = BlockCompression(*shape, **made) if learned else None
        self.compress_values = BlockCompression(*shape, **made) if learned else None

    def forward(self, x: Tensor, table: RotaryTable | None = None) -> Tensor:
        """x [B, T, hidden] -> [B, T, hidden]; table: `rotary(positions)`, where the layer has a rotary."""
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ArgumentError(f"x has shape {list(x.shape)}; valid: [B, T, {self.hidden_size}]")
        if table is None and self._rotate is not None:
            raise ArgumentError("table is None; the layer was made with rotary=: layer(x, rotary(positions))")
        if table is not None and self._rotate is None:
            raise ArgumentError("table was given, but the layer was made without rotary=")
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = head_norm(q, self.q_norm), head_norm(k, self.k_norm)
        if self._rotate is not None:
            q, k = self._rotate(q, k, table)
        gates = torch.sigmoid(self.gate_proj(x)).unflatten(-1, (3, self.num_heads)).unbind(-2)
        o = nsa(q, k, v, *gates, compress=self._compress(k, v), impl=self.impl, **self.sizes)
        return self.o_proj(o.flatten(-2))  # type: ignore[no-any-return]

    def _compress(self, k: Tensor, v: Tensor) -> Any:
        keys, values = self.compress_keys, self.compress_values
        if keys is None or values is None:
            return "mean"
        # They take the tokens, not the blocks that nsa would hand them, which overlap: fewer copies.
        return (lambda _: keys(k), lambda _: values(v))

    def extra_repr(self) -> str:
        shown = (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        )
        return f"{shown}, head_dim={self.head_dim}, " + ", ".join(f"{k}={v}" for k, v in self.sizes.items())


def _check_rotary(rotary: RotaryEmbedding | None, head_dim: int) -> None:
    if rotary is None:
        return
    if not isinstance(rotary, RotaryEmbedding):
        raise ArgumentError(
            f"rotary is a {type(rotary).__name__}; valid: an oomph.nn.RotaryEmbedding or None"
        )
    if rotary.heads_first or rotary.dim != head_dim:
        raise ArgumentError(
            f"rotary has dim={rotary.dim} and heads_first={rotary.heads_first}; valid: "
            f"RotaryEmbedding({head_dim}, heads_first=False)"
        )
