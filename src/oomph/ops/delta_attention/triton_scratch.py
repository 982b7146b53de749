"""What the kernels of delta attention read and hand to each other, and where that memory comes from."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.ops.delta_attention.triton_plan import Plan


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    log_alpha: Tensor
    beta: Tensor
    initial: Tensor | None
    scale: float

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.log_alpha, self.beta

    def strides(self, names: str) -> list[int]:
        """Of batch, token and head, for the inputs whose places (0 for q) `names` lists."""
        return [stride for name in names for stride in self._strides[int(name)]]

    @functools.cached_property
    def _strides(self) -> tuple[tuple[int, ...], ...]:
        return tuple(x.stride()[:3] for x in self.tensors)


@dataclass(frozen=True)
class Scratch:
    """What the kernels of a segment hand to each other. Whole: with a row for every token of the call."""

    w: Tensor
    key_out: Tensor
    query_in: Tensor
    whole_keys: bool
    u: Tensor
    whole_values: bool
    scores: Tensor
    inverse: Tensor | None
    decay: Tensor  # of each chunk: the factor of the state, and the log-decays of both halves added up
    narrow: Tensor

    @property
    def rows(self) -> tuple[int, int]:
        return self.w.shape[1], self.u.shape[1]


def forward_scratch(inputs: Inputs, plan: Plan, o: Tensor) -> Scratch:
    """u is kept where o will be: the recurrence reads a chunk's u before it writes the chunk's o."""
    w, key_out, query_in = _keys(inputs, plan)
    scores, inverse, decay, narrow = _tiles(inputs, plan, keep_inverse=False)
    return Scratch(w, key_out, query_in, False, o, True, scores, inverse, decay, narrow)


def backward_scratch(inputs: Inputs, plan: Plan, grads: Sequence[Tensor | None]) -> Scratch:
    """w, key_out and query_in are kept where gradients will be: what writes those reads none of these."""
    grad_q, grad_k, grad_v, grad_la = grads
    third = next((x for x in (grad_v, grad_la) if x is not None and _has_room(x, inputs.k)), None)
    u = inputs.v.new_empty(plan.batch, plan.scratch_rows, plan.heads, plan.dv)
    scores, inverse, decay, narrow = _tiles(inputs, plan, keep_inverse=True)
    if grad_q is not None and grad_k is not None and third is not None:
        return Scratch(third, grad_k, grad_q, True, u, False, scores, inverse, decay, narrow)
    w, key_out, query_in = _keys(inputs, plan)
    return Scratch(w, key_out, query_in, False, u, False, scores, inverse, decay, narrow)


def new_states(inputs: Inputs, plan: Plan, count: int) -> Tensor:
    return inputs.k.new_empty(count, plan.heads, plan.dk, plan.dv, dtype=torch.float32)


def chunk_states(inputs: Inputs, plan: Plan) -> tuple[Tensor, Tensor]:
    """For every chunk of a segment, the state before it and the gradient of the state after it."""
    before, after = inputs.k.new_empty(2, plan.batch * plan.heads, plan.segment, plan.dk, plan.dv).unbind()
    return before, after


def _keys(inputs: Inputs, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    w, key_out, query_in = inputs.k.new_empty(3, plan.batch, plan.scratch_rows, plan.heads, plan.dk).unbind()
    return w, key_out, query_in


def _tiles(inputs: Inputs, plan: Plan, keep_inverse: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    tiles = plan.batch * plan.heads, plan.segment
    scores = inputs.k.new_empty(*tiles, plan.chunk, plan.chunk)
    inverse = torch.empty_like(scores) if keep_inverse else None
    decay = inputs.k.new_empty(*tiles, 3, plan.dk, dtype=torch.float32)
    return scores, inverse, decay, inputs.k.new_empty(*tiles, dtype=torch.int32)


def _has_room(gradient: Tensor, keys: Tensor) -> bool:
    return gradient.dtype == keys.dtype and gradient.shape == keys.shape
