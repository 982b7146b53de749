"""Device memory that the attention kernels take and no output shows.

The rules list temporaries, as rules.py says how to read them.

Sources, all in ATen: flash_attn/flash_api.cpp, attention.cu, attention_backward.cu, cudnn/MHA.cpp,
mem_eff_attention/kernel_{forward,backward}.h with kernels/cutlassB.h, attention.cpp (_safe_softmax),
cuda/SoftMax.cu. cuDNN's workspaces are known to cuDNN alone: its rows are fitted to an H200 with cuDNN 9.19
(tests/prediction/data/attention_h200.jsonl), and assumed to hold for other GPUs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.deterministic import deterministic_required
from oomph.gpus import GPU
from oomph.prediction.cuda.rules import HOST_OUTPUTS, BoundArguments, temporaries

aten = torch.ops.aten

_FLOAT = 4

# What cuDNN takes in every workspace beside the buffers that it lays out there (measured).
_CUDNN_HEADER = 256


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


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


def _flash_head(head: int) -> int:
    return _round_up(head, 32 if head <= 128 else 64)


@temporaries(aten._scaled_dot_product_flash_attention.default)
def _flash_forward(call: BoundArguments, gpu: GPU) -> list[int]:
    query, key = call["query"], call["key"]
    batch, heads, length, head = query.shape
    rng_state = 2 * 8
    if call["dropout_p"] > 0:
        # Splitting over keys is not implemented with dropout; the generator's state is allocated twice.
        return [rng_state]
    splits = _flash_splits(batch * heads * math.ceil(length / 64), key.size(2), head, gpu)
    if splits <= 1:
        return []
    rows = splits * batch * heads * length
    return [rows * _FLOAT, rows * _flash_head(head) * _FLOAT]


def _flash_splits(blocks: int, key_length: int, head: int, gpu: GPU) -> int:
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
    efficiency = {}
    for splits in candidates:
        waves = blocks * splits / slots
        efficiency[splits] = waves / math.ceil(waves)
    best = max(efficiency.values(), default=0.0)
    return next((splits for splits in candidates if efficiency[splits] >= 0.85 * best), 1)


@temporaries(aten._scaled_dot_product_flash_attention_backward.default)
def _flash_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    query, key = call["query"], call["key"]
    batch, heads, length, head = query.shape
    rows = batch * heads * _round_up(length, 128)
    parts = math.ceil(gpu.multiprocessors / (batch * heads)) if deterministic_required() else 1
    grouped = 0 if key.size(1) == heads else batch * heads * key.size(2) * head * key.element_size()
    return [
        _copy_unless_rows_first(call["grad_out"]),
        _copy_unless_rows_first(call["out"]),
        rows * _FLOAT,  # softmax_d
        parts * rows * _flash_head(head) * _FLOAT,  # dq_accum
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
        widths = _round_up(head, tile.queries) + _round_up(value_head, tile.queries)
        elements += parts * tile.keys * widths
    events.append(batch * heads * _round_up(elements, 4) * _FLOAT)
    return events


def _key_splits(batch_heads: int, key_length: int, tile: _BackwardTile) -> int:
    if deterministic_required() or (batch_heads >= 256 and key_length <= 2 * tile.keys):
        return 1
    return max(1, min(math.ceil(key_length / tile.keys), 200 // batch_heads))


HOST_OUTPUTS[aten._scaled_dot_product_efficient_attention.default] = (
    # Outside graph capture the random seed and offset are host tensors.
    lambda call: frozenset({2, 3})
)


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
    return [copy, sum(_round_up(part, 16) for part in parts) + _CUDNN_HEADER]


def _cudnn_host_outputs(call: BoundArguments) -> frozenset[int]:
    """Without a backward to come, no log-sum-exp is made."""
    return frozenset() if call["compute_log_sumexp"] else frozenset({1})


HOST_OUTPUTS[aten._scaled_dot_product_cudnn_attention.default] = _cudnn_host_outputs


# Math


@temporaries(aten._safe_softmax.default)
def _safe_softmax(call: BoundArguments, gpu: GPU) -> list[int]:
    """Rows that are masked altogether are found (one byte per score) and set to zero."""
    scores = call["self"]
    columns = max(scores.size(call["dim"]), 1) if scores.dim() else 1
    return [scores.numel(), scores.numel() // columns, scores.element_size()]


@temporaries(aten._softmax_backward_data.default)
def _softmax_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    """grad_output * output, as large as the scores. log_softmax's backward needs no such product."""
    grad, output = call["grad_output"], call["output"]
    return [output.numel() * torch.promote_types(grad.dtype, output.dtype).itemsize]
