"""A model's weights for other programs: safetensors, named as in the model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from oomph.errors import UserError
from oomph.training.checkpoints import folders
from oomph.training.checkpoints.tensor_file import STORABLE, write_bytes, write_tensors
from oomph.training.checkpoints.tree import memory_key
from oomph.units import parse_bytes

INDEX = "model.safetensors.index.json"


def export(
    model_state: Mapping[str, Tensor],
    path: str | Path,
    metadata: Mapping[str, str] | None = None,
    shard: int | str = "5GB",
) -> list[Path]:
    """Write `model_state` (a model's state_dict) and return the files.

    `path`: a file that ends in .safetensors, or a folder. In a folder it is model.safetensors, or, beyond
    `shard` bytes, model-00001-of-00003.safetensors ... with an index, as Hugging Face's libraries read them.
    Tensors that share memory are written once, under the first name; the metadata says which name stands for
    which. Files appear whole; one tensor at a time is copied to the host.
    """
    path = Path(path)
    tensors, tied = _named(model_state)
    said = {"format": "pt", **{key: str(value) for key, value in (metadata or {}).items()}, **tied}
    try:
        if path.suffix == ".safetensors":
            path.parent.mkdir(parents=True, exist_ok=True)
            return _written({path: tensors}, said)
        path.mkdir(parents=True, exist_ok=True)
        shards = _shards(tensors, parse_bytes(shard))
        if len(shards) == 1:
            return _written({path / "model.safetensors": tensors}, said)
        count = len(shards)
        files = {
            path / f"model-{number:05d}-of-{count:05d}.safetensors": part
            for number, part in enumerate(shards, 1)
        }
        written = _written(files, said)
        index = {
            "metadata": {"total_size": sum(_size(tensor) for tensor in tensors.values())},
            "weight_map": {name: file.name for file, part in files.items() for name in part},
        }
        _replace(path / INDEX, lambda partial: write_bytes(partial, json.dumps(index, indent=1).encode()))
        return [*written, path / INDEX]
    except OSError as problem:
        raise UserError(f"could not export to {path}: {problem.strerror}") from None


def _named(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each memory once, and the names that stand for another."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        if type(tensor) not in (Tensor, Parameter):
            raise UserError(f"cannot export {name}: it is a {type(tensor).__name__}, not a plain tensor")
        if tensor.dtype not in STORABLE or tensor.layout is not torch.strided or tensor.is_meta:
            what = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise UserError(f"cannot export {name}: safetensors has no place for {what}")
        kept = first.setdefault(memory_key(tensor) if tensor.numel() else name, name)
        if kept == name:
            tensors[name] = tensor.resolve_conj().resolve_neg()
        else:
            tied[name] = kept
    return tensors, tied


def _shards(tensors: dict[str, Tensor], largest: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + _size(tensor) > largest:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += _size(tensor)
    return shards


def _written(files: Mapping[Path, dict[str, Tensor]], metadata: Mapping[str, str]) -> list[Path]:
    for path, tensors in files.items():
        _replace(path, lambda partial, tensors=tensors: write_tensors(partial, tensors, metadata))  # type: ignore[misc]
    return list(files)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.unlink(missing_ok=True)
        write(partial)
        os.replace(partial, path)
        folders.sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
