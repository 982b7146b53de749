"""The state of every random number generator that training draws from, as tensors and plain data."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from oomph.errors import UserError


def rng_state() -> dict[str, Any]:
    """Of Python's `random`, torch on the host and on each GPU, and numpy where it is imported."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    if "numpy" in sys.modules:
        import numpy as np

        found = np.random.get_state(legacy=False)
        assert isinstance(found, dict)
        state["numpy"] = _with(
            found, np.ndarray, lambda array: {"dtype": str(array.dtype), "numbers": array.tolist()}
        )
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on where `rng_state` was. GPUs beyond those that both machines have are left alone."""
    try:
        python = state["python"]
        random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
        torch.set_rng_state(state["torch"].cpu())
        if "cuda" in state and torch.cuda.is_available():
            for device, one in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
                torch.cuda.set_rng_state(one.cpu(), device)
        if "numpy" in state:
            import numpy as np

            np.random.set_state(_arrays(state["numpy"], np))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as problem:
        raise UserError(f"the checkpoint's random number state cannot be used here: {problem}") from None


def _with(value: Any, kind: type, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with(item, kind, change) for key, item in value.items()}
    return change(value) if isinstance(value, kind) else value


def _arrays(value: Any, np: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "numbers"}:
        return np.array(value["numbers"], dtype=value["dtype"])
    return {key: _arrays(item, np) for key, item in value.items()}
