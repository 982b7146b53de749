"""Forward and backward as a CUDA graph: the same losses, gradients and random numbers."""

import threading

import pytest
import torch
from torch import nn

from oomph_lab.training.step import CudaGraphForwardBackward, ForwardBackward, Precision

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("as_tensor", [False, True])
def test_replays_give_the_gradients_of_eager_passes(as_tensor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 1)).cuda()
    batches = [{"x": torch.randn(8, 16, device="cuda")} for _ in range(4)]
    factors = [0.5, 0.5, 0.25, 0.5]
    if as_tensor:
        factors = [torch.tensor(each, device="cuda") for each in factors]
    plain = ForwardBackward(model, lambda model, batch: model(batch["x"]).square().mean(), _plain("cuda"))

    def run(passes):
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        losses = [passes(batch, factor) for batch, factor in zip(batches, factors, strict=True)]
        gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        return losses, gradients, torch.cuda.get_rng_state()

    for found, right in zip(run(graphs_of(plain)), run(plain), strict=True):
        torch.testing.assert_close(found, right)


def test_the_memory_of_replays_counts_as_that_of_eager_passes():
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


def test_released_graphs_are_free_and_captured_again_give_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.Dropout(0.5), nn.Linear(2048, 1)).cuda()
    plain = ForwardBackward(model, lambda model, batch: model(batch["x"]).square().mean(), _plain("cuda"))
    batches = [{"x": torch.randn(1 << 16, 512, device="cuda")} for _ in range(4)]

    def gradients(passes, releases):
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


def test_other_work_holds_no_memory_after_it():
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


def test_a_thread_may_pin_batches_during_a_capture():
    """As the one does that takes them from a data worker; all are kept, so that none is used again."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(200))).cuda()
    passes = CudaGraphForwardBackward(model, lambda model, batch: model(batch["x"]).mean(), _plain("cuda"))
    stop = threading.Event()
    failed = []

    def pin():
        pinned = []
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


def graphs_of(plain):
    return CudaGraphForwardBackward(plain.model, plain.loss, plain.precision)


def _plain(device):
    return Precision(torch.device(device), None)
