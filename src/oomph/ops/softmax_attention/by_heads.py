"""Fused attention whose backward pass takes a few heads at a time.

In backward the fused kernels hold float32 sums of q's size, and the gradients of k and v once for every query
head: at 131,072 tokens and 32 heads of 80 that is 2.5 GiB, beside gradients of 0.9. Heads do not know of each
other, so the same kernels run on one group of key/value heads after the other, and hold that for one group.
(Deterministic, flash holds a sum for every multiprocessor, whatever the group: little is saved then.)
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomph.ops.common import no_compile, refuse_second_derivatives
from oomph.units import MiB

aten = torch.ops.aten
Given = tuple[Tensor, ...]  # the gradient, q, k, v, out
Rest = tuple[Any, ...]
_ENOUGH = 512 * MiB  # of a group: smaller ones would start more kernels and save little


def key_heads_at_a_time(q: Tensor, k: Tensor) -> int:
    """How many key/value heads a group has: all of them where backward needs little anyway."""
    heads = k.shape[1]
    per_head = q.numel() // max(1, heads) * (4 + 2 * q.element_size())  # the sums for q; of k and v, each
    return max(
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (size == 1 or size * per_head <= _ENOUGH)
    )


class _Kernels(NamedTuple):
    """forward(q, k, v, causal, scale) -> out, lse, and more, of which backward wants the first six."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)


def _cudnn_backward(given: Given, lse: Tensor, rest: Rest, causal: bool, scale: float) -> Any:
    *lengths, seed, offset = rest
    return aten._scaled_dot_product_cudnn_attention_backward(
        *given, lse, seed, offset, None, *lengths, 0.0, causal, scale=scale
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)


def _flash_backward(given: Given, lse: Tensor, rest: Rest, causal: bool, scale: float) -> Any:
    *lengths, seed, offset = rest
    return aten._scaled_dot_product_flash_attention_backward(
        *given, lse, *lengths, 0.0, causal, seed, offset, scale=scale
    )


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(given: Given, lse: Tensor, rest: Rest, causal: bool, scale: float) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, lse, 0.0, causal, scale=scale)


# The last one is for tests: the CPU needs no such thing.
KERNELS = {
    "cudnn": _Kernels(_cudnn_forward, _cudnn_backward),
    "flash": _Kernels(_flash_forward, _flash_backward),
    "cpu": _Kernels(_cpu_forward, _cpu_backward),
}


@no_compile
def attention_by_heads(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, backend: str, key_heads: int
) -> Tensor:
    """softmax(q k^T * scale) v, [B, H, T, D]; in backward, `key_heads` key/value heads at a time."""
    out: Tensor = _ByHeads.apply(q, k, v, causal, scale, backend, key_heads)
    return out


class _ByHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, backend: str, key_heads: int
    ) -> Tensor:
        out, lse, *rest = KERNELS[backend].forward(q, k, v, causal, scale)
        rest = rest[:6]  # cum_q, cum_k, max_q, max_k, seed, offset
        tensors = [part for part in rest if isinstance(part, Tensor)]
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.rest = tuple(None if isinstance(part, Tensor) else (part,) for part in rest)
        ctx.how = causal, scale, backend, key_heads
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("attention")
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        left = iter(tensors)
        rest = tuple(next(left) if part is None else part[0] for part in ctx.rest)
        causal, scale, backend, key_heads = ctx.how
        whole = [torch.empty_like(x) for x in (q, k, v)]
        for queries, keys in _groups(q.shape[1], k.shape[1], key_heads):
            given = (grad[:, queries], q[:, queries], k[:, keys], v[:, keys], out[:, queries])
            # The kernels take the log-sum-exp to lie closely.
            parts = KERNELS[backend].backward(given, lse[:, queries].contiguous(), rest, causal, scale)
            for into, heads, part in zip(whole, (queries, keys, keys), parts, strict=True):
                into[:, heads].copy_(part)
        wanted = [each if want else None for each, want in zip(whole, ctx.needs_input_grad[:3], strict=True)]
        return *wanted, None, None, None, None


def _groups(heads: int, key_heads: int, at_a_time: int) -> Iterator[tuple[slice, slice]]:
    """The query heads and the key/value heads of each group."""
    each = heads // key_heads
    for start in range(0, key_heads, at_a_time):
        stop = min(start + at_a_time, key_heads)
        yield slice(start * each, stop * each), slice(start, stop)
