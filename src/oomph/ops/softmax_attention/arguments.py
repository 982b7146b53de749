"""The arguments of attention: biases computed from indices, block-sparse patterns, and a checked call."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common

# Biases ----------------------------------------------------------------------------------------------


@runtime_checkable
class BiasFunction(Protocol):
    """The term added to the scaled score of query `q_index` and key `k_index` in batch b and head h.

    The four arguments are integer tensors that broadcast against each other; the result must broadcast with
    them. Use elementwise arithmetic and indexing only, no branches on values.

    List the tensors that the function reads in an attribute `tensors`: gradients flow to those. A function
    that reads a tensor which requires a gradient and does not list it is refused.
    """

    def __call__(self, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class LocalityBias:
    """-strength * |t - s|^2 between the query's point t and the key's point s.

    Points are stored as [d, N] or [B, d, N], so that kernels read one coordinate of neighbouring points with
    coalesced loads.
    """

    query_points: Tensor
    key_points: Tensor
    strength: float = 10.0

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return (self.query_points, self.key_points)

    def __call__(self, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        t, s = self.query_points, self.key_points
        distance: Tensor | None = None
        for axis in range(t.shape[-2]):  # one coordinate at a time: no [..., d] temporary
            t_axis = t[b, axis, q_index] if t.dim() == 3 else t[axis][q_index]
            s_axis = s[b, axis, k_index] if s.dim() == 3 else s[axis][k_index]
            difference = t_axis - s_axis
            square = difference * difference
            distance = square if distance is None else distance + square
        assert distance is not None
        return distance * -self.strength

    def check_shape(self, batch: int, queries: int, keys: int) -> None:
        for name, points, length in (("t", self.query_points, queries), ("s", self.key_points, keys)):
            if points.shape[-1] != length or (points.dim() == 3 and points.shape[0] != batch):
                given = (*points.shape[:-2], points.shape[-1], points.shape[-2])
                raise ArgumentError(
                    f"locality_bias {name} has shape {given}; "
                    f"valid here: [{length}, d] or [{batch}, {length}, d]"
                )


def locality_bias(t: Tensor, s: Tensor, strength: float = 10.0) -> LocalityBias:
    """The bias -strength * |t - s|^2 between query points t and key points s, each [N, d] or [B, N, d].

    Computed in fp32 (float64 if the points are), whatever the dtype of the attention: in bf16 squared
    distances are off by whole units of score. Differentiable in t and s.
    """
    for name, points in (("t", t), ("s", s)):
        if not isinstance(points, Tensor) or points.dim() not in (2, 3) or not points.is_floating_point():
            given = tuple(points.shape) if isinstance(points, Tensor) else type(points).__name__
            raise ArgumentError(f"locality_bias {name} is {given}; valid: a float tensor [N, d] or [B, N, d]")
    if t.shape[-1] != s.shape[-1] or t.shape[-1] == 0:
        raise ArgumentError(
            f"locality_bias needs points of one dimension; given t with {t.shape[-1]}, s with {s.shape[-1]}"
        )
    dtype = torch.float64 if torch.float64 in (t.dtype, s.dtype) else torch.float32
    t, s = (points.to(dtype).transpose(-1, -2).contiguous() for points in (t, s))
    return LocalityBias(t, s, float(strength))


# Block patterns --------------------------------------------------------------------------------------

PATTERN_KINDS = ("local", "global", "mixed")


@dataclass(frozen=True)
class BlockPattern:
    """Which blocks of keys a block of queries attends to, before the causal mask.

    local:  the blocks at most `window` blocks away, on either side.
    global: every `stride`-th block of the keys (0, stride, ...), and the query's own block.
    mixed:  both.

    Positions are divided into blocks of `block`. Query i has position i + K - Q, so that during generation
    the newest query is at the newest key.
    """

    kind: str
    block: int = 64
    window: int = 1
    stride: int = 2

    def __post_init__(self) -> None:
        common.check_one_of("kind", self.kind, PATTERN_KINDS)
        common.check_whole(block=self.block, stride=self.stride)
        common.check_whole(0, window=self.window)

    def key_blocks(self, query_block: int, total: int, causal: bool = False) -> list[int]:
        """The blocks, out of `total`, that query block `query_block` attends to, in increasing order."""
        blocks: set[int] = {query_block}
        if self.kind in ("local", "mixed"):
            blocks.update(range(query_block - self.window, query_block + self.window + 1))
        if self.kind in ("global", "mixed"):
            blocks.update(range(0, total, self.stride))
        last = min(total - 1, query_block) if causal else total - 1
        return sorted(block for block in blocks if 0 <= block <= last)

    def count(self, length: int, causal: bool = False) -> tuple[int, int]:
        """(blocks attended to, blocks in total) for self-attention over `length` positions."""
        total = -(-length // self.block)
        return sum(len(self.key_blocks(i, total, causal)) for i in range(total)), total * total


# A call ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AttentionArguments:
    """A checked call. At most one of `bias` and `bias_function` is set.

    q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E]; bias has 4 dimensions, each 1 or full.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    bias: Tensor | None
    bias_function: BiasFunction | None
    pattern: BlockPattern | None
    key_mask: Tensor | None  # [B, K], True where a key may be attended to
    scale: float
    memory_budget: int | None

    @property
    def queries(self) -> int:
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    @property
    def offset(self) -> int:
        """Position minus index of a query: the last query is at the last key."""
        return self.keys - self.queries

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def has_empty(self) -> bool:
        return 0 in (self.q.numel(), self.k.numel(), self.v.numel())

    @property
    def is_plain(self) -> bool:
        """Without bias, pattern and padding."""
        biased = self.bias is not None or self.bias_function is not None
        return not biased and self.pattern is None and self.key_mask is None

    @property
    def masks_future(self) -> bool:
        """Whether causality masks any pair. A single query, the last, attends to every key."""
        return self.causal and self.queries != 1

    @property
    def bias_tensors(self) -> Sequence[Tensor]:
        """Those that a bias function lists as read."""
        return tuple(getattr(self.bias_function, "tensors", ()))

    @property
    def bias_needs_grad(self) -> bool:
        tensors = [*self.bias_tensors, *([] if self.bias is None else [self.bias])]
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def without_tensors(self) -> "AttentionArguments":
        """For ctx: tensors are kept by save_for_backward alone, so that a freed graph frees them.

        A bias function keeps its own tensors, because backward calls it again.
        """
        empty = self.q.new_empty(0)
        return replace(self, q=empty, k=empty, v=empty, bias=None, key_mask=None)


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    bias: Tensor | BiasFunction | None = None,
    pattern: BlockPattern | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    memory_budget: str | int | None = None,
) -> AttentionArguments:
    common.check_flags(causal=causal)
    common.check_floating(q=q, k=k, v=v)
    q, k, v = _autocast(q, k, v)
    common.check_same_dtype(q=q, k=k, v=v)
    tensor_bias = bias if isinstance(bias, Tensor) else None
    common.check_floating(**common.not_none(bias=tensor_bias))
    if key_mask is not None and not isinstance(key_mask, Tensor):
        raise ArgumentError(f"key_mask is a {type(key_mask).__name__}, not a tensor")
    common.check_same_device(q=q, k=k, v=v, bias=tensor_bias, key_mask=key_mask)
    _check_shapes(q, k, v)
    if pattern is not None and not isinstance(pattern, BlockPattern):
        raise ArgumentError(
            f"pattern is a {type(pattern).__name__}; valid: None, or e.g. BlockPattern('local', window=1)"
        )
    batch, keys = k.shape[0], k.shape[2]
    if key_mask is not None and (key_mask.dtype != torch.bool or tuple(key_mask.shape) != (batch, keys)):
        raise ArgumentError(
            f"key_mask is {key_mask.dtype} {list(key_mask.shape)}; valid: torch.bool [{batch}, {keys}]"
        )
    return AttentionArguments(
        q,
        k,
        v,
        bool(causal),
        None if tensor_bias is None else _broadcast_bias(tensor_bias, q, k),
        None if bias is tensor_bias else _check_function(bias, q, k),
        pattern,
        key_mask,
        common.scale_or_default(scale, 1.0 / math.sqrt(q.shape[3])),
        common.parse_memory_budget(memory_budget),
    )


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Autocast's rule for scaled_dot_product_attention: its dtype for all; float64 is unchanged."""
    if not common.autocast_enabled(q) or torch.float64 in (q.dtype, k.dtype, v.dtype):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dim() == k.dim() == v.dim() == 4:
        problem = "attention takes 4-dimensional tensors"
    elif not q.shape[0] == k.shape[0] == v.shape[0]:
        problem = "batch sizes differ"
    elif k.shape[1:3] != v.shape[1:3]:
        problem = "k and v differ in heads or length"
    elif q.shape[3] != k.shape[3] or q.shape[3] == 0:
        problem = "q and k must have one head size, at least 1"
    elif k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        problem = "query heads are not a multiple of key/value heads"
    else:
        return
    raise ArgumentError(
        f"{problem}; given q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; "
        "valid: q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E] with H a multiple of G"
    )


def _broadcast_bias(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias with 4 dimensions."""
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    bias_4d = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape)) if bias.dim() < 4 else bias
    if bias_4d.dim() > 4 or any(b not in (1, f) for b, f in zip(bias_4d.shape, full, strict=True)):
        raise ArgumentError(f"bias has shape {list(bias.shape)}, which does not broadcast to {list(full)}")
    return bias_4d


def _check_function(bias: object, q: Tensor, k: Tensor) -> BiasFunction:
    if not callable(bias):
        raise ArgumentError(
            f"bias is a {type(bias).__name__}; valid: None, a tensor, or a function f(b, h, q_index, k_index)"
        )
    function: BiasFunction = bias
    check_shape = getattr(function, "check_shape", None)
    if check_shape is not None:
        check_shape(q.shape[0], q.shape[2], k.shape[2])
    tensors = getattr(function, "tensors", None)
    common.check_same_device(q=q, **{f"bias.tensors[{i}]": each for i, each in enumerate(tensors or ())})
    if tensors is not None or not torch.is_grad_enabled() or 0 in (q.numel(), k.numel()):
        return function
    index = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=q.device)
    value = function(index, index, index, index)
    if isinstance(value, Tensor) and value.requires_grad:
        raise ArgumentError(
            "the bias function reads a tensor that requires a gradient and does not list it; "
            "give it an attribute `tensors`, or detach what it reads"
        )
    return function
