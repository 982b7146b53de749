"""Write a model's weights as safetensors, in the layout that Hugging Face libraries read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from oomph.errors import UserError
from oomph.units import parse_bytes
from oomph_lab.training.checkpoint_state import STORABLE, memory_key
from oomph_lab.training.libraries import need

INDEX = "model.safetensors.index.json"


def export(
    model_state: Mapping[str, Tensor],
    path: str | Path,
    metadata: Mapping[str, str] | None = None,
    shard: int | str = "5GB",
) -> None:
    """Write `model_state` (a model's state_dict) to `path`, which does not exist yet.

    path: a file that ends in .safetensors, or a folder. A folder gets model.safetensors, or, beyond `shard`
    bytes, model-00001-of-00003.safetensors ... and an index. Tensors that share memory are written once,
    under the first name; the metadata maps the other names to it. `path` appears when it is complete.
    """
    path = Path(path)
    save_file = need("safetensors.torch", "export").save_file
    hub = need("huggingface_hub", "export")
    tensors, tied = without_duplicates(model_state)
    header = {"format": "pt", **(metadata or {}), **tied}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _partial(path) as partial:
            if path.suffix == ".safetensors":
                save_file(_on_host(tensors), partial, header)
            else:
                partial.mkdir()
                shards = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=parse_bytes(shard))
                for file, names in shards.filename_to_tensors.items():
                    save_file(_on_host({name: tensors[name] for name in names}), partial / file, header)
                if shards.is_sharded:
                    index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
                    (partial / INDEX).write_text(json.dumps(index, indent=1))
            os.replace(partial, path)
    except OSError as error:
        raise UserError(f"could not export to {path}: {error.strerror}") from None


def check_export(file: str) -> None:
    """Raise before a training what `export` would raise after it."""
    path = Path(file)
    for module in ("safetensors.torch", "huggingface_hub"):
        need(module, "export")
    try:
        if path.exists():
            raise UserError(f"--export {file!r} exists already; give another name")
        if not path.absolute().parent.is_dir():
            raise UserError(f"--export {file!r}: the folder {str(path.parent)!r} does not exist")
        with _partial(path):
            pass
    except OSError as error:
        raise UserError(f"--export {file!r}: cannot write there: {error.strerror}") from None


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """A name in a temporary folder beside `path`, to be renamed to it."""
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        yield Path(folder) / path.name


def without_duplicates(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
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


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies: safetensors refuses two views of one storage."""
    return {
        name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
