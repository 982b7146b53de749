"""The activation of an MLP and its derivative over the buffers of one tile; fp32 or fp64 inside.

Every element is read before it is written, so a result may take the memory of what it is computed from.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def _wide(value):
    """fp32, or float64 where the memory is."""
    if value.dtype == tl.float64:
        return value
    else:
        return value.to(tl.float32)


@triton.jit
def _value_and_slope(z, ACTIVATION: tl.constexpr):
    """act(z) and act'(z)."""
    if ACTIVATION == "silu":
        small = tl.exp(-tl.abs(z))  # never overflows
        sigmoid = tl.where(z >= 0.0, 1.0, small) / (1.0 + small)
        value = z * sigmoid
        slope = sigmoid * (1.0 + z * (1.0 - sigmoid))
    elif ACTIVATION == "gelu":
        below = 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476))  # P(normal < z)
        value = z * below
        slope = below + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (z + 0.044715 * z * z * z)
        small = tl.exp(-2.0 * tl.abs(inner))
        tanh = tl.where(inner >= 0.0, 1.0 - small, small - 1.0) / (1.0 + small)
        value = 0.5 * z * (1.0 + tanh)
        inner_slope = 0.7978845608028654 * (1.0 + 0.134145 * z * z)
        slope = 0.5 * (1.0 + tanh) + 0.5 * z * (1.0 - tanh * tanh) * inner_slope
    else:
        # Written so that NaN stays NaN, as in torch: comparisons with NaN are false.
        value = tl.where(z <= 0.0, 0.0, z)
        slope = tl.where(z <= 0.0, 0.0, 1.0)
    return value, slope


@triton.jit
def activate(
    gate_ptr, up_ptr, hidden_ptr, count, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """Gated: hidden := act(gate) * up. Else: hidden := act(up)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    up = _wide(tl.load(up_ptr + at, mask=inside, other=0.0))
    if GATED:
        gate = _wide(tl.load(gate_ptr + at, mask=inside, other=0.0))
        value, _ = _value_and_slope(gate, ACTIVATION)
        tl.store(hidden_ptr + at, (value * up).to(hidden_ptr.dtype.element_ty), mask=inside)
    else:
        value, _ = _value_and_slope(up, ACTIVATION)
        tl.store(hidden_ptr + at, value.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit
def differentiate(
    gate_ptr, up_ptr, grad_ptr, d_gate_ptr, hidden_ptr, count,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From gate, up and grad = d hidden: d gate and hidden where they are to go, d up in place of grad."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    up = _wide(tl.load(up_ptr + at, mask=inside, other=0.0))
    grad = _wide(tl.load(grad_ptr + at, mask=inside, other=0.0))
    half = up_ptr.dtype.element_ty
    if GATED:
        gate = _wide(tl.load(gate_ptr + at, mask=inside, other=0.0))
        value, slope = _value_and_slope(gate, ACTIVATION)
        tl.store(d_gate_ptr + at, (grad * up * slope).to(half), mask=inside)
        tl.store(hidden_ptr + at, (value * up).to(half), mask=inside)
        tl.store(grad_ptr + at, (grad * value).to(half), mask=inside)
    else:
        value, slope = _value_and_slope(up, ACTIVATION)
        tl.store(hidden_ptr + at, value.to(half), mask=inside)
        tl.store(grad_ptr + at, (grad * slope).to(half), mask=inside)
