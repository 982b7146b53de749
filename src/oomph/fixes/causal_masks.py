"""Causal masks that are not in memory: one value on and below a diagonal, another above it.

`CausalMask` describes what `torch.tril(torch.ones(n, n))` and its relatives hold, and follows comparisons,
slices and casts of it. `release_mask_buffers` replaces the masks that modules store as buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from oomph.fixes.journal import Journal
from oomph.fixes.lazy_tensor import (
    Args,
    Expression,
    Kwargs,
    LazyTensor,
    RecordedCall,
    function_name,
    lazy_tensor,
    modes_paused,
)
from oomph.ops.launch import is_fake
from oomph.torch_internals import current_dispatch_mode

Number = bool | int | float
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_CONTENT = "_oomph_mask"  # attribute of a tensor whose content is known, with the version it is known of


class CausalMask(Expression):
    """[..., rows, columns], the same over leading dimensions: `below` where column <= row + diagonal, else
    `above`. A constant tensor has the same value twice."""

    keeps_value = False  # making it again is cheaper than the memory
    subject = "a causal mask"

    def __init__(
        self,
        shape: Sequence[int],
        diagonal: int,
        below: Number,
        above: Number,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape, self.diagonal, self.below, self.above = torch.Size(shape), diagonal, below, above
        self.dtype, self._device = dtype, device
        self.record(RecordedCall(self.materialize, ()))

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def is_constant(self) -> bool:
        return self.below == self.above

    def materialize(self) -> Tensor:
        below, above = (
            torch.full((), value, dtype=self.dtype, device=self.device) for value in (self.below, self.above)
        )
        if self.is_constant or len(self.shape) < 2:
            return below.expand(self.shape).contiguous()
        lower = torch.ones(self.shape[-2:], dtype=torch.bool, device=self.device).tril(self.diagonal)
        return torch.where(lower, below, above).expand(self.shape).contiguous()

    def value(self, keep: bool | None = None) -> Tensor:
        if keep or self.computed:
            return super().value(keep)
        with modes_paused(), self.program_view():
            return self.materialize()  # not by the recorded call, which would make the whole for a slice

    def is_causal_for(self, scores: Sequence[int]) -> bool:
        """Whether `below` covers the keys up to each query's own position, for scores of this shape.

        The last query is at the last key, and every query sees a key.
        """
        queries, keys = scores[-2:]
        return (
            tuple(self.shape[-2:]) == (queries, keys)
            and self.diagonal == keys - queries >= 0
            and math.prod(self.shape[:-2]) == 1
            and len(self.shape) <= len(scores)
        )

    def like(self, **changes: Any) -> CausalMask:
        names = ("shape", "diagonal", "below", "above", "dtype", "device")
        return CausalMask(**{name: changes.get(name, getattr(self, name)) for name in names})

    def follow(self, name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if name in ("__deepcopy__", "__reduce_ex__"):
            made = (self.shape, self.diagonal, self.below, self.above, self.dtype, self.device)
            return self.like() if name == "__deepcopy__" else (_rebuild, made)
        if name in ("to", "cuda", "cpu", "type_as"):
            return self._to(name, args, kwargs)
        if func == _SET_DATA and isinstance(args[1], CausalMask) and args[1].dtype == self.dtype:
            self._device = args[1].device  # how FSDP moves a module's buffers
            return None
        others = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor | Expression)]
        if not all(isinstance(other, CausalMask) for other in others):
            return NotImplemented
        result = after(name, args, kwargs)
        if result is None:
            return NotImplemented
        if name in _VIEWS and name not in ("tril", "triu", "clone"):
            result.record(
                RecordedCall(func, (self, *args[1:]), kwargs)
            )  # shares memory where that is written
        return result

    def follow_write(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """Loading a checkpoint that holds this mask changes nothing."""
        if name != "copy_" or not isinstance(args[1], Tensor) or is_fake(args[1]):
            return NotImplemented
        return (
            self
            if args[1].shape == self.shape and torch.equal(args[1], self.value().to(args[1]))
            else NotImplemented
        )

    def _to(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """`.to` in any of its forms."""
        device, dtype = self.device, self.dtype
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, Tensor | Expression):
                device, dtype = value.device, value.dtype
            elif isinstance(value, str | torch.device | int) and not isinstance(value, bool):
                device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
        if name == "cpu" or (name == "cuda" and device.type != "cuda"):
            device = torch.device(name)
        same_device = device.type == self.device.type and (device.index or 0) == (self.device.index or 0)
        if dtype == self.dtype and same_device and not kwargs.get("copy"):
            return self
        below, above = torch.tensor((self.below, self.above), dtype=self.dtype).to(dtype).tolist()
        return self.like(below=below, above=above, dtype=dtype, device=device)


def _rebuild(*made: Any) -> LazyTensor:
    return lazy_tensor(CausalMask(*made))


# What calls return -----------------------------------------------------------------------------------


def made_by(name: str, args: Args, kwargs: Kwargs, made: Tensor) -> CausalMask | None:
    """The content of a tensor that a factory function has returned."""
    value: Any = None
    if name in ("ones", "new_ones", "ones_like", "zeros", "new_zeros", "zeros_like"):
        value = int("ones" in name)
    elif name in ("full", "full_like", "new_full"):
        at = 2 if name == "new_full" else 1
        value = args[at] if len(args) > at else kwargs.get("fill_value")
    elif name in ("tensor", "scalar_tensor", "new_tensor") and made.dim() == 0:
        value = args[-1] if args else kwargs.get("data")
    if not isinstance(value, bool | int | float) or made.requires_grad or made.is_complex():
        return None
    value = bool(value) if made.dtype == torch.bool else value
    return CausalMask(made.shape, 0, value, value, made.dtype, made.device)


def after(name: str, args: Args, kwargs: Kwargs) -> CausalMask | None:
    """The result of a call whose tensor arguments are all CausalMasks; None where it is not one."""
    if name in _VIEWS:
        return _VIEWS[name](*args, **kwargs)
    return _elementwise(name, args, kwargs) if name in _ELEMENTWISE else None


def _cut(mask: CausalMask, diagonal: int = 0, *, lower: bool) -> CausalMask | None:
    """tril or triu of a constant, or of a mask that it does not change."""
    if len(mask.shape) < 2:
        return None
    if not mask.is_constant:
        unchanged = mask.above == 0 if lower else mask.below == 0
        bound = mask.diagonal if lower else mask.diagonal + 1
        return mask.like() if unchanged and diagonal == bound else None
    zero = False if mask.dtype == torch.bool else 0
    return mask.like(diagonal=diagonal, above=zero) if lower else mask.like(diagonal=diagonal - 1, below=zero)


def _getitem(mask: CausalMask, index: Any) -> CausalMask | None:
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is None or part is ... or _is_plain_index(part) for part in parts):
        return None
    rest = len(mask.shape) - sum(part is not None and part is not ... for part in parts)
    if rest < 0 or sum(part is ... for part in parts) > 1:
        return None
    at = next((i for i, part in enumerate(parts) if part is ...), len(parts))
    parts[at : at + 1] = [slice(None)] * rest
    shape: list[int] = []
    diagonal, dim, rows = mask.diagonal, 0, len(mask.shape) - 2
    for part in parts:
        if part is None:
            if dim > rows:  # between rows and columns, or after them
                return None
            shape.append(1)
            continue
        if isinstance(part, int):
            if dim >= rows and not mask.is_constant:
                return None
        else:
            start, stop, step = part.indices(mask.shape[dim])
            if step != 1:
                return None
            shape.append(max(0, stop - start))
            diagonal += start if dim == rows else -start if dim == rows + 1 else 0
        dim += 1
    return mask.like(shape=shape, diagonal=diagonal)


def _is_plain_index(part: Any) -> bool:
    if isinstance(part, slice):
        return all(end is None or type(end) is int for end in (part.start, part.stop, part.step))
    return type(part) is int


def _sizes(sizes: Sequence[Any]) -> list[int]:
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    return list(sizes) if all(type(size) is int for size in sizes) else []


def _reshape(mask: CausalMask, *sizes: Any) -> CausalMask | None:
    """Only where rows and columns stay, and dimensions of one come or go."""
    wanted = _sizes(sizes)
    if tuple(wanted[-2:]) != tuple(mask.shape[-2:]) or len(mask.shape) < 2:
        return None
    if math.prod(mask.shape[:-2]) != 1 or math.prod(wanted[:-2]) != 1:
        return None
    return mask.like(shape=wanted)


def _expand(mask: CausalMask, *sizes: Any) -> CausalMask | None:
    wanted = _sizes(sizes)
    own = (1,) * (len(wanted) - len(mask.shape)) + tuple(mask.shape)
    if len(wanted) != len(own) or -1 in wanted[: len(wanted) - len(mask.shape)]:
        return None
    full = [have if want == -1 else want for want, have in zip(wanted, own, strict=True)]
    if tuple(full[-2:]) != own[-2:] or any(h not in (1, f) for f, h in zip(full, own, strict=True)):
        return None
    return mask.like(shape=full)


def _unsqueeze(mask: CausalMask, dim: int) -> CausalMask | None:
    at = dim if dim >= 0 else dim + len(mask.shape) + 1
    if at > len(mask.shape) - 2:
        return None
    return mask.like(shape=(*mask.shape[:at], 1, *mask.shape[at:]))


_VIEWS: dict[str, Callable[..., CausalMask | None]] = {
    "tril": lambda mask, diagonal=0: _cut(mask, diagonal, lower=True),
    "triu": lambda mask, diagonal=0: _cut(mask, diagonal, lower=False),
    "__getitem__": _getitem,
    "view": _reshape,
    "reshape": _reshape,
    "expand": _expand,
    "unsqueeze": _unsqueeze,
    "contiguous": lambda mask: mask.like(),
    "clone": lambda mask: mask.like(),
}
_ELEMENTWISE = frozenset(
    "eq ne lt le gt ge logical_not bitwise_not neg abs log logical_and bitwise_and logical_or bitwise_or "
    "add sub rsub mul div bool float half bfloat16 double int long type masked_fill where".split()
)


def _elementwise(name: str, args: Args, kwargs: Kwargs) -> CausalMask | None:
    """Each entry of the result depends on the same entry of the arguments: computed for the two values."""
    if name in ("eq", "ne") and isinstance(args[0], CausalMask) and args[1:] in ((0,), [0]):  # most frequent
        below, above = ((value == args[1]) == (name == "eq") for value in (args[0].below, args[0].above))
        return args[0].like(below=below, above=above, dtype=torch.bool)
    masks = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, CausalMask)]
    cut = [mask for mask in masks if not mask.is_constant]
    shapes = {mask.shape for mask in masks if mask.shape}
    function = torch.where if name == "where" else getattr(Tensor, name, getattr(torch, name, None))
    if len({mask.diagonal for mask in cut}) > 1 or len(shapes) != 1 or function is None:
        return None
    if name != "where" and not isinstance(args[0], CausalMask):
        return None
    try:
        pair = function(*map(_values, args), **{key: _values(value) for key, value in kwargs.items()})
    except (RuntimeError, TypeError):
        return None
    if not isinstance(pair, Tensor) or pair.shape != (2,) or pair.device.type != "cpu":
        return None
    below, above = pair.tolist()
    return (cut or masks)[0].like(shape=shapes.pop(), below=below, above=above, dtype=pair.dtype)


def _values(arg: Any) -> Any:
    """A mask as the tensor of its two values. A 0-dimensional one stays so: it does not promote dtypes."""
    if not isinstance(arg, CausalMask):
        return arg
    pair = torch.tensor((arg.below, arg.above), dtype=arg.dtype, device="cpu")
    return pair if arg.shape else pair[0]


# Known content of tensors that are in memory ---------------------------------------------------------


def note_content(name: str, args: Args, kwargs: Kwargs, made: Any) -> None:
    """Remember what a factory function has made."""
    if isinstance(made, Tensor):
        content = made_by(name, args, kwargs, made)
        if content is not None:
            _set_content(made, content)


def _set_content(tensor: Tensor, content: CausalMask) -> None:
    setattr(tensor, _CONTENT, (content, tensor._version))


def known_content(tensor: Any) -> CausalMask | None:
    content, version = getattr(tensor, _CONTENT, (None, 0)) if isinstance(tensor, Tensor) else (None, 0)
    return content if content is not None and tensor._version == version else None


def content_of_data(tensor: Tensor) -> CausalMask | None:
    """Reads a square mask of two values."""
    shape = tuple(tensor.shape)
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 2 or math.prod(shape) != shape[-1] ** 2:
        return None
    square = tensor.detach().reshape(shape[-2:])
    below, above = square[-1, 0].item(), square[0, -1].item()
    if below == above or isinstance(below, complex):
        return None
    values = torch.tensor((below, above), dtype=tensor.dtype, device=square.device)
    columns = torch.arange(shape[-1], device=square.device)
    for start in range(
        0, shape[-1], 1024
    ):  # in slices: a large mask should not need several times its memory
        rows = torch.arange(start, min(start + 1024, shape[-1]), device=square.device)
        expected = torch.where(columns <= rows[:, None], values[0], values[1])
        if not torch.equal(square[start : start + 1024], expected):
            return None
    return CausalMask(shape, 0, below, above, tensor.dtype, tensor.device)


# Buffers ---------------------------------------------------------------------------------------------


def release_mask_buffers(module: nn.Module, name: str, journal: Journal) -> None:
    """Replace the buffers of this module that are causal masks by LazyTensors, which move with the module.

    They are saved in checkpoints as tensors; loading one that holds the same mask changes nothing.
    """
    for key, buffer in list(module._buffers.items()):
        if buffer is None or isinstance(buffer, LazyTensor) or buffer.is_meta:
            continue
        if buffer.layout is not torch.strided or type(buffer) is nn.Parameter:
            continue
        content = known_content(buffer) if is_fake(buffer) else content_of_data(buffer)
        if content is not None and not content.is_constant:
            what = f"the causal mask {key} {list(buffer.shape)} is not stored"
            journal.set(module, key, lazy_tensor(content.like(device=buffer.device)), name, what)


class BuildWithMaskContent:
    """Builds a model. Where tensors have no data, remembers which causal masks they would hold."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build = build

    def __call__(self) -> nn.Module:
        if current_dispatch_mode() is None:
            return self.build()
        with _ContentMode():
            return self.build()


class _ContentMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and made.dim() > 1 and is_fake(made):
            self._note(function_name(func), args, kwargs, made)
        return made

    def _note(self, name: str, args: Args, kwargs: Kwargs, made: Tensor) -> None:
        note_content(name, args, kwargs, made)
        given = [known_content(arg) or arg for arg in args]
        if not any(isinstance(arg, CausalMask) for arg in given):
            return
        if any(isinstance(value, Tensor) for value in (*given, *kwargs.values())):
            return
        content = given[0]._to(name, given, kwargs) if name == "to" else after(name, given, kwargs)
        if content is not None and content.shape == made.shape and content.dtype == made.dtype:
            _set_content(made, content)
