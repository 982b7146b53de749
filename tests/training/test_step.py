"""Forward and backward as a CUDA graph: the same losses, gradients and random numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import trained
from torch import Tensor, nn

from oomph.training.step import CudaGraphForwardBackward, ForwardBackward, Precision
from oomph.training.trainer import Trainer

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class Replay:
    """Instead of a CUDA graph: its loss is the sum of the copied-in batch, times the factor."""

    def __init__(self, inputs: Any, loss: Tensor) -> None:
        self.inputs, self.loss = inputs, loss

    def replay(self) -> None:
        batch, factor = self.inputs
        self.loss.copy_(batch["x"].sum() * factor)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def capture(self: CudaGraphForwardBackward, given: Any) -> Any:
        batch, factor = given
        inputs = ({"x": batch["x"].clone()}, factor.clone() if isinstance(factor, Tensor) else factor)
        loss = torch.zeros(())
        made.append(inputs)
        return Replay(inputs, loss), inputs, loss

    monkeypatch.setattr(CudaGraphForwardBackward, "_capture", capture)
    return made


def test_what_is_captured_again_and_what_is_copied_in(
    captures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model = nn.Linear(3, 1)
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    passes = CudaGraphForwardBackward(model, lambda model, batch: batch["x"], _plain("cpu"))
    tensors = [(3, torch.tensor(factor)) for factor in (1.0, 0.25, 0.0)]  # one graph
    for size, factor in ((3, 1.0), (3, 0.5), (4, 1.0), (3, 1.0), *tensors):
        assert float(passes({"x": torch.ones(size)}, factor)) == size * float(factor)
    assert len(captures) == 4
    passes.graph_bytes = 1024
    passes.release()
    assert passes.graph_bytes == 0
    assert float(passes({"x": torch.ones(3)}, 1.0)) == 3
    assert len(captures) == 5
    model.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match="were freed: zero them in place"):
        passes({"x": torch.ones(3)}, 1.0)


def test_graphs_are_released_for_another_stage_and_for_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A curriculum of two, two and then more steps; an evaluation after the fifth, and at the end."""
    released: list[int] = []
    evaluated_at: list[int] = []
    seen: list[Trainer] = []
    begin = Trainer.start_measuring

    def watched(trainer: Trainer) -> None:
        seen.append(trainer)
        begin(trainer)

    monkeypatch.setattr(Trainer, "start_measuring", watched)

    @contextmanager
    def evaluating(self: ForwardBackward) -> Iterator[None]:
        evaluated_at.append(seen[0].step)
        yield

    monkeypatch.setattr(ForwardBackward, "release", lambda self: released.append(seen[0].step))
    monkeypatch.setattr(ForwardBackward, "released", evaluating)
    trained(tmp_path / "run", ["training.eval_every=5", "training.steps=6"], "hatchling")
    assert released == [0, 2, 4]
    assert evaluated_at == [5, 6]


@pytest.mark.parametrize("as_tensor", [pytest.param(each, marks=on_a_gpu) for each in (False, True)])
def test_replays_give_the_gradients_of_eager_passes(as_tensor: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 1)).cuda()
    batches = [{"x": torch.randn(8, 16, device="cuda")} for _ in range(4)]
    factors: list[Any] = [0.5, 0.5, 0.25, 0.5]
    if as_tensor:
        factors = [torch.tensor(each, device="cuda") for each in factors]
    plain = ForwardBackward(model, lambda model, batch: model(batch["x"]).square().mean(), _plain("cuda"))

    def run(passes: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        losses = [passes(batch, factor) for batch, factor in zip(batches, factors, strict=True)]
        gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        return losses, gradients, torch.cuda.get_rng_state()

    for found, right in zip(run(graphs_of(plain)), run(plain), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_memory_of_replays_counts_as_that_of_eager_passes() -> None:
    device = torch.device("cuda")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8))).cuda()
    plain = ForwardBackward(model, lambda model, batch: model(batch["x"]).square().mean(), _plain("cuda"))
    batch = {"x": torch.randn(1 << 17, 512, device="cuda")}
    for _ in range(2):
        plain(batch, 1.0)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plain(batch, 1.0)
    right = torch.cuda.max_memory_allocated() - before
    captured = graphs_of(plain)
    captured(batch, 1.0)
    torch.cuda.reset_peak_memory_stats()
    captured(batch, 1.0)
    assert torch.cuda.max_memory_allocated() - before < 0.5 * right  # the allocator sees no replay
    allocated = torch.cuda.memory_allocated(device) + captured.graph_bytes
    peak = max(torch.cuda.max_memory_allocated(device), captured.peak_before_capture, allocated)
    # The copy that a replay reads; and matrix products hold 33 MiB for each thread on the capture's stream.
    more = batch["x"].nbytes + 2 * 33 * 2**20
    assert peak - before == pytest.approx(right + more, abs=0.05 * right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_released_graphs_are_free_and_captured_again_give_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.Dropout(0.5), nn.Linear(2048, 1)).cuda()
    plain = ForwardBackward(model, lambda model, batch: model(batch["x"]).square().mean(), _plain("cuda"))
    batches = [{"x": torch.randn(1 << 16, 512, device="cuda")} for _ in range(4)]

    def gradients(passes: Any, releases: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        for batch in batches:
            passes(batch, 0.5)
            if releases:  # in the middle of a step: gradients so far stay
                held = torch.cuda.memory_reserved()
                passes.release()
                assert torch.cuda.memory_reserved() < held - (256 << 20)
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    right = gradients(plain, releases=False)
    torch.testing.assert_close(gradients(graphs_of(plain), releases=True), right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_other_work_holds_no_memory_after_it() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    model = nn.Linear(512, 512).cuda()
    passes = CudaGraphForwardBackward(model, lambda model, batch: model(batch["x"]).mean(), _plain("cuda"))
    batch = {"x": torch.randn(1 << 16, 512, device="cuda")}
    right = passes(batch, 1.0)
    passes.release()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with passes.released(), torch.no_grad():
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
def test_a_thread_may_pin_batches_during_a_capture() -> None:
    """As the one does that takes them from a data worker; all are kept, so that none is used again."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(200))).cuda()
    passes = CudaGraphForwardBackward(model, lambda model, batch: model(batch["x"]).mean(), _plain("cuda"))
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


def graphs_of(plain: ForwardBackward) -> CudaGraphForwardBackward:
    return CudaGraphForwardBackward(plain.model, plain.loss, plain.precision)


def _plain(device: str) -> Precision:
    return Precision(torch.device(device), None)
