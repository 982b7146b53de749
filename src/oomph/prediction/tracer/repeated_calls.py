"""Calls of a model that repeat an earlier one are not traced again.

Evaluation loops and gradient accumulation call a model many times with the same shapes. Where as much memory
is in use as before the last traced calls, a further call would allocate and free exactly what those did: only
its results are made. With gradients enabled, the results lead to an autograd node that ends the backward
pass, which is repeated as well: every parameter has a gradient already, into which the passes accumulate.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oomph.prediction.tracer.tracer import Tracer
from oomph.prediction.tracer.work import Kernel
from oomph.torch_internals import FakeTensor, tree_flatten, tree_unflatten

_TRACED_TIMES = 3  # until then the allocator finds blocks for all requests among those of the calls before
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class _NotRepeatable(Exception):
    """An argument or result that may carry state from one call to the next."""


@dataclass(frozen=True, slots=True)
class _TensorLike:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(slots=True)
class _TracedCall:
    module: weakref.ref[nn.Module]
    live_bytes: int  # before the call
    times: int  # it was traced one after the other
    results: list[Any]  # _TensorLike for a tensor
    structure: Any
    forward: list[Kernel]
    backward: list[Kernel]


class _EndOfBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, module: nn.Module, *results: _TensorLike) -> Any:
        ctx.module = module
        return tuple(map(_make, results))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        for parameter in ctx.module.parameters():
            if parameter.requires_grad and parameter.grad is None:  # dropped since the call
                parameter.grad = torch.empty_like(parameter)
        return (None,) * (len(gradients) + 2)


def _keeps_graph(module: nn.Module) -> bool:
    """Whether a program could read from the module what the call computed: hooks, an auxiliary loss."""
    kept = (value for value in vars(module).values() if isinstance(value, torch.Tensor))
    return bool(module._forward_hooks) or any(value.grad_fn is not None for value in kept)


def _make(like: _TensorLike) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="cuda")


class RepeatedCalls:
    """Of the modules that are inside no other."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._traced: dict[Any, _TracedCall] = {}
        self._pending: list[_TracedCall] = []  # called since the last backward pass, and repeated in it
        self._last: _TracedCall | None = None  # traced since the last backward pass

    def call(self, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        tracer = self._tracer
        live = tracer.recorder.live_bytes
        try:
            key = self._key(module, args, kwargs)
        except _NotRepeatable:
            key = None
        if key is None:  # not inside of `except`: an error of the program would show both tracebacks
            return forward(module, *args, **kwargs)
        known = self._traced.get(key)
        same = known is not None and known.live_bytes == live
        if known is not None and same and known.module() is module and known.times >= _TRACED_TIMES:
            return self._repeat(known, module)
        first, kernels = len(tracer.recorder.allocations), len(tracer.work.kernels)
        out = forward(module, *args, **kwargs)
        try:
            leaves, structure = tree_flatten(out)
            results = self._results(leaves, first, module.training)
            if any(_keeps_graph(each) for each in module.modules()):
                raise _NotRepeatable
        except _NotRepeatable:
            self._traced.pop(key, None)
        else:
            times = known.times + 1 if known is not None and same else 1
            self._last = self._traced[key] = _TracedCall(
                weakref.ref(module), live, times, results, structure, tracer.work.kernels[kernels:], []
            )
        return out

    def _key(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        with_grad = torch.is_grad_enabled()
        if with_grad:
            trained = [each for each in module.parameters() if each.requires_grad]
            if not trained or any(each.grad is None for each in trained):
                raise _NotRepeatable
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        described = tuple(self._describe(leaf) for leaf in leaves)
        counting = self._tracer.work.counting  # kernels are needed from a call that counted them
        return id(module), module.training, with_grad, autocast, counting, described, str(structure)

    def _describe(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad and torch.is_grad_enabled():
                raise _NotRepeatable  # a gradient flows through
            value = self._tracer.values.known(leaf) if leaf.dtype in (torch.bool, torch.int64) else None
            is_mask = value is not None and value.numel() > 0 and int(value.max()) <= 1
            without_padding = bool(value.all()) if is_mask and value is not None else None
            return tuple(leaf.shape), leaf.dtype, leaf.device, without_padding
        if not isinstance(leaf, _PLAIN):
            raise _NotRepeatable
        return leaf

    def _results(self, leaves: list[Any], first: int, training: bool) -> list[Any]:
        found: list[Any] = []
        storages: set[int] = set()
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                allocation = self._tracer.recorder.allocation_of(leaf)
                if allocation is None or allocation.id < first or allocation.id in storages:
                    raise _NotRepeatable  # of the host, of an earlier call, or two views of one tensor
                storages.add(allocation.id)
                found.append(_TensorLike(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad))
            elif isinstance(leaf, _PLAIN):
                found.append(leaf)
            elif training and type(leaf).__name__.endswith("Cache"):
                found.append(None)  # of keys and values, which no training loop reads
            else:
                raise _NotRepeatable
        return found

    def _repeat(self, known: _TracedCall, module: nn.Module) -> Any:
        with_grad = [like for like in known.results if isinstance(like, _TensorLike) and like.requires_grad]
        if with_grad:
            leaf = next(each for each in module.parameters() if each.requires_grad)
            linked = iter(_EndOfBackward.apply(leaf, module, *with_grad))
            self._pending.append(known)
        leaves = [
            like if not isinstance(like, _TensorLike) else next(linked) if like.requires_grad else _make(like)
            for like in known.results
        ]
        if self._tracer.work.counting:
            self._tracer.work.kernels += known.forward
        return tree_unflatten(leaves, known.structure)

    def after_backward(self, kernels: int) -> None:
        """`kernels`: how many had been counted before it."""
        work = self._tracer.work
        if self._last is not None and not self._pending:
            self._last.backward = work.kernels[kernels:]
        elif self._pending and work.counting:
            # These include the kernels of the loss, which runs outside of the model.
            work.kernels[kernels:] = self._pending[-1].backward
        self._last = None
        self._pending.clear()
