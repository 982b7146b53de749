"""Report 004's arithmetic against predictions of its naive form."""

from __future__ import annotations

import torch

import oomph
from oomph.systems.ginr import PRESETS, claims, naive


def predicted(preset):
    def images(device):
        return {"images": torch.zeros(claims.BATCH, 3, 32, 32, device=device)}

    workload = oomph.Workload(lambda: naive.build(PRESETS[preset]), images, optimizer=None)
    return oomph.predict(workload, gpu="a100-40gb")


def test_feed_forwards_in_the_place_of_attention_still_do_not_fit_40_gib():
    attention, feed_forward = predicted("default"), predicted("solution_1_feedforward")
    assert attention.fits is False
    assert feed_forward.fits is False
    saved = 1 - feed_forward.peak.allocated / attention.peak.allocated
    assert 0.05 < saved < 0.2
    assert feed_forward.peak.allocated > claims.solution_1_saved()
