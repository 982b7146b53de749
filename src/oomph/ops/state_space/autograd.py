"""The autograd function of selective_scan, and the scan with Triton kernels: one launch in each pass.

Saved for backward: the inputs, and the states at the start of every chunk. Nothing of size [B, L, d] that is
not an input is saved: with a gate z, y before the gate is recomputed from the states, which backward needs
anyway.

Where batch rows x blocks of channels are too few to fill a GPU, the tokens are divided into segments that run
in parallel. The initial state of each segment is computed first (`_segment_states`), which takes one more
pass over the inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import Kernels, OpFunction, no_autocast, power_of_two, refuse_second_derivatives
from oomph.ops.state_space import chunked
from oomph.ops.state_space.chunked import Scan, ScanInputs

_KERNELS = Kernels("oomph.ops.state_space.kernels")
# 64 channels of it are 16 warps; beyond, the partial sums of dB and dC would outgrow everything else.
_MAX_STATE = 64
_STEP = 4  # tokens that a kernel loads at a time
_CHUNK_MULTIPLE = 8  # of _STEP
# Per thread, at most: all programs of a usual size, 2048 warps on 132 SMs, run at once.
_REGISTERS = 128
# Programs that fill a GPU. A constant, because segments take memory and a prediction must see the same.
_PROGRAMS = 1024
# Segments cost one more pass over the inputs; fewer are not worth it.
_MIN_SEGMENTS = 4


class SelectiveScan(OpFunction):
    op = "selective_scan"

    @staticmethod
    def forward(ctx: Any, impl: str, scan: Scan, *tensors: Tensor | None) -> Tensor:
        inputs = ScanInputs(*tensors)
        forward = triton_forward if impl == "triton" else chunked.forward
        with no_autocast(inputs.x):
            y_BLd, saved = forward(inputs, scan)
        ctx.impl, ctx.scan = impl, scan
        ctx.save_for_backward(*tensors, saved)
        return y_BLd

    @staticmethod
    def backward(ctx: Any, g_BLd: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives("selective_scan")
        *tensors, saved = ctx.saved_tensors
        wanted = ScanInputs(*ctx.needs_input_grad[2:])
        backward = triton_backward if ctx.impl == "triton" else chunked.backward
        with no_autocast(g_BLd):
            grads = backward(ScanInputs(*tensors), ctx.scan, saved, g_BLd, wanted)
        return (None, None, *grads)


def why_not_kernels(n: int, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run a scan with state size n and states of `dtype`; None where they can."""
    if dtype == torch.float64:
        return "the kernels compute in float32, which is too little for float64"
    if n > _MAX_STATE:
        return f"the state's n={n} is above {_MAX_STATE}, the limit of the kernels"
    return None


def round_up_chunk(chunk: int) -> int:
    return -(-chunk // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE


@dataclass(frozen=True)
class StateTile:
    """The part of the states [d, n] that one program holds in registers."""

    channels: int
    n: int
    warps: int

    def blocks(self, d: int) -> int:
        return -(-d // self.channels)


def state_tile(d: int, n: int) -> StateTile:
    """Wide in channels, because the partial sums of dB and dC take n / channels of x's size each."""
    padded_n = power_of_two(n)
    channels = min(64, power_of_two(d))
    warps = max(1, channels * padded_n // 256)
    return StateTile(channels, padded_n, warps)


@dataclass(frozen=True)
class _Grid:
    """How a scan is divided into programs."""

    tile: StateTile
    segments: int
    segment_chunks: int
    programs: int

    @staticmethod
    def of(scan: Scan) -> "_Grid":
        tile = state_tile(scan.d, scan.n)
        rows_and_blocks = max(1, tile.blocks(scan.d) * scan.batch)
        segments = _PROGRAMS // rows_and_blocks
        if segments < _MIN_SEGMENTS:
            segments = 1
        segment_chunks = max(1, -(-scan.chunks // segments))
        segments = max(1, -(-scan.chunks // segment_chunks))
        return _Grid(tile, segments, segment_chunks, rows_and_blocks * segments)

    @property
    def constants(self) -> dict[str, int]:
        tile = self.tile
        return {"BD": tile.channels, "N": tile.n, "num_warps": tile.warps, "maxnreg": _REGISTERS}


def triton_forward(inputs: ScanInputs, scan: Scan) -> tuple[Tensor, Tensor | None]:
    """As chunked.forward."""
    grid = _Grid.of(scan)
    x, delta, A, B, C, D, z, bias = inputs
    A, D, bias = _contiguous(A, D, bias)
    y_BLd = x.new_empty(scan.batch, scan.length, scan.d)
    saved, entry = scan.new_states(x, torch.float32), None
    if y_BLd.numel() == 0:
        return y_BLd, saved
    if grid.segments > 1:
        entry = _segment_states(inputs, scan, grid, x, B, gradient=False)
    _KERNELS.launch(
        "scan_forward",
        (grid.programs,),
        *(y_BLd, x, delta, A, B, C, D, z, bias, entry, saved),
        *_input_strides(inputs),
        *(scan.batch, scan.length, scan.d, scan.n, grid.segments, grid.segment_chunks),
        DIRECTIONS=scan.directions,
        REVERSE=scan.reverse_first,
        SOFTPLUS=scan.softplus,
        K=scan.chunk,
        S=_STEP,
        passes=_time_in_passes(x, scan.n),
        **grid.constants,
    )
    return y_BLd, saved


def triton_backward(
    inputs: ScanInputs, scan: Scan, saved: Tensor, g_BLd: Tensor, wanted: ScanInputs
) -> ScanInputs:
    """As chunked.backward."""
    grid = _Grid.of(scan)
    directions, batch, length, d, n = scan.directions, scan.batch, scan.length, scan.d, scan.n
    x, delta, A, B, C, D, z, bias = inputs
    A, D, bias = _contiguous(A, D, bias)

    def empty(want: bool, *shape: int, like: Tensor | None = None) -> Tensor | None:
        if not want:
            return None
        return x.new_empty(shape, dtype=torch.float32 if like is None else like.dtype)

    segments = (directions, grid.segments, batch)
    channel_blocks = (directions, grid.tile.blocks(d), batch)
    dx = empty(wanted.x, *x.shape, like=x)
    # The kernel sums it over tokens, so the bias needs it too.
    ddelta = empty(wanted.delta or wanted.bias, *delta.shape, like=delta)
    dz = None if z is None else empty(wanted.z, *z.shape, like=z)
    dA = empty(wanted.A, *segments, d, n)
    dB = empty(wanted.B, *channel_blocks, length, n)
    dC = empty(wanted.C, *channel_blocks, length, n)
    dD = empty(wanted.D, *segments, d)
    dbias = empty(wanted.bias, *segments, d)
    if g_BLd.numel() == 0:
        for each in (dA, dB, dC, dD, dbias):
            if each is not None:
                each.zero_()
    else:
        entry = None
        if grid.segments > 1:
            entry = _segment_states(inputs, scan, grid, g_BLd.unsqueeze(0), C, gradient=True)
        tile = grid.tile
        scratch_shape = (grid.programs, scan.chunk // _STEP, tile.channels, tile.n)
        scratch = x.new_empty(scratch_shape, dtype=torch.float32)
        _KERNELS.launch(
            "scan_backward",
            (grid.programs,),
            *(g_BLd, x, delta, A, B, C, D, z, bias, entry, saved, scratch),
            *(dx, ddelta, dA, dB, dC, dD, dz, dbias),
            *g_BLd.stride(),
            *_input_strides(inputs),
            *(batch, length, d, n, grid.segments, grid.segment_chunks),
            DIRECTIONS=directions,
            REVERSE=scan.reverse_first,
            SHARED_X=x.shape[0] == 1,
            SOFTPLUS=scan.softplus,
            K=scan.chunk,
            S=_STEP,
            passes=_time_in_passes(x, n),
            **grid.constants,
        )
    return ScanInputs(
        dx,
        ddelta if wanted.delta else None,
        _sum(dA, inputs.A, (1, 2)),
        _sum(dB, B, (1,)),
        _sum(dC, C, (1,)),
        _sum(dD, inputs.D, (1, 2)),
        dz,
        _sum(dbias, inputs.bias, (1, 2)),
    )


def _segment_states(
    inputs: ScanInputs,
    scan: Scan,
    grid: _Grid,
    value: Tensor,
    vector_RBLn: Tensor,
    gradient: bool,
) -> Tensor:
    """The initial state of every segment [R, segments, B, d, n], or with `gradient` its gradient dh."""
    A, bias = _contiguous(inputs.A, inputs.bias)
    shape = (scan.directions, grid.segments, scan.batch, scan.d)
    states = value.new_empty(*shape, scan.n, dtype=torch.float32)
    delta_sums = value.new_empty(shape, dtype=torch.float32)
    delta, z_BLd = inputs.delta, inputs.z if gradient else None
    _KERNELS.launch(
        "segment_final_states",
        (grid.programs,),
        *(states, delta_sums, value, delta, A, vector_RBLn, z_BLd, bias),
        *(*_shared_strides(value), *delta.stride(), *vector_RBLn.stride(), *_gate_strides(z_BLd)),
        *(scan.batch, scan.length, scan.d, scan.n, grid.segments, grid.segment_chunks * scan.chunk),
        DIRECTIONS=scan.directions,
        REVERSE=scan.reverse_first,
        GRADIENT=gradient,
        SOFTPLUS=scan.softplus,
        **grid.constants,
    )
    _KERNELS.launch(
        "segment_initial_states",
        (grid.tile.blocks(scan.d) * scan.batch * scan.directions,),
        *(states, delta_sums, A, scan.batch, scan.d, scan.n, grid.segments),
        REVERSE=scan.reverse_first,
        GRADIENT=gradient,
        **grid.constants,
    )
    return states


def _time_in_passes(x: Tensor, n: int) -> float:
    """For predictions of time: the n states of a channel, not memory, determine the time of a scan.

    It equals so many passes over its tensors, measured on an H200 (n = 16, dtypes of 16 and 32 bits).
    """
    return max(1.0, 2.2 * n / x.element_size())


def _input_strides(inputs: ScanInputs) -> tuple[int, ...]:
    return (
        *_shared_strides(inputs.x),
        *inputs.delta.stride(),
        *inputs.B.stride(),
        *inputs.C.stride(),
        *_gate_strides(inputs.z),
    )


def _shared_strides(tensor_RBLd: Tensor) -> tuple[int, ...]:
    """With stride 0 over directions where both share it."""
    return (0 if tensor_RBLd.shape[0] == 1 else tensor_RBLd.stride(0), *tensor_RBLd.stride()[1:])


def _gate_strides(z_BLd: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if z_BLd is None else z_BLd.stride()


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """Small tensors, which the kernels read without strides."""
    return [None if each is None else each.contiguous() for each in tensors]


def _sum(parts: Tensor | None, of: Tensor | None, dims: tuple[int, ...]) -> Tensor | None:
    if parts is None or of is None:
        return None
    if all(parts.shape[dim] == 1 for dim in dims):
        return parts.view(of.shape).to(of.dtype)
    return parts.sum(dim=dims).to(of.dtype)
