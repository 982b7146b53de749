"""Torch's deterministic kernels, switched on for a region and reported in one line where torch has none."""

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
def deterministic_algorithms(enabled: bool = True) -> Iterator[None]:
    """Allow only kernels that give the same bits at every run. An op without one raises UserError."""
    if not enabled:
        yield
        return
    before = settings()
    try:
        workspace = before[2] if before[2] in _ACCEPTED else _ACCEPTED[0]
        set_settings((2, False, workspace))  # filling new memory would write every result twice
        with deterministic_errors():
            yield
    finally:
        set_settings(before)


def settings() -> Settings:
    """torch's deterministic debug mode (0: off, 1: warn, 2: error), whether new memory is filled then, and
    CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads at its first matrix product."""
    mode = torch.get_deterministic_debug_mode()
    return mode, _new_memory.fill_uninitialized_memory, os.environ.get(_WORKSPACE)


def set_settings(settings: Settings) -> None:
    mode, _new_memory.fill_uninitialized_memory, workspace = settings
    if mode != torch.get_deterministic_debug_mode():
        # Not by its debug mode: this sets Inductor's too (and imports it, so only where something changes).
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
    if workspace is None:
        os.environ.pop(_WORKSPACE, None)
    else:
        os.environ[_WORKSPACE] = workspace


def deterministic_required() -> bool:
    """Whether a nondeterministic kernel is an error, not only a warning."""
    return torch.are_deterministic_algorithms_enabled() and (
        not torch.is_deterministic_algorithms_warn_only_enabled()
    )


@contextmanager
def deterministic_errors() -> Iterator[None]:
    """Turn torch's errors about nondeterministic kernels into a UserError of one line."""
    try:
        yield
    except RuntimeError as error:
        op, refused, _ = str(error).partition(NO_KERNEL)
        if refused:
            message = f"only deterministic kernels are allowed, and torch has none for {op}"
        elif _TOO_LATE in str(error):
            message = (
                "cuBLAS ran before deterministic kernels were required; start the process with "
                f"{_WORKSPACE}={_ACCEPTED[0]}"
            )
        else:
            raise
        raise UserError(message) from error
