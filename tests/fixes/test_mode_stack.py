"""While a fix does its own work, its mode is not asked; modes of others are."""

import pytest
import torch
import torch.nn.functional as F
from small import Attention, TinyLM, seeded, tiny_batch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from oomph import fixes
from oomph.fixes.attention.mode import FusingMode
from oomph.fixes.deferral.mode_stack import as_written
from oomph.fixes.outer_products import DeltaMode


class Log(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_modes_that_defer_are_taken_off_and_all_come_back_in_their_order():
    with Log() as below, FusingMode() as fusing, Log() as above, DeltaMode() as delta:
        with as_written():
            assert _get_current_function_mode_stack() == [below, above]
            with as_written():
                assert _get_current_function_mode_stack() == [below, above]
        assert _get_current_function_mode_stack() == [below, fusing, above, delta]
        with pytest.raises(ValueError, match="mine"), as_written():
            raise ValueError("mine")
        assert _get_current_function_mode_stack() == [below, fusing, above, delta]
    assert _get_current_function_mode_stack() == []


def test_nothing_is_taken_off_where_nothing_defers():
    with Log() as log, as_written():
        assert _get_current_function_mode_stack() == [log]


def test_the_mode_is_asked_about_the_program_s_own_calls_only(monkeypatch):
    asked, ask = [], FusingMode.__torch_function__

    def counted(self, func, *rest):
        asked.append(func.__name__)
        return ask(self, func, *rest)

    model, batch = seeded(lambda: TinyLM(layers=1)), tiny_batch("cpu")
    with Log() as log:
        model.blocks[0].attention(torch.randn(2, 8, 32))
    fixes.apply_to_model("fused_attention", model)
    monkeypatch.setattr(FusingMode, "__torch_function__", counted)
    model(batch["tokens"])
    assert len(asked) <= len(log.names)
    assert "scaled_dot_product_attention" not in asked


def test_a_mode_around_the_model_sees_the_fused_call():
    attention = seeded(lambda: Attention(32, 4, 64))
    fixes.apply_to_model("fused_attention", attention)
    with Log() as log:
        attention(torch.randn(2, 8, 32))
    assert F.scaled_dot_product_attention.__name__ in log.names
    assert "softmax" not in log.names
