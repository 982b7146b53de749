"""A nested state as JSON and a flat dictionary of tensors, and back.

JSON holds everything but tensors; a tensor is a mark with its name. What JSON has no word for carries a tag:
a dictionary whose first key begins with "$". Nothing that is read names code: the tags below are all.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oomph.errors import UserError
from oomph.training.checkpoints import wrapped
from oomph.training.checkpoints.tensor_file import STORABLE, Malformed

Path = tuple[Any, ...]
Json = Any
_PLAIN = "tensors, numbers, strings, bytes, None, lists, tuples, dictionaries"


@dataclass(frozen=True)
class Leaf:
    """Where a tensor is kept, and how it was laid out when that was not contiguous."""

    name: str
    strides: tuple[int, ...] | None = None
    # Of a dtype that the file has no word for: it is kept as bytes.
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None


@dataclass
class Parts:
    """`tensors` are the state's own memory, each once; `structure` is everything else, as JSON; `places` has
    the tensors themselves, by where they stand."""

    structure: Json = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    places: dict[Path, Tensor] = field(default_factory=dict)


def take_apart(state: dict[Any, Any]) -> Parts:
    parts = Parts()
    taking = _Taking(parts.tensors, parts.places)
    try:
        parts.structure = taking.encoded(state, ())
    except RecursionError:
        raise UserError("the state to save contains itself, or is nested too deeply") from None
    return parts


class _Taking:
    def __init__(self, tensors: dict[str, Tensor], places: dict[Path, Tensor]) -> None:
        self.tensors, self.places = tensors, places
        self.seen: dict[Any, str] = {}

    def encoded(self, value: Any, path: Path) -> Json:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, int):
            return int(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, dict):
            return self._dictionary(value, path)
        if isinstance(value, torch.Size):
            return {"$size": list(value)}
        if isinstance(value, list | tuple):
            items = [self.encoded(item, (*path, index)) for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            return self.encoded(value.item(), path)
        raise UserError(
            f"cannot save {shown(path)}: it is a {type(value).__name__}; a checkpoint holds {_PLAIN}"
        )

    def _dictionary(self, value: dict[Any, Any], path: Path) -> Json:
        if all(type(key) is str for key in value) and not any(key.startswith("$") for key in value):
            return {key: self.encoded(item, (*path, key)) for key, item in value.items()}
        # JSON's keys are strings; an optimizer's are numbers.
        return {
            "$dict": [
                [self.encoded(key, (*path, "(key)")), self.encoded(item, (*path, key))]
                for key, item in value.items()
            ]
        }

    def _tensor(self, tensor: Tensor, path: Path) -> Json:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            parts = wrapped.parts_of(tensor)
            if parts is None:
                raise UserError(
                    f"cannot save {shown(path)}: it is a {type(tensor).__module__}.{type(tensor).__name__}, "
                    "which this process does not hold as plain tensors; convert it first"
                )
            kind, inner, context = parts
            return {
                "$wrapped": {
                    "kind": kind,
                    "tensors": {key: self._tensor(part, (*path, key)) for key, part in inner.items()},
                    "context": self.encoded(context, (*path, "(context)")),
                }
            }
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            what = "on the meta device" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
            raise UserError(f"cannot save {shown(path)}: it is {what}; a checkpoint holds strided tensors")
        self.places[path] = tensor
        tensor = tensor.detach()
        name, known = self._name(tensor, path)
        tensor = tensor.resolve_conj().resolve_neg()
        mark: dict[str, Any] = {"$tensor": name}
        if is_dense(tensor) and not tensor.is_contiguous():
            # Quantised optimizer state is by blocks of memory, so that its layout must come back too.
            mark["strides"] = list(tensor.stride())
        if tensor.dtype not in STORABLE:
            mark["dtype"], mark["shape"] = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            tensor = tensor.contiguous().reshape(-1).view(torch.uint8)
        if not known:
            self.tensors[name] = tensor
        return mark

    def _name(self, tensor: Tensor, path: Path) -> tuple[str, bool]:
        same = memory_key(tensor) if tensor.numel() else path
        if same in self.seen:
            return self.seen[same], True
        name = base = shown(path)
        count = 1
        while name in self.tensors:  # {"a": {"b": x}, "a.b": y}
            count += 1
            name = f"{base}#{count}"
        self.seen[same] = name
        return name, False


def put_together(structure: Json, tensor_at: Callable[[Path, Leaf], Tensor]) -> Any:
    """The state again. `structure` is what a file says: whatever is not as written above is Malformed."""
    try:
        return _decoded(structure, (), tensor_at)
    except RecursionError:
        raise Malformed("is nested too deeply") from None


def leaves(structure: Json) -> dict[Path, Leaf]:
    """Every tensor of a structure, by where it stands."""
    try:
        return {path: _leaf(mark) for path, mark in _marks(structure, ())}
    except RecursionError:
        raise Malformed("is nested too deeply") from None


def _marks(value: Json, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _marks(item, (*path, index))
    elif isinstance(value, dict):
        if "$tensor" in value:
            yield path, value
        elif "$dict" in value:
            for key, item in _pairs(value["$dict"]):
                yield from _marks(item, (*path, _decoded(key, path, _no_tensor)))
        elif "$tuple" in value:
            yield from _marks(value["$tuple"], path)
        elif "$wrapped" in value:
            yield from _marks(_of(value["$wrapped"], dict).get("tensors"), path)
        else:
            for key, item in value.items():
                yield from _marks(item, (*path, key))


def _decoded(value: Json, path: Path, tensor_at: Callable[[Path, Leaf], Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, (*path, index), tensor_at) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decoded(item, (*path, key), tensor_at) for key, item in value.items()}
    held = value[tag]
    if tag == "$tensor":
        return tensor_at(path, _leaf(value))
    if tag == "$dict":
        keyed = [(_decoded(key, path, _no_tensor), item) for key, item in _pairs(held)]
        try:
            return {key: _decoded(item, (*path, key), tensor_at) for key, item in keyed}
        except TypeError:
            raise Malformed(f"has a key at {shown(path)} that cannot be one") from None
    if tag == "$tuple":
        return tuple(_decoded(_of(held, list), path, tensor_at))
    if tag == "$size":
        return torch.Size(_sizes(held))
    if tag == "$float" and held in ("nan", "inf", "-inf"):
        return float(held)
    if tag == "$bytes":
        try:
            return base64.b64decode(_of(held, str))
        except ValueError:
            raise Malformed(f"has bytes at {shown(path)} that are none") from None
    if tag == "$dtype":
        return _dtype(held)
    if tag == "$device":
        try:
            return torch.device(_of(held, str))
        except RuntimeError:
            raise Malformed(f"names a device {held[:40]!r} that is none") from None
    if tag == "$wrapped" and isinstance(held, dict):
        inner = _of(held.get("tensors"), dict)
        return wrapped.made(
            _of(held.get("kind"), str),
            {key: _decoded(part, (*path, key), tensor_at) for key, part in inner.items()},
            _decoded(held.get("context"), path, _no_tensor),
        )
    raise Malformed(f"has an unknown mark {tag[:40]!r} at {shown(path)}")


def memory_key(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one and the same memory, read in the same way."""
    return (
        *(tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()),
        *(tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()),
    )


def shown(path: Path) -> str:
    return ".".join(str(key) for key in path) or "(the state)"


def _no_tensor(path: Path, leaf: Leaf) -> Tensor:
    raise Malformed(f"has a tensor for a key at {shown(path)}")


def _leaf(mark: dict[str, Any]) -> Leaf:
    strides, dtype, shape = (mark.get(key) for key in ("strides", "dtype", "shape"))
    return Leaf(
        _of(mark["$tensor"], str),
        None if strides is None else _sizes(strides),
        None if dtype is None else _dtype(dtype),
        None if shape is None else _sizes(shape),
    )


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, _of(name, str), None)
    if not isinstance(found, torch.dtype):
        raise Malformed(f"names a dtype {name!r} that this torch does not have")
    return found


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 1 << 60 for size in value):
        raise Malformed("has a shape that is none")
    return tuple(value)


def _pairs(value: Any) -> list[list[Any]]:
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise Malformed("has a dictionary that is none")
    return value


def _of(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise Malformed(f"has a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def is_dense(tensor: Tensor) -> bool:
    return is_dense_layout(tensor.shape, tensor.stride())


def is_dense_layout(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Every number of its stretch of memory once, in whatever order."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return expected > 0
