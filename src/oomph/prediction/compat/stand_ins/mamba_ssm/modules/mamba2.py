"""state-spaces/mamba, mamba_ssm/modules/mamba2.py, as it trains on one GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.prediction.compat.stand_ins.causal_conv1d import causal_conv1d_fn

from ..ops.triton.layernorm_gated import RMSNorm as RMSNormGated
from ..ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from .common import check_training, softplus_inverse


class Mamba2(nn.Module):
    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if process_group is not None:
            raise NotImplementedError("oomph's stand-in for Mamba2 takes no process_group")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner, self.headdim, self.ngroups = expand * d_model, headdim, ngroups
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        self.nheads, self.D_has_hdim, self.rmsnorm = self.d_ssm // headdim, D_has_hdim, rmsnorm
        self.norm_before_gate, self.chunk_size, self.layer_idx = norm_before_gate, chunk_size, layer_idx
        self.activation, self.use_mem_eff_path, self.dt_limit = "silu", use_mem_eff_path, dt_limit
        self.in_proj = nn.Linear(
            d_model, 2 * self.d_inner + 2 * ngroups * d_state + self.nheads, bias=bias, **made
        )
        channels = self.d_ssm + 2 * ngroups * d_state
        self.conv1d = nn.Conv1d(
            channels, channels, d_conv, groups=channels, padding=d_conv - 1, bias=conv_bias, **made
        )
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        self.act = nn.SiLU()
        self.dt_bias = nn.Parameter(softplus_inverse(self.nheads, dt_min, dt_max, dt_init_floor, made))
        A = torch.empty(self.nheads, dtype=torch.float32, device=device).uniform_(*A_init_range)
        self.A_log = nn.Parameter(torch.log(A).to(dtype=dtype))
        self.D = nn.Parameter(torch.ones(self.d_ssm if D_has_hdim else self.nheads, device=device))
        for parameter in (self.dt_bias, self.A_log, self.D):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        if rmsnorm:
            group = self.d_ssm // ngroups
            self.norm = RMSNormGated(self.d_ssm, 1e-5, group, norm_before_gate, **made)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **made)

    def forward(
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Any:
        """Of [batch, L, d_model], or [batch * L, d_model] with `seqlen`."""
        check_training(inference_params)
        zxbcdt = self.in_proj(u)
        if seqlen is not None:
            zxbcdt = zxbcdt.unflatten(0, (-1, seqlen))
        A = -torch.exp(self.A_log.float())
        D = self.D.unflatten(0, (-1, self.headdim)) if self.D_has_hdim else self.D
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        if self.use_mem_eff_path:
            out = mamba_split_conv1d_scan_combined(
                zxbcdt,
                weight,
                bias,
                self.dt_bias,
                A,
                D=D,
                chunk_size=self.chunk_size,
                seq_idx=seq_idx,
                activation=self.activation,
                rmsnorm_weight=self.norm.weight if self.rmsnorm else None,
                outproj_weight=self.out_proj.weight,
                outproj_bias=self.out_proj.bias,
                headdim=None if self.D_has_hdim else self.headdim,
                ngroups=self.ngroups,
                norm_before_gate=self.norm_before_gate,
            )
        else:
            out = self.out_proj(self._separately(zxbcdt, weight, bias, A, D))
        return out if seqlen is None else out.flatten(0, 1)

    def _separately(
        self, zxbcdt: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, D: Tensor
    ) -> Tensor:
        of_groups = self.ngroups * self.d_state
        mlp = (zxbcdt.shape[-1] - 2 * self.d_ssm - 2 * of_groups - self.nheads) // 2
        widths = [mlp, mlp, self.d_ssm, self.d_ssm + 2 * of_groups, self.nheads]
        z0, x0, z, xBC, dt = zxbcdt.split(widths, dim=-1)
        xBC = causal_conv1d_fn(xBC.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)
        x, B, C = xBC.split([self.d_ssm, of_groups, of_groups], dim=-1)
        heads, states = (-1, self.headdim), (self.ngroups, self.d_state)
        y = mamba_chunk_scan_combined(
            x.unflatten(-1, heads),
            dt,
            A,
            B.unflatten(-1, states),
            C.unflatten(-1, states),
            chunk_size=self.chunk_size,
            D=D,
            z=None if self.rmsnorm else z.unflatten(-1, heads),
            dt_bias=self.dt_bias,
            dt_softplus=True,
        ).flatten(2)
        if self.rmsnorm:
            y = self.norm(y, z)
        joined: Tensor = torch.cat([F.silu(z0) * x0, y], dim=-1) if mlp > 0 else y
        return joined
