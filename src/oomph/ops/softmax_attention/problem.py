"""The arguments of one attention call, checked and brought into one form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.launch import is_fake
from oomph.ops.softmax_attention.biases import BiasFunction, declared_tensors, hidden_gradient
from oomph.ops.softmax_attention.patterns import BlockPattern


@dataclass(frozen=True, eq=False)
class Problem:
    """A checked call. `bias` has 4 dimensions. Never both a bias and a function, both lengths and a mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    bias: Tensor | None
    bias_function: BiasFunction | None
    pattern: BlockPattern | None
    key_lengths: Tensor | None  # [B]
    key_mask: Tensor | None  # [B, K], True where a key may be seen
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
        """A query's position among the keys is its index plus this: the last query is at the last key."""
        return self.keys - self.queries

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def is_plain(self) -> bool:
        """Without bias, pattern or padding: its shapes say all about it."""
        return self.bias is None and self.bias_function is None and self.pattern is None and not self.padded

    @property
    def padded(self) -> bool:
        return self.key_lengths is not None or self.key_mask is not None

    def seen_BK(self) -> Tensor | None:
        """The padding as a mask; made anew from lengths."""
        if self.key_lengths is None:
            return self.key_mask
        return torch.arange(self.keys, device=self.k.device) < self.key_lengths[:, None]

    @property
    def cuts_future(self) -> bool:
        """Does causality forbid any pair? A single query, the last, sees every key."""
        return self.causal and self.queries != 1

    @property
    def bias_tensors(self) -> Sequence[Tensor]:
        return () if self.bias_function is None else declared_tensors(self.bias_function)

    @property
    def bias_needs_grad(self) -> bool:
        tensors = [*self.bias_tensors, *([] if self.bias is None else [self.bias])]
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def make_problem(
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
) -> Problem:
    common.check_floating(q=q, k=k, v=v)
    q, k, v = _under_autocast(q, k, v)
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
    return Problem(
        q,
        k,
        v,
        bool(causal),
        None if tensor_bias is None else _four_dimensional(tensor_bias, q, k),
        None if bias is None or isinstance(bias, Tensor) else _checked_function(bias, q, k),
        pattern,
        *_checked_padding(key_lengths, key_mask, k),
        _scale(scale, q),
        common.parse_memory_budget(memory_budget),
    )


def _under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Autocast's rule for scaled_dot_product_attention: its dtype for all, float64 left alone."""
    kind = q.device.type
    if not torch.is_autocast_enabled(kind) or torch.float64 in (q.dtype, k.dtype, v.dtype):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    fault = _fault_of_shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    if fault is not None:
        raise ArgumentError(
            f"{fault}; given q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; "
            "valid: q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E] with H a multiple of G"
        )


def _fault_of_shapes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> str | None:
    if not len(q) == len(k) == len(v) == 4:
        return "attention takes 4-dimensional tensors"
    if not q[0] == k[0] == v[0]:
        return "batch sizes differ"
    if k[1:3] != v[1:3]:
        return "k and v differ in heads or length"
    if q[3] != k[3] or q[3] == 0:
        return "q and k must have one head size, at least 1"
    if k[1] == 0 or q[1] % k[1]:
        return "query heads are not a multiple of key/value heads"
    return None


def _four_dimensional(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    wide = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape)) if bias.dim() < 4 else bias
    if wide.dim() > 4 or any(b not in (1, f) for b, f in zip(wide.shape, full, strict=True)):
        raise ArgumentError(f"bias has shape {list(bias.shape)}, which does not broadcast to {list(full)}")
    return wide


def _checked_function(bias: object, q: Tensor, k: Tensor) -> BiasFunction:
    if not callable(bias):
        raise ArgumentError(
            f"bias is a {type(bias).__name__}; valid: None, a tensor, or a function f(b, h, q_index, k_index)"
        )
    function: BiasFunction = bias
    check = getattr(function, "check_shape", None)
    if check is not None:
        check(q.shape[0], q.shape[2], k.shape[2])
    tensors = declared_tensors(function)
    common.check_same_device(q=q, **{f"bias.tensors[{i}]": tensor for i, tensor in enumerate(tensors)})
    if 0 not in (q.numel(), k.numel()) and hidden_gradient(function, q.device):
        raise ArgumentError(
            "the bias function reads a tensor that requires a gradient and does not list it; "
            "give it an attribute `tensors`, or detach what it reads"
        )
    return function


def _checked_padding(
    key_lengths: Tensor | None, key_mask: Tensor | None, k: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    batch, keys = k.shape[0], k.shape[2]
    if key_lengths is not None and key_mask is not None:
        raise ArgumentError("key_lengths and key_mask were both given; give one")
    if key_mask is not None and (key_mask.dtype != torch.bool or tuple(key_mask.shape) != (batch, keys)):
        raise ArgumentError(
            f"key_mask is {key_mask.dtype} {list(key_mask.shape)}; valid: torch.bool [{batch}, {keys}]"
        )
    if key_lengths is not None and (
        key_lengths.dtype not in (torch.int32, torch.int64) or tuple(key_lengths.shape) != (batch,)
    ):
        raise ArgumentError(
            f"key_lengths is {key_lengths.dtype} {list(key_lengths.shape)}; valid: torch.int64 [{batch}]"
        )
    if key_lengths is not None:
        _check_lengths(key_lengths, keys)
    return key_lengths, key_mask


def _check_lengths(key_lengths: Tensor, keys: int) -> None:
    """Where the values can be read at once: not on a GPU, not in a prediction, not in a compiled graph."""
    if key_lengths.device.type != "cpu" or is_fake(key_lengths) or torch.compiler.is_compiling():
        return
    wrong = [length for length in key_lengths.tolist() if not 0 <= length <= keys]
    if wrong:
        raise ArgumentError(f"key_lengths has {wrong[0]}; valid: 0 to {keys}, the number of keys")


def _scale(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return 1.0 / math.sqrt(q.shape[3])
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ArgumentError(f"scale={scale!r} is not valid; a finite number, or None for 1/sqrt(head size)")
    return float(scale)
