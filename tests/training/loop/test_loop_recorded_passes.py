"""Passes that are recorded once and replayed: the same losses, gradients and random numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import trained
from torch import Tensor, nn

from oomph.training.loop.memory import memory_now
from oomph.training.loop.passes import Passes, RecordedPasses
from oomph.training.loop.precision import Precision
from oomph.training.loop.trainer import Trainer

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class Replay:
    """In the place of a CUDA graph: its loss is the sum of what was copied in, times the factor."""

    def __init__(self, inputs: Any, loss: Tensor) -> None:
        self.inputs, self.loss = inputs, loss

    def replay(self) -> None:
        batch, factor = self.inputs
        self.loss.copy_(batch["x"].sum() * factor)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def record(self: RecordedPasses, given: Any) -> Any:
        batch, factor = given
        inputs = ({"x": batch["x"].clone()}, factor.clone() if isinstance(factor, Tensor) else factor)
        loss = torch.zeros(())
        made.append(inputs)
        return Replay(inputs, loss), inputs, loss

    monkeypatch.setattr(RecordedPasses, "_record", record)
    return made


def test_a_factor_that_is_a_tensor_is_copied_in_and_recorded_once(recordings: list[Any]) -> None:
    passes = RecordedPasses(Passes(nn.Identity(), lambda model, batch: batch["x"], _plain("cpu")))
    found = [float(passes({"x": torch.ones(3)}, torch.tensor(share))) for share in (0.25, 0.5, 0.0)]
    assert found == [0.75, 1.5, 0.0]
    assert len(recordings) == 1


def test_other_shapes_and_other_numbers_are_recorded_anew(recordings: list[Any]) -> None:
    passes = RecordedPasses(Passes(nn.Identity(), lambda model, batch: batch["x"], _plain("cpu")))
    for size, factor in ((3, 1.0), (3, 0.5), (4, 1.0), (3, 1.0), (3, torch.tensor(1.0))):
        assert float(passes({"x": torch.ones(size)}, factor)) == size * float(factor)
    assert len(recordings) == 4


def test_what_was_forgotten_is_recorded_anew(recordings: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: given_back.append("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append("emptied"))
    passes = RecordedPasses(Passes(nn.Identity(), lambda model, batch: batch["x"], _plain("cpu")))
    passes.forget()
    assert given_back == []  # there was nothing
    for _ in range(2):
        assert float(passes({"x": torch.ones(3)}, 1.0)) == 3
    passes.replay_bytes = 1024
    passes.forget()
    assert given_back == ["waited", "emptied"]
    assert passes.replay_bytes == 0
    assert float(passes({"x": torch.ones(3)}, 1.0)) == 3
    assert len(recordings) == 2


def test_work_in_the_place_of_recordings_begins_without_them(
    recordings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(RecordedPasses, "_on_one_stream", lambda self: nullcontext())
    passes = RecordedPasses(Passes(nn.Identity(), lambda model, batch: batch["x"], _plain("cpu")))
    passes({"x": torch.ones(3)}, 1.0)
    with passes.in_their_place():
        assert not passes._recorded
    assert float(passes({"x": torch.ones(3)}, 1.0)) == 3
    assert len(recordings) == 2


def test_gradients_that_were_freed_are_not_missed_in_silence(recordings: list[Any]) -> None:
    model = nn.Linear(3, 1)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    passes = RecordedPasses(Passes(model, lambda model, batch: batch["x"], _plain("cpu")))
    passes({"x": torch.ones(3)}, 1.0)
    model.zero_grad(set_to_none=False)
    passes({"x": torch.ones(3)}, 1.0)
    model.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match="were freed: zero them in place"):
        passes({"x": torch.ones(3)}, 1.0)


def test_recordings_are_forgotten_for_another_stage_and_for_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A curriculum of two, two and then more steps; an evaluation after the fifth, and at the end."""
    forgot: list[int] = []
    in_their_place: list[int] = []
    seen: list[Trainer] = []
    begin = Trainer.begin

    def watched(trainer: Trainer) -> None:
        seen.append(trainer)
        begin(trainer)

    monkeypatch.setattr(Trainer, "begin", watched)

    @contextmanager
    def evaluating(self: Passes) -> Iterator[None]:
        in_their_place.append(seen[0].step)
        yield

    monkeypatch.setattr(Passes, "forget", lambda self: forgot.append(seen[0].step))
    monkeypatch.setattr(Passes, "in_their_place", evaluating)
    trained(tmp_path / "run", ["training.eval_every=5", "training.steps=6"], "hatchling")
    assert forgot == [0, 2, 4]
    assert in_their_place == [5, 6]


@pytest.mark.parametrize("as_tensor", [pytest.param(each, marks=on_a_gpu) for each in (False, True)])
def test_replayed_passes_give_the_gradients_of_passes_as_they_are(as_tensor: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 1)).cuda()
    batches = [{"x": torch.randn(8, 16, device="cuda")} for _ in range(4)]
    factors: list[Any] = [0.5, 0.5, 0.25, 0.5]
    if as_tensor:
        factors = [torch.tensor(each, device="cuda") for each in factors]
    plain = Passes(model, lambda model, batch: model(batch["x"]).square().mean(), _plain("cuda"))

    def run(passes: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        losses = [passes(batch, factor) for batch, factor in zip(batches, factors, strict=True)]
        gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        return losses, gradients, torch.cuda.get_rng_state()

    for found, right in zip(run(RecordedPasses(plain)), run(plain), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_memory_of_replays_counts_as_that_of_passes_as_they_are() -> None:
    device = torch.device("cuda")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8))).cuda()
    plain = Passes(model, lambda model, batch: model(batch["x"]).square().mean(), _plain("cuda"))
    batch = {"x": torch.randn(1 << 17, 512, device="cuda")}
    for _ in range(2):
        plain(batch, 1.0)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plain(batch, 1.0)
    right = torch.cuda.max_memory_allocated() - before
    recorded = RecordedPasses(plain)
    recorded(batch, 1.0)
    torch.cuda.reset_peak_memory_stats()
    recorded(batch, 1.0)
    assert torch.cuda.max_memory_allocated() - before < 0.5 * right  # the allocator sees no replay
    found = memory_now(device, recorded.replay_bytes, recorded.peak_before)
    assert found is not None
    # The copy that a replay reads; and matrix products hold 33 MiB for each thread on the recording's stream.
    more = batch["x"].nbytes + 2 * 33 * 2**20
    assert found.peak - before == pytest.approx(right + more, abs=0.05 * right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_forgotten_is_free_and_recorded_anew_gives_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.Dropout(0.5), nn.Linear(2048, 1)).cuda()
    plain = Passes(model, lambda model, batch: model(batch["x"]).square().mean(), _plain("cuda"))
    batches = [{"x": torch.randn(1 << 16, 512, device="cuda")} for _ in range(4)]

    def gradients(passes: Any, forgets: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        for batch in batches:
            passes(batch, 0.5)
            if forgets:  # in the middle of a step: what was added so far stays
                held = torch.cuda.memory_reserved()
                passes.forget()
                assert torch.cuda.memory_reserved() < held - (256 << 20)
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    right = gradients(plain, forgets=False)
    torch.testing.assert_close(gradients(RecordedPasses(plain), forgets=True), right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_in_the_place_of_recordings_holds_no_memory_after_it() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    model = nn.Linear(512, 512).cuda()
    passes = RecordedPasses(Passes(model, lambda model, batch: model(batch["x"]).mean(), _plain("cuda")))
    batch = {"x": torch.randn(1 << 16, 512, device="cuda")}
    right = passes(batch, 1.0)
    passes.forget()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with passes.in_their_place(), torch.no_grad():
        found = model(batch["x"]).mean()
        assert torch.cuda.memory_reserved() < reserved + 2 * batch["x"].nbytes
        torch.testing.assert_close(found, right)
        del found
    assert torch.cuda.memory_allocated() == allocated
    with torch.no_grad():
        model(batch["x"])
    assert torch.cuda.memory_allocated() > allocated + (8 << 20)  # what another stream costs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_thread_may_pin_batches_while_a_pass_is_recorded() -> None:
    """As the one does that takes them from a data worker; all are kept, so that none is used again."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(200))).cuda()
    passes = RecordedPasses(Passes(model, lambda model, batch: model(batch["x"]).mean(), _plain("cuda")))
    stop = threading.Event()
    failed: list[RuntimeError] = []

    def pin() -> None:
        pinned: list[Tensor] = []
        while not stop.wait(0.001) and len(pinned) < 2000:
            try:
                pinned.append(torch.empty(1 << 20, dtype=torch.uint8).pin_memory())
            except RuntimeError as error:
                failed.append(error)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        for rows in range(1, 9):
            passes({"x": torch.randn(rows, 64, device="cuda")}, 1.0)
    finally:
        stop.set()
        thread.join()
    assert not failed


def _plain(device: str) -> Precision:
    return Precision(torch.device(device), None)
