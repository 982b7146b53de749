"""Without a GPU, Triton kernels run in its interpreter, which must be selected before Triton is imported."""

import importlib.util
import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def _keep_masks_boolean() -> None:
    """Triton 3.9's interpreter broadcasts `scalar < scalar` as integers, and then refuses it as a mask."""
    from triton.runtime import interpreter

    splat = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        result = splat(self, kind, value)
        if value.data.dtype == bool:
            result.data = result.data.astype(bool)
        return result

    interpreter.InterpreterBuilder.create_splat = create_splat


if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    _keep_masks_boolean()


@pytest.fixture(autouse=True)
def _in_process(in_process: None) -> None:
    """Predictions of every test here."""
