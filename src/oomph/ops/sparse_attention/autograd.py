"""The three branches through Triton kernels, forward and backward.

Saved for backward: the inputs, the compressed keys and values, the result of each branch, its log-sum-exp
(one fp32 number per token and query head) and the selected blocks. The branches' results are needed for the
gradients of the gates; with them, no softmax needs another pass.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import refuse_second_derivatives
from oomph.ops.launch import Kernels, why_not_triton
from oomph.ops.sparse_attention import selection
from oomph.ops.sparse_attention.arguments import NSAConfig
from oomph.ops.sparse_attention.selection import (
    LOG2_E,
    MIN_TILE,
    SHARED_MEMORY,
    RowValues,
    SelectedAttention,
    TileConfig,
    cdiv,
    power_of_two,
    strided,
)

_KERNELS = Kernels("oomph.ops.sparse_attention.kernels_window")
_MAX_HEAD_DIM = 256
_MAX_GROUP = 64
_MAX_STRIDES = 16  # per compressed block: a loop over them is unrolled
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_not_kernels(q: Tensor, k: Tensor, dtype: torch.dtype, config: NSAConfig) -> str | None:
    """Why the kernels cannot run the call; None where they can."""
    reason = why_not_triton(q)
    if reason is not None:
        return reason
    head_dim, group, name = q.shape[3], q.shape[2] // k.shape[2], str(dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        return f"no {name} kernel"
    if head_dim > _MAX_HEAD_DIM:
        return f"head sizes above {_MAX_HEAD_DIM}"
    if group > _MAX_GROUP:
        return f"groups of more than {_MAX_GROUP} query heads"
    if config.strides_per_compressed > _MAX_STRIDES:
        return f"compressed blocks of more than {_MAX_STRIDES} strides"
    shape = f"with head size {head_dim} and groups of {group} in {name}"
    if selection.selected_shared_bytes(dtype, head_dim, group, config) > SHARED_MEMORY:
        return f"blocks of {config.block_size} keys {shape} do not fit into shared memory"
    if selection.importance_shared_bytes(dtype, head_dim, group, config) > SHARED_MEMORY:
        return f"{config.strides_per_block} compressed keys per block {shape} do not fit into shared memory"
    return None


class SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ck: Tensor,
        cv: Tensor,
        gate_cmp: Tensor,
        gate_slc: Tensor,
        gate_win: Tensor,
        config: NSAConfig,
        grad_enabled: bool,
    ) -> Tensor:
        q, k, v, ck, cv = (_contiguous_rows(x) for x in (q, k, v, ck, cv))
        gates = (gate_cmp.contiguous(), gate_slc.contiguous(), gate_win.contiguous())
        needs_backward = grad_enabled and any(ctx.needs_input_grad)
        compressed, lse_cmp = _window_forward(q, ck, cv, _compressed_band(config), config.scale)
        chosen = selection.select_blocks(q, ck, lse_cmp, config)
        windowed, lse_win = _window_forward(q, k, v, sliding_window(q, config), config.scale)
        selected_attention = SelectedAttention(q, k, v, chosen, config, backward=False)
        out, selected, lse_slc = selected_attention.forward(compressed, windowed, gates, keep=needs_backward)
        ctx.save_for_backward(
            q, k, v, ck, cv, *gates, compressed, selected, windowed, lse_cmp, lse_slc, lse_win, chosen
        )
        ctx.config = config
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("nsa")
        q, k, v, ck, cv, *saved = ctx.saved_tensors
        gate_cmp, gate_slc, gate_win, compressed, selected, windowed, *saved = saved
        lse_cmp, lse_slc, lse_win, chosen = saved
        config: NSAConfig = ctx.config
        want_q, want_k, want_v, want_ck, want_cv, *want_gates, _, _ = ctx.needs_input_grad
        grad = _contiguous_rows(grad)
        delta_cmp, delta_slc, delta_win = selection.branch_deltas(grad, compressed, selected, windowed)
        rows_cmp = RowValues(lse_cmp, delta_cmp, _heads_first(gate_cmp))
        rows_win = RowValues(lse_win, delta_win, _heads_first(gate_win))
        rows_slc = RowValues(lse_slc, delta_slc, gate_slc)
        band, window, scale = _compressed_band(config), sliding_window(q, config), config.scale
        dq = dk = dv = dck = dcv = None
        if want_q:
            dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            _window_dq(dq, q, ck, cv, grad, rows_cmp, band, scale, add=False)
            _window_dq(dq, q, k, v, grad, rows_win, window, scale, add=True)
        if (want_ck or want_cv) and ck.numel():
            dck, dcv = _window_dkdv(q, ck, cv, grad, rows_cmp, band, scale, split=True)
        if want_k or want_v:
            dk, dv = _window_dkdv(q, k, v, grad, rows_win, window, scale, split=False)
        if want_q or want_k or want_v:
            selected_attention = SelectedAttention(q, k, v, chosen, config, backward=True)
            if dq is not None:
                selected_attention.add_dq(dq, grad, rows_slc)
            if dk is not None and dv is not None:
                selected_attention.add_dkdv(dk, dv, grad, rows_slc)
        return (
            dq,
            dk if want_k else None,
            dv if want_v else None,
            dck if want_ck else None,
            dcv if want_cv else None,
            delta_cmp.transpose(1, 2).to(gate_cmp.dtype) if want_gates[0] else None,
            delta_slc.to(gate_slc.dtype) if want_gates[1] else None,
            delta_win.transpose(1, 2).to(gate_win.dtype) if want_gates[2] else None,
            None,
            None,
        )


def _contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _heads_first(gate: Tensor) -> Tensor:
    """[B, T, Q] -> [B, Q, T] in float32."""
    out = torch.empty(gate.transpose(1, 2).shape, dtype=torch.float32, device=gate.device)
    return out.copy_(gate.transpose(1, 2))


# The compressed and the sliding-window branch --------------------------------------------------------


@dataclass(frozen=True)
class KeyBand:
    """Key j stands for tokens j * stride .. j * stride + span - 1; see kernels_window.py."""

    span: int = 1
    stride: int = 1
    window: int = 0  # in tokens; 0: no limit

    def constants(self, head_dim: int) -> dict[str, Any]:
        return {
            "SPAN": self.span,
            "STRIDE": self.stride,
            "WINDOW": self.window,
            "BLOCK_D": power_of_two(head_dim, MIN_TILE),
            "PRECISION": "ieee",
        }


def _compressed_band(config: NSAConfig) -> KeyBand:
    return KeyBand(config.compress_block, config.compress_stride)


def sliding_window(q: Tensor, config: NSAConfig) -> KeyBand:
    # No limit where the window covers all tokens: it is a compile-time constant, and lengths share kernels.
    return KeyBand(window=config.window if config.window < q.shape[1] else 0)


def _window_tiles(dtype: torch.dtype, head_dim: int) -> tuple[TileConfig, TileConfig, TileConfig]:
    """Tokens x keys of forward, dq, and dk with dv: the largest that fit into the registers of an H200."""
    if dtype == torch.float32:  # exact products, without tensor cores
        if head_dim <= 64:
            return (TileConfig(32, 32, 4, 1),) * 3
        return (TileConfig(16, 32 if head_dim <= 128 else 16, 4, 1),) * 3
    if head_dim <= 64:
        return TileConfig(128, 64, 4, 3), TileConfig(128, 64, 8, 2), TileConfig(64, 128, 8, 2)
    if head_dim <= 128:
        return TileConfig(64, 64, 4, 3), TileConfig(128, 64, 8, 3), TileConfig(64, 128, 8, 3)
    return TileConfig(64, 32, 4, 2), TileConfig(64, 32, 8, 2), TileConfig(16, 64, 8, 2)


def _window_forward(q: Tensor, k: Tensor, v: Tensor, band: KeyBand, scale: float) -> tuple[Tensor, Tensor]:
    """The result [B, T, Q, D] and its log-sum-exp [B, Q, T]."""
    batch, tokens, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    tile = _window_tiles(q.dtype, head_dim)[0]
    _KERNELS.launch(
        "window_forward",
        (cdiv(tokens, tile.rows) * batch * heads,),
        *(*strided(q), *strided(k), *strided(v), out, lse, *_sizes(q, k), scale * LOG2_E),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        **band.constants(head_dim),
        **tile.launch_options,
    )
    return out, lse


def _window_dq(
    dq: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    rows: RowValues,
    band: KeyBand,
    scale: float,
    *,
    add: bool,
) -> None:
    """Write dq, or add to it."""
    batch, tokens, heads, head_dim = q.shape
    tile = _window_tiles(q.dtype, head_dim)[1]
    _KERNELS.launch(
        "window_dq",
        (cdiv(tokens, tile.rows) * batch * heads,),
        *(*strided(q), *strided(k), *strided(v), *strided(grad), dq),
        *(rows.lse, rows.delta, rows.gate, *_sizes(q, k), scale * LOG2_E, scale),
        ADD=add,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        **band.constants(head_dim),
        **tile.launch_options,
    )


def _window_dkdv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    rows: RowValues,
    band: KeyBand,
    scale: float,
    *,
    split: bool,
) -> tuple[Tensor, Tensor]:
    """dk and dv. `split`: a program per query head, for few keys that many tokens attend to; then a sum."""
    batch, _, heads, head_dim = q.shape
    n_keys, key_heads = k.shape[1:3]
    group = heads // key_heads
    split = split and group > 1
    shape = (batch, n_keys, heads if split else key_heads, head_dim)
    dtype = torch.float32 if split else k.dtype
    dk, dv = (torch.empty(shape, dtype=dtype, device=k.device) for _ in "kv")
    tile = _window_tiles(q.dtype, head_dim)[2]
    _KERNELS.launch(
        "window_dkdv",
        (cdiv(n_keys, tile.columns) * batch * shape[2],),
        *(*strided(q), *strided(k), *strided(v), *strided(grad), dk, dv),
        *(rows.lse, rows.delta, rows.gate, *_sizes(q, k), scale * LOG2_E, scale),
        HEADS=1 if split else group,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        **band.constants(head_dim),
        **tile.launch_options,
    )
    if not split:
        return dk, dv
    grouped = (batch, n_keys, key_heads, group, head_dim)
    dk = dk.view(grouped).sum(3).to(k.dtype)
    return dk, dv.view(grouped).sum(3).to(v.dtype)


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    return q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2], q.shape[3]
