"""Programs whose memory grows with every call of a model: stopped past the limit, with the line."""

import pytest
import torch
from small_programs import line_of, workload
from torch import nn

import oomph
from oomph import ProgramError, Script
from oomph.report.terminal import verdict
from oomph.units import MiB

WIDTH = 1024  # a batch of as many rows takes 4 MiB
LEFT = 4 * MiB  # by each call that keeps its result
BEFORE = """
import torch
model = torch.nn.Linear(1024, 1024).cuda()
kept = []
def batch():
    return torch.randn(1024, 1024, device="cuda")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def predict(source, **options):
        (tmp_path / "evaluate.py").write_text(BEFORE + source)
        return oomph.predict(Script("evaluate.py"), **options)

    return predict


def test_an_evaluation_loop_that_keeps_graphs_is_stopped_with_its_growth_and_line(script):
    source = "x = batch()\nwhile True:\n    kept.append(model(x).relu().sum())  # the call\n"
    found = script(source, gpu="h200", max="64MiB")
    assert found.verdict == "does not fit"
    assert found.growth.site.line == (BEFORE + source).split("\n").index(source.split("\n")[2]) + 1
    assert LEFT <= found.growth.bytes <= LEFT + MiB
    assert "more than" in verdict(found).line
    assert "with every call" in verdict(found).line


@pytest.mark.parametrize("kept", ["model(batch())", "model(batch()).detach()"])
def test_a_list_or_cache_that_grows_for_ever_is_stopped(script, kept):
    found = script(f"while True:\n    kept.append({kept})\n", gpu="h200", max="64MiB")
    assert (found.verdict, found.growth.calls > 2) == ("does not fit", True)


def test_a_cache_inside_of_a_model_is_counted_in_every_call(script):
    source = """
class Bank(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.bank = model, []
    def forward(self, x):
        self.bank.append(self.inner(x))
        return self.bank[-1]
bank = Bank()
with torch.no_grad():
    for _ in range(12):
        bank(batch())
"""
    found = script(source, gpu="h200")
    assert found.peak.allocated >= 12 * LEFT
    assert found.growth is None


@pytest.mark.parametrize(
    "source",
    [
        "sum(model(batch()).sum() for _ in range(8)).backward()\n",
        "kept = [batch() for _ in range(40)]\nmodel(kept[0]).sum().backward()\n",
        "with torch.no_grad():\n    x = batch()[:1]\n    for _ in range(40):\n"
        "        x = torch.cat([x, model(x[-1:])])\n",
    ],
    ids=["micro-batches", "data set", "generation"],
)
def test_programs_that_grow_and_end_are_traced_to_their_end(script, source):
    found = script(source, gpu="h200", max="32MiB")
    assert found.growth is None
    assert not any("was stopped" in note.text for note in found.notes)


class _Positions(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.embedding, self.index = nn.Embedding(64, 8), index

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        if self.index:
            return self.embedding.weight[positions]  # by index
        return self.embedding(positions)


@pytest.mark.parametrize("index", [False, True])
def test_a_known_index_beyond_the_table_is_the_programs_error(index):
    def step(length):
        model = _Positions(index)
        return workload(
            model=lambda: model,
            batch=lambda device: torch.ones(2, length, device=device),
            loss=lambda model, batch: model(batch).sum(),
        )

    assert oomph.predict(step(64)).peak.allocated > 0
    with pytest.raises(ProgramError, match=r"index 64 is out of range.*64") as failed:
        oomph.predict(step(65))
    assert failed.value.line in (line_of(_Positions, "# by index"), line_of(_Positions, "self.embedding(pos"))


LIBRARY = """
import torch
def layer(x):
    return torch.relu(x @ x)
"""


def test_a_line_of_a_library_is_shown_with_the_caller_of_its_bytes(tmp_path, monkeypatch):
    library = tmp_path / "site-packages" / "layers"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(LIBRARY)
    source = """
import sys, torch
sys.path.insert(0, "site-packages")
from layers import layer
w = torch.ones(512, 512, device="cuda", requires_grad=True)
with torch.no_grad():
    layer(w)
y = layer(w)  # training
y.sum().backward()
"""
    (tmp_path / "train.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    found = oomph.predict(Script("train.py"))
    callers = {site.caller.line for site, _ in found.by_line() if site.file.endswith("__init__.py")}
    assert callers == {source.split("\n").index("y = layer(w)  # training") + 1}


def test_weights_that_are_made_from_what_was_moved_are_no_batch():
    def train():
        parts = [torch.ones(32, 64).cuda() for _ in range(6)]
        model = nn.Linear(64, 192).cuda()
        model.weight = nn.Parameter(torch.cat(parts))
        return lambda: model(torch.ones(7, 64).cuda()).sum().backward()

    assert [one.shape for one in oomph.predict(train).batch] == [(7, 64)]
