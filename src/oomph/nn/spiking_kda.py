"""The block of report 000: Kimi Delta Attention whose writes and decay depend on spiking neurons.

Legend: B batch, T tokens, H heads, D head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.nn.common import RecurrentState, check_tokens, head_norm, wide
from oomph.nn.delta_attention import ShortConvolution
from oomph.ops.common import check_number, check_whole
from oomph.ops.delta_attention import kda
from oomph.ops.short_convolution import unit_vectors
from oomph.ops.spiking import lif_gate
from oomph.ops.tokenwise import tokenwise_checkpoint

_TAPS = 3  # of the short convolution


@dataclass(frozen=True, eq=False)
class SpikingKDAState(RecurrentState):
    """The state of a block after some tokens.

    conv [B, K - 1, hidden]: the last tokens of the convolution; membrane [B, H, D] of the neurons; memory
    [B, H, D, D] of the attention; output [B, H, D]: the last one, which a dropped token repeats.
    """

    conv: Tensor
    membrane: Tensor
    memory: Tensor
    output: Tensor


class SpikingKDABlock(nn.Module):
    """x + attention(x), where a head writes and forgets only at tokens at which one of its neurons fires.

        h = silu(causal conv(RMSNorm(x)))          q, k, v = linear(h), q and k scaled to length 1 per head
        s, membrane = lif_gate(linear(h))          spikes [B, T, H, D]
        alpha = sigmoid(W_down silu(W_up h) + a s)          beta = sigmoid(w h + sum of b s)
        silent head (no spike of its D) or dropped token: alpha = 1, beta = 0, so its memory stays as it is
        o = kda(q, k, v, log alpha, beta), unscaled: o_t = S_t^T q_t
        dropped token: o repeats the last one that was not dropped, detached
        y = x + W_o RMSNorm(o) * sigmoid(U_2 silu(U_1 x)), the norm per head

    The neurons integrate dropped tokens as any other. Silence has no gradient: gradients reach the neurons
    through a s and b s at tokens where their head is not silent, and back in time from there. Tokens are
    dropped in training only, independently with probability `token_drop`.

    `y, state = block(x)`; passing the state to the next call continues the sequences.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        gate_rank: int = 256,
        decay: float = 0.92,
        threshold: float = 0.35,
        surrogate_beta: float = 9.0,
        token_drop: float = 0.0,
        norm_eps: float = 1e-6,
        mode: str = "auto",
        memory_chunk_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """gate_rank: of W_down W_up and U_2 U_1. mode and memory_chunk_size: those of kda."""
        super().__init__()
        check_whole(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim, gate_rank=gate_rank)
        check_number("a probability in [0, 1)", lambda number: 0 <= number < 1, token_drop=token_drop)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.decay, self.threshold, self.surrogate_beta = decay, threshold, surrogate_beta
        self.token_drop = token_drop
        self.mode, self.memory_chunk_size = mode, memory_chunk_size
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        width = num_heads * head_dim
        self.norm = nn.RMSNorm(hidden_size, eps=norm_eps, **made)
        self.conv = ShortConvolution(hidden_size, _TAPS, **made)
        self.qk_proj = nn.Linear(hidden_size, 2 * width, bias=False, **made)
        self.v_proj = nn.Linear(hidden_size, width, bias=False, **made)
        self.drive_proj = nn.Linear(hidden_size, width, **made)
        self.decay_up = nn.Linear(hidden_size, gate_rank, bias=False, **made)
        self.decay_down = nn.Linear(gate_rank, width, bias=False, **made)
        self.write_proj = nn.Linear(hidden_size, num_heads, bias=False, **made)
        self.spike_decay = nn.Parameter(torch.empty(num_heads, head_dim, **made))  # a
        self.spike_write = nn.Parameter(torch.empty(num_heads, head_dim, **made))  # b
        self.o_norm = nn.RMSNorm(head_dim, eps=norm_eps, **made)
        self.o_proj = nn.Linear(width, hidden_size, bias=False, **made)
        self.gate_up = nn.Linear(hidden_size, gate_rank, bias=False, **made)
        self.gate_down = nn.Linear(gate_rank, hidden_size, bias=False, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Of this module only; submodules have their own."""
        nn.init.zeros_(self.spike_decay)
        nn.init.zeros_(self.spike_write)

    def forward(
        self, x: Tensor, state: SpikingKDAState | None = None, *, dropped: Tensor | None = None
    ) -> tuple[Tensor, SpikingKDAState]:
        """x [B, T, hidden] -> y [B, T, hidden], and the state after the last token.

        dropped [B, T], True where a token is dropped, takes the place of the draw (also in evaluation).
        """
        check_tokens(self.hidden_size, x=x)
        dropped_BT = self._dropped(x, dropped)
        h, conv = self.conv(self.norm(x), None if state is None else state.conv)
        spikes, membrane = lif_gate(
            self._heads(self.drive_proj(h)),
            decay=self.decay,
            threshold=self.threshold,
            surrogate_beta=self.surrogate_beta,
            initial=None if state is None else state.membrane,
        )
        awake_BTH = spikes.detach().bool().any(-1)
        if dropped_BT is not None:
            awake_BTH = awake_BTH & ~dropped_BT.unsqueeze(-1)
        # Queries and keys at once: fewer launches, which matters for small models.
        qk_BTND = tokenwise_checkpoint(
            unit_vectors, (self.qk_proj(h).unflatten(-1, (2 * self.num_heads, -1)),)
        )
        q_BTHD, k_BTHD = qk_BTND.chunk(2, 2)
        o_BTHD, memory = kda(
            q_BTHD,
            k_BTHD,
            self._heads(self.v_proj(h)),
            self._log_decay(h, spikes, awake_BTH),
            self._write_strength(h, spikes, awake_BTH),
            initial_state=None if state is None else state.memory,
            scale=1.0,
            mode=self.mode,
            # mode="sequential" has no chunks; a config may change the mode and leave the size.
            memory_chunk_size=None if self.mode == "sequential" else self.memory_chunk_size,
        )
        before = None if state is None else state.output
        if dropped_BT is not None:
            o_BTHD = forward_fill(o_BTHD, dropped_BT, before)
        written = self.o_proj(head_norm(o_BTHD, self.o_norm).flatten(-2))
        y = x + written * torch.sigmoid(self.gate_down(F.silu(self.gate_up(x))))
        return y, SpikingKDAState(conv, membrane, memory, self._last(o_BTHD, before))

    def _dropped(self, x: Tensor, given: Tensor | None) -> Tensor | None:
        if given is not None:
            if given.dtype != torch.bool or given.shape != x.shape[:2]:
                raise ArgumentError(
                    f"dropped is {given.dtype} {list(given.shape)}; valid: bool {list(x.shape[:2])}"
                )
            return given
        if not self.training or self.token_drop == 0:
            return None
        return torch.rand(x.shape[:2], device=x.device) < self.token_drop

    def _log_decay(self, h: Tensor, spikes: Tensor, awake_BTH: Tensor) -> Tensor:
        f_BTHD = self._heads(self.decay_down(F.silu(self.decay_up(h))))
        return tokenwise_checkpoint(spiking_log_decay, (f_BTHD, spikes, awake_BTH), (self.spike_decay,))

    def _write_strength(self, h: Tensor, spikes: Tensor, awake_BTH: Tensor) -> Tensor:
        weighted_BTH = torch.einsum("bthd,hd->bth", spikes, self.spike_write)
        beta_BTH = torch.sigmoid(wide(self.write_proj(h)) + wide(weighted_BTH))
        return torch.where(awake_BTH, beta_BTH, 0.0)

    def _last(self, o_BTHD: Tensor, before: Tensor | None) -> Tensor:
        if o_BTHD.shape[1]:
            return o_BTHD[:, -1].detach().clone()
        return o_BTHD.new_zeros(o_BTHD.shape[0], *o_BTHD.shape[2:]) if before is None else before

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1))

    def extra_repr(self) -> str:
        shown = f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}"
        shown += f", decay={self.decay}, threshold={self.threshold}, surrogate_beta={self.surrogate_beta}"
        return f"{shown}, token_drop={self.token_drop}, mode={self.mode!r}"


def spiking_log_decay(f_BTHD: Tensor, spikes: Tensor, awake_BTH: Tensor, a_HD: Tensor) -> Tensor:
    """log sigmoid(f + a s) in float32, and exactly 0 where the head is not awake."""
    log_alpha = F.logsigmoid(wide(f_BTHD) + wide(a_HD) * wide(spikes))
    return torch.where(awake_BTH.unsqueeze(-1), log_alpha, 0.0)


def forward_fill(x_BTX: Tensor, dropped_BT: Tensor, before_BX: Tensor | None = None) -> Tensor:
    """x [B, T, ...] with each dropped row replaced by the last row before it that is kept, detached.

    Rows dropped before any was kept get `before` [B, ...] (default zeros), detached too. The host does not
    read the mask.
    """
    if x_BTX.shape[1] == 0:
        return x_BTX
    source = x_BTX.detach()
    first = (
        torch.zeros_like(source[:, :1]) if before_BX is None else before_BX.detach().to(x_BTX.dtype)[:, None]
    )
    numbers_T = torch.arange(x_BTX.shape[1], device=x_BTX.device)
    # The largest number of a kept row so far; -1 while there is none.
    last_BT = torch.where(dropped_BT, -1, numbers_T).cummax(dim=1).values
    batch_B1 = torch.arange(x_BTX.shape[0], device=x_BTX.device)[:, None]
    repeated = source[batch_B1, last_BT.clamp(min=0)]
    trailing = (1,) * (x_BTX.dim() - 2)
    repeated = torch.where((last_BT < 0).view(*last_BT.shape, *trailing), first, repeated)
    return torch.where(dropped_BT.view(*dropped_BT.shape, *trailing), repeated, x_BTX)
