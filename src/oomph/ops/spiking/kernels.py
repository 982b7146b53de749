# mypy: disable-error-code="no-untyped-def,valid-type,assignment"
"""Triton kernels of the gate. A program loops over time with a block of channels of one sequence.

Legend: B batch, T time, N channels. The inputs of STEPS steps are loaded together, while the STEPS before
them are computed: a load takes much longer than a step's arithmetic, and each step depends on the last.
"""

import triton
import triton.language as tl


@triton.jit
def _load_steps(pointers, step, inside, left, STEPS: tl.constexpr):
    """The rows at pointers, pointers + step, ... as a tuple; zeros for those from `left` on."""
    rows = ()
    for i in tl.static_range(STEPS):
        rows = rows + (tl.load(pointers + i * step, mask=inside & (i < left), other=0.0),)  # noqa: RUF005
    return rows


@triton.jit
def lif_forward(
    drive_ptr, spikes_ptr, slope_ptr, membrane_ptr, initial_ptr,
    T, N, drive_b, drive_t,
    decay: tl.float64, threshold: tl.float64, surrogate_beta: tl.float64,
    HAS_INITIAL: tl.constexpr, KEEP_SLOPE: tl.constexpr,
    DOUBLE: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """drive [B, T, N] -> spikes and slope [B, T, N], membrane [B, N]."""
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    theta = tl.full((BLOCK,), threshold, WIDE)
    steepness = tl.full((BLOCK,), surrogate_beta, WIDE)
    leak = tl.full((BLOCK,), decay, WIDE)
    m = tl.zeros((BLOCK,), WIDE)
    if HAS_INITIAL:
        m = tl.load(initial_ptr + row * N + columns, mask=inside, other=0.0).to(WIDE)

    # Offsets in 64 bits; full() rather than to(), because Triton makes a stride of 1 a constant.
    drive_step, step = tl.full((), drive_t, tl.int64), tl.full((), N, tl.int64)
    drive_at = drive_ptr + row * drive_b + columns
    offset = row * T * N + columns  # in contiguous tensors
    drives = _load_steps(drive_at, drive_step, inside, T, STEPS)
    for start in range(0, T, STEPS):
        drive_at += STEPS * drive_step
        following = _load_steps(drive_at, drive_step, inside, T - start - STEPS, STEPS)
        for i in tl.static_range(STEPS):
            live = inside & (start + i < T)
            charged = leak * m + drives[i].to(WIDE)
            fired = charged > theta
            spike = tl.where(charged == charged, fired.to(WIDE), charged)  # NaN fires as NaN
            tl.store(spikes_ptr + offset + i * step, spike, mask=live)
            if KEEP_SLOPE:
                small = tl.exp(-tl.abs(steepness * (charged - theta)))
                tl.store(slope_ptr + offset + i * step, small / ((1 + small) * (1 + small)), mask=live)
            m = tl.where(live, tl.where(fired, charged - theta, charged), m)
        offset += STEPS * step
        drives = following
    tl.store(membrane_ptr + row * N + columns, m, mask=inside)


@triton.jit
def lif_backward(
    slope_ptr, grad_spikes_ptr, grad_membrane_ptr, grad_drive_ptr, grad_initial_ptr,
    T, N, grad_b, grad_t,
    decay: tl.float64, threshold: tl.float64, surrogate_beta: tl.float64,
    HAS_GRAD_SPIKES: tl.constexpr, HAS_GRAD_MEMBRANE: tl.constexpr,
    DOUBLE: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """From the last step to the first: grad_drive [B, T, N], grad_initial [B, N]."""
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    theta = tl.full((BLOCK,), threshold, WIDE)
    steepness = tl.full((BLOCK,), surrogate_beta, WIDE)
    leak = tl.full((BLOCK,), decay, WIDE)
    g = tl.zeros((BLOCK,), WIDE)
    if HAS_GRAD_MEMBRANE:
        g = tl.load(grad_membrane_ptr + row * N + columns, mask=inside, other=0.0).to(WIDE)

    # Steps of negative length: from the last row backwards.
    grad_step, step = -tl.full((), grad_t, tl.int64), -tl.full((), N, tl.int64)
    offset = row * T * N + columns - (T - 1) * step
    slopes = _load_steps(slope_ptr + offset, step, inside, T, STEPS)
    if HAS_GRAD_SPIKES:
        grad_at = grad_spikes_ptr + row * grad_b + columns - (T - 1) * grad_step
        grads = _load_steps(grad_at, grad_step, inside, T, STEPS)
    for start in range(0, T, STEPS):
        left = T - start - STEPS
        ahead = offset + STEPS * step
        next_slopes = _load_steps(slope_ptr + ahead, step, inside, left, STEPS)
        if HAS_GRAD_SPIKES:
            grad_at += STEPS * grad_step
            next_grads = _load_steps(grad_at, grad_step, inside, left, STEPS)
        for i in tl.static_range(STEPS):
            live = inside & (start + i < T)
            slope = steepness * slopes[i].to(WIDE)
            now = g * (1 - theta * slope)
            if HAS_GRAD_SPIKES:
                now += grads[i].to(WIDE) * slope
            tl.store(grad_drive_ptr + offset + i * step, now, mask=live)
            g = tl.where(live, leak * now, g)
        offset = ahead
        slopes = next_slopes
        if HAS_GRAD_SPIKES:
            grads = next_grads
    tl.store(grad_initial_ptr + row * N + columns, g, mask=inside)
