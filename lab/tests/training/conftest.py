import pytest
import torch


@pytest.fixture(autouse=True)
def _quick_and_equal(monkeypatch):
    """Samples of a few tokens; one thread, since models this small are slower with more; and the same
    kernels in all tests: torch disables oneDNN for good after a bfloat16 product fails in it."""
    monkeypatch.setattr("oomph_lab.training.evaluation.NEW_TOKENS", 3)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = True
    yield
    torch.set_num_threads(before)
