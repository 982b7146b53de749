"""NPT at the report's size, predicted: its own form does not fit, the model does."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import oomph
from oomph.systems.npt import PRESETS, NPTOptimization, naive

pytest.importorskip("transformers")

GiB = 2**30


def predicted(model, batch=4, length=512):
    def inputs(device):
        return {"input_ids": torch.randint(0, 128256, (batch, length), device=device)}

    return oomph.predict(oomph.Workload(model, inputs), gpu="a100-80gb")


def test_llama_8b_trains_in_its_base_and_one_layers_activations():
    prediction = predicted(PRESETS["default"].build)
    assert prediction.fits
    assert prediction.peak.device < 17.5 * GiB


def test_llama_8b_in_8_bits_is_smaller():
    layers = replace(PRESETS["default"], optimization=NPTOptimization(use_8bit=True))
    with torch.device("meta"):
        model = layers.build()
    held = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
    assert held < 8.6 * GiB


def test_the_reports_form_fits_no_gpu():
    prediction = predicted(lambda: naive.build(replace(PRESETS["default"], convert_layers=1), "whole"))
    assert not prediction.fits
    # W + dW and dW in float32, [4, 512, 4096, 14336] each.
    assert prediction.peak.allocated > 2 * 448 * GiB


def test_the_reports_loop_over_tokens_does_not_fit_either():
    class OneLayer(nn.Module):
        def __init__(self):
            super().__init__()
            linear = nn.Linear(4096, 14336, bias=False, dtype=torch.bfloat16)
            self.np_component = naive.DeltaPerToken.replacing(linear, 16)

        def forward(self, h):
            component = self.np_component
            return component(h, component.modulation(h)).float().square().mean()

    def states(device):  # of a layer that comes after a converted one: they have a gradient
        return torch.randn(4, 128, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)

    prediction = oomph.predict(
        oomph.Workload(OneLayer, states, lambda model, h: model(h), optimizer=None), gpu="a100-80gb"
    )
    assert not prediction.fits
    assert prediction.peak.allocated > 128 * 4 * 4096 * 14336 * 4
