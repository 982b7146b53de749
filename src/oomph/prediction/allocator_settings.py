"""What PYTORCH_CUDA_ALLOC_CONF says, as far as it decides which memory is reserved."""

from __future__ import annotations

import re
from dataclasses import dataclass

from oomph.errors import UserError

_MIB = 1024 * 1024
_LEAST_SPLIT = 20  # MiB: torch refuses a max_split_size_mb that is not above it
# These decide about the host, about locks, or only when a memory fraction is set.
_WITHOUT_EFFECT = (
    "garbage_collection_threshold",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "release_lock_on_cudamalloc",
)
_MODELLED = ("expandable_segments", "max_split_size_mb")


@dataclass(frozen=True)
class AllocatorSettings:
    """Those of torch's settings that the simulated allocator knows."""

    expandable_segments: bool = False
    max_split: int | None = None  # bytes: a block of this size or more is never split; None: no such size

    def __str__(self) -> str:
        """As PYTORCH_CUDA_ALLOC_CONF takes them; empty for the defaults."""
        parts = ["expandable_segments:True"] if self.expandable_segments else []
        parts += [f"max_split_size_mb:{self.max_split // _MIB}"] if self.max_split is not None else []
        return ",".join(parts)


def allocator_settings(text: str | None) -> AllocatorSettings:
    """The settings in a string as PYTORCH_CUDA_ALLOC_CONF takes it; None and "" are the defaults."""
    expandable, max_split = False, None
    for part in re.split(r",(?![^\[]*\])", text or ""):
        key, _, value = (word.strip() for word in part.partition(":"))
        if not key or key in _WITHOUT_EFFECT or (key, value) == ("backend", "native"):
            continue
        if key == "expandable_segments":
            if value not in ("True", "False"):
                raise _wrong(text, f"expandable_segments is {value!r}; valid: True, False")
            expandable = value == "True"
        elif key == "max_split_size_mb":
            if not value.isdecimal() or int(value) <= _LEAST_SPLIT:
                valid = f"a whole number above {_LEAST_SPLIT}"
                raise _wrong(text, f"max_split_size_mb is {value!r}; valid: {valid}")
            max_split = int(value) * _MIB
        else:
            raise _wrong(text, f"{key!r} cannot be predicted; valid: {', '.join(_MODELLED)}")
    return AllocatorSettings(expandable, max_split)


def _wrong(text: str | None, why: str) -> UserError:
    return UserError(f"Workload allocator={text!r}: {why}")
