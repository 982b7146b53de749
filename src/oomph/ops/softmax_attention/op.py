"""The public function: checks the call, chooses an implementation, runs it."""

from typing import Any

from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import ASKED_FOR, Choice, explained_by, log_choice, no_compile
from oomph.ops.softmax_attention.biases import BiasFunction
from oomph.ops.softmax_attention.chunked import chunked
from oomph.ops.softmax_attention.chunked_cpu import chunked_cpu, fits_cpu_kernel, queries_per_tile
from oomph.ops.softmax_attention.flex import flex, why_not_flex
from oomph.ops.softmax_attention.fused import BACKENDS, fused, fused_backends
from oomph.ops.softmax_attention.patterns import BlockPattern
from oomph.ops.softmax_attention.problem import Problem, make_problem
from oomph.ops.softmax_attention.reference import reference
from oomph.ops.softmax_attention.tiles import tile_sizes
from oomph.ops.softmax_attention.triton_attention import triton_attention, why_not_kernels

IMPLS = ("auto", "sdpa", *BACKENDS, "triton", "flex", "chunked", "reference")


def _choose(*arguments: Any, impl: str = "auto", **options: Any) -> Choice:
    common.check_one_of("impl", impl, IMPLS)
    return _decide(make_problem(*arguments, **options), impl)


@explained_by(_choose)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    bias: Tensor | BiasFunction | None = None,
    pattern: BlockPattern | None = None,
    key_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    memory_budget: str | int | None = None,
    impl: str = "auto",
) -> Tensor:
    """softmax(q k^T * scale + bias) v, exactly, with memory linear in the lengths in forward and backward.

    q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E] of one dtype, H a multiple of G (query heads h*H/G and on
    share key/value head h); the result is [B, H, Q, E]. Scores and sums are fp32 (float64 for float64).

    causal: a query sees keys up to its own position, which is its index + K - Q: the last query is at the
        last key, as generation with a cache needs (PyTorch's `is_causal` aligns the first ones instead).
    bias: added to the scaled scores. A tensor that broadcasts to [B, H, Q, K] (its gradient is formed at its
        own size), or a function f(b, h, q_index, k_index) of index tensors (see BiasFunction; gradients flow
        to what it lists in `tensors`). `locality_bias(t, s)` makes one.
    pattern: which blocks of keys a block of queries sees: local(), global_(), mixed(). Not causal by itself.
    key_lengths, key_mask: padding. Keys at or after key_lengths[b] are not seen ([B] integers from 0 to K:
        others are refused on the CPU; on a GPU, which would have to be waited for, they count as 0 or K);
        or, key_mask [B, K] is True where a key may be seen.
    scale: default 1/sqrt(D).
    memory_budget: for the tiles of impl="chunked", such as "64MiB"; default 256 MiB, on the CPU 32 MiB.
    impl: "auto", or by name: "sdpa" (the best fused kernel of PyTorch), one of those ("cudnn", "flash",
        "efficient"), "triton" (our kernels: patterns, padding, locality_bias), "flex" (FlexAttention:
        other bias functions; a new kind of call compiles for 5 to 10 seconds, in silence), "chunked" (plain
        torch), "reference" (the whole matrix).

    A query that may see no key gets zeros, and gives zero gradients. `oomph.ops.explain(attention, ...)`
    tells what would run and why. First derivatives only.
    """
    common.check_one_of("impl", impl, IMPLS)
    p = make_problem(
        q,
        k,
        v,
        causal=causal,
        bias=bias,
        pattern=pattern,
        key_lengths=key_lengths,
        key_mask=key_mask,
        scale=scale,
        memory_budget=memory_budget,
    )
    choice = log_choice("attention", _decide(p, impl))
    if choice.impl == "reference":
        given = p.bias if p.bias_function is None else p.bias_function
        return reference(
            p.q,
            p.k,
            p.v,
            causal=p.causal,
            bias=given,
            pattern=p.pattern,
            key_mask_BK=p.seen_BK(),
            scale=p.scale,
        )
    if choice.impl == "chunked":
        return chunked_cpu(p) if _on_cpu_kernel(p) else chunked(p)
    if choice.impl == "triton":
        return triton_attention(p)
    if choice.impl == "flex":
        return flex(p)
    return fused(p, choice.impl)


def _decide(p: Problem, impl: str) -> Choice:
    if impl == "reference":
        return Choice("reference", ASKED_FOR)
    if impl == "chunked":
        return _chunked(p, ASKED_FOR)
    backends, passed_over = fused_backends(p)
    if impl in ("sdpa", *BACKENDS):
        fitting = backends if impl == "sdpa" else [name for name in backends if name == impl]
        if not fitting:
            raise ArgumentError(f"impl={impl!r} cannot run this call in linear memory ({passed_over})")
        return Choice(fitting[0], ASKED_FOR)
    if impl == "auto" and backends:
        return Choice(backends[0], passed_over or "first of PyTorch's fused kernels on this GPU")
    return _decide_without_fused(p, impl, passed_over)


@no_compile
def _decide_without_fused(p: Problem, impl: str, passed_over: str) -> Choice:
    no_kernels, no_flex = why_not_kernels(p), why_not_flex(p)
    if impl in ("triton", "flex"):
        objection = no_kernels if impl == "triton" else no_flex
        if objection is not None:
            raise ArgumentError(f"impl={impl!r} cannot run this call ({objection})")
        return Choice(impl, ASKED_FOR)
    if no_kernels is None and p.q.device.type == "cuda":  # on a CPU they only run in Triton's interpreter
        return Choice("triton", f"no fused kernel ({passed_over})")
    if no_flex is None:
        return Choice("flex", f"no fused kernel ({passed_over})")
    no_kernels = no_kernels or "the interpreter is for tests"
    return _chunked(
        p, f"no fused kernel ({passed_over}), no kernel of ours ({no_kernels}), no FlexAttention ({no_flex})"
    )


def _on_cpu_kernel(p: Problem) -> bool:
    return fits_cpu_kernel(p) and not p.bias_needs_grad


def _chunked(p: Problem, reason: str) -> Choice:
    if _on_cpu_kernel(p):
        return Choice("chunked", reason, {"queries": queries_per_tile(p)})
    sizes = tile_sizes(p)
    settings = {"batch": sizes.batch, "key_value_heads": sizes.heads, "queries": sizes.queries}
    return Choice("chunked", reason, settings)
