"""Weights times values, as one call of ops.attention.

B batch, H query heads, G key/value heads, T queries, S keys, D and E head sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oomph.fixes.attention.score_state import State
from oomph.ops.softmax_attention import attention


def fused(state: State, v: Tensor) -> Tensor | None:
    """softmax(scores) v, [*lead, T, E]; None where it would not be the same function."""
    shapes = _four_dimensional(state, v)
    masks = [_at_scores(fill.forbidden(), state) for fill in state.fills]
    terms = [_at_scores(term.value, state) for term in state.terms]
    if shapes is None or not _rows_are_covered(state):
        return None
    known_masks = [mask for mask in masks if mask is not None]
    known_terms = [term for term in terms if term is not None]
    if len(known_masks) < len(masks) or len(known_terms) < len(terms):
        return None
    state.check_unchanged()
    q, k, v4 = shapes
    wide = q.dtype
    if not wide == k.dtype == v.dtype:
        wide = torch.promote_types(torch.promote_types(wide, k.dtype), v.dtype)
        if state.context.autocast is None:
            q, k, v4 = q.to(wide), k.to(wide), v4.to(wide)
    own = state.context.matmul_dtype(wide)
    bias = _sum(known_terms, [term.factor for term in state.terms], own)
    seen = _Seen(q.shape[2], k.shape[2], state.future is not None, known_masks)
    bias = seen.put_into(bias, own, q.device, show_in_empty_rows=_empty_rows_matter(state))
    out = attention(
        q, k, v4, causal=seen.causal, bias=bias, key_mask=seen.key_mask(q.shape[0]), scale=state.scale
    )
    if _empty_rows_matter(state):
        out = _with_empty_rows(out, v4, state, known_masks)
    dtype = state.context.matmul_dtype(v.dtype)
    if out.dtype != dtype:
        out = out.to(dtype)
    return out if len(state.shape) == 4 else out.reshape(*state.lead, out.shape[2], out.shape[3])


class _Seen:
    """Which keys a query may see, divided into what the op has arguments for and what goes into a bias.

    A bias of queries x keys that needs no gradient takes everything with it, as far as it need not grow: the
    kernels know it, and nothing beside it.
    """

    def __init__(self, queries: int, keys: int, causal: bool, masks: Sequence[Tensor]) -> None:
        self.queries, self.keys, self.causal = queries, keys, causal
        self.by_key = [mask for mask in masks if mask.shape[1:3] == (1, 1)]
        self.by_pair = [mask for mask in masks if mask.shape[1:3] != (1, 1)]

    def put_into(
        self, bias: Tensor | None, dtype: torch.dtype, device: torch.device, *, show_in_empty_rows: bool
    ) -> Tensor | None:
        """`show_in_empty_rows`: a row that is masked throughout is shown instead. Not every kernel gives
        zeros for rows of -inf; what they give is replaced afterwards."""
        is_matrix = bool(self.by_pair) or (bias is not None and bias.shape[2] == self.queries > 1)
        if is_matrix and not (bias is not None and bias.requires_grad and torch.is_grad_enabled()):
            if self.causal:
                self.by_pair.append(_later(self.queries, self.keys, device)[None, None])
                self.causal = False
            matrices = [*self.by_pair, *([] if bias is None else [bias])]
            if all(each.shape[0] > 1 or each.shape[1] == 1 for each in matrices):
                self.by_pair, self.by_key = [*self.by_pair, *self.by_key], []
        mask = _any(self.by_pair)
        if mask is None:
            return bias
        if show_in_empty_rows:
            mask = mask & ~mask.all(-1, keepdim=True)
        if bias is None:
            return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(mask, -math.inf)
        return bias.masked_fill(mask, -math.inf)

    def key_mask(self, batch: int) -> Tensor | None:
        """[B, S], True where a key may be seen."""
        forbidden = _any(self.by_key)
        return None if forbidden is None else ~forbidden[:, 0, 0, :].expand(batch, self.keys)


def _four_dimensional(state: State, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """q, k, v as the op takes them. Reshaping joins dimensions, which may copy; nothing is repeated
    but where the program broadcasts over the batch."""
    q, k, lead = state.q, state.k, state.lead
    if not q.dim() == k.dim() == v.dim() == len(lead) + 2 or v.shape[-2] != k.shape[-2]:
        return None
    if any(have not in (1, want) for have, want in zip(v.shape[:-2], lead, strict=True)):
        return None
    q = _expanded(q, lead)
    if len(lead) == 1:
        return q[:, None], _expanded(k, lead)[:, None], _expanded(v, lead)[:, None]
    # Key heads: as many as there are, one for all, or (grouped, in five dimensions) one for a whole group.
    grouped = len(lead) == 3 and k.shape[2] == v.shape[2] == 1 < lead[2]
    heads = lead[-1]
    if k.shape[-3] == v.shape[-3] == 1:
        heads = 1
    outer = lead[:-1]
    k, v = _expanded(k, (*outer, heads)), _expanded(v, (*outer, heads))
    if grouped:
        return q.flatten(1, 2), k.squeeze(2), v.squeeze(2)
    if len(lead) == 2:
        return q, k, v
    q, k, v = (each.flatten(0, len(outer) - 1) for each in (q, k, v))
    return q, k, v


def _expanded(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Itself where it has these dimensions already: a view costs time in forward and in backward."""
    shape = tensor.shape
    return tensor if shape[:-2] == lead else tensor.expand(*lead, *shape[-2:])


def _at_scores(tensor: Tensor, state: State) -> Tensor | None:
    """A mask or term as it broadcasts to [B, H, T, S]; None where that needs a copy at full size."""
    lead = state.lead
    rank = len(lead) + 2
    wide = tensor.reshape((1,) * (rank - tensor.dim()) + tuple(tensor.shape))
    if len(lead) == 2:
        return wide
    if len(lead) == 1:
        return wide[:, None]
    own = tuple(wide.shape[:-2])
    if math.prod(own) == 1:
        return wide.reshape(1, 1, *wide.shape[-2:])
    if math.prod(own[:-1]) == 1 and not (len(lead) == 3 and state.k.shape[2] == 1):
        return wide.reshape(1, *wide.shape[-3:])
    return None


def _sum(terms: Sequence[Tensor], factors: Sequence[float], dtype: torch.dtype) -> Tensor | None:
    total: Tensor | None = None
    for term, factor in zip(terms, factors, strict=True):
        part = term if factor == 1 else term.to(torch.promote_types(term.dtype, dtype)) * factor
        total = part if total is None else total + part
    return total


def _later(queries: int, keys: int, device: torch.device) -> Tensor:
    """[T, S] True for keys after the query's own position."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)


def _any(masks: Sequence[Tensor]) -> Tensor | None:
    total: Tensor | None = None
    for mask in masks:
        total = mask if total is None else total | mask
    return total


# Rows in which every key is masked -------------------------------------------------------------------------
# With -inf the program's weights are NaN there, and the op gives zeros. With large negative numbers its
# weights are equal over all keys that were filled with the largest one.


def _rows_are_covered(state: State) -> bool:
    """Is it known what the program computes in rows without a visible key?"""
    values = {fill.value for fill in state.fills}
    if not values or state.empty_rows_are_zero:
        return True
    if values == {-math.inf}:
        return state.future in (None, -math.inf)
    if len(values) > 1 or state.terms_after_fills:
        return False
    if state.future == -math.inf:  # whether a masked key that lies ahead has one value or the other
        return state.fills_before_future in (0, len(state.fills))
    return state.future is None or (state.future in values and not state.future_is_added)


def _empty_rows_matter(state: State) -> bool:
    """Does the program compute numbers in them?"""
    return state.empty_rows_are_zero or any(fill.value != -math.inf for fill in state.fills)


def _with_empty_rows(out: Tensor, v: Tensor, state: State, masks: Sequence[Tensor]) -> Tensor:
    """The mean of those values whose keys were filled with the finite number, where a row has no others.

    Zeros where the program has set the weights to zero.
    """
    forbidden = _any(masks)
    assert forbidden is not None
    queries, keys = out.shape[2], v.shape[2]
    v = v.repeat_interleave(out.shape[1] // v.shape[1], 1) if v.shape[1] not in (1, out.shape[1]) else v
    wide = torch.promote_types(v.dtype, torch.float32)
    if state.future is None:
        empty = forbidden.all(-1, keepdim=True)
    elif forbidden.shape[2] == 1:
        own = torch.arange(keys - queries, keys, device=out.device)  # the key at a query's own position
        full = forbidden.expand(*forbidden.shape[:3], keys)
        empty = full.long().cumprod(-1)[..., own].bool().transpose(2, 3)
    else:
        empty = (forbidden | _later(queries, keys, out.device)).all(-1, keepdim=True)
    if state.empty_rows_are_zero:
        mean = out.new_zeros(())
    elif state.future != -math.inf:
        mean = v.mean(2, keepdim=True, dtype=wide)
    elif state.fills_before_future:
        own = torch.arange(keys - queries, keys, device=out.device)
        mean = v.cumsum(2, dtype=wide)[:, :, own] / (own + 1)[:, None]
    else:
        filled = forbidden.expand(*forbidden.shape[:3], keys).to(wide)
        mean = (filled @ v.to(wide)) / filled.sum(-1, keepdim=True).clamp_min(1)
    return torch.where(empty, mean.to(out.dtype), out)
