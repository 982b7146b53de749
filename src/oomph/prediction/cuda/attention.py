"""scaled_dot_product_attention as CUDA runs it: which backend is chosen, and the operators it then calls.

The rules follow torch 2.11 built for CUDA 13 (sdp_utils.cpp and attention.cpp of ATen). A trace runs on
tensors that are on a fake GPU, so the choice cannot be left to torch: it would choose for a CPU.

Query is [batch, heads, L, head size]; key and value are [batch, key/value heads, S, head size].
"""

import enum
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.deterministic import deterministic_required
from oomph.prediction.cuda.rules import program_error
from oomph.torch_internals import get_sdp_priority_order

aten = torch.ops.aten
Capability = tuple[int, int]


class Backend(enum.Enum):
    """The values are torch's own numbers for its backends (torch._fused_sdp_choice)."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


_GENERIC_ORDER = (Backend.FLASH, Backend.EFFICIENT, Backend.MATH, Backend.CUDNN)
_CUDNN_FIRST_ORDER = (Backend.CUDNN, Backend.FLASH, Backend.EFFICIENT, Backend.MATH)

# The cuDNN that the torch 2.11 wheels for CUDA 13 bring; used where the running torch has none.
SHIPPED_CUDNN = 91900

# cuDNN takes head sizes above 128 on Hopper only, and only from this version on. Newer torch (after 2.11)
# waits for cuDNN 9.22 instead.
_CUDNN_WIDE_HEADS = 91000


@dataclass(frozen=True)
class Operand:
    """What the choice looks at in one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @staticmethod
    def of(tensor: Tensor) -> "Operand":
        return Operand(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)


@dataclass(frozen=True)
class AttentionCall:
    """One call of scaled_dot_product_attention on a GPU of the given compute capability."""

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    grad_enabled: bool = True
    capability: Capability = (9, 0)

    @property
    def differentiable(self) -> bool:
        """Will a backward pass follow? The mask does not count, as in torch."""
        inputs = (self.query, self.key, self.value)
        return self.grad_enabled and any(operand.requires_grad for operand in inputs)


@dataclass(frozen=True)
class SdpaSettings:
    """What the user allows, and which cuDNN is there."""

    enabled: frozenset[Backend] = frozenset(Backend)
    order: tuple[Backend, ...] | None = None  # None: torch's own default for the GPU
    cudnn_version: int = SHIPPED_CUDNN
    prefer_cudnn: bool = True
    deterministic: bool = False

    @staticmethod
    def current() -> "SdpaSettings":
        """Those in force: torch.nn.attention.sdpa_kernel, torch.backends.cuda.enable_*_sdp, environment."""
        flags = {
            Backend.MATH: torch.backends.cuda.math_sdp_enabled(),
            Backend.FLASH: torch.backends.cuda.flash_sdp_enabled(),
            Backend.EFFICIENT: torch.backends.cuda.mem_efficient_sdp_enabled(),
            Backend.CUDNN: torch.backends.cuda.cudnn_sdp_enabled(),
        }
        numbers = {backend.value: backend for backend in Backend}
        order = tuple(numbers[n] for n in get_sdp_priority_order() if n in numbers)
        # Either default may be in force, depending on the machine that predicts; neither is the user's wish.
        user_order = None if order in (_GENERIC_ORDER, _CUDNN_FIRST_ORDER) else order
        return SdpaSettings(
            enabled=frozenset(backend for backend, allowed in flags.items() if allowed),
            order=user_order,
            cudnn_version=torch.backends.cudnn.version() or SHIPPED_CUDNN,
            prefer_cudnn=os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1",
            deterministic=deterministic_required(),
        )


def choose_backend(call: AttentionCall, settings: SdpaSettings | None = None) -> tuple[Backend, str]:
    """The backend CUDA would run, and why those before it in torch's order were passed over."""
    settings = settings or SdpaSettings.current()
    passed_over: list[str] = []
    for backend in settings.order or _default_order(call, settings):
        objection = _objection(backend, call, settings)
        if objection is None:
            return backend, "; ".join(passed_over) or "first choice on sm_{}{}".format(*call.capability)
        passed_over.append(f"{backend.name.lower()}: {objection}")
    raise program_error(
        RuntimeError(f"scaled_dot_product_attention: no backend can run ({'; '.join(passed_over)})")
    )


def _default_order(call: AttentionCall, settings: SdpaSettings) -> tuple[Backend, ...]:
    # cuDNN 9.15.1 fixed lengths that are not multiples of 128; before it, torch does not put cuDNN first.
    cudnn_first = settings.prefer_cudnn and settings.cudnn_version > 91500 and call.capability[0] in (9, 10)
    return _CUDNN_FIRST_ORDER if cudnn_first else _GENERIC_ORDER


def _objection(backend: Backend, call: AttentionCall, settings: SdpaSettings) -> str | None:
    if backend not in settings.enabled:
        return "switched off"
    if backend is Backend.MATH:
        return None
    ranks = {len(call.query.shape), len(call.key.shape), len(call.value.shape)}
    if ranks != {4}:
        return "query, key and value must have 4 dimensions"
    objection = _shared_objection(call, backend)
    if objection is not None:
        return objection
    specific: dict[Backend, Callable[[AttentionCall, SdpaSettings], str | None]] = {
        Backend.FLASH: _flash_objection,
        Backend.EFFICIENT: _efficient_objection,
        Backend.CUDNN: _cudnn_objection,
    }
    return specific[backend](call, settings)


def _shared_objection(call: AttentionCall, backend: Backend) -> str | None:
    """Limits that all fused kernels have, in their own variations."""
    q, k, v = call.query, call.key, call.value
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return "batch sizes differ"
    if 0 in (q.shape[2], k.shape[2]):
        return "empty sequence"
    heads, key_heads, value_heads = q.shape[1], k.shape[1], v.shape[1]
    if call.enable_gqa and backend is not Backend.EFFICIENT:
        if backend is Backend.FLASH and key_heads != value_heads:
            return "key and value have different numbers of heads"
        if heads % key_heads or heads % value_heads:
            return "key/value heads do not divide query heads"
    elif not heads == key_heads == value_heads:
        return "numbers of heads differ"
    unit_strides = all(operand.stride[-1] == 1 for operand in (q, k, v))
    if not unit_strides and not (backend is not Backend.EFFICIENT and q.shape[-1] == 1):
        return "last dimension is not contiguous"
    if call.mask is not None and call.mask.stride[-1] != 1:
        return "mask's last dimension is not contiguous"
    return None


def _flash_objection(call: AttentionCall, settings: SdpaSettings) -> str | None:
    q, k, v = call.query, call.key, call.value
    if call.mask is not None:
        return "no attention mask"
    if not (q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256):
        return "head sizes must be equal and at most 256"
    if not (8, 0) <= call.capability <= (12, 1):
        return "needs sm_80 or later"
    if call.differentiable and _small_shared_memory(call.capability):
        head = q.shape[-1]
        if 192 < head <= 224 or (head > 224 and call.dropout_p > 0):
            return f"no backward for head size {head} on this GPU"
    if call.is_causal and q.shape[2] != k.shape[2]:
        return "causal needs equal query and key lengths"
    return _low_precision_objection(call)


def _small_shared_memory(capability: Capability) -> bool:
    """GPUs with 99 KiB of shared memory per block, where flash's widest backward kernels do not fit."""
    return (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)


def _efficient_objection(call: AttentionCall, settings: SdpaSettings) -> str | None:
    q, k, v = call.query, call.key, call.value
    if not (5, 0) <= call.capability <= (12, 1):
        return "unsupported GPU"
    alignment = _efficient_alignment(q.dtype, call.capability)
    if q.shape[-1] != k.shape[-1]:
        return "query and key head sizes differ"
    if any(size == 0 or size % alignment for size in (q.shape[-1], v.shape[-1])):
        return f"head size is not a multiple of {alignment}"
    return _dtype_objection(call, {torch.float16, torch.float32})


def _efficient_alignment(dtype: torch.dtype, capability: Capability) -> int:
    half = dtype in (torch.float16, torch.bfloat16)
    tensor_cores = capability[0] >= 8 or (capability[0] == 7 and half)
    smallest = 4 if capability[0] >= 8 else 1
    return max(smallest, 128 // (16 if half else 32)) if tensor_cores else smallest


def _cudnn_objection(call: AttentionCall, settings: SdpaSettings) -> str | None:
    q, k, v = call.query, call.key, call.value
    if settings.cudnn_version < 90000:
        return "cuDNN older than 9"
    if call.dropout_p > 0 and 91100 < settings.cudnn_version < 91400:
        return "cuDNN 9.11 to 9.13 has no dropout"
    if settings.deterministic:
        return "not deterministic"
    if not (8, 0) <= call.capability <= (12, 1):
        return "needs sm_80 or later"
    objection = _low_precision_objection(call) or _cudnn_mask_objection(call)
    if objection is not None:
        return objection
    heads = (q.shape[-1], v.shape[-1])
    if max(heads) > _cudnn_widest_head(call.capability, settings.cudnn_version, heads):
        return f"head size {max(heads)} is too large"
    if any(size % 8 for size in heads):
        return "head size is not a multiple of 8"
    if k.shape[2] == 1:
        return "key length 1"
    if call.dropout_p != 0 and q.shape[2] == 1:
        return "query length 1 with dropout"
    return None


def _cudnn_widest_head(capability: Capability, version: int, heads: tuple[int, int]) -> int:
    if capability == (9, 0) and version >= _CUDNN_WIDE_HEADS:
        return 256
    if capability[0] == 10 and version >= 91100 and heads == (192, 128):
        return 192
    return 128


def _cudnn_mask_objection(call: AttentionCall) -> str | None:
    mask = call.mask
    if mask is None:
        return None
    if mask.requires_grad:
        return "mask requires a gradient"
    full = (call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2])
    rank = len(mask.shape)
    if rank not in (2, 4) or any(m not in (1, f) for m, f in zip(mask.shape, full[4 - rank :], strict=True)):
        return "mask shape does not broadcast from 2 or 4 dimensions"
    return None


def _low_precision_objection(call: AttentionCall) -> str | None:
    return _dtype_objection(call, {torch.float16})


def _dtype_objection(call: AttentionCall, allowed: set[torch.dtype]) -> str | None:
    if call.capability >= (8, 0):
        allowed = allowed | {torch.bfloat16}
    dtypes = {call.query.dtype, call.key.dtype, call.value.dtype}
    if len(dtypes) == 1 and dtypes <= allowed:
        return None
    return f"no kernel for {str(call.query.dtype).removeprefix('torch.')}"


def attention_like_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    capability: Capability,
) -> Tensor:
    """Run the operators, and so make the allocations, that CUDA's scaled_dot_product_attention would.

    Only aten operators are called; autograd's own formulas give the backward. Tensors are created from the
    inputs (new_full, new_ones), never by bare factory functions, so that they inherit the fake device.
    """
    call = AttentionCall(
        Operand.of(query),
        Operand.of(key),
        Operand.of(value),
        None if attn_mask is None else Operand.of(attn_mask),
        dropout_p,
        is_causal,
        enable_gqa,
        torch.is_grad_enabled(),
        capability,
    )
    backend, _ = choose_backend(call)
    mask = None if attn_mask is None else _as_float_mask(attn_mask, query.dtype)
    if backend is Backend.FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend is Backend.CUDNN:
        out: Tensor = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.differentiable, dropout_p, is_causal, False, scale=scale
        )[0]
        return out
    if backend is Backend.EFFICIENT:
        if mask is not None:
            mask = _aligned_mask(mask).expand(query.size(0), query.size(1), query.size(2), key.size(2))
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, call.differentiable, dropout_p, is_causal, scale=scale
        )[0]
        return out
    return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)


def _as_float_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask becomes one to add: 0 where attention is allowed, -inf elsewhere."""
    if mask.dtype != torch.bool:
        return mask
    blocked = mask.new_full((), -math.inf, dtype=dtype)
    allowed = mask.new_full((), 0.0, dtype=dtype)
    additive: Tensor = aten.where.self(mask, allowed, blocked)
    return additive


def _aligned_mask(mask: Tensor) -> Tensor:
    """Efficient attention reads the mask 8 elements at a time: pad its rows unless every stride allows it."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.size(-1)
    padded: Tensor = aten.constant_pad_nd(mask, [0, 8 - length % 8])
    return padded.narrow(-1, 0, length)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    head = query.size(-1)
    padding = -head % 8
    if padding:
        query, key, value = (aten.constant_pad_nd(t, [0, padding]) for t in (query, key, value))
    # The scale is that of the head size before padding.
    scale = 1.0 / math.sqrt(head) if scale is None else scale
    out: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out.narrow(-1, 0, head) if padding else out


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The unfused path. aten._scaled_dot_product_attention_math cannot stand in for it: on fake tensors it
    adds the mask out of place, one L x S matrix more than on a GPU, and its dropout takes the CPU's way.

    Names are kept bound to the end, as in torch, because what they hold is freed only then.
    """
    dtype = query.dtype
    low_precision_allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    upcast = dtype in (torch.float16, torch.bfloat16) and not low_precision_allowed
    wide_query, wide_key, wide_value = (t.to(torch.float32) if upcast else t for t in (query, key, value))
    factor = math.sqrt(abs(scale) if scale is not None else 1.0 / math.sqrt(query.size(-1)))
    scaled_query = aten.mul.Scalar(wide_query, -factor if scale is not None and scale < 0 else factor)
    if is_causal:
        lower = aten.tril(query.new_ones((query.size(-2), key.size(-2)), dtype=torch.bool))
        mask = _as_float_mask(lower, scaled_query.dtype)
        del lower
    full_key, full_value = wide_key, wide_value
    if enable_gqa and not query.size(-3) == key.size(-3) == value.size(-3):
        full_key = wide_key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        full_value = wide_value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = torch.matmul(scaled_query, aten.mul.Scalar(full_key.transpose(-2, -1), factor))
    if mask is not None:
        scores.add_(mask)
    weights = aten._safe_softmax(scores, -1)
    del scores
    if dropout_p > 0:
        weights = aten.native_dropout(weights, dropout_p, True)[0]
    out = torch.matmul(weights, full_value).to(dtype)
    weights.to(dtype)  # torch returns the weights too, in the caller's dtype, and drops them
    return out
