"""Files that a traced program saves: torch.save, pickle and safetensors write shapes instead of data."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import pickle
import sys
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from oomph import torch_internals as internals
from oomph.prediction.tracer.fake_cuda import Patches
from oomph.torch_internals import FakeTensor, storage_id

_SAVED = b"tensors of a prediction, without data\n"
_searched_modules: set[str] = set()
_with_safe_open: set[str] = set()
_map_location: ContextVar[Any] = ContextVar("map_location", default=None)


def install_saving(patches: Patches) -> None:
    """What a program saves, it can load again."""
    _tell_storages_apart(patches)
    _save_without_data(patches)
    _load_to_gpu(patches)
    _save_safetensors_without_data(patches)
    _map_written_arrow_files(patches)
    _save_tokenizers(patches)


def _tell_storages_apart(patches: Patches) -> None:
    """Libraries find tensors that share memory by its address, which is 0 for all fake ones."""
    address = torch.UntypedStorage.data_ptr

    def data_ptr(storage: torch.UntypedStorage) -> int:
        with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
            if found := address(storage):  # some storages without data refuse the question, some warn
                return found
        return storage_id(storage)

    def of_tensor(tensor: FakeTensor) -> int:
        return data_ptr(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()

    patches.set(torch.UntypedStorage, "data_ptr", data_ptr)
    patches.set(FakeTensor, "data_ptr", of_tensor)


def _save_without_data(patches: Patches) -> None:
    """torch.save, and pickle, write shapes and dtypes instead of data; torch.load reads them back."""

    def reduce(tensor: FakeTensor, protocol: Any) -> Any:
        layout = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device)
        return _tensor_without_data, (layout, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))

    save_real, load_real = torch.save, torch.load

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):  # of a tensor with data, by pickle
            return save_real(obj, f, *args, **kwargs)
        data = _SAVED + pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        if hasattr(f, "write"):
            f.write(data)
        else:
            Path(f).write_bytes(data)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext(f) if hasattr(f, "read") else open(f, "rb") as file:
            start = file.tell()
            saved = file.read() if file.read(len(_SAVED)) == _SAVED else None
            if saved is None:
                file.seek(start)
        if saved is None:  # or a tensor with values in a file that we have written
            where = _map_location.get() if map_location is None else map_location
            return load_real(f, where, *args, **kwargs)
        token = _map_location.set(map_location)
        try:
            return pickle.loads(saved)
        finally:
            _map_location.reset(token)

    patches.set(FakeTensor, "__reduce_ex__", reduce)
    patches.set(torch, "save", save)
    patches.set(torch, "load", load)


def _tensor_without_data(
    layout: tuple[Any, Any, torch.dtype, str], requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    shape, stride, dtype, device = layout
    where = _map_location.get()
    if isinstance(where, dict):
        where = where.get(device, device)
    if callable(where):  # such as lambda storage, location: storage.cuda()
        moved = where(torch.UntypedStorage(0, device="cpu"), device)
        where = None if moved is None else getattr(moved, "loaded_to", "cpu")
    where = device if where is None else where
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=where)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _load_to_gpu(patches: Patches) -> None:
    """torch.load moves the storages of a real file to the GPU, one by one, then makes tensors of them."""
    to = torch.UntypedStorage.to

    def to_device(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type != "cuda":
            return to(storage, device=device, non_blocking=non_blocking)
        storage.loaded_to = device
        return storage  # torch reads the data of old files into it later

    def on_its_device(tensor: torch.Tensor) -> torch.Tensor:
        storage: Any = tensor.untyped_storage()
        if not hasattr(storage, "loaded_to"):
            return tensor
        if not hasattr(storage, "on_gpu"):  # allocated with the shape and dtype of its first tensor
            length = storage.nbytes() // tensor.element_size()
            whole = tensor if tensor.numel() == length else tensor.as_strided((length,), (1,), 0)
            storage.on_gpu = torch.empty_like(
                whole, device=storage.loaded_to, memory_format=torch.contiguous_format
            )
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        view = storage.on_gpu.view(-1).view(tensor.dtype).as_strided(*layout)
        return view.detach().requires_grad_(tensor.requires_grad)

    patches.set(torch.UntypedStorage, "to", to_device)
    patches.set(*internals.REBUILT_TENSOR_DEVICE, on_its_device)


def find_users_of_safetensors() -> None:
    """Also before a fork, in the parent: to look at every module takes a child as long as a small trace."""
    new = sys.modules.keys() - _searched_modules | {"__main__"}  # where a notebook imports between traces
    _searched_modules.update(new)
    _with_safe_open.update(name for name in new if "safe_open" in getattr(sys.modules[name], "__dict__", ()))


def _save_safetensors_without_data(patches: Patches) -> None:
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

    find_users_of_safetensors()
    for user in map(sys.modules.get, _with_safe_open):
        if getattr(user, "safe_open", None) is open_real:
            patches.set(user, "safe_open", open_written)
    real: Any = module.save_file
    real.write = _write_safetensors
    patches.callback(functools.partial(setattr, real, "__code__", real.__code__))
    real.__code__ = _call_write.__code__


def _map_written_arrow_files(patches: Patches) -> None:
    """As for safetensors: datasets.load_dataset writes a file with Python's functions, then maps it."""

    def imported() -> None:
        import pyarrow

        map_real = pyarrow.memory_map

        def map_written(path: Any, mode: str = "r") -> Any:
            with open(path, "rb" if mode == "r" else "r+b") as file:
                return map_real(f"/dev/fd/{file.fileno()}", mode)

        patches.set(pyarrow, "memory_map", map_written)

    patches.when_imported("pyarrow", imported)


def _save_tokenizers(patches: Patches) -> None:
    """As for safetensors: native code writes and reads tokenizer.json."""

    def imported() -> None:
        from tokenizers import Tokenizer

        def save(tokenizer: Any, path: Any, pretty: bool = True) -> None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(tokenizer.to_str(pretty=pretty))

        def from_file(path: Any) -> Any:
            with open(path, encoding="utf-8") as file:
                return Tokenizer.from_str(file.read())

        patches.set(Tokenizer, "save", save)
        patches.set(Tokenizer, "from_file", staticmethod(from_file))

    patches.when_imported("tokenizers", imported)


def _call_write(tensors: Any, filename: Any, metadata: Any = None) -> None:
    """Runs in the namespace of safetensors.torch."""
    save_file.write(tensors, filename, metadata)  # type: ignore[name-defined]  # noqa: F821


def _write_safetensors(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Any) -> None:
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
