"""Runs a module's forward so that its score matrices are deferred."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from oomph.fixes.attention.lazy_masks import LazyMask
from oomph.fixes.attention.score_state import version
from oomph.fixes.attention.scores import Scores, begin
from oomph.fixes.attention.triangles import Triangle, after, made_by
from oomph.fixes.deferral.deferred import (
    MAY_CHANGE,
    Deferred,
    Options,
    changes_in_place,
)
from oomph.fixes.deferral.mode import CallsMode
from oomph.ops.common import no_compile
from oomph.ops.launch import is_fake

_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
_MAKERS = {
    *("ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"),
    *("tensor", "scalar_tensor", "new_tensor"),
}
_CUTS = {"tril", "triu"}
_LOOKED_AT = {*_PRODUCTS, *_MAKERS, *_CUTS, "view", *MAY_CHANGE}


class Known:
    """Tensors of one value, or of a triangle of two, by the calls that made them."""

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary | None = None  # made for the first one: most programs make none

    def put(self, tensor: Tensor, triangle: Triangle) -> None:
        if self._known is None:
            self._known = WeakIdKeyDictionary()
        self._known[tensor] = (triangle, version(tensor))

    def get(self, tensor: Any) -> Triangle | None:
        if self._known is None or not isinstance(tensor, Tensor):
            return None
        triangle, then = self._known.get(tensor, (None, 0))
        return triangle if triangle is not None and version(tensor) == then else None

    def note_made(self, name: str, args: Sequence[Any], kwargs: Options, made: Any) -> None:
        if name in _MAKERS and isinstance(made, Tensor):
            triangle = made_by(name, args, kwargs, made)
            if triangle is not None:
                self.put(made, triangle)


class FusingMode(CallsMode):
    looked_at = frozenset(_LOOKED_AT)

    def __init__(self) -> None:
        super().__init__()
        self._known = Known()
        self._scores: list[weakref.ref[Scores]] = []
        self._results: list[weakref.ref[Tensor]] = []

    def handled(self, name: str, func: Any, args: Sequence[Any], kwargs: Options) -> Any:
        if name in _PRODUCTS and kwargs.get("out") is None:
            state = begin(name, func, args, kwargs)
            if state is not None:
                return Scores(state, self)
        elif changes_in_place(name, args, kwargs):
            self._before_change((*args[:1], kwargs.get("out")))
        elif name in _CUTS:
            known = self._known.get(args[0] if args else None)
            triangle = after(name, (known, *args[1:]), kwargs) if known is not None else None
            if triangle is not None:
                return LazyMask(triangle, args[0].device)
        elif name == "view" and args and self._is_result(args[0]):
            return _viewed(func, args, kwargs)
        made = func(*args, **kwargs)
        self._known.note_made(name, args, kwargs, made)
        return made

    def begun(self, scores: Scores) -> None:
        self._scores.append(weakref.ref(scores))

    def ended(self, result: Tensor) -> None:
        self._results.append(weakref.ref(result))

    def number_in(self, tensor: Tensor) -> float | None:
        known = self._known.get(tensor)
        if known is not None and known.is_uniform and not known.shape:
            return float(known.below)
        if tensor.dim() or tensor.requires_grad or is_fake(tensor) or tensor.device.type != "cpu":
            return None  # on a GPU it would have to be waited for
        return float(tensor)

    def _before_change(self, written: Sequence[Any]) -> None:
        """Scores that were to be made of what is changed now are made first."""
        alive = [scores for reference in self._scores if (scores := reference()) is not None]
        waiting = [scores for scores in alive if scores.state is not None]
        self._scores = [weakref.ref(scores) for scores in waiting]
        if not waiting:
            return
        storages = {t.untyped_storage()._cdata for t in written if isinstance(t, Tensor)}
        for scores in waiting:
            if scores.state is not None and any(
                tensor.untyped_storage()._cdata in storages for tensor, _ in scores.state.held
            ):
                scores.real()

    def _is_result(self, tensor: Any) -> bool:
        """Is it what a fused call gave, or a view of that?"""
        if not self._results or not isinstance(tensor, Tensor):
            return False
        # As torch sees it from outside: logits that are not there yet would be computed to answer.
        with torch._C.DisableTorchFunctionSubclass():
            base = tensor._base
            for reference in self._results:
                result = reference()
                if result is None:
                    continue
                if tensor is result or base is result:
                    return True
                root = result._base
                if root is not None and (tensor is root or base is root):
                    return True
        return False

    def returned(self, tensor: Tensor) -> Tensor:
        """As the program's own product would be laid out."""
        return tensor.contiguous() if self._is_result(tensor) else tensor


def _viewed(func: Any, args: Sequence[Any], kwargs: Options) -> Tensor:
    """Of the program's own product any view could be taken; a fused kernel's result may lie otherwise."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        if len(args) > 1 and isinstance(args[1], torch.dtype):
            raise
        return args[0].reshape(*args[1:], **kwargs)


@no_compile
def with_fused_attention(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The module's own forward; what it returns has been computed."""
    with FusingMode() as mode:
        out = forward(*args, **kwargs)
    if isinstance(out, Tensor):
        return mode.returned(out)
    return tree_map_only(
        (Deferred, Tensor), lambda x: x.real() if isinstance(x, Deferred) else mode.returned(x), out
    )
