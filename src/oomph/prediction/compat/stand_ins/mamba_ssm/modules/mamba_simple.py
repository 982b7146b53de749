"""state-spaces/mamba, mamba_ssm/modules/mamba_simple.py, as it trains: without caches of generation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from oomph.prediction.compat.stand_ins.causal_conv1d import causal_conv1d_fn

from ..ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
from .block import Block  # here in mamba_ssm 1
from .common import check_training, softplus_inverse


class Mamba(nn.Module):
    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner = inner = int(expand * d_model)
        self.dt_rank = rank = math.ceil(d_model / 16) if dt_rank == "auto" else int(dt_rank)
        self.use_fast_path, self.layer_idx = use_fast_path, layer_idx
        self.in_proj = nn.Linear(d_model, inner * 2, bias=bias, **made)
        self.conv1d = nn.Conv1d(
            inner, inner, d_conv, groups=inner, padding=d_conv - 1, bias=conv_bias, **made
        )
        self.activation, self.act = "silu", nn.SiLU()
        self.x_proj = nn.Linear(inner, rank + d_state * 2, bias=False, **made)
        self.dt_proj = nn.Linear(rank, inner, bias=True, **made)
        with torch.no_grad():
            self.dt_proj.bias.copy_(softplus_inverse(inner, dt_min, dt_max, dt_init_floor, made))
        self.dt_proj.bias._no_reinit = True  # type: ignore[attr-defined]
        states = torch.arange(1, d_state + 1, dtype=torch.float32, device=device)
        self.A_log = nn.Parameter(torch.log(states.repeat(inner, 1)))
        self.D = nn.Parameter(torch.ones(inner, device=device))
        for parameter in (self.A_log, self.D):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        self.out_proj = nn.Linear(inner, d_model, bias=bias, **made)

    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Any:
        """Of [batch, L, d_model]."""
        check_training(inference_params)
        batch, length, _ = hidden_states.shape
        xz = (self.in_proj.weight @ hidden_states.permute(2, 0, 1).flatten(1)).unflatten(1, (batch, length))
        xz = xz.transpose(0, 1)
        if self.in_proj.bias is not None:
            xz = xz + self.in_proj.bias.to(dtype=xz.dtype)[:, None]
        A = -torch.exp(self.A_log.float())
        if self.use_fast_path:
            return mamba_inner_fn(
                xz,
                self.conv1d.weight,
                self.conv1d.bias,
                self.x_proj.weight,
                self.dt_proj.weight,
                self.out_proj.weight,
                self.out_proj.bias,
                A,
                None,
                None,
                self.D.float(),
                delta_bias=self.dt_proj.bias.float(),
                delta_softplus=True,
            )
        x, z = xz.chunk(2, dim=1)
        x = causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu")
        projected = self.x_proj(x.transpose(1, 2).flatten(0, 1))
        dt, B, C = projected.split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        dt = (self.dt_proj.weight @ dt.t()).unflatten(1, (batch, length)).transpose(0, 1)
        B, C = (each.unflatten(0, (batch, length)).transpose(1, 2).contiguous() for each in (B, C))
        bias = self.dt_proj.bias.float()
        y = selective_scan_fn(x, dt, A, B, C, self.D.float(), z=z, delta_bias=bias, delta_softplus=True)
        return self.out_proj(y.transpose(1, 2))


__all__ = ["Block", "Mamba"]
