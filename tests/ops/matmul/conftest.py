"""Triton 3.6's interpreter has two gaps that this kernel meets; they are closed here for its tests.

One-element arrays become loop bounds, which NumPy refuses from 2.4 on. And bfloat16, which it keeps as 16-bit
integers, is multiplied as those integers by `tl.dot`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oomph.ops.launch import interpreted


@pytest.fixture(autouse=True)
def _interpreter_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    if not interpreted():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(interpreter, a), _widened(interpreter, b), *rest)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _widened(interpreter: Any, operand: Any) -> Any:
    """bfloat16 is the upper half of a float32."""
    if not operand.dtype.scalar.is_bf16():
        return operand
    import triton.language as tl

    bits = operand.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
