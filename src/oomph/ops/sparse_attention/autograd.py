"""The three branches through Triton kernels, forward and backward.

Saved for backward: the inputs, the compressed keys and values, the result of each branch, its log-sum-exp
(one fp32 number per token and query head) and the selected blocks. The branches' results are needed for the
gradients of the gates; with them, no softmax needs another pass.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import (
    Kernels,
    OpFunction,
    TileConfig,
    cdiv,
    contiguous_rows,
    power_of_two,
    refuse_second_derivatives,
    strided,
    why_not_triton,
)
from oomph.ops.sparse_attention import selection
from oomph.ops.sparse_attention.arguments import NSAConfig
from oomph.ops.sparse_attention.selection import LOG2_E, MIN_TILE, SHARED_MEMORY, RowValues, SelectedAttention

_KERNELS = Kernels("oomph.ops.sparse_attention.kernels")
_MAX_HEAD_DIM = 256
_MAX_GROUP = 64
_MAX_STRIDES = 16  # per compressed block: a loop over them is unrolled
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_not_kernels(q: Tensor, k: Tensor, dtype: torch.dtype, config: NSAConfig) -> str | None:
    """Why the kernels cannot run the call; None where they can."""
    reason = why_not_triton(q, dtype)
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


class SparseAttention(OpFunction):
    op = "nsa"

    @staticmethod
    def forward(ctx: Any, config: NSAConfig, grad_enabled: bool, *tensors: Tensor) -> Tensor:
        q, k, v, ck, cv = (contiguous_rows(x) for x in tensors[:5])
        gates = [gate.contiguous() for gate in tensors[5:]]
        needs_backward = grad_enabled and any(ctx.needs_input_grad)
        compressed_band, window_band = _bands(q, config)
        compressed, lse_cmp = _BandAttention(q, ck, cv, compressed_band, config.scale).forward()
        chosen = selection.select_blocks(q, ck, lse_cmp, config)
        windowed, lse_win = _BandAttention(q, k, v, window_band, config.scale).forward()
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
        _, _, want_q, want_k, want_v, want_ck, want_cv, *want_gates = ctx.needs_input_grad
        grad = contiguous_rows(grad)
        delta_cmp, delta_slc, delta_win = selection.branch_deltas(grad, compressed, selected, windowed)
        rows_cmp = RowValues(lse_cmp, delta_cmp, _heads_first(gate_cmp))
        rows_win = RowValues(lse_win, delta_win, _heads_first(gate_win))
        rows_slc = RowValues(lse_slc, delta_slc, gate_slc)
        compressed_band, window_band = _bands(q, config)
        compressed_attention = _BandAttention(q, ck, cv, compressed_band, config.scale)
        window_attention = _BandAttention(q, k, v, window_band, config.scale)
        dq = dk = dv = dck = dcv = None
        if want_q:
            dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            compressed_attention.write_dq(dq, grad, rows_cmp, add=False)
            window_attention.write_dq(dq, grad, rows_win, add=True)
        if (want_ck or want_cv) and ck.numel():
            dck, dcv = compressed_attention.dkdv(grad, rows_cmp, split=True)
        if want_k or want_v:
            dk, dv = window_attention.dkdv(grad, rows_win, split=False)
        if want_q or want_k or want_v:
            selected_attention = SelectedAttention(q, k, v, chosen, config, backward=True)
            if dq is not None:
                selected_attention.add_dq(dq, grad, rows_slc)
            if dk is not None and dv is not None:
                selected_attention.add_dkdv(dk, dv, grad, rows_slc)
        return (
            None,
            None,
            dq,
            dk if want_k else None,
            dv if want_v else None,
            dck if want_ck else None,
            dcv if want_cv else None,
            delta_cmp.transpose(1, 2).to(gate_cmp.dtype) if want_gates[0] else None,
            delta_slc.to(gate_slc.dtype) if want_gates[1] else None,
            delta_win.transpose(1, 2).to(gate_win.dtype) if want_gates[2] else None,
        )


def _heads_first(gate: Tensor) -> Tensor:
    """[B, T, Q] -> [B, Q, T] in float32."""
    out = torch.empty(gate.transpose(1, 2).shape, dtype=torch.float32, device=gate.device)
    return out.copy_(gate.transpose(1, 2))


# The compressed and the sliding-window branch --------------------------------------------------------


@dataclass(frozen=True)
class KeyBand:
    """Key j stands for tokens j * stride .. j * stride + span - 1; see kernels.py."""

    span: int = 1
    stride: int = 1
    window: int = 0  # in tokens; 0: no limit


def _bands(q: Tensor, config: NSAConfig) -> tuple[KeyBand, KeyBand]:
    """Of the compressed and of the sliding-window branch."""
    # No limit where the window covers all tokens: it is a compile-time constant, and lengths share kernels.
    window = config.window if config.window < q.shape[1] else 0
    return KeyBand(config.compress_block, config.compress_stride), KeyBand(window=window)


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


class _BandAttention:
    """Attention of q to a band of keys k and values v: the launches of one branch."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, band: KeyBand, scale: float) -> None:
        self.q, self.k, self.band, self.scale = q, k, band, scale
        self.inputs = (*strided(q), *strided(k), *strided(v))
        self.tiles = _window_tiles(q.dtype, q.shape[3])

    def forward(self) -> tuple[Tensor, Tensor]:
        """The result [B, T, Q, D] and its log-sum-exp [B, Q, T]."""
        batch, tokens, heads, _ = self.q.shape
        out = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=self.q.device)
        tile = self.tiles[0]
        self._launch("window_forward", tile, cdiv(tokens, tile.rows) * batch * heads, (out, lse))
        return out, lse

    def write_dq(self, dq: Tensor, grad: Tensor, rows: RowValues, *, add: bool) -> None:
        """Write dq, or add to it."""
        batch, tokens, heads, _ = self.q.shape
        tile = self.tiles[1]
        programs = cdiv(tokens, tile.rows) * batch * heads
        self._launch("window_dq", tile, programs, (*strided(grad), dq, *rows), self.scale, ADD=add)

    def dkdv(self, grad: Tensor, rows: RowValues, *, split: bool) -> tuple[Tensor, Tensor]:
        """dk and dv. `split`: a program per query head, where many tokens attend to few keys; then a sum."""
        batch, _, heads, head_dim = self.q.shape
        n_keys, key_heads = self.k.shape[1:3]
        group = heads // key_heads
        split = split and group > 1
        shape = (batch, n_keys, heads if split else key_heads, head_dim)
        dtype = torch.float32 if split else self.k.dtype
        dk, dv = (torch.empty(shape, dtype=dtype, device=self.k.device) for _ in "kv")
        tile = self.tiles[2]
        programs, members = cdiv(n_keys, tile.columns) * batch * shape[2], 1 if split else group
        self._launch(
            "window_dkdv", tile, programs, (*strided(grad), dk, dv, *rows), self.scale, HEADS=members
        )
        if not split:
            return dk, dv
        grouped = (batch, n_keys, key_heads, group, head_dim)
        dk = dk.view(grouped).sum(3).to(self.k.dtype)
        return dk, dv.view(grouped).sum(3).to(self.k.dtype)

    def _launch(
        self,
        name: str,
        tile: TileConfig,
        programs: int,
        tensors: Any,
        *natural_scale: float,
        **constants: Any,
    ) -> None:
        _, tokens, heads, head_dim = self.q.shape
        n_keys, key_heads = self.k.shape[1:3]
        _KERNELS.launch(
            name,
            (programs,),
            *(*self.inputs, *tensors, tokens, n_keys, heads, heads // key_heads, head_dim),
            *(self.scale * LOG2_E, *natural_scale),
            SPAN=self.band.span,
            STRIDE=self.band.stride,
            WINDOW=self.band.window,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_D=power_of_two(head_dim, MIN_TILE),
            PRECISION="ieee",
            **constants,
            **tile.launch_options,
        )
