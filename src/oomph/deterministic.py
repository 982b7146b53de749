"""Torch's deterministic kernels, for as long as they are wanted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from oomph.errors import UserError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_ACCEPTED = (":4096:8", ":16:8")  # with another, torch refuses matrix products: cuBLAS is not deterministic
NO_KERNEL = " does not have a deterministic implementation"  # torch's words
_TOO_LATE = "not deterministic because it uses CuBLAS"
_new_memory: Any = torch.utils.deterministic
Settings = tuple[int, bool, str | None]


@contextmanager
def deterministic_algorithms(wanted: bool = True) -> Iterator[None]:
    """Only kernels that give the same bits at every run; an op that has none ends it, in one line."""
    if not wanted:
        yield
        return
    before = settings()
    try:
        workspace = before[2] if before[2] in _ACCEPTED else _ACCEPTED[0]
        set_settings((2, False, workspace))  # filling new memory would write every result twice
        with refusals_told():
            yield
    finally:
        set_settings(before)


def settings() -> Settings:
    """Whether deterministic kernels are wanted (0: no, 1: others with a warning, 2: no others), whether new
    memory is filled then, and how cuBLAS is to work, which is read at its first matrix product."""
    mode = torch.get_deterministic_debug_mode()
    return mode, _new_memory.fill_uninitialized_memory, os.environ.get(_WORKSPACE)


def set_settings(wanted: Settings) -> None:
    mode, _new_memory.fill_uninitialized_memory, workspace = wanted
    if mode != torch.get_deterministic_debug_mode():
        # Not by its debug mode: this sets Inductor's too (and imports it, so only where something changes).
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
    if workspace is None:
        os.environ.pop(_WORKSPACE, None)
    else:
        os.environ[_WORKSPACE] = workspace


def alone_wanted() -> bool:
    """Whether other kernels are an error, not only a warning."""
    return torch.are_deterministic_algorithms_enabled() and (
        not torch.is_deterministic_algorithms_warn_only_enabled()
    )


@contextmanager
def refusals_told() -> Iterator[None]:
    """What torch refuses to compute where only deterministic kernels are wanted, in one line."""
    try:
        yield
    except RuntimeError as error:
        op, refused, _ = str(error).partition(NO_KERNEL)
        if refused:
            told = f"only deterministic kernels are wanted, and torch has none for {op}"
        elif _TOO_LATE in str(error):
            told = "cuBLAS was used before deterministic kernels were wanted; start the process with "
            told += f"{_WORKSPACE}={_ACCEPTED[0]}"
        else:
            raise
        raise UserError(told) from error
