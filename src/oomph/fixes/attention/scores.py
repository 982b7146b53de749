"""Score matrices that are not computed: from q k^T over scaling, masks and softmax to the product with v."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from oomph.errors import UserError
from oomph.fixes.attention.fusion import fused
from oomph.fixes.attention.products import as_product, einsum_product
from oomph.fixes.attention.score_state import BEFORE, Call, Context, State, Term, version
from oomph.fixes.attention.score_steps import STEPS
from oomph.fixes.deferral.deferred import Arguments, Deferred, Options

_IN_PLACE = ("add_", "sub_", "mul_", "div_", "masked_fill_")
_FUNCTION_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


class Watch(Protocol):
    """What goes on around the scores."""

    def begun(self, scores: Scores) -> None: ...

    def ended(self, result: Tensor) -> None:
        """The result of a fused call."""

    def number_in(self, tensor: Tensor) -> float | None:
        """The number that a tensor is known to hold."""


class Scores(Deferred):
    """Scores, or after the softmax weights."""

    rank = 0  # knows what to do with masks

    def __init__(self, state: State, watch: Watch) -> None:
        super().__init__()
        self.state: State | None = state
        self.watch = watch
        watch.begun(self)

    @property
    def _known(self) -> Any:
        return self._real if self.state is None else self.state

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._known.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._known.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._known.device if self.state is None else self.state.q.device

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._known.requires_grad

    def _compute(self) -> Tensor:
        assert self.state is not None
        if self.state.requires_grad and not torch.is_grad_enabled():
            _refuse_custom_functions()
        return self.state.computed()

    def real(self) -> Tensor:
        made = super().real()
        self.state = None  # what it was made of may go
        return made

    def follow(self, name: str, func: Any, args: Arguments, kwargs: Options) -> Any:
        state = self.state
        if state is None or Context.now(state.q.device) != state.context:
            return NotImplemented
        if name == "contiguous" and args[0] is self:
            return self
        if name in ("matmul", "bmm", "einsum"):
            return self._times_values(state, name, args, kwargs)
        if name == "dropout":
            return self if args[0] is self and _keeps_all(*args[1:], **kwargs) else NotImplemented
        if name in _IN_PLACE:
            return self._in_place(state, name, args, kwargs)
        step = STEPS.get(name)
        if step is None:
            return NotImplemented
        changed = step(self, state, func, args, kwargs)
        if changed is None:
            return NotImplemented
        if changed is state:
            return self
        child = Scores(changed, self.watch)
        if name in ("view", "reshape"):
            return self.add_view(child, lambda base: func(base, *args[1:], **kwargs))
        return child

    def _in_place(self, state: State, name: str, args: Arguments, kwargs: Options) -> Any:
        if args[0] is not self or self.shares_memory:
            return NotImplemented
        out_of_place = getattr(Tensor, name.rstrip("_"))
        changed = STEPS[name.rstrip("_")](self, state, out_of_place, args, kwargs)
        if changed is None:
            return NotImplemented
        if changed.dtype != state.dtype:  # what is written in place keeps its dtype
            changed = changed.then(Call(Tensor.to, (BEFORE, state.dtype), {}), dtype=state.dtype)
        self.state = changed
        return self

    def _times_values(self, state: State, name: str, args: Arguments, kwargs: Options) -> Any:
        out: Callable[[Tensor], Tensor] | None = None
        if name == "einsum":
            found = einsum_product(args, kwargs, self)
            if found is None:
                return NotImplemented
            v, out = found
        elif len(args) == 2 and args[0] is self and isinstance(args[1], Tensor) and not kwargs:
            v = args[1]
        else:
            return NotImplemented
        if not state.is_weights or not v.is_floating_point():
            return NotImplemented
        if state.context.autocast is None and v.dtype != state.dtype:
            return NotImplemented
        result = fused(state, v)
        if result is None:
            return NotImplemented
        result = result if out is None else out(result)
        self.watch.ended(result)
        return result


def _keeps_all(p: Any = 0.5, training: Any = True, inplace: Any = False, **other: Any) -> bool:
    """Does dropout with these arguments leave everything as it is?"""
    p, training = other.get("p", p), other.get("train", training)
    return (isinstance(p, int | float) and p == 0) or training is False


def _refuse_custom_functions() -> None:
    """A gradient cannot find its way out of an autograd Function to what was deferred before it."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _FUNCTION_APPLY and any(
            isinstance(arg, Deferred) for arg in frame.f_locals.get("args", ())
        ):
            raise UserError(
                "fix 'fused_attention': attention scores are given to an autograd function of the model's "
                "own; leave the fix out of this module"
            )
        frame = frame.f_back  # type: ignore[assignment]


def begin(name: str, func: Any, args: Arguments, kwargs: Options) -> State | None:
    """The state of a product that may be one of queries with keys."""
    product = as_product(name, args, kwargs)
    if product is None:
        return None
    q, k, scale, added = product
    context = Context.now(q.device)
    if q.dtype != k.dtype and context.autocast is None:
        return None
    shape, keys = q.shape, k.shape
    lead = shape[:-2]
    if lead != keys[:-2]:
        try:
            lead = torch.broadcast_shapes(lead, keys[:-2])
        except RuntimeError:
            return None
    read = tuple(arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor))
    return State(
        q,
        k,
        torch.Size((*lead, shape[-2], keys[-2])),
        context.matmul_dtype(q.dtype),
        context,
        (Call(func, tuple(args), dict(kwargs)),),
        tuple((tensor, version(tensor)) for tensor in (*read, q, k)),
        scale,
        () if added is None else (Term(*added),),
    )
