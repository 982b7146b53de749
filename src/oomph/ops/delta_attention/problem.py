"""One call of kda, checked: a failure is one line that names the argument and what is valid."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import autocast_enabled, matmul_dtype
from oomph.ops.launch import is_fake

MODES = ("auto", "sequential", "scan", "chunked")
IMPLS = ("auto", "torch", "triton", "reference")


@dataclass(frozen=True, eq=False)
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    log_alpha: Tensor
    beta: Tensor
    initial_state: Tensor | None
    scale: float
    memory_chunk_size: int | None
    budget: int | None
    cu_seqlens: Tensor | None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.log_alpha, self.beta

    @property
    def state_dtype(self) -> torch.dtype:
        return state_dtype(*self.inputs)

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def streams(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return (self.streams, self.q.shape[2], self.q.shape[3], self.v.shape[3])

    @property
    def needs_gradient(self) -> bool:
        given = (*self.inputs, self.initial_state)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)

    def lengths(self) -> list[int] | None:
        """Of the packed sequences; where they are on a GPU this waits for it. None without cu_seqlens.

        In a prediction their values may be unknown: then the sequences are taken to be equally long.
        """
        if self.cu_seqlens is None:
            return None
        if is_fake(self.cu_seqlens):
            share, more = divmod(self.tokens, self.streams)
            return [share + (number < more) for number in range(self.streams)]
        ends = self.cu_seqlens.tolist()
        _check_ends(ends, self.tokens)
        return [end - start for start, end in itertools.pairwise(ends)]

    def start(self) -> Tensor:
        """The initial states, zeros where none were given."""
        if self.initial_state is not None:
            return self.initial_state
        return self.q.new_zeros(self.state_shape, dtype=self.state_dtype)


def state_dtype(*inputs: Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32


def make_problem(
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
) -> Problem:
    common.check_floating(q=q, k=k, v=v, log_alpha=log_alpha, beta=beta)
    common.check_floating_if_given(initial_state=initial_state)
    _check_shapes(q, k, v, log_alpha, beta)
    common.check_same_device(q=q, k=k, v=v, log_alpha=log_alpha, beta=beta, initial_state=initial_state)
    if autocast_enabled(q):
        q, k, v = (x.to(matmul_dtype(x)) for x in (q, k, v))
    common.check_same_dtype(q=q, k=k, v=v)
    if scale is None:
        scale = q.shape[3] ** -0.5
    elif isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale):
        raise ArgumentError(f"scale={scale!r} is not valid; choose a finite number, or None for dk**-0.5")
    size = memory_chunk_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ArgumentError(
            f"memory_chunk_size={size!r} is not valid; choose a number of tokens >= 1, or None"
        )
    budget = common.parse_memory_budget(memory_budget)
    if size is not None and budget is not None:
        raise ArgumentError("memory_chunk_size and memory_budget were both given; choose one of them")
    ends = _as_ends(cu_seqlens, q)
    p = Problem(q, k, v, log_alpha, beta, initial_state, float(scale), size, budget, ends)
    _check_state(p)
    _check_values(p, check)
    return p


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor) -> None:
    named = {"q": q, "k": k, "v": v, "log_alpha": log_alpha}
    for name, x in named.items():
        if x.dim() != 4:
            raise ArgumentError(f"{name} has shape {list(x.shape)}; valid: [B, T, H, d], 4 dimensions")
    if q.shape[3] < 1 or v.shape[3] < 1:
        raise ArgumentError(f"q has head size {q.shape[3]} and v {v.shape[3]}; valid: 1 or more")
    for name, x in (("k", k), ("log_alpha", log_alpha)):
        if x.shape != q.shape:
            raise ArgumentError(f"{name} has shape {list(x.shape)}; valid: that of q, {list(q.shape)}")
    if v.shape[:3] != q.shape[:3]:
        raise ArgumentError(
            f"v has shape {list(v.shape)}; valid: {[*q.shape[:3], 'dv']} to match q".replace("'", "")
        )
    if beta.shape != q.shape[:3]:
        raise ArgumentError(
            f"beta has shape {list(beta.shape)}; valid: {list(q.shape[:3])}, one per token and head"
        )


def _check_state(p: Problem) -> None:
    state = p.initial_state
    if state is None:
        return
    if tuple(state.shape) != p.state_shape:
        raise ArgumentError(f"initial_state has shape {list(state.shape)}; valid: {list(p.state_shape)}")
    if state.dtype != p.state_dtype:
        raise ArgumentError(f"initial_state has dtype {state.dtype}; valid here: {p.state_dtype}")


def _as_ends(cu_seqlens: Tensor | Sequence[int] | None, q: Tensor) -> Tensor | None:
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
    if not is_fake(ends) and ends.device.type == "cpu":
        _check_ends(ends.tolist(), q.shape[1])
    return ends


def _check_ends(ends: list[int], tokens: int) -> None:
    rising = all(start <= end for start, end in itertools.pairwise(ends))
    if not rising or ends[0] != 0 or ends[-1] != tokens:
        shown = str(ends) if len(ends) <= 8 else f"[{', '.join(map(str, ends[:6]))}, ..., {ends[-1]}]"
        raise ArgumentError(f"cu_seqlens={shown} is not valid; valid: rising from 0 to T = {tokens}")


def _check_values(p: Problem, check: bool | None) -> None:
    """What only the data can tell: by default on a CPU, where it costs little; never in a prediction."""
    if check is not None and not isinstance(check, bool):
        raise ArgumentError(f"check={check!r} is not valid; choose True, False, or None (on a CPU only)")
    if check is None:
        check = p.q.device.type == "cpu"
    if not check or is_fake(p.q) or p.q.numel() == 0:
        return
    with torch.no_grad():
        largest = p.log_alpha.detach().max()
        low, high = p.beta.detach().aminmax()
    # NaN compares as False: it is no error here, and shows in the results.
    if bool(largest > 0):
        raise ArgumentError(
            f"log_alpha has a value of {largest.item():.4g}; valid: <= 0 (a decay of at most 1)"
        )
    if bool((low < 0) | (high > 1)):
        raise ArgumentError(f"beta has values from {low.item():.4g} to {high.item():.4g}; valid: 0 to 1")
    if p.cu_seqlens is not None and p.cu_seqlens.device.type != "cpu":
        p.lengths()
