"""Functions with the whole training in them, and what is said of what they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_programs import line_of, notes_of
from torch import nn

import oomph

WIDTH = 256
MiB = 1 << 20


def batch() -> torch.Tensor:
    return torch.randn(4096, WIDTH, device="cuda")


class Training:
    """A model and its optimizer."""

    def __init__(self) -> None:
        self.model = nn.Linear(WIDTH, WIDTH).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.kept: list[torch.Tensor] = []

    def step(self) -> None:
        out = self.model(batch())
        out.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def setup() -> Callable[[], None]:
    return Training().step


def test_a_loop_of_ones_own_is_traced_whole_and_whoever_waits_is_told_of_the_short_way() -> None:
    def training() -> None:
        own = Training()
        for _ in range(5):
            own.step()

    told: list[str] = []
    prediction = oomph.predict(training, gpu="h200", progress=lambda text, share: told.append(text))
    assert prediction.peak.allocated == oomph.predict(setup, gpu="h200").peak.allocated
    said = [text for text in told if "a function that returns its step is traced for three" in text]
    assert [text.split(";")[0] for text in said] == [
        "running the program, optimizer step 4",
        "running the program, optimizer step 5",
    ]


def test_steps_of_other_optimizers_before_the_step_is_returned_change_nothing() -> None:
    def warmed_up() -> Callable[[], None]:
        teacher = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(teacher.parameters())
        for _ in range(10):
            teacher(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        return setup()

    expected = oomph.predict(setup, gpu="h200").peak.allocated
    assert oomph.predict(warmed_up, gpu="h200").peak.allocated == expected


def test_one_step_alone_is_said_to_be_too_few_for_the_optimizers_state() -> None:
    prediction = oomph.predict(lambda: Training().step())
    assert "only one optimizer step of the function was traced" in notes_of(prediction)
    assert prediction.peak.allocated < oomph.predict(setup).peak.allocated


@pytest.mark.parametrize("enter", ["with", "set"])
def test_a_stream_of_the_programs_own_is_noted_once_with_its_line(enter: str) -> None:
    def setup() -> Callable[[], None]:
        own, side = Training(), torch.cuda.Stream()

        def step() -> None:
            if enter == "with":
                with torch.cuda.stream(side):  # with
                    own.step()
                with torch.cuda.stream(side):
                    own.step()
            else:
                torch.cuda.set_stream(side)  # set
                own.step()

        return step

    (note,) = oomph.predict(setup, gpu="h200").notes
    assert "as if all streams were one" in note.text
    assert note.site is not None
    assert note.site.line == line_of(setup, f"# {enter}")


def test_the_current_stream_and_the_default_one_are_nothing_to_note() -> None:
    def setup() -> Callable[[], None]:
        own = Training()

        def step() -> None:
            torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.stream(torch.cuda.default_stream()),
            ):
                own.step()

        return step

    assert oomph.predict(setup, gpu="h200").notes == ()


def test_numbers_read_from_the_gpu_are_noted_once_with_the_first_line() -> None:
    def setup() -> Callable[[], None]:
        own = Training()

        def step() -> None:
            own.model(batch()).sum().item()  # first
            own.model(batch()).mean().item()
            own.step()

        return step

    (note,) = oomph.predict(setup, gpu="h200").notes
    assert "taken as 1.0" in note.text
    assert note.site is not None
    assert note.site.line == line_of(setup, "# first")
