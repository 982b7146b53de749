"""Kimi Delta Attention as its authors define the layer (arXiv 2510.26692), and its short convolution.

Legend: B batch, T tokens, C channels, K taps, H heads, D head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.nn.common import RecurrentState, check_tokens, reset_step_bias, wide
from oomph.ops.common import check_shape, check_whole
from oomph.ops.delta_attention import kda
from oomph.ops.short_convolution import short_convolution
from oomph.ops.tokenwise import tokenwise_checkpoint

_TAPS = 4  # of the short convolutions


class ShortConvolution(nn.Module):
    """silu(conv(x)), row t from rows t - K + 1 .. t. The weight [C, 1, K] is that of a depthwise nn.Conv1d.

    With `unit_size`, groups of so many channels are then scaled to length 1. Saved for backward: the input.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        *,
        unit_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(channels=channels, kernel_size=kernel_size)
        self.channels, self.kernel_size, self.unit_size = channels, kernel_size, unit_size
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -(self.kernel_size**-0.5), self.kernel_size**-0.5)  # as nn.Conv1d

    def forward(self, x_BTC: Tensor, state_BKC: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, T, C], the K - 1 tokens before it (default zeros) -> the result, the last K - 1 tokens."""
        before = self.kernel_size - 1
        valid = x_BTC.shape[0], before, self.channels
        check_shape(valid, " (batch, tokens before x, channels)", state=state_BKC)
        if state_BKC is None:
            joined = F.pad(x_BTC, (0, 0, before, 0))
        else:
            joined = torch.cat([state_BKC.to(x_BTC.dtype), x_BTC], dim=1)
        # A copy, because a view of a few rows would keep all of them alive.
        last = joined[:, joined.shape[1] - before :].clone()
        return short_convolution(joined, self.weight, unit_size=self.unit_size), last

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}"


@dataclass(frozen=True, eq=False)
class KimiDeltaState(RecurrentState):
    """The state of a layer after some tokens: the last tokens of the convolutions, and the memory.

    conv_q, conv_k, conv_v [B, K - 1, ...]; memory [B, H, D, D] in float32.
    """

    conv_q: Tensor
    conv_k: Tensor
    conv_v: Tensor
    memory: Tensor


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
        gate_rank: int | None = None,
        norm_eps: float = 1e-5,
        mode: str = "auto",
        memory_chunk_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """gate_rank, of f and g: default head_dim. mode and memory_chunk_size: those of kda."""
        super().__init__()
        rank = head_dim if gate_rank is None else gate_rank
        check_whole(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim, gate_rank=rank)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.norm_eps, self.mode, self.memory_chunk_size = norm_eps, mode, memory_chunk_size
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        width = num_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=False, **made)
        self.k_proj = nn.Linear(hidden_size, width, bias=False, **made)
        self.v_proj = nn.Linear(hidden_size, width, bias=False, **made)
        self.q_conv1d = ShortConvolution(width, _TAPS, unit_size=head_dim, **made)
        self.k_conv1d = ShortConvolution(width, _TAPS, unit_size=head_dim, **made)
        self.v_conv1d = ShortConvolution(width, _TAPS, **made)
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, rank, bias=False, **made), nn.Linear(rank, width, bias=False, **made)
        )
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False, **made)
        self.A_log = nn.Parameter(torch.empty(num_heads, **made))
        self.dt_bias = nn.Parameter(torch.empty(width, **made))
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, rank, bias=False, **made), nn.Linear(rank, width, bias=True, **made)
        )
        self.o_norm = nn.RMSNorm(head_dim, eps=norm_eps, **made)
        self.o_proj = nn.Linear(width, hidden_size, bias=False, **made)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rates exp(A_log) in 1..16, and softplus(dt_bias) log-uniform in 0.001..0.1.

        Of this module only; submodules have their own.
        """
        self.A_log.uniform_(1.0, 16.0).log_()
        reset_step_bias(self.dt_bias)

    def forward(self, x: Tensor, state: KimiDeltaState | None = None) -> tuple[Tensor, KimiDeltaState]:
        """x [B, T, hidden] -> y [B, T, hidden], and the state after the last token."""
        check_tokens(self.hidden_size, x=x)
        q, conv_q = self.q_conv1d(self.q_proj(x), None if state is None else state.conv_q)
        k, conv_k = self.k_conv1d(self.k_proj(x), None if state is None else state.conv_k)
        v, conv_v = self.v_conv1d(self.v_proj(x), None if state is None else state.conv_v)
        o_BTHD, memory = kda(
            self._heads(q),
            self._heads(k),
            self._heads(v),
            self._log_decay(x),
            torch.sigmoid(wide(self.b_proj(x))),
            initial_state=None if state is None else state.memory,
            mode=self.mode,
            memory_chunk_size=self.memory_chunk_size,
        )
        gate_BTHD = self._heads(self.g_proj(x))
        o_BTHD = tokenwise_checkpoint(self._gated_norm, (o_BTHD, gate_BTHD), (self.o_norm.weight,))
        return self.o_proj(o_BTHD.flatten(-2)), KimiDeltaState(conv_q, conv_k, conv_v, memory)

    def _log_decay(self, x: Tensor) -> Tensor:
        f_BTHD = self._heads(self.f_proj(x))
        return tokenwise_checkpoint(log_decay, (f_BTHD,), (self.A_log, self.dt_bias))

    def _gated_norm(self, o_BTHD: Tensor, gate_BTHD: Tensor, weight: Tensor) -> Tensor:
        return gated_head_norm(o_BTHD, gate_BTHD, weight, self.norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))

    def extra_repr(self) -> str:
        shown = f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}"
        return f"{shown}, mode={self.mode!r}"


def gated_head_norm(x_BTHD: Tensor, gate_BTHD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of each head, times sigmoid(gate)."""
    x, gate, weight = wide(x_BTHD), wide(gate_BTHD), wide(weight_D)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return (x * scale * weight * torch.sigmoid(gate)).to(gate_BTHD.dtype)


def log_decay(f_BTHD: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """-exp(A_log) * softplus(f + dt_bias) in float32: A_log per head, dt_bias [H * D] per channel."""
    heads, size = f_BTHD.shape[-2:]
    step = F.softplus(wide(f_BTHD) + wide(dt_bias).view(heads, size))
    return -wide(A_log).exp().view(heads, 1) * step
