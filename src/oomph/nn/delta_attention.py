"""Kimi Delta Attention as its authors define the layer (arXiv 2510.26692), around `oomph.ops` kda.

Legend: B batch, T tokens, H heads, D the size of a head's queries and keys, V that of its values, N packed
sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.nn.arguments import positive, positive_if_given
from oomph.nn.short_convolution import Packing, ShortConvolution
from oomph.nn.step_sizes import reset_step_bias
from oomph.nn.token_functions import gated_head_norm, wide
from oomph.ops import common
from oomph.ops.delta_attention import kda
from oomph.ops.delta_attention.api import IMPLS, MODES
from oomph.ops.tokenwise import tokenwise_checkpoint

# A new layer forgets at rates whose time constants are spread over this range of step sizes.
_STEP_RANGE = (0.001, 0.1)
_RATE_RANGE = (1.0, 16.0)


@dataclass(frozen=True, eq=False)
class KimiDeltaState:
    """What a layer carries from token to token: a few tokens for the convolutions, and the memory.

    conv_q, conv_k, conv_v [B, K - 1, ...]; memory [B, H, D, V] in float32. Of packed sequences, N for B.
    """

    conv_q: Tensor
    conv_k: Tensor
    conv_v: Tensor
    memory: Tensor

    def detach(self) -> "KimiDeltaState":
        """The same numbers without their history: for training on one stretch of a text after another."""
        return KimiDeltaState(
            self.conv_q.detach(), self.conv_k.detach(), self.conv_v.detach(), self.memory.detach()
        )


class KimiDeltaAttention(nn.Module):
    """Linear attention with a decay per channel and delta-rule writes; memory O(1) per generated token.

        q, k, v = silu(conv(W x)), q and k scaled to length 1 per head
        log alpha = -exp(A_log) * softplus(f(x) + dt_bias), f of low rank      beta = sigmoid(w x)
        y = W_o (RMSNorm(kda(q, k, v, log alpha, beta)) * sigmoid(g(x))), g of low rank

    Names and shapes of the parameters are those of the published layer. `y, state = layer(x)`; giving the
    state to the next call continues the sequences, by one token or many.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        value_head_dim: int | None = None,
        gate_rank: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        mode: str = "auto",
        memory_chunk_size: int | None = None,
        memory_budget: str | int | None = None,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """value_head_dim: default head_dim. gate_rank, of f and g: default value_head_dim."""
        super().__init__()
        values = head_dim if value_head_dim is None else value_head_dim
        rank = values if gate_rank is None else gate_rank
        positive(
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            value_head_dim=values,
            gate_rank=rank,
            conv_size=conv_size,
        )
        positive_if_given(memory_chunk_size=memory_chunk_size)
        common.parse_memory_budget(memory_budget)
        common.check_one_of("mode", mode, MODES)
        common.check_one_of("impl", impl, IMPLS)
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_dim, self.value_head_dim = head_dim, values
        self.conv_size, self.norm_eps = conv_size, norm_eps
        self.mode, self.impl = mode, impl
        self.memory_chunk_size, self.memory_budget = memory_chunk_size, memory_budget
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        keys, width = num_heads * head_dim, num_heads * values
        self.q_proj = nn.Linear(hidden_size, keys, bias=False, **made)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False, **made)
        self.v_proj = nn.Linear(hidden_size, width, bias=False, **made)
        self.q_conv1d = ShortConvolution(keys, conv_size, unit_size=head_dim, **made)
        self.k_conv1d = ShortConvolution(keys, conv_size, unit_size=head_dim, **made)
        self.v_conv1d = ShortConvolution(width, conv_size, **made)
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, rank, bias=False, **made), nn.Linear(rank, keys, bias=False, **made)
        )
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False, **made)
        self.A_log = nn.Parameter(torch.empty(num_heads, **made))
        self.dt_bias = nn.Parameter(torch.empty(keys, **made))
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, rank, bias=False, **made), nn.Linear(rank, width, bias=True, **made)
        )
        self.o_norm = nn.RMSNorm(values, eps=norm_eps, **made)
        self.o_proj = nn.Linear(width, hidden_size, bias=False, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Those of this module itself; its children have their own, as torch's modules do."""
        self.reset_gate()

    @torch.no_grad()
    def reset_gate(self) -> None:
        """First values of the decay: rates in 1..16, and softplus(dt_bias) spread in log over 0.001..0.1."""
        self.A_log.uniform_(*_RATE_RANGE).log_()
        reset_step_bias(self.dt_bias, *_STEP_RANGE)

    def forward(
        self,
        x: Tensor,
        state: KimiDeltaState | None = None,
        *,
        cu_seqlens: Tensor | Sequence[int] | None = None,
    ) -> tuple[Tensor, KimiDeltaState]:
        """x [B, T, hidden] -> y [B, T, hidden], and the state after the last token.

        cu_seqlens [N + 1]: the ends of N sequences packed one after another into B = 1, from 0 to T; nothing
        passes between them, and states are those of the N sequences.
        """
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ArgumentError(f"x has shape {list(x.shape)}; valid: [B, T, {self.hidden_size}]")
        packing = None if cu_seqlens is None else Packing.of(cu_seqlens, x, self.conv_size)
        earlier = (None, None, None) if state is None else (state.conv_q, state.conv_k, state.conv_v)
        q, conv_q = self.q_conv1d(self.q_proj(x), earlier[0], packing)
        k, conv_k = self.k_conv1d(self.k_proj(x), earlier[1], packing)
        v, conv_v = self.v_conv1d(self.v_proj(x), earlier[2], packing)
        o_BTHV, memory = kda(
            self._heads(q),
            self._heads(k),
            self._heads(v),
            self._log_decay(x),
            torch.sigmoid(wide(self.b_proj(x))),
            initial_state=None if state is None else state.memory,
            mode=self.mode,
            memory_chunk_size=self.memory_chunk_size,
            memory_budget=self.memory_budget,
            cu_seqlens=cu_seqlens,
            impl=self.impl,
        )
        gate_BTHV = self._heads(self.g_proj(x))
        o_BTHV = tokenwise_checkpoint(self._gated_norm, (o_BTHV, gate_BTHV), (self.o_norm.weight,))
        return self.o_proj(o_BTHV.flatten(-2)), KimiDeltaState(conv_q, conv_k, conv_v, memory)

    def _log_decay(self, x: Tensor) -> Tensor:
        f_BTHD = self._heads(self.f_proj(x))
        return tokenwise_checkpoint(official_log_decay, (f_BTHD,), (self.A_log, self.dt_bias))

    def _gated_norm(self, o_BTHV: Tensor, gate_BTHV: Tensor, weight: Tensor) -> Tensor:
        return gated_head_norm(o_BTHV, gate_BTHV, weight, self.norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))

    def extra_repr(self) -> str:
        shown = f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}"
        shown += f", value_head_dim={self.value_head_dim}" if self.value_head_dim != self.head_dim else ""
        return f"{shown}, mode={self.mode!r}"


def official_log_decay(f_BTHD: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """-exp(A_log) * softplus(f + dt_bias) in float32: A_log per head, dt_bias [H * D] per channel."""
    heads, size = f_BTHD.shape[-2:]
    step = F.softplus(wide(f_BTHD) + wide(dt_bias).view(heads, size))
    return -wide(A_log).exp().view(heads, 1) * step
