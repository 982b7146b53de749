"""Allocator settings: put into the Workload, followed by predictions and measurements."""

import pytest
import torch
from small import workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.registry import FixContext
from oomph.measurement.measure import allocator_set_to
from oomph.records import FixUse

MIB = 1024 * 1024


class Growing(nn.Module):
    """Every call is longer than the last: segments of the default allocator fit none of the next."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x):
        return sum(
            self.layers(x.new_ones(length, 512) * x).sum() * 1e-6 for length in range(20_000, 40_000, 2_500)
        )


def growing():
    return oomph.Workload(Growing, lambda device: torch.ones(1, device=device), lambda model, x: model(x))


def test_expandable_segments_are_proposed_where_they_save_and_priced_as_the_replay_says():
    work = growing()
    prediction = oomph.predict(work, gpu="h200")
    proposals = fixes.propose(prediction, work, only=("allocator",))
    first = proposals[0]
    assert first.options == {"expandable_segments": True}
    assert first.saving > 100 * MIB
    assert first.slowdown == 1
    after = oomph.predict(oomph.apply(first, work), gpu="h200")
    assert after.peak.reserved == first.peak.reserved
    assert after.peak.allocated <= prediction.peak.allocated  # blocks are split more finely


def test_nothing_is_proposed_where_nothing_is_saved_or_the_settings_are_given():
    work = workload()
    prediction = oomph.predict(work, gpu="h200")
    assert fixes.find("allocator").proposals(FixContext(prediction, work)) == []
    given = oomph.apply("allocator", growing())
    assert fixes.propose(oomph.predict(given, gpu="h200"), given, only=("allocator",)) == []


def test_the_workload_says_what_the_variable_must_be():
    both = FixUse("allocator", {"expandable_segments": True, "max_split_size_mb": 256})
    assert oomph.apply(both, workload()).allocator == "expandable_segments:True,max_split_size_mb:256"
    assert oomph.apply("allocator", workload()).allocator == "expandable_segments:True"
    assert oomph.apply(both, workload()).fixes == (both,)


class FakeCuda:
    """Stands for torch's allocator where there is no GPU."""

    def __init__(self, monkeypatch, reserved=0):
        self.said = []
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
        monkeypatch.setattr("oomph.workload.set_allocator_settings", self.said.append)
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


DEVICE = torch.device("cuda", 0)


def test_a_measurement_sets_the_allocator_and_sets_it_back(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    with allocator_set_to("expandable_segments:True", DEVICE):
        assert cuda.said == ["expandable_segments:True"]
    assert cuda.said[1:] == ["expandable_segments:False,max_split_size_mb:8796093022207"]


def test_a_process_that_holds_memory_already_is_told_what_to_set(monkeypatch):
    FakeCuda(monkeypatch, reserved=2 * MIB)
    with (
        pytest.raises(UserError, match="start it with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        allocator_set_to("expandable_segments:True", DEVICE),
    ):
        pass
