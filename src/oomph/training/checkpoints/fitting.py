"""Whether a checkpoint's tensors are those that a model has: what differs, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oomph.errors import UserError
from oomph.training.checkpoints.tensor_file import Entry
from oomph.training.checkpoints.tree import Leaf, shown

if TYPE_CHECKING:
    from oomph.training.checkpoints.saved import Saved

_NAMED = 3


def check_fit(
    saved: Saved,
    found: dict[Any, Leaf],
    entries: dict[str, Entry],
    wanted: dict[Any, Tensor],
    keys: set[Any],
) -> None:
    """The tensors of the checkpoint under `keys` are `wanted`, else UserError."""
    there = {path: _form(leaf, entries[leaf.name]) for path, leaf in found.items() if path[0] in keys}
    here = {path: (tuple(tensor.shape), tensor.dtype) for path, tensor in wanted.items()}
    problems = []
    if missing := [shown(path) for path in here if path not in there]:
        problems.append(f"missing from it: {_some(missing)}")
    if unexpected := [shown(path) for path in there if path not in here]:
        problems.append(f"not known here: {_some(unexpected)}")
    different = [
        f"{shown(path)} is {_said(there[path])} there and {_said(here[path])} here"
        for path in here
        if path in there and there[path] != here[path]
    ]
    if different:
        problems.append(_some(different))
    if problems:
        raise UserError(
            f"{saved.folder} does not fit this model: {'; '.join(problems)}; resume with the config it was "
            "saved with, or save into another folder"
        )


def _form(leaf: Leaf, entry: Entry) -> tuple[tuple[int, ...], torch.dtype]:
    if leaf.dtype is not None:
        return leaf.shape or (), leaf.dtype
    return entry.shape, entry.dtype


def _said(form: tuple[tuple[int, ...], torch.dtype]) -> str:
    shape, dtype = form
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
