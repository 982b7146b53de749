"""Modes of several fixes around one forward."""

import pytest
import torch
import torch.nn.functional as F
from small import Attention, seeded
from torch.overrides import TorchFunctionMode

from oomph import fixes
from oomph.fixes.fused_attention import AttentionMode
from oomph.fixes.modulated_linear import DeltaMode


class Log(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_around_the_model_sees_the_fused_call():
    attention = seeded(lambda: Attention(32, 4, 64))
    fixes.apply_to_model("fused_attention", attention)
    with Log() as log:
        attention(torch.randn(2, 8, 32))
    assert F.scaled_dot_product_attention.__name__ in log.names
    assert "softmax" not in log.names


def test_modes_of_several_fixes_do_not_see_each_other_s_work():
    q, k, v = (torch.randn(2, 40, 4) for _ in range(3))

    def run():
        scores = q @ k.mT
        return (scores / 2).tanh().softmax(-1) @ v, torch.einsum("btd,bte->btde", q, k).sum()

    expected = run()
    with DeltaMode(), AttentionMode(), pytest.warns(UserWarning, match="tanh"):
        found = run()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one + 0, other)
