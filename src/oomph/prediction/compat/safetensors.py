"""safetensors: native code opens files itself. Those of a prediction have a header and a hole for data."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from oomph.prediction.compat.library import Library
from oomph.prediction.patches import Patches

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer

_searched_modules: set[str] = set()
_with_safe_open: set[str] = set()


def _import_and_find_users() -> None:
    with contextlib.suppress(ImportError):
        import safetensors.torch  # noqa: F401
    _find_users()


def _find_users() -> None:
    """Also before a fork, in the parent: to look at every module takes a child as long as a small trace."""
    new = sys.modules.keys() - _searched_modules | {"__main__"}  # where a notebook imports between traces
    _searched_modules.update(new)
    _with_safe_open.update(name for name in new if "safe_open" in getattr(sys.modules[name], "__dict__", ()))


def _save_without_data(patches: Patches, tracer: Tracer) -> None:
    """Replaces save_file's code: modules that imported it by name keep the function."""
    if importlib.util.find_spec("safetensors") is None:
        return
    import safetensors
    from safetensors import torch as module

    open_real = safetensors.safe_open

    def open_written(filename: Any, *args: Any, **kwargs: Any) -> Any:
        """Its native code opens the path itself, where files that the program has written are not."""
        with open(filename, "rb") as file:
            return open_real(f"/dev/fd/{file.fileno()}", *args, **kwargs)

    _find_users()
    for user in map(sys.modules.get, _with_safe_open):
        if getattr(user, "safe_open", None) is open_real:
            patches.set(user, "safe_open", open_written)
    real: Any = module.save_file
    real.write = _write
    patches.callback(functools.partial(setattr, real, "__code__", real.__code__))
    real.__code__ = _call_write.__code__


def _call_write(tensors: Any, filename: Any, metadata: Any = None) -> None:
    """Runs in the namespace of safetensors.torch."""
    save_file.write(tensors, filename, metadata)  # type: ignore[name-defined]  # noqa: F821


def _write(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Any) -> None:
    """A valid file with a header and a hole of the tensors' size, which takes no space on disk."""
    names = {dtype: name for name, dtype in sys.modules["safetensors.torch"]._TYPES.items()}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        layout = {"dtype": names[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**layout, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(filename, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


LIBRARY = Library("safetensors", None, in_trace=_save_without_data, before_fork=_import_and_find_users)
