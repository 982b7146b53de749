"""The public function: checks the call, chooses an implementation, runs it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import ASKED_FOR, Choice, explained_by, log_choice, no_autocast, no_compile
from oomph.ops.delta_attention.chunked import CHUNK, Call, chunked
from oomph.ops.delta_attention.costs import torch_costs, torch_default, triton_costs
from oomph.ops.delta_attention.problem import IMPLS, MODES, Problem, make_problem
from oomph.ops.delta_attention.reference import reference
from oomph.ops.delta_attention.scan import scan
from oomph.ops.delta_attention.segments import plan_batch, plan_packed, tokens_per_segment
from oomph.ops.delta_attention.sequential import sequential
from oomph.ops.launch import why_not_triton

# Up to so many tokens, without gradients, a loop over them is faster than one chunk in plain torch.
_FEW_TOKENS = 8
_LARGEST_HEAD = 256

Run = Callable[[tuple[Tensor, ...], Tensor], tuple[Tensor, Tensor]]


def _choose(mode: str, impl: str, **given: Any) -> Choice:
    common.check_one_of("mode", mode, MODES)
    common.check_one_of("impl", impl, IMPLS)
    return _decide(make_problem(**given), mode, impl)


@explained_by(_choose)
def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    mode: str = "auto",
    memory_chunk_size: int | None = None,
    memory_budget: str | int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    impl: str = "auto",
    check: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Kimi delta attention: (o [B, T, H, dv], final state [B, H, dk, dv]), exact, linear in T.

    Per head, token by token, a state S [dk, dv] first decays, then is corrected towards the token's value:
        S = diag(exp(log_alpha)) S;   S += beta k (v - S^T k)^T;   o = scale S^T q

    q, k, log_alpha [B, T, H, dk], v [B, T, H, dv], beta [B, T, H]; log_alpha <= 0, beta from 0 to 1. A token
    with log_alpha = 0 and beta = 0 leaves the state as it is, to the bit. T = 0 gives an empty o and the
    state that was given.

    dtypes: q, k, v of one dtype (under autocast they become autocast's), which o has; log_alpha and beta any.
        The state is float32, or float64 where one of the five is, and so is all arithmetic but the products
        of impl="triton", whose factors are of q's dtype.
    initial_state: [B, H, dk, dv] in the state's dtype; default zeros. Gradients flow to it and from the final
        state, so a sequence may be cut anywhere, and generation goes on from a state token by token.
    scale: default dk**-0.5.
    mode: "sequential" (a loop over tokens), "chunked" (the tokens of a chunk at once, in large products),
        "scan" (field report 000's: a dk x dk matrix per token; to be measured, not used), or "auto":
        sequential for one token, and for a few without gradients; else chunked.
    memory_chunk_size: of mode="chunked", the tokens that are worked on at a time, in whole chunks. Kept for
        backward are the inputs and the states every so many tokens; the rest is made again (on a CPU a call
        of one part keeps up to its inputs' size more). In mode="scan" it
        is the report's: the tokens per part of `precompute_updates`, default 64.
    memory_budget: instead, such as "64MiB": for what is needed beside the inputs, outputs and gradients.
        Where no size meets it, the one that needs least is taken.
    cu_seqlens: N sequences packed one after the other in B = 1: their N + 1 ends, from 0 to T. States are
        then [N, H, dk, dv]. Plain torch must know the values: give a list or a CPU tensor, or it waits for
        the GPU. (In a prediction that does not know them, the sequences are taken to be equally long.)
    impl: "torch" (any device, any mode), "triton" (kernels, mode="chunked", head sizes to 256), "reference"
        (a plain loop, the specification), or "auto": the kernels on a GPU where they apply, else "torch".
    check: log_alpha > 0, beta outside [0, 1] and malformed cu_seqlens are errors. Finding them takes the
        values: by default (None) on a CPU only; True also on a GPU, and waits for it. Unchecked, the
        recurrence is computed as written, and may overflow. Never in a prediction.

    `oomph.ops.explain(kda, ...)` tells what would run and why. First derivatives only, except by
    mode="sequential", mode="scan" and impl="reference".
    """
    common.check_one_of("mode", mode, MODES)
    common.check_one_of("impl", impl, IMPLS)
    sizes = (memory_chunk_size, memory_budget, cu_seqlens, check)
    return _run(q, k, v, log_alpha, beta, initial_state, scale, *sizes, mode, impl)


@no_compile  # the loops over chunks would be unrolled
def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float | None,
    memory_chunk_size: int | None,
    memory_budget: str | int | None,
    cu_seqlens: Tensor | Sequence[int] | None,
    check: bool | None,
    mode: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    sizes = (memory_chunk_size, memory_budget, cu_seqlens, check)
    p = make_problem(q, k, v, log_alpha, beta, initial_state, scale, *sizes)
    choice = log_choice("kda", _decide(p, mode, impl))
    with no_autocast(p.q):
        if p.v.numel() == 0:
            return p.v.clone(), p.start().clone()
        if choice.impl == "triton":
            return _run_triton(p, choice.settings["segment_tokens"])
        if choice.impl == "reference":
            return _sequence_by_sequence(p, lambda inputs, state: _run_reference(inputs, state, p))
        if choice.settings["mode"] == "sequential":
            return _sequence_by_sequence(p, lambda inputs, state: sequential(inputs, state, p.scale))  # type: ignore[arg-type]
        if choice.settings["mode"] == "scan":
            size = p.memory_chunk_size or 64
            return _sequence_by_sequence(p, lambda inputs, state: scan(inputs, state, p.scale, size))  # type: ignore[arg-type]
        return _run_chunked(p, choice.settings["segment_tokens"])


def _decide(p: Problem, mode: str, impl: str) -> Choice:
    if impl == "reference":
        if mode not in ("auto", "sequential"):
            raise ArgumentError(f"impl='reference' goes token by token; mode={mode!r} needs impl='torch'")
        return Choice("reference", ASKED_FOR, {"mode": "sequential"})
    if impl == "triton" and mode not in ("auto", "chunked"):
        raise ArgumentError(f"impl='triton' has mode='chunked' only; mode={mode!r} needs impl='torch'")
    if p.memory_chunk_size is not None and mode == "sequential":
        raise ArgumentError(
            "memory_chunk_size is for mode='chunked' and 'scan'; leave it out of 'sequential'"
        )
    if p.budget is not None and mode in ("sequential", "scan"):
        raise ArgumentError(f"memory_budget is for mode='chunked'; leave it out of {mode!r}")
    if mode in ("sequential", "scan"):
        return Choice("torch", ASKED_FOR, {"mode": mode})
    objection = why_not_triton(p.q) or _why_not_kernels(p)
    if impl == "triton" and objection:
        raise ArgumentError(f"impl='triton' cannot run this call ({objection}); choose 'auto' or 'torch'")
    # On a CPU the kernels only run in Triton's interpreter, which auto leaves to tests.
    kernels = impl == "triton" or (impl == "auto" and objection is None and p.q.device.type == "cuda")
    few = _why_sequential(p, kernels) if mode == "auto" and impl != "triton" else None
    if few is not None:
        return Choice("torch", few, {"mode": "sequential"})
    if kernels:
        reason = ASKED_FOR if impl == "triton" else "kernels on the GPU"
        return Choice("triton", reason, {"mode": "chunked", "segment_tokens": _triton_segment(p)})
    if impl == "torch":
        reason = ASKED_FOR
    else:
        reason = f"no kernel ({objection or 'the interpreter is for tests'}): chunks in large products"
    return Choice("torch", reason, {"mode": "chunked", "segment_tokens": _torch_segment(p)})


def _why_sequential(p: Problem, kernels: bool) -> str | None:
    if p.cu_seqlens is not None or p.memory_chunk_size is not None or p.budget is not None:
        return None
    if p.tokens == 1:
        return "one token"
    if 1 < p.tokens <= _FEW_TOKENS and not p.needs_gradient and not kernels:
        return f"{p.tokens} tokens without gradients"
    return None


def _why_not_kernels(p: Problem) -> str | None:
    if p.state_dtype == torch.float64:
        return "the kernels accumulate in float32, which is too little for float64"
    if max(p.q.shape[3], p.v.shape[3]) > _LARGEST_HEAD:
        return f"a head size above {_LARGEST_HEAD}"
    if p.q.device.type == "cpu" and p.q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    return None


def _torch_segment(p: Problem) -> int:
    costs = torch_costs(p)
    default = torch_default(p, costs)
    return tokens_per_segment(p.tokens, CHUNK, costs, p.memory_chunk_size, p.budget, default)


def _triton_segment(p: Problem) -> int | None:
    """None: the kernels' own default."""
    if p.memory_chunk_size is None and p.budget is None:
        return None
    costs, step = triton_costs(p)
    return tokens_per_segment(p.tokens, step, costs, p.memory_chunk_size, p.budget, p.tokens)


def _run_triton(p: Problem, segment_tokens: int | None) -> tuple[Tensor, Tensor]:
    from oomph.ops.delta_attention.fused import fused_kda

    ends = None if p.cu_seqlens is None else p.cu_seqlens.to(p.q.device)
    return fused_kda(*p.inputs, p.initial_state, p.scale, ends, segment_tokens)


def _run_chunked(p: Problem, segment_tokens: int) -> tuple[Tensor, Tensor]:
    lengths = p.lengths()
    if lengths is None:
        plan = plan_batch(p.q.shape[0], p.tokens, CHUNK, segment_tokens)
    else:
        plan = plan_packed(lengths, CHUNK, segment_tokens)
    return chunked(*p.inputs, p.initial_state, Call(plan, lengths is not None, p.scale, p.state_dtype))


def _run_reference(inputs: tuple[Tensor, ...], state: Tensor, p: Problem) -> tuple[Tensor, Tensor]:
    wide = (x.to(state.dtype) for x in inputs)
    o, final = reference(*wide, initial_state=state, scale=p.scale)  # type: ignore[misc]
    return o.to(p.v.dtype), final


def _sequence_by_sequence(p: Problem, run: Run) -> tuple[Tensor, Tensor]:
    """`run(inputs, states)` of the whole batch, or of each packed sequence in turn."""
    lengths, state = p.lengths(), p.start()
    if lengths is None:
        return run(p.inputs, state)
    outputs, finals, start = [], [], 0
    for number, length in enumerate(lengths):
        begin = state[number : number + 1]
        if length:
            part = tuple(x[:, start : start + length] for x in p.inputs)
            o, begin = run(part, begin)
            outputs.append(o)
        finals.append(begin)
        start += length
    return torch.cat(outputs, 1), torch.cat(finals)
