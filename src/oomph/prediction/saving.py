"""torch.save and pickle write shapes instead of data. What a program saves, it can load."""

from __future__ import annotations

import contextlib
import functools
import pickle
import warnings
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from oomph import torch_internals as internals
from oomph.prediction import overlay
from oomph.prediction.patches import Patches
from oomph.torch_internals import FakeTensor, storage_id

_SAVED = b"tensors of a prediction, without data\n"
_map_location: ContextVar[Any] = ContextVar("map_location", default=None)


def install_saving(patches: Patches) -> None:
    """What a program saves, it can load again."""
    _tell_storages_apart(patches)
    _save_without_data(patches)
    _load_to_gpu(patches)
    _map_files(patches)


def is_without_data(file: Any) -> bool:
    """Whether `save` has written what comes next in a file."""
    start = file.tell()
    found: bool = file.read(len(_SAVED)) == _SAVED
    file.seek(start)
    return found


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
            saved = file.read()[len(_SAVED) :] if is_without_data(file) else None
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


def _map_files(patches: Patches) -> None:
    """torch.from_file opens a path in C, and what is shared is written to the file."""

    def redirected(real: Any) -> Any:
        @functools.wraps(real)
        def from_file(filename: Any, shared: Any = False, *args: Any, **kwargs: Any) -> Any:
            if shared and overlay.installed is not None:
                filename = overlay.installed.creating(filename)
            return real(filename, shared, *args, **kwargs)

        return from_file

    patches.set(torch, "from_file", redirected(torch.from_file))
    of_storage = staticmethod(redirected(torch.UntypedStorage.from_file))
    patches.set(torch.UntypedStorage, "from_file", of_storage, missing_ok=True)


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
