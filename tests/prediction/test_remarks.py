"""What the reader of a prediction is told beside its figures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from small_programs import line_of, workload
from torch import nn

import oomph


def test_memory_that_grows_with_every_step_is_pointed_out_with_its_line() -> None:
    def train() -> Callable[[], None]:
        model = nn.Linear(512, 512).cuda()
        seen = []

        def step() -> None:
            out = model(torch.randn(4096, 512, device="cuda"))
            seen.append(out.softmax(-1))  # kept
            out.sum().backward()
            model.zero_grad()

        return step

    prediction = oomph.predict(train, gpu="rtx3090")
    (note,) = (note for note in prediction.notes if "grows" in note.text)
    assert "8.0 MiB with every step" in note.text
    assert note.site is not None
    assert note.site.line == line_of(train, "# kept")


def test_a_steady_step_on_a_known_card_needs_no_remark() -> None:
    assert oomph.predict(workload(), gpu="rtx3090").notes == ()


def test_a_card_of_unknown_generation_is_said_to_be_modelled_as_another() -> None:
    for gpu in (None, "24GiB"):
        assert any("H200" in note.text for note in oomph.predict(workload(), gpu=gpu).notes)


def test_convolution_workspaces_are_said_to_be_estimates() -> None:
    image = workload(
        lambda: nn.Conv2d(64, 64, 3, padding=1),
        batch=lambda device: torch.randn(8, 64, 64, 64, device=device),
    )
    assert any("cuDNN" in note.text for note in oomph.predict(image, gpu="a100-80gb").notes)
