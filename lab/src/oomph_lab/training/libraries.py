"""Libraries that are imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from oomph.errors import UserError


def need(module: str, purpose: str) -> Any:
    """Import an optional module; `purpose` begins the error where its package is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise UserError(
            f"{purpose} needs the package {package}, which is not installed; pip install oomph-lab"
        ) from error
