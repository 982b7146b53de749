"""The public function: checks the arguments, chooses an implementation, runs it."""

from typing import Any

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import ASKED_FOR, Choice, explained_by, log_choice, opaque_op
from oomph.ops.softmax_attention.arguments import (
    AttentionArguments,
    BiasFunction,
    BlockPattern,
    check_arguments,
)
from oomph.ops.softmax_attention.autograd import TritonAttention, why_not_kernels
from oomph.ops.softmax_attention.chunked import ChunkedAttention, chunk_sizes
from oomph.ops.softmax_attention.reference import reference
from oomph.ops.softmax_attention.sdpa import BACKENDS, sdpa, usable_backends

IMPLS = ("auto", "sdpa", *BACKENDS, "triton", "chunked", "reference")


def _check_and_choose(impl: str, **given: Any) -> tuple[AttentionArguments, Choice]:
    common.check_one_of("impl", impl, IMPLS)
    a = check_arguments(**given)
    return a, _choose(a, impl)


@explained_by(lambda **arguments: _check_and_choose(**arguments)[1])
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    bias: Tensor | BiasFunction | None = None,
    pattern: BlockPattern | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    memory_budget: str | int | None = None,
    impl: str = "auto",
) -> Tensor:
    """softmax(q k^T * scale + bias) v, exactly, with memory linear in the lengths in forward and backward.

    q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E] of one dtype, H a multiple of G (query heads h*H/G and on
    share key/value head h); the result is [B, H, Q, E]. Scores and sums are fp32 (float64 for float64).

    causal: a query attends to keys up to its own position, which is its index + K - Q: the last query is at
        the last key, as generation with a cache needs (PyTorch's `is_causal` aligns the first ones instead).
    bias: added to the scaled scores. A tensor that broadcasts to [B, H, Q, K] (its gradient is formed at its
        own size), or a function f(b, h, q_index, k_index) of index tensors (see BiasFunction; gradients flow
        to the tensors it lists in `tensors`). `locality_bias(t, s)` makes one.
    pattern: which blocks of keys a block of queries attends to. Not causal by itself.
    key_mask: padding, [B, K], True where a key may be attended to.
    scale: default 1/sqrt(D).
    memory_budget: for the chunks of impl="chunked", such as "64MiB"; default 256 MiB, on the CPU 32 MiB.
    impl: "auto", or by name: "sdpa" (the best fused kernel of PyTorch), one of those ("cudnn", "flash",
        "efficient"), "triton" (our kernels: patterns, padding, locality_bias), "chunked" (plain torch),
        "reference" (the whole matrix).

    A query without keys gets zeros and gives zero gradients. `oomph.ops.explain(attention, ...)` says what
    would run and why. First derivatives only.
    """
    given: dict[str, Any] = {
        "q": q, "k": k, "v": v, "causal": causal, "bias": bias, "pattern": pattern,
        "key_mask": key_mask, "scale": scale, "memory_budget": memory_budget, "impl": impl,
    }  # fmt: skip
    # The compiler traces PyTorch's own kernels and the reference; the rest is one op to it.
    traced = torch.compiler.is_dynamo_compiling() and _is_traceable(**given)
    return _attention_traced(**given) if traced else _attention(**given)


def _is_traceable(impl: str, **given: Any) -> bool:
    if impl in ("auto", "sdpa", *BACKENDS):
        return bool(usable_backends(check_arguments(**given))[0])
    return impl == "reference"


def _attention_traced(**given: Any) -> Tensor:
    a, choice = _check_and_choose(**given)
    log_choice("attention", choice)
    if choice.impl == "reference":
        bias = a.bias if a.bias_function is None else a.bias_function
        options: dict[str, Any] = {"causal": a.causal, "bias": bias, "pattern": a.pattern, "scale": a.scale}
        return reference(a.q, a.k, a.v, key_mask_BK=a.key_mask, **options)
    out: Tensor
    if choice.impl == "chunked":
        out = ChunkedAttention.apply(a, a.q, a.k, a.v, a.bias, *a.bias_tensors)
    elif choice.impl == "triton":
        out = TritonAttention.apply(a, a.q, a.k, a.v)
    else:
        out = sdpa(a, choice.impl)
    return out


_attention = opaque_op(_attention_traced)


def _choose(a: AttentionArguments, impl: str) -> Choice:
    if impl == "reference":
        return Choice("reference", ASKED_FOR)
    if impl == "chunked":
        return Choice("chunked", ASKED_FOR, chunk_sizes(a)._asdict())
    backends, refused = usable_backends(a)
    if impl in ("sdpa", *BACKENDS):
        usable = backends if impl == "sdpa" else [name for name in backends if name == impl]
        if not usable:
            raise ArgumentError(f"impl={impl!r} cannot run this call in linear memory ({refused})")
        return Choice(usable[0], ASKED_FOR)
    if impl == "auto" and backends:
        return Choice(backends[0], refused or "first of PyTorch's fused kernels on this GPU")
    no_kernels = why_not_kernels(a)
    if impl == "triton":
        if no_kernels is not None:
            raise ArgumentError(f"impl={impl!r} cannot run this call ({no_kernels})")
        return Choice(impl, ASKED_FOR)
    if no_kernels is None and a.q.device.type == "cuda":  # on a CPU they only run in Triton's interpreter
        return Choice("triton", f"no fused kernel ({refused})")
    no_kernels = no_kernels or "the interpreter is for tests"
    reason = f"no fused kernel ({refused}), no kernel of ours ({no_kernels})"
    return Choice("chunked", reason, chunk_sizes(a)._asdict())
