"""Write a model's weights as safetensors, in the layout that Hugging Face libraries read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from oomph.errors import UserError
from oomph.training.checkpoint_state import STORABLE, memory_key
from oomph.training.libraries import need
from oomph.units import parse_bytes

INDEX = "model.safetensors.index.json"


def export(
    model_state: Mapping[str, Tensor],
    path: str | Path,
    metadata: Mapping[str, str] | None = None,
    shard: int | str = "5GB",
) -> list[Path]:
    """Write `model_state` (a model's state_dict) and return the files written.

    path: a file that ends in .safetensors, or a folder. A folder gets model.safetensors, or, beyond `shard`
    bytes, model-00001-of-00003.safetensors ... and an index. Tensors that share memory are written once,
    under the first name; the metadata maps the other names to it. Each file is complete when it appears.
    """
    path = Path(path)
    tensors, tied = _without_duplicates(model_state)
    header = {"format": "pt", **{key: str(value) for key, value in (metadata or {}).items()}, **tied}
    try:
        if path.suffix == ".safetensors":
            files = {path: tensors}
        else:
            shards = list(_shards(tensors, parse_bytes(shard)))
            names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
            names = ["model.safetensors"] if len(shards) == 1 else names
            files = {path / name: part for name, part in zip(names, shards, strict=True)}
        for file, part in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with _replacing(file) as partial:
                need("safetensors.torch", "export").save_file(_on_host(part), partial, header)
        if len(files) == 1:
            return list(files)
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {name: file.name for file, part in files.items() for name in part},
        }
        with _replacing(path / INDEX) as partial:
            partial.write_text(json.dumps(index, indent=1))
        return [*files, path / INDEX]
    except OSError as error:
        raise UserError(f"could not export to {path}: {error.strerror}") from None


def _without_duplicates(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each memory once, and the names that stand for another."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        if type(tensor) not in (Tensor, Parameter):
            raise UserError(f"cannot export {name}: it is a {type(tensor).__name__}, not a plain tensor")
        if tensor.dtype not in STORABLE or tensor.layout is not torch.strided or tensor.is_meta:
            form = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            raise UserError(f"cannot export {name}: safetensors cannot hold {form}")
        kept = first.setdefault(memory_key(tensor) if tensor.numel() else name, name)
        if kept == name:
            tensors[name] = tensor.detach()
        else:
            tied[name] = kept
    return tensors, tied


def _shards(tensors: dict[str, Tensor], largest: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > largest:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies: safetensors refuses two views of one storage."""
    return {
        name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
