"""The scan with Triton kernels: one launch each way, and for few rows two small ones before it.

Where rows x blocks of channels are too few to fill a GPU, the tokens are cut into segments that run side by
side. What enters each segment is found first (`_enter_segments`): one more pass over the inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.ops.launch import Kernels
from oomph.ops.state_space.problem import Gradients, Inputs, Options, Sizes, Wanted

KERNELS = Kernels("oomph.ops.state_space.triton")
SEGMENT_KERNELS = Kernels("oomph.ops.state_space.triton_segments")

# 64 channels of it are 16 warps; beyond, the partial sums of dB and dC would outgrow everything else.
LARGEST_STATE = 64
# Chunks are whole multiples of the tokens that are taken at a time.
LARGEST_STEP = 8
# Programs that fill a GPU, not asked of the device: segments take memory, and a prediction must see the same.
PROGRAMS = 1024
# Segments cost one more pass over the inputs; fewer do not make up for it.
FEWEST_SEGMENTS = 4


@dataclass(frozen=True)
class Tile:
    """Which part of the states [d, n] one program has in its registers."""

    channels: int
    numbers: int
    warps: int
    step: int  # tokens taken at a time
    registers: int  # per thread, at most

    def blocks(self, d: int) -> int:
        return -(-d // self.channels)


def tile_of(d: int, n: int) -> Tile:
    """Wide in channels, because the partial sums of dB and dC take n / channels of x's count each.

    Registers are limited so that all programs of a usual size run at once: 2048 warps on 132 processors.
    """
    numbers = _power_of_two(n)
    channels = min(64, _power_of_two(d))
    warps = max(1, channels * numbers // 256)
    return Tile(channels, numbers, warps, step=4, registers=128)


def why_not_these(n: int, wide: torch.dtype) -> str | None:
    if wide == torch.float64:
        return "the kernels compute in float32, which is too little for float64"
    if n > LARGEST_STATE:
        return f"the state's n={n} is above {LARGEST_STATE}, which the kernels are made for"
    return None


def _passes(x: Tensor, n: int) -> float:
    """For predictions of time: the n states of a channel, not memory, are what a scan takes its time for.

    As long as so many passes over its tensors, measured on an H200 (n = 16, both dtypes of 16 and 32 bits).
    """
    return max(1.0, 2.2 * n / x.element_size())


def whole_chunk(chunk: int) -> int:
    return -(-chunk // LARGEST_STEP) * LARGEST_STEP


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As chunked.forward."""
    sizes = Sizes.of(inputs, options)
    layout = _Layout.of(sizes, tile_of(sizes.d, sizes.n))
    x, new = inputs.x_RBLd, inputs.x_RBLd.new_empty
    A, D, bias, initial = _dense(inputs.A_Rdn, inputs.D_Rd, inputs.bias_Rd, inputs.initial_RBdn)
    y_BLd = new(sizes.batch, sizes.length, sizes.d)
    state, wide = (sizes.d, sizes.n), torch.float32
    kept = new(sizes.ways, sizes.batch, sizes.chunks, *state, dtype=wide) if options.keep_states else None
    final = new(sizes.ways, sizes.batch, *state, dtype=wide) if options.keep_final else None
    if y_BLd.numel() == 0:
        if final is not None:
            final.copy_(initial) if initial is not None else final.zero_()
        return y_BLd, final, kept
    entry = initial
    if layout.segments > 1:
        entry = _enter_segments(inputs, options, sizes, layout, x, inputs.B_RBLn, initial, gradient=False)
    KERNELS.launch(
        "scan_forward",
        (layout.programs,),
        y_BLd,
        x,
        inputs.delta_RBLd,
        A,
        inputs.B_RBLn,
        inputs.C_RBLn,
        D,
        inputs.z_BLd,
        bias,
        entry,
        kept,
        final,
        *_strides_of_ways(x),
        *inputs.delta_RBLd.stride(),
        *inputs.B_RBLn.stride(),
        *inputs.C_RBLn.stride(),
        *_strides_of_gate(inputs.z_BLd),
        sizes.batch,
        sizes.length,
        sizes.d,
        sizes.n,
        layout.segments,
        layout.segment_chunks,
        WAYS=sizes.ways,
        LEFTWARD=options.first_is_leftward,
        SOFTPLUS=options.softplus,
        K=options.chunk,
        S=layout.tile.step,
        passes=_passes(x, sizes.n),
        **layout.constants,
    )
    return y_BLd, final, kept


def backward(
    inputs: Inputs, options: Options, kept: Tensor, g_BLd: Tensor, g_final: Tensor | None, wanted: Wanted
) -> Gradients:
    """As chunked.backward."""
    sizes = Sizes.of(inputs, options)
    layout = _Layout.of(sizes, tile_of(sizes.d, sizes.n))
    ways, batch, length, d, n = sizes.ways, sizes.batch, sizes.length, sizes.d, sizes.n
    x, z = inputs.x_RBLd, inputs.z_BLd
    A, D, bias, g_final = _dense(inputs.A_Rdn, inputs.D_Rd, inputs.bias_Rd, g_final)

    def room(want: bool, *shape: int, like: Tensor | None = None) -> Tensor | None:
        if not want:
            return None
        return x.new_empty(shape, dtype=torch.float32 if like is None else like.dtype)

    segments = (ways, layout.segments, batch)
    channel_blocks = (ways, layout.tile.blocks(d), batch)
    dx = room(wanted.x, *x.shape, like=x)
    # Its sum over tokens is made on the way, so that the bias needs it made too.
    ddelta = room(wanted.delta or wanted.bias, *inputs.delta_RBLd.shape, like=inputs.delta_RBLd)
    dz = None if z is None else room(wanted.z, *z.shape, like=z)
    dA = room(wanted.A, *segments, d, n)
    dB = room(wanted.B, *channel_blocks, length, n)
    dC = room(wanted.C, *channel_blocks, length, n)
    dD = room(wanted.D, *segments, d)
    dbias = room(wanted.bias, *segments, d)
    dinitial = room(wanted.initial, ways, batch, d, n)
    if g_BLd.numel() == 0:
        for each in (dA, dB, dC, dD, dbias):
            if each is not None:
                each.zero_()
        if dinitial is not None:
            dinitial.copy_(g_final) if g_final is not None else dinitial.zero_()
    else:
        entry = g_final
        if layout.segments > 1:
            g_1BLd = g_BLd.unsqueeze(0)
            entry = _enter_segments(
                inputs, options, sizes, layout, g_1BLd, inputs.C_RBLn, g_final, gradient=True
            )
        rounds = options.chunk // layout.tile.step
        spare = x.new_empty(layout.programs, rounds, *layout.tile_shape, dtype=torch.float32)
        KERNELS.launch(
            "scan_backward",
            (layout.programs,),
            g_BLd,
            x,
            inputs.delta_RBLd,
            A,
            inputs.B_RBLn,
            inputs.C_RBLn,
            D,
            z,
            bias,
            entry,
            kept,
            spare,
            dx,
            ddelta,
            dA,
            dB,
            dC,
            dD,
            dz,
            dbias,
            dinitial,
            *g_BLd.stride(),
            *_strides_of_ways(x),
            *inputs.delta_RBLd.stride(),
            *inputs.B_RBLn.stride(),
            *inputs.C_RBLn.stride(),
            *_strides_of_gate(z),
            batch,
            length,
            d,
            n,
            layout.segments,
            layout.segment_chunks,
            WAYS=ways,
            LEFTWARD=options.first_is_leftward,
            SHARED_X=x.shape[0] == 1,
            SOFTPLUS=options.softplus,
            K=options.chunk,
            S=layout.tile.step,
            passes=_passes(x, n),
            **layout.constants,
        )
    return Gradients(
        dx,
        ddelta if wanted.delta else None,
        _summed(dA, inputs.A_Rdn, (1, 2)),
        _summed(dB, inputs.B_RBLn, (1,)),
        _summed(dC, inputs.C_RBLn, (1,)),
        _summed(dD, inputs.D_Rd, (1, 2)),
        dz,
        _summed(dbias, inputs.bias_Rd, (1, 2)),
        None if dinitial is None or inputs.initial_RBdn is None else dinitial.to(inputs.initial_RBdn.dtype),
    )


@dataclass(frozen=True)
class _Layout:
    """How the work is cut into programs."""

    tile: Tile
    segments: int
    segment_chunks: int
    programs: int

    @staticmethod
    def of(sizes: Sizes, tile: Tile) -> "_Layout":
        side_by_side = max(1, tile.blocks(sizes.d) * sizes.batch)
        segments = PROGRAMS // side_by_side
        if segments < FEWEST_SEGMENTS:
            segments = 1
        segment_chunks = max(1, -(-sizes.chunks // segments))
        segments = max(1, -(-sizes.chunks // segment_chunks))
        return _Layout(tile, segments, segment_chunks, side_by_side * segments)

    @property
    def tile_shape(self) -> tuple[int, int]:
        return self.tile.channels, self.tile.numbers

    @property
    def constants(self) -> dict[str, int]:
        tile = self.tile
        return {"BD": tile.channels, "N": tile.numbers, "num_warps": tile.warps, "maxnreg": tile.registers}


def _enter_segments(
    inputs: Inputs,
    options: Options,
    sizes: Sizes,
    layout: _Layout,
    value: Tensor,
    vector_RBLn: Tensor,
    entry_RBdn: Tensor | None,
    gradient: bool,
) -> Tensor:
    """The state that enters every segment [R, segments, B, d, n], or with `gradient` the state's gradient."""
    A, bias = _dense(inputs.A_Rdn, inputs.bias_Rd)
    shape = (sizes.ways, layout.segments, sizes.batch, sizes.d)
    ends = value.new_empty(*shape, sizes.n, dtype=torch.float32)
    sums = value.new_empty(shape, dtype=torch.float32)
    z_BLd = inputs.z_BLd if gradient else None
    SEGMENT_KERNELS.launch(
        "segment_ends",
        (layout.programs,),
        ends,
        sums,
        value,
        inputs.delta_RBLd,
        A,
        vector_RBLn,
        z_BLd,
        bias,
        *_strides_of_ways(value),
        *inputs.delta_RBLd.stride(),
        *vector_RBLn.stride(),
        *_strides_of_gate(z_BLd),
        sizes.batch,
        sizes.length,
        sizes.d,
        sizes.n,
        layout.segments,
        layout.segment_chunks * options.chunk,
        WAYS=sizes.ways,
        LEFTWARD=options.first_is_leftward,
        GRADIENT=gradient,
        SOFTPLUS=options.softplus,
        **layout.constants,
    )
    SEGMENT_KERNELS.launch(
        "link_segments",
        (layout.tile.blocks(sizes.d) * sizes.batch * sizes.ways,),
        ends,
        sums,
        A,
        entry_RBdn,
        sizes.batch,
        sizes.d,
        sizes.n,
        layout.segments,
        LEFTWARD=options.first_is_leftward,
        GRADIENT=gradient,
        **layout.constants,
    )
    return ends


def _strides_of_ways(tensor: Tensor) -> tuple[int, ...]:
    """Of [R, B, L, d]; where both directions share it, the second finds it in the same place."""
    return (0 if tensor.shape[0] == 1 else tensor.stride(0), *tensor.stride()[1:])


def _strides_of_gate(z_BLd: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if z_BLd is None else z_BLd.stride()


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    """The small ones are read without strides."""
    return [None if each is None else each.contiguous() for each in tensors]


def _summed(parts: Tensor | None, of: Tensor | None, dims: tuple[int, ...]) -> Tensor | None:
    if parts is None or of is None:
        return None
    if all(parts.shape[dim] == 1 for dim in dims):
        return parts.view(of.shape).to(of.dtype)
    return parts.sum(dim=dims).to(of.dtype)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
