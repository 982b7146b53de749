"""The steps from scores to weights: each gives the state after a call, or None where it does not know it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oomph.fixes.attention.lazy_masks import LazyMask
from oomph.fixes.attention.score_state import BEFORE, NEVER, Call, Constant, Fill, State, Term
from oomph.fixes.attention.triangles import Triangle
from oomph.fixes.deferral.deferred import Arguments, Deferred, Options

if TYPE_CHECKING:
    from oomph.fixes.attention.scores import Scores


def _multiplied(scores: Scores, state: State, func: Any, args: Arguments, kwargs: Options) -> State | None:
    if len(args) != 2 or kwargs or state.is_weights:
        return None
    by = args[1] if args[0] is scores else args[0]
    number = _number(by, scores)
    call = _call(func, args, kwargs, scores)
    if number is not None:
        return state.scaled(call, number)
    return _scaled_by_tensor(state, call, by, torch.mul)


def _divided(scores: Scores, state: State, func: Any, args: Arguments, kwargs: Options) -> State | None:
    if len(args) != 2 or kwargs or state.is_weights or args[0] is not scores:
        return None
    number = _number(args[1], scores)
    call = _call(func, args, kwargs, scores)
    if number is not None:
        return state.scaled(call, 1 / number) if number else None
    return _scaled_by_tensor(state, call, args[1], torch.div)


def _scaled_by_tensor(state: State, call: Call, by: Any, how: Any) -> State | None:
    """A learned temperature, the same over queries and keys: of q instead."""
    if not isinstance(by, Tensor) or state.terms or state.fills or state.future is not None:
        return None
    if by.dim() > state.q.dim() or tuple(by.shape[-2:]) not in ((), (1,), (1, 1)):
        return None
    if not by.is_floating_point() or (by.dim() > 0 and by.dtype != state.q.dtype):
        return None
    q = how(state.q, by)
    if q.shape != state.q.shape or q.dtype != state.q.dtype:
        return None
    return state.then(call, q=q)


def _added(scores: Scores, state: State, func: Any, args: Arguments, kwargs: Options) -> State | None:
    if len(args) != 2 or kwargs or state.is_weights:
        return None
    first = args[0] is scores
    sign = -1.0 if func.__name__.startswith("sub") else 1.0
    if sign < 0 and not first:
        return None
    term = args[1] if first else args[0]
    call = _call(func, args, kwargs, scores)
    if isinstance(term, LazyMask) and not term.is_real:
        triangle = term.triangle
        cuts_future = triangle.dtype.is_floating_point and triangle.below == 0 and triangle.above <= NEVER
        known = state.future in (None, triangle.above)
        if sign > 0 and cuts_future and known and _is_causal(triangle, state):
            dtype = torch.promote_types(state.dtype, triangle.dtype)
            future = _future(state, float(triangle.above))
            return state.then(call, **future, future_is_added=True, dtype=dtype)
        term = term.real()
        call = _call(func, args, kwargs, scores)
    if not isinstance(term, Tensor) or not term.is_floating_point() or not _fits(term, state):
        return None
    dtype = state.dtype if term.dim() == 0 else torch.promote_types(state.dtype, term.dtype)
    terms = (*state.terms, Term(term, sign))
    filled = bool(state.fills) or state.future not in (None, -math.inf)
    return state.then(call, terms=terms, terms_after_fills=state.terms_after_fills or filled, dtype=dtype)


def _filled(scores: Scores, state: State, func: Any, args: Arguments, kwargs: Options) -> State | None:
    """masked_fill, of scores or (with 0, by the same masks) of weights."""
    given = dict(zip(("scores", "mask", "value"), args, strict=False)) | dict(kwargs)
    if given.keys() != {"scores", "mask", "value"} or given["scores"] is not scores:
        return None
    return _masked(scores, state, func, args, kwargs, given["mask"], given["value"], False)


def _chosen(scores: Scores, state: State, func: Any, args: Arguments, kwargs: Options) -> State | None:
    """torch.where(condition, scores, value) or the other way round."""
    if len(args) != 3 or kwargs or args[0] is scores or args[1] is args[2]:
        return None
    condition, yes, no = args
    inverted = yes is scores
    return _masked(scores, state, func, args, kwargs, condition, no if inverted else yes, inverted)


def _masked(
    scores: Scores,
    state: State,
    func: Any,
    args: Arguments,
    kwargs: Options,
    mask: Any,
    value: Any,
    inverted: bool,
) -> State | None:
    number = _number(value, scores)
    if number is None:
        return None
    if state.is_weights:
        same = len(state.fills) == 1 and state.fills[0].mask is mask and state.fills[0].inverted == inverted
        if not same or number != 0 or state.future is not None:
            return None
        return state.then(_call(func, args, kwargs, scores), empty_rows_are_zero=True)
    if number > NEVER:
        return None
    call = _call(func, args, kwargs, scores)
    if isinstance(mask, LazyMask) and not mask.is_real:
        triangle = mask.triangle
        masked_below, masked_above = (bool(x) != inverted for x in (triangle.below, triangle.above))
        cuts_future = triangle.dtype == torch.bool and masked_above and not masked_below
        if cuts_future and state.future in (None, number) and _is_causal(triangle, state):
            return state.then(call, **_future(state, number))
        mask = mask.real()
        call = _call(func, args, kwargs, scores)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not _fits(mask, state):
        return None
    return state.then(call, fills=(*state.fills, Fill(mask, number, inverted)))


def _future(state: State, value: float) -> dict[str, Any]:
    """It takes the place of what was filled in before."""
    return {"future": value, "fills_before_future": len(state.fills)}


def _softmax(scores: Scores, state: State, func: Any, args: Arguments, kwargs: Options) -> State | None:
    names = ("input", "dim", "_stacklevel", "dtype") if len(args) > 3 else ("input", "dim", "dtype")
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k != "_stacklevel"}
    if given.get("dim") not in (-1, len(state.shape) - 1) or state.is_weights:
        return None
    dtype = given.get("dtype") or state.dtype
    if given.get("dtype") is None and state.context.autocast is not None:
        dtype = torch.promote_types(state.dtype, torch.float32)  # autocast's own rule
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    return state.then(_call(func, args, kwargs, scores), is_weights=True, dtype=dtype)


def _converted(scores: Scores, state: State, func: Any, args: Arguments, kwargs: Options) -> State | None:
    names = {"float": torch.float32, "half": torch.half, "bfloat16": torch.bfloat16, "double": torch.float64}
    dtype = names.get(func.__name__)
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Tensor):
            if value.device != state.q.device:
                return None
            dtype = value.dtype
        elif isinstance(value, torch.device) and value == state.q.device:
            dtype = dtype or state.dtype
        else:
            return None
    if args[0] is not scores or dtype is None or not dtype.is_floating_point:
        return None
    return state if dtype == state.dtype else state.then(_call(func, args, kwargs, scores), dtype=dtype)


def _reshaped(scores: Scores, state: State, func: Any, args: Arguments, kwargs: Options) -> State | None:
    """Batch and heads joined or taken apart."""
    if kwargs or len(args) < 2:
        return None
    sizes = list(args[1]) if isinstance(args[1], tuple | list) else list(args[1:])
    if not all(type(size) is int for size in sizes) or len(sizes) < 3:
        return None
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = state.shape.numel() // -math.prod(sizes)
    wanted = tuple(sizes[:-2])
    if tuple(sizes[-2:]) != tuple(state.shape[-2:]) or math.prod(wanted) != math.prod(state.lead):
        return None
    rank = len(state.lead)

    def lead_of(tensor: Tensor) -> Tensor | None:
        """The tensor for the new leading dimensions, where it has all of the old ones, or none."""
        own = tuple(tensor.shape[:-2])
        if len(own) == rank and own == state.lead:
            return tensor.reshape(*wanted, *tensor.shape[-2:])
        return tensor.reshape(tensor.shape[-2:]) if math.prod(own) == 1 and tensor.dim() > 1 else None

    q, k = (lead_of(each.expand(*state.lead, *each.shape[-2:])) for each in (state.q, state.k))
    if q is None or k is None:
        return None
    terms, fills = [], []
    for term in state.terms:
        value = lead_of(term.value)
        if value is None:
            return None
        terms.append(term._replace(value=value))
    for fill in state.fills:
        mask = lead_of(fill.mask)
        if mask is None:
            return None
        fills.append(fill._replace(mask=mask))
    call = _call(func, args, kwargs, scores)
    shape = torch.Size(sizes)
    return state.then(call, q=q, k=k, shape=shape, terms=tuple(terms), fills=tuple(fills))


STEPS: dict[str, Callable[[Scores, State, Any, Arguments, Options], State | None]] = {
    **dict.fromkeys(("mul", "multiply"), _multiplied),
    **dict.fromkeys(("div", "divide", "true_divide"), _divided),
    **dict.fromkeys(("add", "sub", "subtract"), _added),
    "masked_fill": _filled,
    "where": _chosen,
    "softmax": _softmax,
    **dict.fromkeys(("to", "type", "type_as", "float", "half", "bfloat16", "double"), _converted),
    **dict.fromkeys(("view", "reshape"), _reshaped),
}


def _call(func: Any, args: Arguments, kwargs: Options, scores: Scores) -> Call:
    return Call(
        func,
        tuple([_recorded(arg, scores) for arg in args]),
        {key: _recorded(value, scores) for key, value in kwargs.items()} if kwargs else {},
    )


def _recorded(arg: Any, scores: Scores) -> Any:
    if arg is scores:
        return BEFORE
    if isinstance(arg, LazyMask):
        return arg.real() if arg.is_real else Constant(arg.triangle, arg.device)
    return arg.real() if isinstance(arg, Deferred) else arg


def _fits(tensor: Tensor, state: State) -> bool:
    """Does it broadcast to the scores, and the scores stay of their shape?"""
    shape = tuple(tensor.shape)
    full = tuple(state.shape)[len(state.shape) - len(shape) :] if len(shape) <= len(state.shape) else ()
    return len(shape) == len(full) and all(a in (1, b) for a, b in zip(shape, full, strict=True))


def _is_causal(triangle: Triangle, state: State) -> bool:
    """Is `below` what a query at the end of the keys sees, and does every query see one?"""
    queries, keys = state.shape[-2:]
    return (
        triangle.shape[-2:] == (queries, keys)
        and triangle.diagonal == keys - queries >= 0
        and math.prod(triangle.shape[:-2]) == 1
        and len(triangle.shape) <= len(state.shape)
    )


def _number(value: Any, scores: Scores) -> float | None:
    """A number, or that in a tensor which is known."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return scores.watch.number_in(value) if isinstance(value, Tensor) else None
