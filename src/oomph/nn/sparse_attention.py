"""Native sparse attention as a layer: projections, gates and a learned compression around `oomph.ops.nsa`.

B batch, T tokens, H heads, D head size, L tokens of a compressed block, S of a stride, N blocks, U strides.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.nn.common import check_tokens, head_norm
from oomph.nn.rotary import RotaryEmbedding
from oomph.ops.common import check_one_of, check_whole
from oomph.ops.rotary_embedding import RotaryTable
from oomph.ops.sparse_attention import nsa
from oomph.ops.sparse_attention.arguments import NSAConfig


class BlockCompression(nn.Module):
    """Compresses each of the overlapping blocks to one token: W2 silu(W1 (block + position) + b1) + b2.

    A block [L, D] of one head is one vector of L * D. All heads share the weights; `position` [L, D] starts
    at zero. Saved for backward: one copy of the tokens. A product with whole blocks, which overlap, would
    need L / S copies; so W1 is applied to strides, and a block's product is the sum of those of its strides.
    The position's term is the same for every block and is added once.
    """

    def __init__(
        self,
        head_dim: int,
        block: int,
        stride: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(head_dim=head_dim, compress_block=block, compress_stride=stride)
        if block % stride:
            raise ArgumentError(f"compress_block={block} is not a multiple of compress_stride={stride}")
        self.block, self.stride = block, stride
        self.position = nn.Parameter(torch.empty(block, head_dim, device=device, dtype=dtype))
        self.first = nn.Linear(block * head_dim, head_dim, device=device, dtype=dtype)
        self.second = nn.Linear(head_dim, head_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Of this module itself; its children have their own, as in torch."""
        nn.init.zeros_(self.position)

    def forward(self, x_BTHD: Tensor) -> Tensor:
        """[B, N, H, D]: the blocks that begin at a multiple of the stride and lie in x entirely."""
        batch, tokens, heads, head_dim = x_BTHD.shape
        parts = self.block // self.stride
        blocks = 0 if tokens < self.block else (tokens - self.block) // self.stride + 1
        strides = blocks + parts - 1 if blocks else 0
        used = x_BTHD[:, : strides * self.stride].reshape(batch, strides, self.stride, heads, head_dim)
        strides_BUHX = used.transpose(2, 3).reshape(batch, strides, heads, self.stride * head_dim)
        total = self.first(self.position.flatten())
        for part, weight in enumerate(self.first.weight.chunk(parts, dim=1)):
            total = total + F.linear(strides_BUHX[:, part : part + blocks], weight)
        return self.second(F.silu(total))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"block={self.block}, stride={self.stride}"


class NativeSparseAttention(nn.Module):
    """Causal attention to compressed, selected and sliding-window tokens, summed with gates per token.

        q, k, v = W x, with QK-norm and rotary embedding if asked for
        gates = sigmoid(linear(x)), one per branch and query head
        y = W_o nsa(q, k, v, gates)

    compression: "mlp" (a BlockCompression for keys and one for values) or "mean". It takes keys after norm
    and rotary embedding, as the other branches do, because all branches share one query.

    rotary: the model's RotaryEmbedding, created with heads_first=False; pass the table that it computes once
    per step to forward.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(
            hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        check_one_of("compression", compression, ("mlp", "mean"))
        if num_heads % num_kv_heads:
            raise ArgumentError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
        if rotary is not None and not isinstance(rotary, RotaryEmbedding):
            raise ArgumentError(
                f"rotary is a {type(rotary).__name__}; valid: an oomph.nn.RotaryEmbedding or None"
            )
        if rotary is not None and (rotary.heads_first or rotary.dim != head_dim):
            raise ArgumentError(
                f"rotary has dim={rotary.dim} and heads_first={rotary.heads_first}; valid: "
                f"RotaryEmbedding({head_dim}, heads_first=False)"
            )
        self.hidden_size, self.head_dim = hidden_size, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.sizes: dict[str, Any] = {
            "block_size": block_size,
            "compress_block": compress_block,
            "compress_stride": compress_stride,
            "top_n": top_n,
            "window": window,
        }
        NSAConfig.create(head_dim, **self.sizes)  # raises for bad sizes
        # Not a child of this layer: the model has one for all layers.
        self._rotate: Callable[..., tuple[Tensor, Tensor]] | None = None if rotary is None else rotary.rotate
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, queries, bias=False, **factory)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False, **factory)
        self.v_proj = nn.Linear(hidden_size, keys, bias=False, **factory)
        self.gate_proj = nn.Linear(hidden_size, 3 * num_heads, **factory)
        self.o_proj = nn.Linear(queries, hidden_size, bias=False, **factory)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps, **factory) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps, **factory) if qk_norm else None
        shape = (head_dim, compress_block, compress_stride)
        self.compress_keys = BlockCompression(*shape, **factory) if compression == "mlp" else None
        self.compress_values = BlockCompression(*shape, **factory) if compression == "mlp" else None

    def forward(self, x: Tensor, table: RotaryTable | None = None) -> Tensor:
        """x [B, T, hidden] -> [B, T, hidden]; table: `rotary(positions)`, where the layer has a rotary."""
        check_tokens(self.hidden_size, x=x)
        if table is None and self._rotate is not None:
            raise ArgumentError("table is None; the layer was made with rotary=: layer(x, rotary(positions))")
        if table is not None and self._rotate is None:
            raise ArgumentError("table was given, but the layer was made without rotary=")
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in projections)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = head_norm(q, self.q_norm), head_norm(k, self.k_norm)
        if self._rotate is not None:
            q, k = self._rotate(q, k, table)
        gates = torch.sigmoid(self.gate_proj(x)).unflatten(-1, (3, self.num_heads)).unbind(-2)
        o = nsa(q, k, v, *gates, compress=self._compress(k, v), **self.sizes)
        return self.o_proj(o.flatten(-2))  # type: ignore[no-any-return]

    def _compress(self, k: Tensor, v: Tensor) -> Any:
        keys, values = self.compress_keys, self.compress_values
        if keys is None or values is None:
            return "mean"
        # The compressors take the tokens instead of the overlapping blocks that nsa passes: fewer copies.
        return (lambda _: keys(k), lambda _: values(v))

    def extra_repr(self) -> str:
        shown = (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        )
        return f"{shown}, head_dim={self.head_dim}, " + ", ".join(f"{k}={v}" for k, v in self.sizes.items())
