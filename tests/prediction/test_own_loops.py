"""Functions with the whole training loop in them: the first steps are traced, and the rest is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_programs import line_of, notes_of
from torch import nn

import oomph
from oomph.prediction import called

WIDTH = 256
MiB = 1 << 20


def batch() -> torch.Tensor:
    return torch.randn(4096, WIDTH, device="cuda")


class Training:
    """A model and its optimizer; counts the steps that were begun."""

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


def test_a_loop_without_end_is_ended_after_three_optimizer_steps() -> None:
    begun: list[int] = []

    def training() -> None:
        own = Training()
        while True:
            begun.append(1)
            own.step()

    prediction = oomph.predict(training, gpu="h200")
    assert len(begun) == 4  # the fourth step's optimizer was not run any more
    assert [step.step for step in prediction.steps] == [1, 2, 3]
    assert (
        "traced the first 3 optimizer steps of training(); what comes after them was not traced"
        in notes_of(prediction)
    )


def test_the_peak_of_a_loop_is_that_of_the_step_which_it_repeats() -> None:
    def training() -> None:
        own = Training()
        for _ in range(1000):
            own.step()

    loop, step = oomph.predict(training, gpu="h200"), oomph.predict(setup, gpu="h200")
    assert loop.peak.allocated == step.peak.allocated
    assert loop.peak.reserved == step.peak.reserved
    assert loop.peak.step == step.peak.step == 2
    assert loop.work.flops == step.work.flops  # of one step


def test_three_steps_and_what_comes_after_them_are_traced_to_the_end() -> None:
    def training() -> None:
        own = Training()
        for _ in range(3):
            own.step()
        torch.zeros(64 * MiB, dtype=torch.uint8, device="cuda")  # an evaluation, say

    prediction = oomph.predict(training)
    assert prediction.peak.allocated > 64 * MiB
    assert "optimizer step" not in notes_of(prediction)


def test_what_a_program_does_after_it_swallowed_the_end_is_not_part_of_the_trace() -> None:
    def training() -> None:
        own = Training()
        for _ in range(6):
            try:
                own.step()
            except:  # noqa: E722 - on purpose: it catches what is none of its business
                torch.zeros(64 * MiB, dtype=torch.uint8, device="cuda")

    prediction = oomph.predict(training)
    assert prediction.peak.allocated == oomph.predict(setup).peak.allocated
    assert "first 3 optimizer steps" in notes_of(prediction)


def test_a_step_that_is_returned_in_spite_of_it_is_what_is_predicted() -> None:
    def warmed_up() -> Callable[[], None]:
        own = Training()
        for _ in range(6):
            try:
                own.step()
            except BaseException:
                own.optimizer.zero_grad()
        return own.step

    prediction = oomph.predict(warmed_up)
    assert [step.step for step in prediction.steps] == [1, 2, 3]
    assert prediction.peak.allocated == oomph.predict(setup).peak.allocated
    assert "optimizer step" not in notes_of(prediction)


def test_a_returned_step_may_make_as_many_optimizer_steps_as_it_likes() -> None:
    def inner_loops() -> Callable[[], None]:
        own = Training()

        def step() -> None:
            for _ in range(6):
                own.step()

        return step

    assert "optimizer step" not in notes_of(oomph.predict(inner_loops))


def test_every_optimizer_gets_its_steps_where_one_steps_more_often() -> None:
    steps = {"critic": 0, "generator": 0}

    def training() -> None:
        critic, generator = Training(), Training()
        while True:
            for _ in range(5):
                critic.step()
                steps["critic"] += 1
            generator.step()
            steps["generator"] += 1

    prediction = oomph.predict(training)
    assert steps == {"critic": 15, "generator": 3}
    assert [step.step for step in prediction.steps] == [1, 2, 3]


def test_an_optimizer_that_never_steps_does_not_keep_the_loop_going() -> None:
    begun: list[int] = []

    def training() -> None:
        own, _unused = Training(), Training()
        while True:
            begun.append(1)
            own.step()

    oomph.predict(training)
    assert len(begun) == 25


def test_an_optimizer_for_every_parameter_that_steps_in_backward_is_one_step_a_round() -> None:
    begun: list[int] = []

    def training() -> None:
        model = nn.Linear(WIDTH, WIDTH).cuda()
        optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

        def hook(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        while True:
            begun.append(1)
            model(batch()).sum().backward()

    assert [step.step for step in oomph.predict(training).steps] == [1, 2, 3]
    assert len(begun) == 4


def test_a_loop_that_keeps_what_its_steps_make_is_pointed_out_with_its_line() -> None:
    def training() -> None:
        own = Training()
        while True:
            own.kept.append(own.model(batch()).softmax(-1).detach())  # kept
            own.step()

    prediction = oomph.predict(training, gpu="h200")
    (note,) = (note for note in prediction.notes if "grows" in note.text)
    assert note.site is not None
    assert note.site.line == line_of(training, "# kept")


def test_one_step_alone_is_said_to_be_too_few_for_the_optimizers_state() -> None:
    prediction = oomph.predict(lambda: Training().step())
    assert "only one optimizer step of the function was traced" in notes_of(prediction)
    assert prediction.peak.step == 1
    assert prediction.peak.allocated < oomph.predict(setup).peak.allocated


def test_the_request_that_does_not_fit_is_told_with_its_step() -> None:
    def training() -> None:
        own = Training()
        while True:
            own.kept.append(torch.zeros(64 * MiB, dtype=torch.uint8, device="cuda"))
            own.step()

    steps = oomph.predict(training).steps
    assert steps[1].reserved < steps[2].reserved
    refused = oomph.predict(training, max=steps[1].reserved).refused
    assert refused is not None
    assert (refused.bytes, refused.step) == (64 * MiB, 3)


def test_training_in_another_thread_is_not_ended() -> None:
    went_on: list[bool] = []

    def train_on_the_host() -> None:
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(6):
            optimizer.step()
        went_on.append(True)

    def training() -> None:
        own = Training()
        for _ in range(3):
            own.step()
        thread = threading.Thread(target=train_on_the_host)
        thread.start()
        thread.join()

    oomph.predict(training)
    assert went_on == [True]


def test_torch_is_as_it_was_after_a_loop_was_ended() -> None:
    before = torch.optim.Optimizer.__init__

    def training() -> None:
        own = Training()
        while True:
            own.step()

    oomph.predict(training)
    assert torch.optim.Optimizer.__init__ is before
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(6):
        optimizer.step()


def test_asking_a_function_for_its_workload_does_not_run_its_loop_either() -> None:
    def training() -> Any:
        own = Training()
        while True:
            own.step()

    assert called(training) is None


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
