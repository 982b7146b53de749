"""Saving from a GPU: what was there at the time of the call, without memory of the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oomph.training.checkpoints import Checkpoints

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_overwritten_right_after_save_is_saved_as_it_was(tmp_path: Path, asynchronous: bool) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=asynchronous)
    x = torch.randn(64 << 20, device="cuda").bfloat16()
    t = torch.randn(1000, 1000, device="cuda").t()
    expected, expected_t = x.cpu(), t.cpu()
    for step in (1, 2):
        checkpoints.save(step, {"x": x, "t": t})
        x.add_(1)
        if step == 1:
            expected.add_(1)
    checkpoints.close()
    saved = checkpoints.latest()
    assert saved is not None
    found = checkpoints.load(saved, into={"x": torch.empty_like(x)})
    assert torch.equal(found["x"].cpu(), expected)
    assert found["x"].is_cuda
    assert torch.equal(found["t"], expected_t)


def test_saving_takes_no_memory_of_the_gpu(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    x = torch.randn(16 << 20, device="cuda")
    t = torch.randn(4000, 1000, device="cuda").t()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    checkpoints.save(1, {"x": x, "t": t})
    checkpoints.close()
    assert torch.cuda.max_memory_allocated() == before
