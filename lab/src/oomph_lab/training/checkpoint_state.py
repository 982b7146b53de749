"""A training state as JSON and named tensors, and back.

The storage of torch.distributed.checkpoint that needs no pickle holds tensors only. Everything else goes into
JSON: a tensor is `{"$tensor": name}` there, a tuple `{"$tuple": [...]}`, and a dictionary whose keys are not
all strings (an optimizer's) `{"$dict": [[key, value], ...]}`. Nothing that is read names code to import.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from oomph.errors import UserError

# safetensors has more, but not in all its versions; other dtypes are stored as bytes.
STORABLE = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def flatten(state: Mapping[Any, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return the JSON structure of `state` and its tensors by name, contiguous and without copies where
    possible. Tensors that share all their memory are listed once."""
    flattening = _Flattening()
    try:
        return flattening.encode(state, ""), flattening.tensors
    except RecursionError:
        raise UserError("the state to save contains itself, or is nested too deeply") from None


class _Flattening:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[Any, str] = {}

    def encode(self, value: Any, name: str) -> Any:
        if value is None or isinstance(value, str | bool | int | float):
            return value
        if isinstance(value, Tensor):
            return self.encode_tensor(value, name)
        if isinstance(value, Mapping):
            items = [(key, self.encode(item, _joined(name, key))) for key, item in value.items()]
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return dict(items)
            if not all(isinstance(key, str | int) for key in value):
                raise UserError(f"cannot save {name}: its keys are not all strings and whole numbers")
            return {"$dict": [[key, item] for key, item in items]}
        if isinstance(value, list | tuple):
            listed = [self.encode(item, _joined(name, index)) for index, item in enumerate(value)]
            return listed if isinstance(value, list) else {"$tuple": listed}
        if isinstance(value, torch.dtype):
            return {"$dtype": _dtype_name(value)}
        if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            return value.item()
        raise UserError(
            f"cannot save {name}: it is a {type(value).__name__}; a checkpoint holds tensors, numbers, "
            "strings, None, lists, tuples and dictionaries"
        )

    def encode_tensor(self, tensor: Tensor, name: str) -> dict[str, Any]:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise UserError(
                f"cannot save {name}: it is a {type(tensor).__name__}; convert it to a plain tensor"
            )
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            where = "on the meta device" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
            raise UserError(f"cannot save {name}: it is {where}; a checkpoint holds strided tensors")
        tensor = tensor.detach()
        key = memory_key(tensor) if tensor.numel() else name
        stored = self.names.setdefault(key, name)
        tensor = tensor.resolve_conj().resolve_neg()
        mark: dict[str, Any] = {"$tensor": stored}
        if not is_dense(tensor):
            tensor = tensor.contiguous()
        if not tensor.is_contiguous() or tensor.dtype not in STORABLE:
            # Stored as its memory, in one dimension: the writer takes contiguous tensors of common dtypes
            # only, and 8-bit optimizer state is quantized by blocks of memory, so strides must be restored.
            mark |= {"dtype": _dtype_name(tensor.dtype), "shape": list(tensor.shape)}
            mark["strides"] = list(tensor.stride())
            tensor = tensor.as_strided((tensor.numel(),), (1,))
            if tensor.dtype not in STORABLE:
                tensor = tensor.view(torch.uint8)
        if stored == name:
            if name in self.tensors:
                raise UserError(f"cannot save two tensors under the name {name}")
            self.tensors[name] = tensor
        return mark


def decode(structure: Any, tensor: Callable[[str, dict[str, Any]], Any], name: str = "") -> Any:
    """The state again. `tensor` is called with the position of each tensor, as a dotted name, and its mark.
    Raises KeyError, TypeError, ValueError or RuntimeError for a structure that `flatten` did not make."""
    if isinstance(structure, list):
        return [decode(item, tensor, _joined(name, index)) for index, item in enumerate(structure)]
    if not isinstance(structure, dict):
        return structure
    tag = next(iter(structure), "")
    if tag == "$tensor":
        return tensor(name, structure)
    if tag == "$tuple":
        return tuple(decode(structure[tag], tensor, name))
    if tag == "$dict":
        return {key: decode(item, tensor, _joined(name, key)) for key, item in structure[tag]}
    if tag == "$dtype":
        return dtype_of(structure[tag])
    if tag.startswith("$"):
        raise ValueError(f"unknown mark {tag[:40]!r}")
    return {key: decode(item, tensor, _joined(name, key)) for key, item in structure.items()}


def stored_form(mark: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, Any]:
    """Shape and dtype of the tensor that a mark stands for; `shape` and `dtype` are those in the file."""
    if "dtype" not in mark:
        return shape, dtype
    return tuple(mark["shape"]), dtype_of(mark["dtype"])


def restored(mark: Mapping[str, Any], stored: Tensor) -> Tensor:
    """The tensor that a mark stands for, as a view of what is in the file."""
    if "dtype" not in mark:
        return stored
    flat = stored.view(dtype_of(mark["dtype"]))
    return flat.as_strided(tuple(mark["shape"]), tuple(mark["strides"]))  # checks the bounds


def memory_key(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that view the same memory in the same way."""
    return (
        *(tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()),
        *(tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()),
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in any order of dimensions."""
    expected = 1
    strided = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in strided if size != 1):
        if stride != expected:
            return False
        expected *= size
    return expected > 0


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


# ------------------------------------------------------------------------ random number generators


def rng_state() -> dict[str, Any]:
    """The state of Python's `random`, of torch on the host and on each GPU, and of numpy if it is imported;
    plain data, since each process of a run has its own."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(each) for each in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }
    if "numpy" in sys.modules:
        import numpy as np

        generator: Any = np.random.get_state()
        name, keys, *rest = generator
        state["numpy"] = [name, keys.tolist(), *rest]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned. GPUs that only one of the two machines has are left alone."""
    try:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(_tensor(state["torch"]))
        if torch.cuda.is_available():
            for device, text in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
                torch.cuda.set_rng_state(_tensor(text), device)
        if "numpy" in state:
            import numpy as np

            np.random.set_state(tuple(state["numpy"]))
    except (LookupError, TypeError, ArithmeticError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"the checkpoint's random number state cannot be restored here: {error}") from None


def _text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
