"""Kimi Delta Attention in the chunkwise (WY) form, in plain torch: a segment of tokens at a time.

Legend: C tokens of a chunk, P positions of a sub-chunk, M sub-chunks of a chunk, N chunks of a segment,
B batch, H heads, W = B * H, X = N * W, K key size, V value size. Within a chunk, q, k and alpha are
[P, M, X, K] with C = M * P, so that one token of every sub-chunk is a contiguous slab; all else has a chunk's
tokens in rows, [X, C, ...].

Per chunk and head, with S the state before it, D_ij = alpha_{j+1} ... alpha_i per channel (1 for i = j) and
G_i = alpha_0 ... alpha_i:
    Akk_ij = sum_d k_i k_j D_ij  for j < i;  Aqk_ij = sum_d q_i k_j D_ij  for j <= i
    kg_j   = k_j D_{C-1, j}                         the keys decayed to the end of the chunk
    error   Z = (I + Akk beta)^-1 (v - (k G) S)     of what the state returns for the keys
    output  o = scale ((q G) S + Aqk (beta Z))
    state   S' = G_{C-1} S + kg^T (beta Z)
What does not depend on S is computed first, for all chunks of a segment; only the state goes from chunk to
chunk.

Every factor is a product of alphas, hence in [0, 1]: nothing can overflow, and a decay so strong that alpha
rounds to 0 is a factor of 0. The usual form, exp(g_i - g_j) with g the cumulative sum of log alpha, loses
digits where g is large, and its gradient cancels to noise.

Saved for backward: the inputs, and the states at the starts of segments. Backward recomputes a segment under
autograd, from the last to the first, so that the memory of a call is that of one segment whatever the length.

On a CPU, a batched product whose second factor is a transposed view is many times slower than one with a
transposed copy (the first factor may be a view): hence _Product, and the copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.ops.common import OpFunction, no_autocast, refuse_second_derivatives
from oomph.torch_internals import disable_torch_function
from oomph.units import KiB, MiB

CHUNK = 32
SUB_CHUNK = 8
# Of a segment, by default. Longer segments take fewer operations, each on more data.
_DEFAULT_SEGMENT_BYTES = 256 * MiB
# Allocators round the sizes of a few dozen tensors up.
_ROUNDING = 64 * KiB


# Segments: the tokens that are processed at a time, in whole chunks, which bounds the memory.


@dataclass(frozen=True)
class MemoryCosts:
    """Bytes beside inputs, outputs and gradients: per token of a segment, fixed, and saved per segment."""

    per_token: int
    fixed: int
    states: int

    def total(self, tokens: int, per_segment: int) -> int:
        in_segment = min(tokens, per_segment)
        return self.fixed + in_segment * self.per_token + (-(-tokens // per_segment) - 1) * self.states


def tokens_per_segment(
    tokens: int, chunk: int, costs: MemoryCosts, asked: int | None, budget: int | None, default: int
) -> int:
    """A multiple of `chunk`: what was asked for, or the most that stays within the budget, or `default`.

    Short segments process few tokens at a time and save many states. Where no length meets the budget, the
    one that needs least is returned.
    """
    if asked is not None:
        return _round_up(asked, chunk)
    whole = _round_up(max(tokens, 1), chunk)
    if budget is None:
        return min(whole, _round_up(default, chunk))
    best, least = whole, costs.total(tokens, whole)
    # Of the lengths that give the same number of segments, the shortest needs least.
    for count in range(1, whole // chunk + 1):
        length = _round_up(-(-whole // count), chunk)
        needed = costs.total(tokens, length)
        if needed <= budget:
            return length
        if needed < least:
            best, least = length, needed
        if (count - 1) * costs.states > least:
            break  # the saved states alone would be more
    return best


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def chunked_memory_costs(q: Tensor, v: Tensor, dtype: torch.dtype) -> MemoryCosts:
    """An upper bound, by up to a tenth for whole chunks, counted in predictions of backward."""
    heads, keys, values = q.shape[2:] + v.shape[3:]
    rows = q.shape[0] * heads * dtype.itemsize
    per_token = 25 * keys + 8 * values + 10 * keys * values // (3 * CHUNK) + 6 * CHUNK
    state = rows * keys * values
    return MemoryCosts(rows * per_token, 4 * state + _ROUNDING, state)


def default_segment_tokens(costs: MemoryCosts) -> int:
    return max(4 * CHUNK, _DEFAULT_SEGMENT_BYTES // max(1, costs.per_token))


def chunked_kda(
    inputs: Sequence[Tensor], initial_state: Tensor | None, dtype: torch.dtype, scale: float, size: int
) -> tuple[Tensor, Tensor]:
    """(o, final state) of q, k, v, log_alpha, beta, which have been checked, `size` tokens at a time.

    `dtype` is that of the state and of all arithmetic.
    """
    # Its products are no attention scores, which the fix fused_attention seeks.
    with disable_torch_function():
        return _ChunkedKDA.apply(*inputs, initial_state, dtype, scale, size)  # type: ignore[no-any-return]


class _ChunkedKDA(OpFunction):
    op = "kda"
    instead = "mode='sequential' can"

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, initial_state, dtype, scale, size = arguments
        out, starts = torch.empty_like(inputs[2]), []
        state = _initial_state(inputs, initial_state, dtype)
        with no_autocast(out):
            for tokens in _segments(inputs, size):
                if tokens.start:
                    starts.append(state)
                out[:, tokens], state = _segment([x[:, tokens] for x in inputs], state, scale)
        ctx.save_for_backward(*inputs, initial_state, *(starts if any(ctx.needs_input_grad) else ()))
        ctx.options = dtype, scale, size
        ctx.set_materialize_grads(False)
        return out, state

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("kda", "mode='sequential' can")
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[:6]  # once: checkpointing unpacks once
        inputs, initial_state, starts, (dtype, scale, size) = saved[:5], saved[5], saved[6:], ctx.options
        grads = [torch.empty_like(x) if want else None for x, want in zip(inputs, wanted, strict=False)]
        starts = [_initial_state(inputs, initial_state, dtype), *starts]
        with no_autocast(inputs[0]):
            for tokens in reversed(_segments(inputs, size)):
                start = starts.pop().detach().requires_grad_(tokens.start > 0 or wanted[5])
                grad_state = _segment_backward(
                    [x[:, tokens] for x in inputs],
                    start,
                    scale,
                    (None if grad_out is None else grad_out[:, tokens], grad_state),
                    [g if g is None else g[:, tokens] for g in grads],
                )
        if wanted[5] and grad_state is None:
            grad_state = torch.zeros_like(initial_state)
        return *grads, grad_state if wanted[5] else None, None, None, None


def _segments(inputs: Sequence[Tensor], size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, inputs[0].shape[1], size)]


def _initial_state(inputs: Sequence[Tensor], initial_state: Tensor | None, dtype: torch.dtype) -> Tensor:
    if initial_state is not None:
        return initial_state
    batch, _, heads, keys = inputs[0].shape
    return inputs[0].new_zeros((batch, heads, keys, inputs[2].shape[3]), dtype=dtype)


def _segment_backward(
    inputs: Sequence[Tensor],
    start: Tensor,
    scale: float,
    given: tuple[Tensor | None, Tensor | None],
    into: Sequence[Tensor | None],
) -> Tensor | None:
    """The gradients of the inputs are written `into` tensors, except where it is None; that of `start` is
    returned, if it requires one. A function, so that nothing of one segment is left when the next begins."""
    leaves = [x.detach().requires_grad_(place is not None) for x, place in zip(inputs, into, strict=True)]
    with torch.enable_grad():
        results = _segment(leaves, start, scale)
    used = [index for index, grad in enumerate(given) if grad is not None]
    asked = [x for x in (*leaves, start) if x.requires_grad]
    outputs, grads = [results[index] for index in used], [given[index] for index in used]
    del results
    found = iter(torch.autograd.grad(outputs, asked, grads, allow_unused=True))
    for place in into:
        if place is not None:
            grad = next(found)
            place.zero_() if grad is None else place.copy_(grad)
    return next(found, None)


# One segment -----------------------------------------------------------------------------------------


def _segment(inputs: Sequence[Tensor], state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, V], the state after it) of the segment's q, k, v, log alpha and beta; differentiable.

    Padding at its end is zeros: log alpha = 0, beta = 0 and k = 0 leave the state unchanged.
    """
    batch, tokens, heads, values = inputs[2].shape
    wide = [x.to(state.dtype) for x in inputs]
    missing = -tokens % CHUNK
    if missing:
        wide = [F.pad(x, (*([0, 0] * (x.dim() - 2)), 0, missing)) for x in wide]
    q, k, v, log_alpha, beta = wide
    q, k, alpha = (_by_position(x) for x in (q, k, log_alpha.exp()))
    v, beta_X1C = _in_rows(v), _in_rows(beta.unsqueeze(-1)).mT
    Akk, Aqk, kg, decay = _intra_chunk(q, k, alpha)
    qG, kG = (x.permute(2, 1, 0, 3).flatten(1, 2) for x in (q * decay, k * decay))
    v, kG = _Solve.apply(Akk * beta_X1C, v, kG)
    total = decay[-1, -1].unsqueeze(-1)
    out, error, last = _States.apply(qG, kG, v, kg * beta_X1C, total, state.flatten(0, 1))
    out = scale * (out + _Product.apply(Aqk * beta_X1C, error))
    out = out.view(-1, batch, heads, CHUNK, values).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return out[:, :tokens].to(inputs[2].dtype), last.view(state.shape)


def _by_position(x: Tensor) -> Tensor:
    """[B, T, H, K] -> [P, M, X, K]"""
    x = x.unflatten(1, (-1, CHUNK // SUB_CHUNK, SUB_CHUNK))
    return x.permute(3, 2, 1, 0, 4, 5).flatten(2, 4)


def _in_rows(x: Tensor) -> Tensor:
    """[B, T, H, d] -> [X, C, d]"""
    return x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4).flatten(0, 2)


def _intra_chunk(q: Tensor, k: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Akk, Aqk [X, C, C], kg [X, K, C], and G [P, M, X, K].

    Within a sub-chunk, a loop over tokens carries the keys along and multiplies them by alpha_i at token i.
    Between sub-chunks, keys at the ends of their own are carried through the following ones, and meet the
    rows of a later sub-chunk decayed from its start, in matrix products.
    """
    carried: list[Tensor] = []
    decays: list[Tensor] = []
    Akk_rows, Aqk_rows = [], []
    # unbind, because the gradient of each slice by itself would be a tensor of the full size.
    for q_i, k_i, alpha_i in zip(q.unbind(), k.unbind(), alpha.unbind(), strict=True):
        carried = [each * alpha_i for each in carried]  # now k_j D_ij
        decays.append(decays[-1] * alpha_i if decays else alpha_i)
        Akk_rows.append([(each * k_i).sum(-1) for each in carried])
        carried.append(k_i)
        Aqk_rows.append([(each * q_i).sum(-1) for each in carried])
    zero = torch.zeros_like(Aqk_rows[0][0])
    diagonals = [
        torch.stack([torch.stack([*row, *[zero] * (len(k) - len(row))], -1) for row in rows], -2).unbind()
        for rows in (Akk_rows, Aqk_rows)
    ]  # M of [X, P, P], for Akk and Aqk
    decay, ends = torch.stack(decays), torch.stack(carried, 2).unbind()  # M of [X, P, K]
    rows = torch.cat((k * decay, q * decay)).permute(1, 2, 0, 3).unbind()  # M of [X, 2 P, K]
    products: tuple[list[Tensor], list[Tensor]] = ([], [])
    before, keys = [torch.ones_like(decays[0][0])], ends[0]
    for m, total in enumerate(decays[-1].unbind()):
        if m:
            met = _Product.apply(rows[m], keys.mT.contiguous()).chunk(2, 1)
            keys = torch.cat((keys * total.unsqueeze(1), ends[m]), 1)
        for index, blocks in enumerate(products):
            block = diagonals[index][m] if m == 0 else torch.cat((met[index], diagonals[index][m]), -1)
            blocks.append(F.pad(block, (0, CHUNK - block.shape[-1])))
        before.append(before[-1] * total)
    Akk, Aqk = (torch.cat(blocks, 1) for blocks in products)
    return Akk, Aqk, keys.mT.contiguous(), decay * torch.stack(before[:-1])


class _Product(torch.autograd.Function):
    """torch.bmm, with a copy of the second factor of backward's first product."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(a, b)
        return torch.bmm(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return torch.bmm(grad, b.mT.contiguous()), torch.bmm(a.mT, grad.contiguous())


class _Solve(torch.autograd.Function):
    """(I + A)^-1 v and (I + A)^-1 kG. On and above the diagonal, A is 0 and its gradient arbitrary."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, v: Tensor, kG: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        identity = torch.eye(CHUNK, dtype=A.dtype, device=A.device).expand_as(A)
        inverse = torch.linalg.solve_triangular(A, identity, upper=False, unitriangular=True)
        v, kG = torch.bmm(inverse, v), torch.bmm(inverse, kG)
        ctx.save_for_backward(inverse, v, kG)
        return v, kG

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inverse, v, kG = ctx.saved_tensors
        grad_v, grad_kG = (torch.bmm(inverse.mT, grad) for grad in grads)
        grad_A = torch.bmm(grad_v, v.mT.contiguous()).baddbmm_(grad_kG, kG.mT.contiguous())
        return grad_A.neg_(), grad_v, grad_kG


class _States(torch.autograd.Function):
    """((q G) S [X, C, V], Z [X, C, V], the last S [W, K, V]), chunk by chunk.

    kG [X, C, K] and v [X, C, V] are solved: Z = v - kG S. kg is [X, K, C], total [X, K, 1].
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        qG, kG, v, kg, total, start = arguments
        state, before, error = start.clone(), v.new_empty(len(v), *start.shape[1:]), v.new_empty(v.shape)
        chunks = (x.split(len(start)) for x in (kG, v, kg, total, before, error))
        for kG_n, v_n, kg_n, total_n, before_n, error_n in zip(*chunks, strict=True):
            before_n.copy_(state)
            torch.baddbmm(v_n, kG_n, before_n, alpha=-1, out=error_n)
            state.mul_(total_n).baddbmm_(kg_n, error_n)
        ctx.save_for_backward(qG, kG, kg, total, before, error)
        return torch.bmm(qG, before), error, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qG, kG, kg, total, before, error = ctx.saved_tensors
        grad_out, grad_error, grad_state = grads
        grad_state, grad_v = grad_state.clone(), torch.empty_like(error)
        # First, the gradients of the states before the chunks through q alone; later, those after them.
        after = torch.bmm(qG.mT, grad_out)
        chunks = (reversed(x.split(len(grad_state))) for x in (kG, kg, total, grad_error, grad_v, after))
        for kG_n, kg_n, total_n, error_n, v_n, after_n in zip(*chunks, strict=True):
            torch.baddbmm(error_n, kg_n.mT, grad_state, out=v_n)
            grad_before = torch.addcmul(after_n, total_n, grad_state)
            after_n.copy_(grad_state)
            torch.baddbmm(grad_before, kG_n.mT, v_n, alpha=-1, out=grad_state)
        before_XVK = before.mT.contiguous()
        return (
            torch.bmm(grad_out, before_XVK),
            torch.bmm(grad_v, before_XVK).neg_(),
            grad_v,
            torch.bmm(after, error.mT.contiguous()),
            after.mul_(before).sum(-1, keepdim=True),
            grad_state,
        )
