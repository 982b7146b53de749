"""Batches on their way to a GPU: from a worker they come pinned, and are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from corpora import drawn, numbered_lines, opened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_a_worker_hands_out_pinned_batches_and_a_state_that_resumes(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    corpus = numbered_lines(tmp_path / "lines.txt", 300)
    whole = drawn(opened(corpus, tmp_path), 40)
    run = opened(corpus, tmp_path, workers=1)
    assert drawn(run, 10) == whole[:10]
    assert all(tensor.is_pinned() for tensor in next(run.train).values())
    state = run.train.state_dict()
    run.train.close()
    resumed = opened(corpus, tmp_path, workers=1)
    resumed.train.load_state_dict(state)
    assert drawn(resumed, 20) == whole[11:31]
    resumed.train.close()
