"""The public function `kda`: checks the arguments, chooses an implementation, runs it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.delta_attention import autograd, chunked
from oomph.ops.delta_attention.chunked import tokens_per_segment
from oomph.ops.delta_attention.dense_scan import dense_scan, dense_updates
from oomph.ops.delta_attention.reference import kda_reference

MODES = ("auto", "sequential", "scan", "chunked")
IMPLS = ("auto", "torch", "triton", "reference")
# Up to so many tokens, without gradients, a loop over them is faster than one chunk in plain torch.
_FEW_TOKENS = 8
_LARGEST_HEAD = 256


def _check_and_choose(mode: str, impl: str, **given: Any) -> tuple["KDAArguments", common.Choice]:
    common.check_one_of("mode", mode, MODES)
    common.check_one_of("impl", impl, IMPLS)
    a = _checked(**given)
    return a, _choose_implementation(a, mode, impl)


@common.explained_by(lambda **arguments: _check_and_choose(**arguments)[1])
@common.opaque_op
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
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention: (o [B, T, H, dv], final state [B, H, dk, dv]), exact, linear in T.

    Per head and token, a state S [dk, dv] decays, then is corrected towards the token's value:
        S = diag(exp(log_alpha)) S;   S += beta k (v - S^T k)^T;   o = scale S^T q

    q, k, log_alpha [B, T, H, dk], v [B, T, H, dv], beta [B, T, H]; log_alpha <= 0, beta in [0, 1]. A token
    with log_alpha = 0 and beta = 0 leaves the state bitwise unchanged. T = 0 returns an empty o and the
    initial state.

    dtypes: q, k, v have one dtype (autocast's under autocast), and so has o; log_alpha and beta have any. The
        state is float32, or float64 if one of the five is, and so is all arithmetic, except that the matrix
        products of impl="triton" have factors of q's dtype.
    initial_state: [B, H, dk, dv] in the state's dtype; default zeros. It and the final state are
        differentiable, so a sequence may be cut anywhere, and generation continues from a state.
    scale: default dk**-0.5.
    mode: "sequential" (a loop over tokens), "chunked" (the tokens of a chunk at once, in matrix products),
        "scan" (field report 000's: a dk x dk matrix per token; for comparison), or "auto": sequential for one
        token, and for a few without gradients, else chunked.
    memory_chunk_size: for mode="chunked", the tokens that are processed at a time, in whole chunks. Saved for
        backward are the inputs and the states every so many tokens; the rest is recomputed. For mode="scan",
        the tokens per part of `precompute_updates`, default 64.
    memory_budget: instead, such as "64MiB": for memory beside inputs, outputs and gradients. If no size meets
        it, the one that needs least is used.
    cu_seqlens: N sequences packed one after the other in B = 1: their N + 1 boundaries, from 0 to T. States
        are then [N, H, dk, dv]. Plain torch needs the values: pass a list or a CPU tensor, or it waits for
        the GPU. (A prediction that does not know them assumes sequences of equal length.)
    impl: "torch" (any device, any mode), "triton" (mode="chunked", head sizes up to 256), "reference" (a loop
        over tokens), or "auto": the kernels on a GPU where they apply, else "torch".

    log_alpha > 0 and beta outside [0, 1] are errors on a CPU. On a GPU, where reading them would wait for it,
    the recurrence is computed as written and may overflow.

    `oomph.ops.explain(kda, ...)` returns what would run and why. Differentiable once; mode="sequential",
    mode="scan" and impl="reference" are differentiable twice.
    """
    a, choice = _check_and_choose(**locals())
    common.log_choice("kda", choice)
    with common.no_autocast(a.q):
        if a.v.numel() == 0:
            state = a.initial_state_or_zeros()
            return common.depend_on(a.v, *a.inputs, state), common.depend_on(state, *a.inputs)
        if choice.impl == "triton":
            ends = None if a.cu_seqlens is None else a.cu_seqlens.to(a.q.device)
            return autograd.triton_kda(
                a.inputs, a.initial_state, a.scale, ends, choice.settings["segment_tokens"]
            )
        if choice.settings["mode"] == "chunked" and a.cu_seqlens is None:
            size = choice.settings["segment_tokens"]
            return chunked.chunked_kda(a.inputs, a.initial_state, a.state_dtype, a.scale, size)
        return _run_per_sequence(a, choice)


def precompute_updates(
    k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, *, memory_chunk_size: int | None = 64
) -> tuple[Tensor, Tensor]:
    """(transitions [B, T, H, dk, dk], writes [B, T, H, dk, dv]) with S_t = transitions_t S_{t-1} + writes_t.

    Field report 000's form of the recurrence, `memory_chunk_size` tokens at a time (None: all). The parts are
    concatenated to the full size, so chunks save some temporaries of forward and nothing of what training
    saves for backward. Differentiable.
    """
    _check_tensors(v, beta, k=k, log_alpha=log_alpha)
    common.check_same_device(k=k, v=v, log_alpha=log_alpha, beta=beta)
    common.check_whole(**common.not_none(memory_chunk_size=memory_chunk_size))
    return dense_updates(k, v, log_alpha, beta, memory_chunk_size)


# Arguments -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KDAArguments:
    """The arguments of one call after all checks, with autocast's dtype and the default scale."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_alpha: Tensor
    beta: Tensor
    initial_state: Tensor | None
    scale: float
    memory_chunk_size: int | None
    memory_budget: int | None
    cu_seqlens: Tensor | None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.log_alpha, self.beta

    @property
    def state_dtype(self) -> torch.dtype:
        return common.state_dtype(*self.inputs)

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return (self.sequences, self.q.shape[2], self.q.shape[3], self.v.shape[3])

    @property
    def needs_gradient(self) -> bool:
        given = (*self.inputs, self.initial_state)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)

    def sequence_lengths(self) -> list[int] | None:
        """Of packed sequences; waits for the GPU if they are there. None without cu_seqlens."""
        if self.cu_seqlens is None:
            return None
        if not common.has_values(self.cu_seqlens):  # a prediction: equal lengths
            share, more = divmod(self.tokens, self.sequences)
            return [share + (index < more) for index in range(self.sequences)]
        boundaries = self.cu_seqlens.tolist()
        _check_boundaries(boundaries, self.tokens)
        return [end - start for start, end in itertools.pairwise(boundaries)]

    def initial_state_or_zeros(self) -> Tensor:
        if self.initial_state is not None:
            return self.initial_state
        return self.q.new_zeros(self.state_shape, dtype=self.state_dtype)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    scale: float | None,
    memory_chunk_size: int | None,
    memory_budget: str | int | None,
    cu_seqlens: Tensor | Sequence[int] | None,
) -> KDAArguments:
    _check_tensors(v, beta, q=q, k=k, log_alpha=log_alpha)
    common.check_floating(**common.not_none(initial_state=initial_state))
    common.check_same_device(q=q, k=k, v=v, log_alpha=log_alpha, beta=beta, initial_state=initial_state)
    if common.autocast_enabled(q):
        q, k, v = (x.to(common.matmul_dtype(x)) for x in (q, k, v))
    common.check_same_dtype(q=q, k=k, v=v)
    scale = common.scale_or_default(scale, q.shape[3] ** -0.5)
    common.check_whole(**common.not_none(memory_chunk_size=memory_chunk_size))
    budget = common.parse_memory_budget(memory_budget)
    if memory_chunk_size is not None and budget is not None:
        raise ArgumentError("memory_chunk_size and memory_budget were both given; choose one of them")
    boundaries = _boundaries_tensor(cu_seqlens, q)
    a = KDAArguments(q, k, v, log_alpha, beta, initial_state, scale, memory_chunk_size, budget, boundaries)
    common.check_shape(a.state_shape, initial_state=initial_state)
    if initial_state is not None and initial_state.dtype != a.state_dtype:
        raise ArgumentError(f"initial_state has dtype {initial_state.dtype}; valid here: {a.state_dtype}")
    _check_values(a)
    return a


def _check_tensors(v: Tensor, beta: Tensor, **keys: Tensor) -> None:
    """keys: tensors [B, T, H, dk] by name; the others must have the shape of the first."""
    common.check_floating(**keys, v=v, beta=beta)
    for name, x in {**keys, "v": v}.items():
        if x.dim() != 4 or x.shape[3] < 1:
            raise ArgumentError(f"{name} has shape {list(x.shape)}; valid: [B, T, H, d] with d >= 1")
    first, *shape = next((name, *x.shape) for name, x in keys.items())
    common.check_shape(shape, f", that of {first}", **keys)
    common.check_shape([*shape[:3], v.shape[3]], f", to match {first}", v=v)
    common.check_shape(shape[:3], ", one per token and head", beta=beta)


def _boundaries_tensor(cu_seqlens: Tensor | Sequence[int] | None, q: Tensor) -> Tensor | None:
    if cu_seqlens is None:
        return None
    valid = "the N + 1 ends of N packed sequences, integers from 0 to T"
    try:
        ends = cu_seqlens if isinstance(cu_seqlens, Tensor) else torch.tensor(cu_seqlens)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(f"cu_seqlens={cu_seqlens!r} is not valid; valid: {valid}") from None
    if ends.dtype not in (torch.int32, torch.int64) or ends.dim() != 1 or ends.numel() < 2:
        raise ArgumentError(f"cu_seqlens is {ends.dtype} of shape {list(ends.shape)}; valid: {valid}")
    if q.shape[0] != 1:
        raise ArgumentError(
            f"cu_seqlens was given with a batch of {q.shape[0]}; valid: packed sequences, B = 1"
        )
    if common.is_readable(ends):
        _check_boundaries(ends.tolist(), q.shape[1])
    return ends


def _check_boundaries(ends: list[int], tokens: int) -> None:
    rising = all(start <= end for start, end in itertools.pairwise(ends))
    if not rising or ends[0] != 0 or ends[-1] != tokens:
        shown = str(ends) if len(ends) <= 8 else f"[{', '.join(map(str, ends[:6]))}, ..., {ends[-1]}]"
        raise ArgumentError(f"cu_seqlens={shown} is not valid; valid: rising from 0 to T = {tokens}")


def _check_values(a: KDAArguments) -> None:
    if not common.is_readable(a.q) or a.q.numel() == 0:
        return
    with torch.no_grad():
        largest = a.log_alpha.detach().max()
        low, high = a.beta.detach().aminmax()
    # NaN compares as False: it is not an error here, and shows in the results.
    if bool(largest > 0):
        raise ArgumentError(
            f"log_alpha has a value of {largest.item():.4g}; valid: <= 0 (a decay of at most 1)"
        )
    if bool((low < 0) | (high > 1)):
        raise ArgumentError(f"beta has values from {low.item():.4g} to {high.item():.4g}; valid: 0 to 1")


# Choice ----------------------------------------------------------------------------------------------


def _choose_implementation(a: KDAArguments, mode: str, impl: str) -> common.Choice:
    if impl == "reference":
        if mode not in ("auto", "sequential"):
            raise ArgumentError(f"impl='reference' goes token by token; mode={mode!r} needs impl='torch'")
        return common.Choice("reference", common.ASKED_FOR, {"mode": "sequential"})
    if impl == "triton" and mode not in ("auto", "chunked"):
        raise ArgumentError(f"impl='triton' has mode='chunked' only; mode={mode!r} needs impl='torch'")
    if a.memory_chunk_size is not None and mode == "sequential":
        raise ArgumentError(
            "memory_chunk_size is for mode='chunked' and 'scan'; leave it out of 'sequential'"
        )
    if a.memory_budget is not None and mode in ("sequential", "scan"):
        raise ArgumentError(f"memory_budget is for mode='chunked'; leave it out of {mode!r}")
    if mode in ("sequential", "scan"):
        return common.Choice("torch", common.ASKED_FOR, {"mode": mode})
    obstacle = common.why_not_triton(a.q, a.q.dtype) or _why_not_these_kernels(a)
    if impl == "triton" and obstacle:
        raise ArgumentError(f"impl='triton' cannot run this call ({obstacle}); choose 'auto' or 'torch'")
    # On a CPU the kernels only run in Triton's interpreter, which is for tests.
    kernels = impl == "triton" or (impl == "auto" and obstacle is None and a.q.device.type == "cuda")
    few = _why_sequential(a, kernels) if mode == "auto" and impl != "triton" else None
    if few is not None:
        return common.Choice("torch", few, {"mode": "sequential"})
    if kernels:
        reason, size = "kernels on the GPU", _triton_segment_tokens(a)
    else:
        reason = f"no kernel ({obstacle or 'the interpreter is for tests'}): chunks in large products"
        size = _torch_segment_tokens(a)
    return common.Choice(
        "triton" if kernels else "torch",
        reason if impl == "auto" else common.ASKED_FOR,
        {"mode": "chunked", "segment_tokens": size},
    )


def _why_sequential(a: KDAArguments, kernels: bool) -> str | None:
    if a.cu_seqlens is not None or a.memory_chunk_size is not None or a.memory_budget is not None:
        return None
    if a.tokens == 1:
        return "one token"
    if 1 < a.tokens <= _FEW_TOKENS and not a.needs_gradient and not kernels:
        return f"{a.tokens} tokens without gradients"
    return None


def _why_not_these_kernels(a: KDAArguments) -> str | None:
    if a.state_dtype == torch.float64:
        return "the kernels accumulate in float32, which is too little for float64"
    if max(a.q.shape[3], a.v.shape[3]) > _LARGEST_HEAD:
        return f"a head size above {_LARGEST_HEAD}"
    return None


def _torch_segment_tokens(a: KDAArguments) -> int:
    costs = chunked.chunked_memory_costs(a.q, a.v, a.state_dtype)
    default = chunked.default_segment_tokens(costs)
    return tokens_per_segment(a.tokens, chunked.CHUNK, costs, a.memory_chunk_size, a.memory_budget, default)


def _triton_segment_tokens(a: KDAArguments) -> int | None:
    """None: the default of the kernels."""
    if a.memory_chunk_size is None and a.memory_budget is None:
        return None
    costs = autograd.kernel_memory_costs(a.inputs, a.needs_gradient)
    return tokens_per_segment(a.tokens, autograd.CHUNK, costs, a.memory_chunk_size, a.memory_budget, a.tokens)


# Run -------------------------------------------------------------------------------------------------


def _run_per_sequence(a: KDAArguments, choice: common.Choice) -> tuple[Tensor, Tensor]:
    """In plain torch, the whole batch at once, or each packed sequence in turn."""
    lengths, state, mode = a.sequence_lengths(), a.initial_state_or_zeros(), choice.settings["mode"]

    def run(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        if mode == "scan":
            size = a.memory_chunk_size or 64
            return dense_scan(*inputs, initial_state=state, scale=a.scale, memory_chunk_size=size)
        if mode == "chunked":
            size = choice.settings["segment_tokens"]
            return chunked.chunked_kda(inputs, state, a.state_dtype, a.scale, size)
        wide = [x.to(state.dtype) for x in inputs]
        o, final = kda_reference(*wide, initial_state=state, scale=a.scale)
        return o.to(a.v.dtype), final

    if lengths is None:
        return run(a.inputs, state)
    outputs, finals = [], []
    # Split at once: the gradient of each slice by itself would be a tensor of the full size.
    parts = zip(*(x.split(lengths, 1) for x in a.inputs), strict=True)
    for part, own_state in zip(parts, state.split(1), strict=True):
        if part[0].shape[1]:
            o, own_state = run(part, own_state)
            outputs.append(o)
        finals.append(own_state)
    return torch.cat(outputs, 1), torch.cat(finals)
