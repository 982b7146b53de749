"""scaled_dot_product_attention as CUDA runs it: which backend is chosen, the operators it then calls, and the
device memory that its kernels take and no output shows.

The rules follow torch 2.11 built for CUDA 13 (sdp_utils.cpp and attention.cpp of ATen). A trace runs on
tensors that are on a fake GPU, so the choice cannot be left to torch: it would choose for a CPU.

The rules of memory list temporaries, as rules.py (`Temporary`) says how to read them. Sources, all in ATen:
flash_attn/flash_api.cpp, attention.cu, attention_backward.cu, cudnn/MHA.cpp,
mem_eff_attention/kernel_{forward,backward}.h with kernels/cutlassB.h. cuDNN's workspaces are known to cuDNN
alone: its rows are fitted to an H200 with cuDNN 9.19 (tests/prediction/data/attention_h200.jsonl), and
assumed to hold for other GPUs.

Query is [batch, heads, L, head size]; key and value are [batch, key/value heads, S, head size].
"""

import enum
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.gpus import GPU
from oomph.prediction.allocator import round_up
from oomph.prediction.ops.registry import composite, flops, host_outputs, op, temporaries
from oomph.prediction.ops.rules import BoundArguments, Flops, RuleContext, bind, program_error
from oomph.torch_internals import OpOverload, deterministic_required, get_sdp_priority_order

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


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of scaled_dot_product_attention, and the compute capability of the GPU."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    capability: Capability = (9, 0)

    @property
    def differentiable(self) -> bool:
        """Will a backward pass follow? The mask does not count, as in torch."""
        inputs = self.query, self.key, self.value
        return torch.is_grad_enabled() and any(each.requires_grad for each in inputs)


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
    # cuDNN 9.15.1 fixed lengths that are not multiples of 128; before it, torch does not put cuDNN first.
    cudnn_first = settings.prefer_cudnn and settings.cudnn_version > 91500 and call.capability[0] in (9, 10)
    for backend in settings.order or (_CUDNN_FIRST_ORDER if cudnn_first else _GENERIC_ORDER):
        objection = _objection(backend, call, settings)
        if objection is None:
            return backend, "; ".join(passed_over) or "first choice on sm_{}{}".format(*call.capability)
        passed_over.append(f"{backend.name.lower()}: {objection}")
    raise program_error(
        RuntimeError(f"scaled_dot_product_attention: no backend can run ({'; '.join(passed_over)})")
    )


def _objection(backend: Backend, call: AttentionCall, settings: SdpaSettings) -> str | None:
    if backend not in settings.enabled:
        return "switched off"
    if backend is Backend.MATH:
        return None
    if {call.query.dim(), call.key.dim(), call.value.dim()} != {4}:
        return "query, key and value must have 4 dimensions"
    specific: dict[Backend, Callable[[AttentionCall, SdpaSettings], str | None]] = {
        Backend.FLASH: _flash_objection,
        Backend.EFFICIENT: _efficient_objection,
        Backend.CUDNN: _cudnn_objection,
    }
    return _shared_objection(call, backend) or specific[backend](call, settings)


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
    unit_strides = all(each.stride(-1) == 1 for each in (q, k, v))
    if not unit_strides and not (backend is not Backend.EFFICIENT and q.shape[-1] == 1):
        return "last dimension is not contiguous"
    if call.attn_mask is not None and call.attn_mask.stride(-1) != 1:
        return "mask's last dimension is not contiguous"
    return None


def _flash_objection(call: AttentionCall, settings: SdpaSettings) -> str | None:
    q, k, v = call.query, call.key, call.value
    if call.attn_mask is not None:
        return "no attention mask"
    if not (q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256):
        return "head sizes must be equal and at most 256"
    if not (8, 0) <= call.capability <= (12, 1):
        return "needs sm_80 or later"
    # GPUs with 99 KiB of shared memory per block, where flash's widest backward kernels do not fit.
    is_small = (8, 6) <= call.capability <= (8, 9) or (12, 0) <= call.capability <= (12, 1)
    if call.differentiable and is_small:
        head = q.shape[-1]
        if 192 < head <= 224 or (head > 224 and call.dropout_p > 0):
            return f"no backward for head size {head} on this GPU"
    if call.is_causal and q.shape[2] != k.shape[2]:
        return "causal needs equal query and key lengths"
    return _dtype_objection(call, {torch.float16})


def _efficient_objection(call: AttentionCall, settings: SdpaSettings) -> str | None:
    q, k, v = call.query, call.key, call.value
    if not (5, 0) <= call.capability <= (12, 1):
        return "unsupported GPU"
    half = q.dtype in (torch.float16, torch.bfloat16)
    tensor_cores = call.capability[0] >= 8 or (call.capability[0] == 7 and half)
    alignment = (8 if half else 4) if tensor_cores else 1
    if q.shape[-1] != k.shape[-1]:
        return "query and key head sizes differ"
    if any(size == 0 or size % alignment for size in (q.shape[-1], v.shape[-1])):
        return f"head size is not a multiple of {alignment}"
    return _dtype_objection(call, {torch.float16, torch.float32})


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
    objection = _dtype_objection(call, {torch.float16}) or _cudnn_mask_objection(call)
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
    mask = call.attn_mask
    if mask is None:
        return None
    if mask.requires_grad:
        return "mask requires a gradient"
    full = (call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2])
    rank = len(mask.shape)
    if rank not in (2, 4) or any(m not in (1, f) for m, f in zip(mask.shape, full[4 - rank :], strict=True)):
        return "mask shape does not broadcast from 2 or 4 dimensions"
    return None


def _dtype_objection(call: AttentionCall, allowed: set[torch.dtype]) -> str | None:
    if call.capability >= (8, 0):
        allowed = allowed | {torch.bfloat16}
    dtypes = {call.query.dtype, call.key.dtype, call.value.dtype}
    if len(dtypes) == 1 and dtypes <= allowed:
        return None
    return f"no kernel for {str(call.query.dtype).removeprefix('torch.')}"


def attention_like_cuda(call: AttentionCall) -> Tensor:
    """Run the operators, and so make the allocations, that CUDA's scaled_dot_product_attention would.

    Only aten operators are called; autograd's own formulas give the backward. Tensors are created from the
    inputs (new_full, new_ones), never by bare factory functions, so that they inherit the fake device.
    """
    backend, _ = choose_backend(call)
    if backend is Backend.FLASH:
        return _flash(call)
    mask = None if call.attn_mask is None else _as_float_mask(call.attn_mask, call.query.dtype)
    if backend is Backend.MATH:
        return _math(call, mask)
    if backend is Backend.EFFICIENT and mask is not None:
        mask = _aligned_mask(mask).expand(*call.query.shape[:3], call.key.size(2))
    given = call.query, call.key, call.value, mask, call.differentiable, call.dropout_p, call.is_causal
    if backend is Backend.CUDNN:
        results = aten._scaled_dot_product_cudnn_attention(*given, False, scale=call.scale)
    else:
        results = aten._scaled_dot_product_efficient_attention(*given, scale=call.scale)
    out: Tensor = results[0]
    return out


@composite(aten.scaled_dot_product_attention.default)
def _attention(context: RuleContext, call: BoundArguments) -> Any:
    return attention_like_cuda(AttentionCall(**call, capability=context.gpu.capability))


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


def _flash(call: AttentionCall) -> Tensor:
    head = call.query.size(-1)
    padding = -head % 8
    inputs = call.query, call.key, call.value
    if padding:
        inputs = tuple(aten.constant_pad_nd(each, [0, padding]) for each in inputs)
    # The scale is that of the head size before padding.
    scale = 1.0 / math.sqrt(head) if call.scale is None else call.scale
    out: Tensor = aten._scaled_dot_product_flash_attention(
        *inputs, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return out.narrow(-1, 0, head) if padding else out


def _math(call: AttentionCall, mask: Tensor | None) -> Tensor:
    """The unfused path. aten._scaled_dot_product_attention_math cannot stand in for it: on fake tensors it
    adds the mask out of place, one L x S matrix more than on a GPU, and its dropout takes the CPU's way.

    Names are kept bound to the end, as in torch, because what they hold is freed only then.
    """
    query, key, value, scale = call.query, call.key, call.value, call.scale
    dtype = query.dtype
    low_precision_allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    upcast = dtype in (torch.float16, torch.bfloat16) and not low_precision_allowed
    wide_query, wide_key, wide_value = (t.to(torch.float32) if upcast else t for t in (query, key, value))
    factor = math.sqrt(abs(scale) if scale is not None else 1.0 / math.sqrt(query.size(-1)))
    scaled_query = aten.mul.Scalar(wide_query, -factor if scale is not None and scale < 0 else factor)
    if call.is_causal:
        lower = aten.tril(query.new_ones((query.size(-2), key.size(-2)), dtype=torch.bool))
        mask = _as_float_mask(lower, scaled_query.dtype)
        del lower
    full_key, full_value = wide_key, wide_value
    if call.enable_gqa and not query.size(-3) == key.size(-3) == value.size(-3):
        full_key = wide_key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        full_value = wide_value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = torch.matmul(scaled_query, aten.mul.Scalar(full_key.transpose(-2, -1), factor))
    if mask is not None:
        scores.add_(mask)
    weights = aten._safe_softmax(scores, -1)
    del scores
    if call.dropout_p > 0:
        weights = aten.native_dropout(weights, call.dropout_p, True)[0]
    out = torch.matmul(weights, full_value).to(dtype)
    weights.to(dtype)  # torch returns the weights too, in the caller's dtype, and drops them
    return out


# ----------------------------------------------------------------------------------------------------- memory

_FLOAT = 4

# What cuDNN takes in every workspace beside the buffers that it lays out there (measured).
_CUDNN_HEADER = 256


def _copy_unless_rows_first(tensor: Tensor) -> int:
    """Bytes of `tensor.transpose(1, 2).contiguous()` for a [B, H, L, D] tensor; 0 when that is already so."""
    order = (0, 2, 1, 3)
    expected = 1
    for dim in reversed(order):
        if tensor.size(dim) != 1 and tensor.stride(dim) != expected:
            return tensor.nbytes
        expected *= tensor.size(dim)
    return 0


# Flash


def flash_head(head: int) -> int:
    return round_up(head, 32 if head <= 128 else 64)


@temporaries(aten._scaled_dot_product_flash_attention.default)
def _flash_forward(call: BoundArguments, gpu: GPU) -> list[int]:
    query, key = call["query"], call["key"]
    batch, heads, length, head = query.shape
    rng_state = 2 * 8
    if call["dropout_p"] > 0:
        # Splitting over keys is not implemented with dropout; the generator's state is allocated twice.
        return [rng_state]
    splits = flash_splits(batch * heads * math.ceil(length / 64), key.size(2), head, gpu)
    if splits <= 1:
        return []
    rows = splits * batch * heads * length
    return [rows * _FLOAT, rows * flash_head(head) * _FLOAT]


def flash_splits(blocks: int, key_length: int, head: int, gpu: GPU) -> int:
    """Into how many parts flash cuts the keys, to keep all multiprocessors busy when there are few rows."""
    slots = 2 * gpu.multiprocessors
    if blocks >= 0.8 * slots:
        return 1
    key_block = 256 if head <= 64 else 128 if head <= 128 else 64
    key_blocks = math.ceil(key_length / key_block)
    candidates = [
        splits
        for splits in range(1, min(128, slots, key_blocks) + 1)
        if splits == 1 or math.ceil(key_blocks / splits) != math.ceil(key_blocks / (splits - 1))
    ]
    waves = [blocks * splits / slots for splits in candidates]
    efficiency = [wave / math.ceil(wave) for wave in waves]
    best = max(efficiency)
    return next(splits for splits, one in zip(candidates, efficiency, strict=True) if one >= 0.85 * best)


@temporaries(aten._scaled_dot_product_flash_attention_backward.default)
def _flash_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    query, key = call["query"], call["key"]
    batch, heads, length, head = query.shape
    rows = batch * heads * round_up(length, 128)
    parts = math.ceil(gpu.multiprocessors / (batch * heads)) if deterministic_required() else 1
    grouped = 0 if key.size(1) == heads else batch * heads * key.size(2) * head * key.element_size()
    return [
        _copy_unless_rows_first(call["grad_out"]),
        _copy_unless_rows_first(call["out"]),
        rows * _FLOAT,  # softmax_d
        parts * rows * flash_head(head) * _FLOAT,  # dq_accum
        grouped,  # dk, then dv, for every query head; summed over each group afterwards
        grouped,
    ]


# Efficient (CUTLASS)


@temporaries(aten._scaled_dot_product_efficient_attention.default)
def _efficient_forward(call: BoundArguments, gpu: GPU) -> list[int]:
    query, value = call["query"], call["value"]
    batch, heads, length, head = query.shape
    in_registers = max(head, value.size(-1)) <= 128
    if in_registers or query.dtype == torch.float32:
        return []
    return [batch * heads * length * value.size(-1) * _FLOAT]  # output accumulated in float32


@dataclass(frozen=True)
class _BackwardTile:
    """One compiled backward kernel: its block of queries x keys, and the widest head it takes."""

    queries: int
    keys: int
    widest_head: int


_ANY = 65536


def _backward_tile(dtype: torch.dtype, head: int, dropout: bool, gpu: GPU) -> _BackwardTile:
    """The first compiled kernel that takes the head and fits the GPU's shared memory."""
    major, minor = gpu.capability
    half = dtype != torch.float32
    # 163 KiB and more on the data-centre chips, 99 KiB on the others from sm_80, at most 96 KiB before. Which
    # tiles fit is inferred from those limits, not from the kernels' exact shared-memory sizes.
    large = major in (9, 10) or (major, minor) == (8, 0)
    tiles = [_BackwardTile(64, 64, 32), _BackwardTile(64, 64, 64)]
    if half and (major, minor) in ((8, 6), (8, 9)) and not dropout:
        tiles.append(_BackwardTile(128, 64, 96))
    if half and large:
        tiles.append(_BackwardTile(128, 128, 128))
    if (half and (major, minor) in ((7, 0), (7, 2))) or (not half and large):
        tiles.append(_BackwardTile(128, 64, 128))
    tiles.append(_BackwardTile(64, 64, 128))
    if (half and major >= 8) or large:
        tiles.append(_BackwardTile(128, 64, _ANY))
    tiles.append(_BackwardTile(64, 64, _ANY))
    return next(tile for tile in tiles if tile.widest_head >= head)


@temporaries(aten._scaled_dot_product_efficient_attention_backward.default)
def _efficient_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    query, key, value = call["query"], call["key"], call["value"]
    batch, heads, length, head = query.shape
    value_head = value.size(-1)
    half = query.dtype != torch.float32
    tile = _backward_tile(query.dtype, max(head, value_head), call["dropout_p"] > 0, gpu)
    in_registers = half and tile.widest_head <= tile.queries
    delta = batch * heads * length * _FLOAT
    events = [_copy_unless_rows_first(call["grad_out_"])]
    if half and (in_registers or gpu.capability[0] != 7 or gpu.capability >= (7, 5)):
        events.append(delta)
    else:
        # (grad_out * out).sum(-1), transposed; a whole product tensor, gone before the workspace comes.
        product = batch * heads * length * value_head * _FLOAT
        casts = [product, product] if half else []
        transposed = [delta, -delta] if length > 1 and heads > 1 else []  # else no copy is needed
        events += [*casts, product, delta, *transposed, -product, *(-n for n in casts)]
    splits_keys = gpu.capability >= (7, 0)
    elements = 0
    if splits_keys or half:
        blocks = math.ceil(length / tile.queries) * math.ceil(head / tile.keys)
        elements += blocks * (tile.queries * tile.keys + 4)  # a tile of dq, its lock and counter
    if half and not in_registers:
        parts = _key_splits(batch * heads, key.size(2), tile) if splits_keys else 1
        widths = round_up(head, tile.queries) + round_up(value_head, tile.queries)
        elements += parts * tile.keys * widths
    events.append(batch * heads * round_up(elements, 4) * _FLOAT)
    return events


def _key_splits(batch_heads: int, key_length: int, tile: _BackwardTile) -> int:
    if deterministic_required() or (batch_heads >= 256 and key_length <= 2 * tile.keys):
        return 1
    return max(1, min(math.ceil(key_length / tile.keys), 200 // batch_heads))


@host_outputs(aten._scaled_dot_product_efficient_attention.default)
def _random_seed(call: BoundArguments) -> frozenset[int]:
    """Outside graph capture the random seed and offset are host tensors."""
    return frozenset({2, 3})


# cuDNN


@temporaries(aten._scaled_dot_product_cudnn_attention.default)
def _cudnn_forward(call: BoundArguments, gpu: GPU) -> list[int]:
    query, value = call["query"], call["value"]
    batch, heads, length, _ = query.shape
    if length > 1:
        return [_CUDNN_HEADER]
    if call["is_causal"]:
        return []
    # A single query is split over the keys: partial outputs, row maxima and row sums in float32. One shape
    # was measured (16 rows, 1024 keys: 33920 bytes); eight parts and the 128 bytes more are what fits it.
    rows = batch * heads
    return [8 * rows * (value.size(-1) + 2) * _FLOAT + 128]


@temporaries(aten._scaled_dot_product_cudnn_attention_backward.default)
def _cudnn_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    """One workspace. cuDNN's frontend lays out the row sums, dq in float32 and, when heads are grouped, dk
    and dv for every query head."""
    query, key, value, grad_out = call["query"], call["key"], call["value"], call["grad_out"]
    batch, heads, length, head = query.shape
    rows = batch * heads * length
    parts = [rows * _FLOAT, rows * head * _FLOAT]
    for tensor in (key, value):
        if tensor.size(1) != heads:
            parts.append(batch * heads * tensor.size(2) * tensor.size(3) * tensor.element_size())
    copy = 0 if grad_out.stride(-1) == 1 else grad_out.nbytes
    return [copy, sum(round_up(part, 16) for part in parts) + _CUDNN_HEADER]


@host_outputs(aten._scaled_dot_product_cudnn_attention.default)
def _log_sum_exp(call: BoundArguments) -> frozenset[int]:
    """None is made without a backward to come."""
    return frozenset() if call["compute_log_sumexp"] else frozenset({1})


# Work

for _backend in ("flash", "efficient", "cudnn"):
    op(f"_scaled_dot_product_{_backend}_attention_backward", launches=3)
    # It takes the random seed, which the forward may leave on the host.
    op(f"_scaled_dot_product_{_backend}_attention_backward.default", takes_two_devices=True)


@flops(
    """
    _scaled_dot_product_flash_attention.default _scaled_dot_product_flash_attention_backward.default
    _scaled_dot_product_efficient_attention.default _scaled_dot_product_efficient_attention_backward.default
    _scaled_dot_product_cudnn_attention.default _scaled_dot_product_cudnn_attention_backward.default
    """
)
def _flops(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Flops:
    """Scores and their product with the values; backward: the scores again, and four gradients."""
    call = bind(func, args, kwargs)
    query, key, value = call["query"], call["key"], call["value"]
    pairs = query.numel() // max(query.shape[-1], 1) * key.shape[-2]
    if call["is_causal"]:
        pairs /= 2
    width, result = query.shape[-1], value.shape[-1]
    each = 3 * width + 2 * result if "backward" in func.overloadpacket.__name__ else width + result
    backend = func.overloadpacket.__name__.removeprefix("_scaled_dot_product_").split("_")[0]
    return Flops(2.0 * pairs * each, query.dtype, f"{backend} attention", depth=width)
