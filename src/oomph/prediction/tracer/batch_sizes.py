"""`--sizes T=4096`: batches of other sizes than those that the program loads.

The batch of a script or function is what it moves to the GPU outside of modules. Every such tensor is
repeated or cut along the dimensions that have the name, or the size that is given instead of a name, so that
ids, labels and masks stay alike. Lengths that a DataLoader gives beside them become those of the new sizes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from oomph.errors import UserError
from oomph.records import DimensionNames, named_shapes
from oomph.units import BATCH_SIZES

Sizes = Mapping[str, int] | Literal["longest"]
_MOST_SECONDS = 10.0  # for looking through a data set
_LENGTHS = ("T", "T of floats")  # names of DimensionNames


class BatchSizes:
    """The sizes that are asked for, and the tensors that got them."""

    def __init__(self, sizes: Sizes, note: Callable[[str], None]) -> None:
        self._asked, self._note = sizes, note
        self.wanted: dict[str, int] = {} if sizes == "longest" else dict(sizes)  # type: ignore[arg-type]
        self._names = DimensionNames(guess=True)  # of the tensors as loaded
        self._rows: int | None = None  # of the last tensor with several dimensions
        self._applied: set[str] = set()
        self.resized: dict[str, None] = {}  # "[16, 512] are traced as [16, 4096]"
        self._features: dict[Any, int] = {}  # the length of floats, by their dtype and other sizes
        self._scanned: set[int] = set()  # ids of data sets
        self.has_short_sequences = False  # whose lengths are not those that are asked for

    def resize(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, on the host, with the sizes that are asked for."""
        shape = tuple(tensor.shape)
        if len(shape) > 1:
            self._rows = shape[0]
        elif shape != (self._rows,):  # such as the weights of classes: no batch
            return tensor
        guessed, length = self._names.guessed, self._names.length
        asked = self._asked_for(shape, str(tensor.dtype), self._names)
        if guessed and not self._names.guessed and "T" in self.wanted:
            either = " or ".join(f"{size}={self.wanted['T']}" for size in (length, shape[1]))
            raise UserError(
                f"--sizes T: the program moves {list(guessed)} as well as ids {list(shape)} to the GPU, of "
                f"other lengths; give the size of the dimension that is meant, as --sizes {either}"
            )
        out = tensor
        for dim, (key, wanted) in asked.items():
            self._applied.add(key)
            if wanted != shape[dim] and shape[dim]:
                out = out.index_select(dim, torch.arange(wanted) % shape[dim])
        if out is not tensor:
            change = f"{list(shape)} are traced as {list(out.shape)}"
            self.resized[change] = None
            self._note(f"--sizes: batches of {change}")
        return out

    def _asked_for(
        self, shape: tuple[int, ...], dtype: str, names: DimensionNames
    ) -> dict[int, tuple[str, int]]:
        """What was given for each dimension that gets a size, and the size. A length of floats that is given
        by its size is that of all batches, whose lengths may differ."""
        asked = {}
        for dim, (name, size) in enumerate(zip(names.of(shape, dtype), shape, strict=True)):
            key = name if name in self.wanted else str(size)
            alike = (dtype, shape[1:dim], shape[dim + 1 :]) if "float" in dtype and name in _LENGTHS else None
            if key in self.wanted:
                asked[dim] = key, self.wanted[key]
                if alike:
                    self._features[alike] = self.wanted[key]
            elif alike in self._features:
                asked[dim] = name, self._features[alike]
        return asked

    def with_lengths(self, batch: Any) -> Any:
        """A batch of a DataLoader, whose lengths (whole numbers, the largest that of a tensor) are set to the
        one that is asked for: the batch that needs most."""
        if not isinstance(batch, (Mapping, list, tuple)):
            return batch
        parts = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
        names, rows = copy.copy(self._names), dict[int, int]()
        lengths: dict[int, int | None] = {}  # that sizes of tensors become, where they are asked for
        for part in parts.values():
            if isinstance(part, torch.Tensor) and part.dim() > 1:
                asked = self._asked_for(tuple(part.shape), str(part.dtype), names)
                wanted = {dim: size for dim, (_, size) in asked.items()}
                rows[part.shape[0]] = wanted.get(0, part.shape[0])
                lengths |= {size: wanted.get(dim) for dim, size in enumerate(part.shape) if dim}
        changed: dict[Any, Any] = {}
        for key, part in parts.items():
            is_vector = isinstance(part, torch.Tensor) and part.dim() == 1 and "int" in str(part.dtype)
            given = part.tolist() if is_vector else part
            if not _is_list_of_numbers(given) or len(given) not in rows or max(given) not in lengths:
                continue
            length = lengths[max(given)]
            made = [length or given[row % len(given)] for row in range(rows[len(given)])]
            changed[key] = torch.tensor(made, dtype=part.dtype) if is_vector else made
            if length:
                self._note(f"--sizes: all lengths of batches are {length}")
        if not changed:
            return batch
        if isinstance(batch, tuple):
            items = (parts | changed).values()
            return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
        batch = copy.copy(batch)  # the program may keep its own
        for key, part in changed.items():
            batch[key] = part
        return batch

    def check_lengths(self, input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> None:
        """Of sequences that the program packs."""
        rows, steps = input.shape[:2] if batch_first else (input.shape[1], input.shape[0])
        if self._applied - {"B"} and (rows, steps) != (lengths.numel(), int(lengths.max())):
            self.has_short_sequences = True

    def explain_failure(self, message: str) -> str:
        """The message of a failure that may follow from the sizes."""
        named = any(name.isalpha() for name in self.wanted)
        hint = "; if another dimension is meant, give its size, as --sizes 16000=32000" if named else ""
        first, changes = message.partition("\n")[0], ", ".join(self.resized)
        return f"{first} (because of --sizes, batches of {changes}{hint})"

    def look_through(self, data: Any) -> None:
        """For "longest": the longest sample of a map-style data set of tensors or lists of numbers."""
        if self._asked != "longest" or id(data) in self._scanned:
            return
        self._scanned.add(id(data))
        try:
            count = len(data)
        except TypeError:
            return
        began, seen, names = time.monotonic(), 0, self._names
        for index in range(count):
            names = DimensionNames(guess=True)
            for name, size in _sizes_of_sample(data[index], names):
                self.wanted[name] = max(size, self.wanted.get(name, 0))
            seen += 1
            if time.monotonic() - began > _MOST_SECONDS:
                break
        self._names = names
        found = " ".join(f"{name}={size}" for name, size in self.wanted.items())
        if found:
            of = f"all {count:,}" if seen == count else f"the first {seen:,} of {count:,}"
            self._note(f"--sizes longest: {found}, of {of} samples")

    def check_applied(self, moved: Sequence[Any]) -> None:
        """Raise for a size that no tensor has."""
        missing = [name for name in self.wanted or ("T",) if name not in self._applied]
        if not missing or (self._asked == "longest" and self._applied):
            return
        what = ", ".join(named_shapes(moved)[:4])
        hint = "; a dimension without a name is given by its size, as 64=128" if what else ""
        what = what or "nothing: it makes its batch there"
        asked = "longest" if self._asked == "longest" else f"{missing[0]}={self.wanted[missing[0]]}"
        why = "no data set of tensors or lists was found" if asked == "longest" else "no such dimension"
        raise UserError(f"--sizes {asked}: {why} in what the program moves to the GPU ({what}){hint}")


def _sizes_of_sample(sample: Any, names: DimensionNames) -> list[tuple[str, int]]:
    """Ids first, because they decide what T is."""
    if isinstance(sample, Mapping):
        sample = list(dict(sample).values())
    parts = sample if isinstance(sample, (list, tuple)) and not _is_list_of_numbers(sample) else [sample]
    arrays = []
    for part in parts:
        if _is_list_of_numbers(part):
            arrays.append(((len(part),), "float" if isinstance(part[0], float) else "int"))
        elif hasattr(part, "shape") and hasattr(part, "dtype") and len(part.shape):
            arrays.append((tuple(part.shape), str(part.dtype)))
    found: list[tuple[str, int]] = []
    for shape, dtype in sorted(arrays, key=lambda array: len(array[0]) > 1 or "float" in array[1]):
        found += zip(names.of((1, *shape), dtype)[1:], shape, strict=True)  # without the batch's dimension
    return [(name, size) for name, size in found if name in (*BATCH_SIZES, "T of floats")]


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], (int, float))
