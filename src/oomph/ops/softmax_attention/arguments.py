"""The arguments of one attention call, checked and normalised."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.softmax_attention.biases import (
    BiasFunction,
    BlockPattern,
    declared_tensors,
    has_undeclared_gradient,
)


@dataclass(frozen=True, eq=False)
class AttentionArguments:
    """A checked call. At most one of `bias` and `bias_function`, and of `key_lengths` and `key_mask`, is set.

    q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E]; bias has 4 dimensions, each 1 or full.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    bias: Tensor | None
    bias_function: BiasFunction | None
    pattern: BlockPattern | None
    key_lengths: Tensor | None  # [B]
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
    def has_padding(self) -> bool:
        return self.key_lengths is not None or self.key_mask is not None

    @property
    def is_plain(self) -> bool:
        """Without bias, pattern and padding."""
        biased = self.bias is not None or self.bias_function is not None
        return not biased and self.pattern is None and not self.has_padding

    @property
    def masks_future(self) -> bool:
        """Whether causality masks any pair. A single query, the last, attends to every key."""
        return self.causal and self.queries != 1

    @property
    def bias_tensors(self) -> Sequence[Tensor]:
        return () if self.bias_function is None else declared_tensors(self.bias_function)

    @property
    def bias_needs_grad(self) -> bool:
        tensors = [*self.bias_tensors, *([] if self.bias is None else [self.bias])]
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def padding_mask(self) -> Tensor | None:
        """[B, K], True where a key may be attended to."""
        if self.key_lengths is None:
            return self.key_mask
        return torch.arange(self.keys, device=self.k.device) < self.key_lengths[:, None]

    def without_tensors(self) -> "AttentionArguments":
        """For ctx: tensors are kept by save_for_backward alone, so that a freed graph frees them.

        A bias function keeps its own tensors, because backward calls it again.
        """
        empty = self.q.new_empty(0)
        return replace(self, q=empty, k=empty, v=empty, bias=None, key_lengths=None, key_mask=None)


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    bias: Tensor | BiasFunction | None = None,
    pattern: BlockPattern | None = None,
    key_lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    memory_budget: str | int | None = None,
) -> AttentionArguments:
    common.check_flags(causal=causal)
    common.check_floating(q=q, k=k, v=v)
    q, k, v = _autocast(q, k, v)
    common.check_same_dtype(q=q, k=k, v=v)
    tensor_bias = bias if isinstance(bias, Tensor) else None
    if tensor_bias is not None:
        common.check_floating(bias=tensor_bias)
    for name, given in (("key_lengths", key_lengths), ("key_mask", key_mask)):
        if given is not None and not isinstance(given, Tensor):
            raise ArgumentError(f"{name} is a {type(given).__name__}, not a tensor")
    common.check_same_device(q=q, k=k, v=v, bias=tensor_bias, key_lengths=key_lengths, key_mask=key_mask)
    _check_shapes(q, k, v)
    if pattern is not None and not isinstance(pattern, BlockPattern):
        raise ArgumentError(
            f"pattern is a {type(pattern).__name__}; valid: None, or a BlockPattern such as local(window=1)"
        )
    _check_padding(key_lengths, key_mask, k)
    return AttentionArguments(
        q,
        k,
        v,
        bool(causal),
        None if tensor_bias is None else _broadcast_bias(tensor_bias, q, k),
        None if bias is None or isinstance(bias, Tensor) else _check_function(bias, q, k),
        pattern,
        key_lengths,
        key_mask,
        _check_scale(scale, q),
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
    tensors = declared_tensors(function)
    common.check_same_device(q=q, **{f"bias.tensors[{i}]": tensor for i, tensor in enumerate(tensors)})
    if 0 not in (q.numel(), k.numel()) and has_undeclared_gradient(function, q.device):
        raise ArgumentError(
            "the bias function reads a tensor that requires a gradient and does not list it; "
            "give it an attribute `tensors`, or detach what it reads"
        )
    return function


def _check_padding(key_lengths: Tensor | None, key_mask: Tensor | None, k: Tensor) -> None:
    batch, keys = k.shape[0], k.shape[2]
    if key_lengths is not None and key_mask is not None:
        raise ArgumentError("key_lengths and key_mask were both given; give one")
    if key_mask is not None and (key_mask.dtype != torch.bool or tuple(key_mask.shape) != (batch, keys)):
        raise ArgumentError(
            f"key_mask is {key_mask.dtype} {list(key_mask.shape)}; valid: torch.bool [{batch}, {keys}]"
        )
    if key_lengths is None:
        return
    if key_lengths.dtype not in (torch.int32, torch.int64) or tuple(key_lengths.shape) != (batch,):
        raise ArgumentError(
            f"key_lengths is {key_lengths.dtype} {list(key_lengths.shape)}; valid: torch.int64 [{batch}]"
        )
    # The values are read only where that does not synchronise or break a graph.
    if torch.compiler.is_compiling() or not common.is_readable(key_lengths):
        return
    wrong = [length for length in key_lengths.tolist() if not 0 <= length <= keys]
    if wrong:
        raise ArgumentError(f"key_lengths has {wrong[0]}; valid: 0 to {keys}, the number of keys")


def _check_scale(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return 1.0 / math.sqrt(q.shape[3])
    if not common.is_number(scale):
        raise ArgumentError(f"scale={scale!r} is not valid; a finite number, or None for 1/sqrt(head size)")
    return float(scale)
