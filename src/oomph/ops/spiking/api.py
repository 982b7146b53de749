"""The leaky integrate-and-fire gate, in plain torch and in Triton kernels; reference.py defines it.

Legend: B batch, T time, N channels (all trailing dimensions as one), S the steps of one slice of time.

Saved for backward: the slope sigmoid'(beta (m - threshold)) of each spike, [B, T, N] in the dtype of the
drive, and not the drive, which nothing else saves where it is the output of a linear layer. The slope and not
the membrane, because rounding it to 16 bits costs a constant 0.2 %, where a rounded membrane would be
multiplied by beta in the exponent.

With G_t the gradient of the membrane before the reset, c_t = beta * slope_t and g_t that of the one after:
    G_t = g_t + (grad_spikes_t - threshold * g_t) * c_t        g_{t-1} = decay * G_t
    grad_drive_t = G_t        grad_initial = g_{-1}
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import contiguous_rows, wide_dtype
from oomph.ops.spiking.reference import lif_gate_reference
from oomph.units import MiB

IMPLS = ("auto", "reference", "chunked", "triton")


def choose(drive: Tensor, impl: str, **options: Any) -> common.Choice:
    common.check_one_of("impl", impl, IMPLS)
    _check(drive, **options)
    return common.choose_triton_or_torch(
        impl,
        drive,
        common.why_not_triton(drive),
        kernels="on CUDA one kernel loops over time, where plain torch launches several per step",
        plain="a loop over time in plain torch",
    )


@common.explained_by(choose)
@common.opaque_op
def lif_gate(
    drive: Tensor,
    *,
    decay: float,
    threshold: float,
    surrogate_beta: float,
    initial: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A leaky integrate-and-fire neuron per channel: (spikes, membrane); reference.py has the definition.

    drive [B, T, ...], time second. spikes, of the same shape and dtype, are 0 or 1 (NaN from where the drive
    is NaN). membrane [B, ...] is the state after the last step and its reset, in float32 (float64 for float64
    drives): given as `initial` of the next call, it continues the sequence, gradients included.
    With T = 0 it is `initial`, or zeros.

    decay in [0, 1], threshold > 0. The gradient of a spike by its membrane is that of
    sigmoid(surrogate_beta * (m - threshold)), and also flows through the reset.

    Membranes are float32 or wider whatever the dtype, with the same roundings in every implementation. Saved
    for backward: the slope of each spike in the dtype of the drive, as large as the drive, which is not
    saved. Second derivatives are refused, except by impl="reference".

    impl: "auto", "chunked" (plain torch), "triton" (one kernel forward, one backward), "reference".
    """
    choice = common.log_choice("lif_gate", choose(**locals()))
    if choice.impl == "reference":
        return lif_gate_reference(drive, decay, threshold, surrogate_beta, initial)
    batch, trailing = drive.shape[0], drive.shape[2:]
    channels = trailing.numel()
    spikes_BTN, membrane_BN = _LIFGate.apply(
        drive.reshape(batch, drive.shape[1], channels),
        None if initial is None else initial.reshape(batch, channels),
        _Constants(float(decay), float(threshold), float(surrogate_beta)),
        choice.impl,
        torch.is_grad_enabled(),  # here, because it is always off within an autograd function
    )
    return spikes_BTN.view(drive.shape), membrane_BN.view(batch, *trailing)


def _check(
    drive: Tensor, decay: float, threshold: float, surrogate_beta: float, initial: Tensor | None
) -> None:
    common.check_floating(drive=drive, **common.not_none(initial=initial))
    if drive.dim() < 2:
        raise ArgumentError(f"drive has shape {list(drive.shape)}; valid: [B, T, ...]")
    positive = {"threshold": threshold, "surrogate_beta": surrogate_beta}
    common.check_number("a number > 0", lambda value: 0 < value < math.inf, **positive)
    common.check_number("a number in [0, 1]", lambda value: 0 <= value <= 1, decay=decay)
    common.check_shape((drive.shape[0], *drive.shape[2:]), ", [B, ...]", initial=initial)
    common.check_same_device(drive=drive, initial=initial)


class _Constants(NamedTuple):
    decay: float
    threshold: float
    surrogate_beta: float


class _LIFGate(common.OpFunction):
    op = "lif_gate"

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        drive_BTN: Tensor,
        initial_BN: Tensor | None,
        constants: _Constants,
        impl: str,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        spikes_BTN = drive_BTN.new_empty(drive_BTN.shape)
        slope_BTN = torch.empty_like(spikes_BTN) if grad_enabled and any(ctx.needs_input_grad) else None
        run = _triton_forward if impl == "triton" else _torch_forward
        with common.no_autocast(drive_BTN):
            membrane_BN = run(drive_BTN, initial_BN, constants, spikes_BTN, slope_BTN)
        ctx.save_for_backward(slope_BTN)
        ctx.constants, ctx.impl = constants, impl
        ctx.initial_dtype = None if initial_BN is None else initial_BN.dtype
        ctx.set_materialize_grads(False)  # zeros for unused spikes would be as large as the spikes
        return spikes_BTN, membrane_BN

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_spikes_BTN: Tensor | None, grad_membrane_BN: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        common.refuse_second_derivatives("lif_gate")
        (slope_BTN,) = ctx.saved_tensors
        want_drive, want_initial, *_ = ctx.needs_input_grad
        if grad_spikes_BTN is None and grad_membrane_BN is None:
            return (None,) * 5
        run = _triton_backward if ctx.impl == "triton" else _torch_backward
        with common.no_autocast(slope_BTN):
            grad_drive_BTN, grad_initial_BN = run(slope_BTN, grad_spikes_BTN, grad_membrane_BN, ctx.constants)
        return (
            grad_drive_BTN if want_drive else None,
            grad_initial_BN.to(ctx.initial_dtype) if want_initial else None,
            *(None, None, None),
        )


# Plain torch: a loop over time that holds a few MiB of it in float32 ---------------------------------

_SLICE_BYTES = 4 * MiB


def _torch_forward(
    drive_BTN: Tensor,
    initial_BN: Tensor | None,
    constants: _Constants,
    spikes_BTN: Tensor,
    slope_BTN: Tensor | None,
) -> Tensor:
    """The final membrane. Spikes and slope are written."""
    wide = wide_dtype(drive_BTN.dtype)
    batch, tokens, channels = drive_BTN.shape
    membrane_BN = drive_BTN.new_zeros(batch, channels, dtype=wide)
    if initial_BN is not None:
        membrane_BN.copy_(initial_BN)
    leaked_BN, fired_BN = torch.empty_like(membrane_BN), torch.empty_like(membrane_BN)
    steps = _steps_per_slice(drive_BTN, wide)
    for start in range(0, tokens, steps):
        times = slice(start, start + steps)
        # The drive at first, then the membranes between integration and reset.
        charged_SBN = _time_first(drive_BTN[:, times], wide)
        for charged_BN in charged_SBN.unbind(0):
            # One rounding per product and per sum, as in the kernel, so that both fire at the same steps.
            torch.mul(membrane_BN, constants.decay, out=leaked_BN)
            charged_BN.add_(leaked_BN)
            torch.gt(charged_BN, constants.threshold, out=fired_BN)
            torch.sub(charged_BN, fired_BN, alpha=constants.threshold, out=membrane_BN)
        # NaN fires as NaN: an error must not look like silence.
        spikes_SBN = torch.where(charged_SBN.isnan(), charged_SBN, charged_SBN > constants.threshold)
        spikes_BTN[:, times].copy_(spikes_SBN.transpose(0, 1))
        del spikes_SBN
        if slope_BTN is not None:
            slope_BTN[:, times].copy_(_slope_(charged_SBN, constants).transpose(0, 1))
    return membrane_BN


def _torch_backward(
    slope_BTN: Tensor,
    grad_spikes_BTN: Tensor | None,
    grad_membrane_BN: Tensor | None,
    constants: _Constants,
) -> tuple[Tensor, Tensor]:
    """The gradients of drive [B, T, N] and initial [B, N]."""
    wide = wide_dtype(slope_BTN.dtype)
    batch, tokens, channels = slope_BTN.shape
    grad_BN = slope_BTN.new_zeros(batch, channels, dtype=wide)
    if grad_membrane_BN is not None:
        grad_BN.copy_(grad_membrane_BN)
    grad_drive_BTN = torch.empty_like(slope_BTN, memory_format=torch.contiguous_format)
    steps = _steps_per_slice(slope_BTN, wide)
    for start in reversed(range(0, tokens, steps)):
        times = slice(start, start + steps)
        slope_SBN = _time_first(slope_BTN[:, times], wide).mul_(constants.surrogate_beta)
        # The part of the spikes' gradient at first, then the gradient of the drive.
        grad_SBN = torch.zeros_like(slope_SBN)
        if grad_spikes_BTN is not None:
            grad_SBN.copy_(grad_spikes_BTN[:, times].transpose(0, 1)).mul_(slope_SBN)
        through_SBN = slope_SBN.mul_(-constants.threshold).add_(1)
        for through_BN, now_BN in zip(
            reversed(through_SBN.unbind(0)), reversed(grad_SBN.unbind(0)), strict=True
        ):
            now_BN.addcmul_(through_BN, grad_BN)
            torch.mul(now_BN, constants.decay, out=grad_BN)
        grad_drive_BTN[:, times].copy_(grad_SBN.transpose(0, 1))
    return grad_drive_BTN, grad_BN


def _slope_(charged_SBN: Tensor, constants: _Constants) -> Tensor:
    """sigmoid'(beta (m - threshold)), in the memory of m; exp never of a positive number."""
    exponent = charged_SBN.sub_(constants.threshold).mul_(constants.surrogate_beta).abs_().neg_()
    small = exponent.exp_()
    return small.div_((small + 1).square_())


def _time_first(x_BTN: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, B, N], so that a step is contiguous."""
    batch, steps, channels = x_BTN.shape
    return x_BTN.new_empty(steps, batch, channels, dtype=dtype).copy_(x_BTN.transpose(0, 1))


def _steps_per_slice(x_BTN: Tensor, wide: torch.dtype) -> int:
    batch, tokens, channels = x_BTN.shape
    return max(1, min(tokens, _SLICE_BYTES // max(1, batch * channels * wide.itemsize)))


# Triton: a program goes through time with a block of channels ----------------------------------------

_KERNELS = common.Kernels("oomph.ops.spiking.kernels")
# Channels of a program. Chosen among three on an H200 that other programs used at the same time: rough.
_FORWARD_CHANNELS, _BACKWARD_CHANNELS = 32, 64
_STEPS = 16  # loaded before the first of them is needed, so that their latencies overlap


def _triton_forward(
    drive_BTN: Tensor,
    initial_BN: Tensor | None,
    constants: _Constants,
    spikes_BTN: Tensor,
    slope_BTN: Tensor | None,
) -> Tensor:
    """As _torch_forward."""
    batch, tokens, channels = drive_BTN.shape
    drive_BTN = contiguous_rows(drive_BTN)
    membrane_BN = drive_BTN.new_empty(batch, channels, dtype=wide_dtype(drive_BTN.dtype))
    if membrane_BN.numel():
        _KERNELS.launch(
            "lif_forward",
            (batch * -(-channels // _FORWARD_CHANNELS),),
            drive_BTN, spikes_BTN, slope_BTN, membrane_BN,
            None if initial_BN is None else initial_BN.contiguous(),
            tokens, channels, *drive_BTN.stride()[:2],
            *constants,
            HAS_INITIAL=initial_BN is not None,
            KEEP_SLOPE=slope_BTN is not None,
            **_compile_constants(membrane_BN.dtype, _FORWARD_CHANNELS),
        )  # fmt: skip
    return membrane_BN


def _triton_backward(
    slope_BTN: Tensor,
    grad_spikes_BTN: Tensor | None,
    grad_membrane_BN: Tensor | None,
    constants: _Constants,
) -> tuple[Tensor, Tensor]:
    """As _torch_backward."""
    batch, tokens, channels = slope_BTN.shape
    grad_spikes_BTN = None if grad_spikes_BTN is None else contiguous_rows(grad_spikes_BTN)
    grad_drive_BTN = torch.empty_like(slope_BTN)
    grad_initial_BN = slope_BTN.new_empty(batch, channels, dtype=wide_dtype(slope_BTN.dtype))
    if grad_initial_BN.numel():
        _KERNELS.launch(
            "lif_backward",
            (batch * -(-channels // _BACKWARD_CHANNELS),),
            slope_BTN, grad_spikes_BTN,
            None if grad_membrane_BN is None else grad_membrane_BN.contiguous(),
            grad_drive_BTN, grad_initial_BN,
            tokens, channels, *((0, 0) if grad_spikes_BTN is None else grad_spikes_BTN.stride()[:2]),
            *constants,
            HAS_GRAD_SPIKES=grad_spikes_BTN is not None,
            HAS_GRAD_MEMBRANE=grad_membrane_BN is not None,
            **_compile_constants(grad_initial_BN.dtype, _BACKWARD_CHANNELS),
        )  # fmt: skip
    return grad_drive_BTN, grad_initial_BN


def _compile_constants(wide: torch.dtype, channels: int) -> dict[str, Any]:
    return {
        "DOUBLE": wide == torch.float64,
        "BLOCK": channels,
        "STEPS": _STEPS,
        "num_warps": 1,
        # A fused multiply-add rounds once where torch rounds twice: channels near the threshold would fire
        # at other steps than on the CPU.
        "enable_fp_fusion": False,
    }
