"""One module reaches into torch's private names, and says in one sentence what a release moved."""

import pytest
import torch

from oomph import torch_internals
from oomph.prediction.patches import Patches
from oomph.torch_internals import UnsupportedTorch, self_test

SENTENCE = r"torch \d+\.\d+\.\d+ moved {}; this oomph supports torch 2\.\d+ to 2\.\d+; [^\n]+$"


def test_the_installed_torch_has_everything():
    self_test()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch.autograd.graph, "_engine_run_backward"), (torch.nn.Module, "_apply"), (torch.cuda, "_lazy_init")],
)
def test_a_name_that_moved_is_reported_in_one_sentence(monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    with pytest.raises(UnsupportedTorch, match=SENTENCE.format(f".*{name}")) as caught:
        self_test()
    assert caught.value.exit_status == 2


def test_a_function_that_behaves_differently_is_reported(monkeypatch):
    monkeypatch.setattr(torch_internals, "current_autograd_node", lambda: None)
    with pytest.raises(UnsupportedTorch, match="_current_autograd_node"):
        self_test()


def test_an_attribute_of_data_loaders_that_moved_is_reported(monkeypatch):
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    monkeypatch.setattr(iterator, "__next__", lambda self: next(self._sampler_iter))
    with pytest.raises(UnsupportedTorch, match="_num_yielded"):
        self_test()


def test_importing_a_name_that_moved_says_so(monkeypatch):
    assert not hasattr(torch_internals, "no_such_name")
    monkeypatch.delattr(torch_internals, "FakeTensor")
    monkeypatch.setattr(torch_internals, "_moved", ["FakeTensor"])  # as its section leaves it
    with pytest.raises(UnsupportedTorch, match=SENTENCE.format("FakeTensor")):
        from oomph.torch_internals import FakeTensor  # noqa: F401


def test_no_patch_is_skipped_silently():
    with Patches() as patches, pytest.raises(UnsupportedTorch, match=r"torch\.cuda\.no_such_function"):
        patches.set(torch.cuda, "no_such_function", None)
