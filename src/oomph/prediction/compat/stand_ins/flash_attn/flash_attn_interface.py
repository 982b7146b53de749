"""Memory: Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.prediction.allocator import round_up
from oomph.prediction.compat import stand_ins
from oomph.prediction.ops.attention import flash_head, flash_splits


@dataclass
class _Call:
    """The arguments beside query, key and value, by the names and in the order of the real functions."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    block_table: Tensor | None = None
    package: str = "flash_attn"
    starts: tuple[Tensor, ...] = ()  # of sequences in one row, for queries and keys
    longest: tuple[int, int] = (0, 0)

    def flops(self, query: Tensor, key: Tensor) -> float:
        """Of the scores and of their product with the values."""
        keys = key.shape[-3] if not self.starts else self.longest[1]
        if self.window_size[0] >= 0:
            keys = min(keys, self.window_size[0] + max(self.window_size[1], 0) + 1)
        return 4.0 * query.numel() * keys / (2 if self.causal else 1)


def _check(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> None:
    """As TORCH_CHECK there, in its order."""
    gpu, heads, key_heads, head = stand_ins.gpu(call.package), query.shape[-2], key.shape[-2], query.shape[-1]
    checks = (
        (gpu.capability >= (8, 0), "FlashAttention only supports Ampere GPUs or newer."),
        (
            query.dtype in (torch.float16, torch.bfloat16),
            "FlashAttention only support fp16 and bf16 data type",
        ),
        (key.dtype == query.dtype, "query and key must have the same dtype"),
        (value.dtype == query.dtype, "query and value must have the same dtype"),
        (all(each.dtype == torch.int32 for each in call.starts), "cu_seqlens_q must have dtype int32"),
        (head <= 256, "FlashAttention forward only supports head dimension at most 256"),
        (heads % key_heads == 0, "Number of heads in key/value must divide number of heads in query"),
        (not (call.softcap > 0 and call.dropout_p > 0), "Softcapping does not support dropout for now"),
        (key.shape[-1] == head == value.shape[-1], "k and v must have the head size of q"),
        (key.shape == value.shape, "k and v must have the same shape"),
    )
    for holds, message in checks:
        if not holds:
            raise RuntimeError(message)


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _padded(tensor: Tensor) -> Tensor:
    return F.pad(tensor, [0, -tensor.shape[-1] % 8]) if tensor.shape[-1] % 8 else tensor


def _single_query(query: Tensor, key: Tensor, call: _Call) -> bool:
    """One query a sequence, in groups: they are computed as rows of the head that they share."""
    length = query.shape[-3] if not call.starts else call.longest[0]
    grouped = query.shape[-2] > key.shape[-2]
    return (
        length == 1
        and grouped
        and max(call.window_size) < 0
        and not call.dropout_p
        and call.alibi_slopes is None
    )


def _forward(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mha_fwd and mha_varlen_fwd: the result, the log-sum-exp, probabilities and the generator's state."""
    query, key, value = map(_rows_contiguous, (query, key, value))
    heads = query.shape[-2]
    out = torch.empty_like(query)
    single = _single_query(query, key, call)
    if not call.starts:
        batch, length, key_length = query.shape[0], query.shape[1], key.shape[1]
        lse = query.new_empty(batch, heads, length, dtype=torch.float32)
    else:
        batch, (length, key_length) = call.starts[0].shape[0] - 1, call.longest
        lse = query.new_empty(heads, query.shape[0], dtype=torch.float32)
    square = (batch, heads, round_up(length, 128), round_up(key_length, 128))
    probabilities = query.new_empty(square if call.return_attn_probs and call.dropout_p > 0 else (0,))
    partial_results = []
    if not call.dropout_p and (not call.starts or single):
        partial_results = _split_results(query, key, batch, length, key_length, single, call.package)
    rng_state = query.new_empty(2, dtype=torch.int64)
    given = query, key, value, out, lse, probabilities, *partial_results
    stand_ins.kernel(call.package, given, flops=call.flops(query, key))
    return out, lse, probabilities, rng_state


def _split_results(
    query: Tensor, key: Tensor, batch: int, length: int, key_length: int, single: bool, package: str
) -> list[Tensor]:
    heads, head = query.shape[-2:]
    if single:
        heads, length = key.shape[-2], heads // key.shape[-2]
    blocks = batch * heads * math.ceil(length / 64)
    splits = flash_splits(blocks, key_length, head, stand_ins.gpu(package))
    if splits <= 1:
        return []
    rows = splits, batch, heads, length
    return [query.new_empty(size, dtype=torch.float32) for size in (rows, (*rows, flash_head(head)))]


def _backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], grad_out: Tensor, grads: list[Tensor], call: _Call
) -> None:
    """mha_bwd and mha_varlen_bwd."""
    query, key, value, out, _ = saved
    grad_out, query, key, value, out = map(_rows_contiguous, (grad_out, query, key, value, out))
    heads, head = query.shape[-2:]
    if not call.starts:
        batch, length = query.shape[0], round_up(query.shape[1], 128)
        rows: tuple[int, ...] = (batch, length)
        softmax_d = query.new_empty(batch, heads, length, dtype=torch.float32)
    else:
        batch = call.starts[0].shape[0] - 1
        rows = (query.shape[0] + 128 * batch,)
        softmax_d = query.new_empty(heads, *rows, dtype=torch.float32)
    size = (*rows, heads, flash_head(head))
    if call.deterministic:
        parts = math.ceil(stand_ins.gpu(call.package).multiprocessors / (batch * heads))
        query_sums = query.new_zeros(parts, *size, dtype=torch.float32)
    else:
        query_sums = query.new_empty(size, dtype=torch.float32)
    grouped = key.shape[-2] != heads
    expanded = [query.new_empty(*key.shape[:-2], heads, head) for _ in range(2)] if grouped else []
    given = grad_out, *saved, *grads, *expanded, softmax_d, query_sums
    stand_ins.kernel(call.package, given, flops=2.5 * call.flops(query, key))
    for each, grad in zip(expanded, grads[1:], strict=False):
        torch.sum(each.unflatten(-2, (key.shape[-2], -1)), -2, out=grad)


class FlashAttention(torch.autograd.Function):
    """`packed`: (qkv), (q, kv) or (q, k, v)."""

    @staticmethod
    def forward(ctx: Any, call: _Call, is_training: bool, *packed: Tensor) -> Any:
        parts = [each.detach() for each in packed]
        query, key, value = parts if len(parts) == 3 else (*parts[:-1], *parts[-1].unbind(-3))
        _check(query, key, value, call)
        head = query.shape[-1]
        query, key, value = map(_padded, (query, key, value))
        out, lse, probabilities, rng_state = _forward(query, key, value, call)
        if is_training:
            ctx.save_for_backward(query, key, value, out, lse, rng_state, *call.starts)
            ctx.call, ctx.packed = call, len(packed)
        out = out[..., :head]
        return (out, lse, probabilities) if call.return_attn_probs else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *others: Any) -> Any:
        saved = ctx.saved_tensors[:5]
        query, key, value = saved[:3]
        like = query, key, value
        separate = [torch.empty_like(each) for each in (like if ctx.packed == 3 else like[: ctx.packed - 1])]
        of_one = like[len(separate) :]  # written next to each other
        grads, views = [*separate], [*separate]
        if of_one:
            shape = *of_one[0].shape[:-2], len(of_one), *of_one[0].shape[-2:]
            grads.append(of_one[0].new_empty(shape))
            views.extend(grads[-1].unbind(-3))
        head = grad_out.shape[-1]
        _backward(saved, _padded(grad_out), views, ctx.call)
        return None, None, *(grad[..., :head] for grad in grads)


def _attention(
    packed: tuple[Tensor, ...],
    call: _Call,
    starts: tuple[Tensor, ...] = (),
    longest: tuple[int, int] = (0, 0),
) -> Any:
    call.starts, call.longest = starts, longest
    is_training = torch.is_grad_enabled() and any(each.requires_grad for each in packed)
    return FlashAttention.apply(call, is_training, *packed)


def _takes_options(function: Any) -> Any:
    """Programs ask for the names of its parameters."""
    own = inspect.signature(function)
    options = list(inspect.signature(_Call).parameters.values())[:_OPTIONS]
    parameters = [each for each in own.parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    function.__signature__ = own.replace(parameters=[*parameters, *options])
    return function


_OPTIONS = 9  # of a call; the others are not


@_takes_options
def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> Any:
    return _attention((q, k, v), _Call(*options, **named))


@_takes_options
def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Any:
    return _attention((qkv,), _Call(*options, **named))


@_takes_options
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    return _attention((q, kv), _Call(*options, **named))


@_takes_options
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **named: Any,
) -> Any:
    lengths = int(max_seqlen_q), int(max_seqlen_k)
    return _attention((q, k, v), _Call(*options, **named), (cu_seqlens_q, cu_seqlens_k), lengths)


@_takes_options
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Any:
    lengths = int(max_seqlen), int(max_seqlen)
    return _attention((qkv,), _Call(*options, **named), (cu_seqlens, cu_seqlens), lengths)


@_takes_options
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **named: Any,
) -> Any:
    lengths = int(max_seqlen_q), int(max_seqlen_k)
    return _attention((q, kv), _Call(*options, **named), (cu_seqlens_q, cu_seqlens_k), lengths)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """mha_fwd_kvcache: for generation, without a backward pass. New keys and values go into the cache."""
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    call = _Call(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    keys, values = k_cache, v_cache
    if block_table is not None:  # pages of 256 keys and more
        pages = q.shape[0], block_table.shape[1] * k_cache.shape[1], *k_cache.shape[2:]
        keys = values = k_cache[:1, :1].expand(pages)
    _check(q, keys, values, call)
    head = q.shape[-1]
    with torch.no_grad():
        padded = [each if block_table is not None else _padded(each) for each in (keys, values)]
        out, lse, *_ = _forward(_padded(q), padded[0], padded[1], call)
        if k is not None:
            stand_ins.kernel("flash_attn", (k, v, k_cache, v_cache))
    out = out[..., :head]
    return (out, lse) if return_softmax_lse else out


# Attention over several GPUs calls the parts itself.


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    window = window_size_left, window_size_right
    call = _Call(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False, return_softmax)
    _check(q, k, v, call)
    return _forward(q, k, v, call)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    window = window_size_left, window_size_right
    call = _Call(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False, return_softmax)
    call.starts, call.longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    _check(q, k, v, call)
    return _forward(q, k, v, call)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    window = window_size_left, window_size_right
    call = _Call(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    given = zip((dq, dk, dv), (q, k, v), strict=True)
    grads = [torch.empty_like(like) if grad is None else grad for grad, like in given]
    _backward((q, k, v, out, softmax_lse), dout, grads, call)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    window = window_size_left, window_size_right
    call = _Call(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    call.starts, call.longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    given = zip((dq, dk, dv), (q, k, v), strict=True)
    grads = [torch.empty_like(like) if grad is None else grad for grad, like in given]
    _backward((q, k, v, out, softmax_lse), dout, grads, call)


_wrapped_flash_attn_forward, _wrapped_flash_attn_backward = _flash_attn_forward, _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
