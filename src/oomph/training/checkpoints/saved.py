"""A checkpoint on disk: found, verified, read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oomph.errors import UserError
from oomph.training.checkpoints import folders
from oomph.training.checkpoints.fitting import check_fit
from oomph.training.checkpoints.manifest import (
    INSTEAD,
    NAME,
    STATE,
    TENSORS,
    Manifest,
    Unsound,
    check_files,
    read_manifest,
)
from oomph.training.checkpoints.storage import fill
from oomph.training.checkpoints.tensor_file import Entry, Malformed, read_header
from oomph.training.checkpoints.tree import Leaf, is_dense_layout, leaves, put_together, take_apart


@dataclass(frozen=True)
class Saved:
    """`warnings`: one line for each newer checkpoint that was passed over, and why; `passed_over`: those."""

    folder: Path
    manifest: Manifest
    verified: bool = False
    warnings: tuple[str, ...] = ()
    passed_over: tuple[Path, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def size(self) -> int:
        return self.manifest.size


def look_at(folder: Path, contents: bool) -> Saved:
    """The checkpoint in `folder`; Unsound when its manifest, its files' sizes or (`contents`) their checksums
    are not right."""
    manifest = read_manifest(folder)
    check_files(folder, manifest, contents)
    return Saved(folder, manifest, contents)


def newest(folder: Path) -> Saved | None:
    """The newest checkpoint in `folder` that verifies, None where there are none.

    Where there are some and none verifies it is an error: a run must not start again from nothing unasked."""
    passed_over: dict[Path, str] = {}
    for _, path in reversed(folders.named(folder)):
        try:
            found = look_at(path, contents=True)
            return replace(found, warnings=tuple(passed_over.values()), passed_over=tuple(passed_over))
        except Unsound as problem:
            passed_over[path] = str(problem).removesuffix(f"; {INSTEAD}")  # which is being done
    warnings = list(passed_over.values())
    if warnings:
        more = f" (and {len(warnings) - 1} older)" if len(warnings) > 1 else ""
        anew = "to start anew, give another output.dir"
        raise Unsound(f"no checkpoint in {folder} can be used: {warnings[0]}{more}; {anew}")
    return None


def find(path: str | Path) -> Saved:
    """The checkpoint that a user means by `path`: one checkpoint's folder, or a folder of them."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; a checkpoint is a folder like step-00000100")
    if path.is_file():
        raise UserError(f"{path} is {_kind(path)}; a checkpoint of oomph is a folder like step-00000100")
    if (path / NAME).exists():
        return look_at(path, contents=True)
    if (path / ".metadata").exists():
        raise UserError(
            f"{path} is a checkpoint of torch.distributed.checkpoint itself, whose .metadata is a pickle "
            "that may execute code; oomph reads its own only"
        )
    found = newest(path)
    if found is None:
        raise UserError(f"{path} holds no checkpoint of oomph: no {NAME}, and no folder like step-00000100")
    return found


def load(saved: Saved, into: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state. Tensors are new, on the host; those under a key of `into` are its own, filled in place.

    `into` is nested like the state, and need not have all its keys. Under those that it has, the tensors must
    be the same ones, with the same shapes and dtypes: what differs is named, and nothing is filled then.
    Tensors that shared memory when saved are one tensor again. No file is unpickled.
    """
    if not saved.verified:
        check_files(saved.folder, saved.manifest, contents=True)
    structure = _structure(saved.folder / STATE)
    wanted: dict[Any, Tensor] = {}
    try:
        found = leaves(structure)
        entries = read_header(saved.folder / TENSORS)
        _check(found, entries)
        if into is not None:
            wanted = take_apart(dict(into)).places
            check_fit(saved, found, entries, wanted, set(into))
        return _filled(saved, structure, found, entries, wanted)
    except Malformed as problem:
        raise Unsound(f"{saved.folder} is not a sound checkpoint: a file {problem}; {INSTEAD}") from None
    except OSError as problem:
        raise Unsound(f"{saved.folder} cannot be read: {problem.strerror}") from None


def _filled(
    saved: Saved,
    structure: Any,
    found: dict[Any, Leaf],
    entries: dict[str, Entry],
    wanted: dict[Any, Tensor],
) -> dict[str, Any]:
    made: dict[str, Tensor] = {}  # by name, in the dtype and layout that was saved
    raw: dict[str, Tensor] = {}  # the bytes of those whose dtype the file has no word for
    for path, leaf in found.items():
        if leaf.name in made:
            continue
        given = wanted.get(path)
        made[leaf.name] = given.detach() if given is not None else _new(leaf, entries[leaf.name])
        if leaf.dtype is not None:
            raw[leaf.name] = torch.empty(entries[leaf.name].shape, dtype=torch.uint8)
    fill({**made, **raw}, saved.folder / TENSORS)
    for name, memory in raw.items():
        made[name].copy_(memory.view(made[name].dtype).view(made[name].shape))

    def at(path: Any, leaf: Leaf) -> Tensor:
        own = wanted.get(path)
        if own is None:
            return made[leaf.name]
        if own.data_ptr() != made[leaf.name].data_ptr():  # two here that were one when saved
            own.detach().copy_(made[leaf.name])
        return own

    try:
        state = put_together(structure, at)
    except KeyError:
        raise Malformed("names a tensor that is not there") from None
    if not isinstance(state, dict):
        raise Malformed("holds no state")
    return state


def _check(found: dict[Any, Leaf], entries: dict[str, Entry]) -> None:
    """What state.json says of its tensors agrees with what the other file holds."""
    if {leaf.name for leaf in found.values()} != entries.keys():
        raise Malformed(f"does not hold the tensors that {STATE} names")
    first: dict[str, Leaf] = {}
    for leaf in found.values():
        entry = entries[leaf.name]
        shape = entry.shape
        if leaf.dtype is not None:
            shape = leaf.shape or ()
            if (entry.dtype, entry.shape) != (torch.uint8, (prod(shape) * leaf.dtype.itemsize,)):
                raise Malformed(f"has {leaf.name} in a shape that its bytes do not have")
        strides = leaf.strides
        if strides is not None and not (len(strides) == len(shape) and is_dense_layout(shape, strides)):
            raise Malformed(f"has {leaf.name} in a layout that is none")
        if first.setdefault(leaf.name, leaf) != leaf:
            raise Malformed(f"has {leaf.name} in two forms")


def _new(leaf: Leaf, entry: Entry) -> Tensor:
    shape = entry.shape if leaf.dtype is None else leaf.shape or ()
    dtype = entry.dtype if leaf.dtype is None else leaf.dtype
    if leaf.strides is None:
        return torch.empty(shape, dtype=dtype)
    return torch.empty_strided(shape, leaf.strides, dtype=dtype)


def _structure(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as problem:
        raise Unsound(f"{path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError):
        raise Unsound(f"{path} is corrupt or not of oomph: it is not JSON; {INSTEAD}") from None


def _kind(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(16)
    if start[:2] == b"PK" or start[:1] == b"\x80":
        return "a file of torch.save or pickle, which may execute code when it is loaded"
    if path.suffix == ".safetensors":
        return "weights without an optimizer or a data position"
    return "a file"
