"""A bidirectional Mamba block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.nn.common import check_tokens, reset_step_bias, wide
from oomph.ops.common import check_whole
from oomph.ops.state_space import selective_scan

_DIRECTIONS = 2  # forward, backward: the leading dimension of parameters that are not shared


class BidirectionalMamba(nn.Module):
    """Mamba's block with a scan in each direction: [B, L, d_model] -> [B, L, d_model].

    Both directions share in_proj, the gate z and out_proj. Each direction r has its own convolution over the
    d_conv tokens up to the current one, its own delta, A, B, C and D; the two scans are summed, then gated.

        inner = expand * d_model        x, z = in_proj(h)        x_r = silu(conv_r(x))
        low_rank, B, C = x_proj x_r     delta = softplus(dt_proj low_rank + dt_bias)
        out_proj(silu(z) * sum over r of scan(x_r, delta, -exp(A_log), B, C, D))

    Parameters are initialised as in Mamba: A = -(1, ..., d_state) in every channel, delta log-uniform in
    [0.001, 0.1], D = 1. The rank of dt_proj is d_model / 16, rounded up. `chunk_size` is
    selective_scan's.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        *,
        chunk_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(d_model=d_model, d_state=d_state, d_conv=d_conv, expand=expand)
        dt_rank = -(-d_model // 16)
        self.d_model, self.d_state, self.d_conv, self.dt_rank = d_model, d_state, d_conv, dt_rank
        self.inner = inner = expand * d_model
        self.chunk_size = chunk_size

        def pair(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(_DIRECTIONS, *shape, device=device, dtype=dtype))

        self.in_proj = nn.Linear(d_model, 2 * inner, bias=False, device=device, dtype=dtype)
        self.conv_weight, self.conv_bias = pair(inner, d_conv), pair(inner)
        self.x_proj = pair(dt_rank + 2 * d_state, inner)
        self.dt_proj, self.dt_bias = pair(inner, dt_rank), pair(inner)
        self.A_log, self.D = pair(inner, d_state), pair(inner)
        self.out_proj = nn.Linear(inner, d_model, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()
        for parameter, inputs in (
            (self.conv_weight, self.d_conv),
            (self.conv_bias, self.d_conv),
            (self.x_proj, self.inner),
            (self.dt_proj, self.dt_rank),
        ):
            parameter.uniform_(-(inputs**-0.5), inputs**-0.5)
        reset_step_bias(self.dt_bias)
        self.A_log.copy_(torch.arange(1, self.d_state + 1, device=self.A_log.device).log())
        self.D.fill_(1.0)

    def forward(self, h: Tensor) -> Tensor:
        """h [B, L, d_model] -> [B, L, d_model]."""
        check_tokens(self.d_model, h=h)
        x_BLd, z_BLd = self.in_proj(h).chunk(2, dim=-1)
        x_2BLd = F.silu(self._convolve(x_BLd))
        parts = (self.dt_rank, self.d_state, self.d_state)
        low_rank, B_2BLn, C_2BLn = _per_direction(x_2BLd, self.x_proj).split(parts, dim=-1)
        y_BLd = selective_scan(
            x_2BLd,
            _per_direction(low_rank, self.dt_proj),
            -torch.exp(wide(self.A_log)),
            B_2BLn,
            C_2BLn,
            self.D,
            z=z_BLd,
            delta_bias=self.dt_bias,
            delta_softplus=True,
            direction="both",
            chunk_size=self.chunk_size,
        )
        out: Tensor = self.out_proj(y_BLd)
        return out

    def _convolve(self, x_BLd: Tensor) -> Tensor:
        """[2, B, L, d]: at token t, over the d_conv tokens up to t, and over the d_conv tokens from t on.

        The second reverses the weights instead of the tokens.
        """
        length, padding = x_BLd.shape[1], self.d_conv - 1
        if x_BLd.numel() == 0:
            return x_BLd.expand(_DIRECTIONS, *x_BLd.shape)
        x_BdL = x_BLd.transpose(1, 2)
        weight_2d1k = self.conv_weight.unsqueeze(2)
        options = {"padding": padding, "groups": self.inner}
        forward = F.conv1d(x_BdL, weight_2d1k[0], self.conv_bias[0], **options)[..., :length]
        backward = F.conv1d(x_BdL, weight_2d1k[1].flip(-1), self.conv_bias[1], **options)[..., padding:]
        return torch.stack([forward.transpose(1, 2), backward.transpose(1, 2)])

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, d_state={self.d_state}, d_conv={self.d_conv}, inner={self.inner}, "
            f"dt_rank={self.dt_rank}, chunk_size={self.chunk_size}"
        )


def _per_direction(x_2BLi: Tensor, weight_2oi: Tensor) -> Tensor:
    """[2, B, L, o]: each direction times its own matrix."""
    product = torch.bmm(x_2BLi.flatten(1, 2), weight_2oi.transpose(1, 2))
    return product.view(*x_2BLi.shape[:3], weight_2oi.shape[1])
