"""Equal buffers become one tensor: the same results, fewer bytes, also after the model is moved."""

import copy
import pickle
import weakref

import pytest
import torch
from small import TinyLM, seeded, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.records import FixUse


def masks(model):
    return {id(block.attention.mask) for block in model.blocks}


def test_they_stay_one_tensor_when_the_model_is_moved_copied_and_pickled():
    model = seeded(TinyLM)
    fixes.apply_to_model("shared_buffers", model)
    mine = model.blocks[0].attention.mask
    for made in (model.double(), copy.deepcopy(model).half(), pickle.loads(pickle.dumps(model)).half()):
        assert len(masks(made)) == 1
        assert made is model or made.blocks[0].attention.mask is not model.blocks[0].attention.mask
    assert model.blocks[0].attention.mask.dtype is torch.float64
    assert mine.dtype is torch.float32


def test_undo_of_a_moved_model_gives_each_layer_its_own_where_the_model_is():
    model = seeded(TinyLM)
    fixes.apply_to_model("shared_buffers", model)
    model.double()
    fixes.undo(model)
    assert len(masks(model)) == 3
    assert {block.attention.mask.dtype for block in model.blocks} == {torch.float64}
    assert model.to(torch.float32) is model


def test_the_copies_are_freed_and_undo_keeps_what_was_loaded_since():
    model = seeded(TinyLM)
    copies = [weakref.ref(block.attention.mask) for block in model.blocks[1:]]
    fixes.apply_to_model("shared_buffers", model)
    assert all(copy() is None for copy in copies)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    fixes.undo(model)
    assert len(masks(model)) == 3
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_different_value_is_not_shared_and_neither_is_minus_zero():
    model = seeded(TinyLM)
    model.blocks[1].attention.mask[0, 0, 3, 3] = 2
    fixes.apply_to_model("shared_buffers", model)
    assert model.blocks[0].attention.mask is model.blocks[2].attention.mask
    assert model.blocks[1].attention.mask is not model.blocks[0].attention.mask
    fixes.undo(model)
    model.blocks[2].attention.mask[0, 0, 0, 1] = -0.0
    with pytest.raises(UserError, match="no two layers have an equal buffer"):
        fixes.apply_to_model("shared_buffers", model)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(2048))
        self.register_buffer("table", torch.arange(2048.0))
        self.norm = nn.BatchNorm1d(2048)

    def forward(self, x):
        self.state[:4] = x[0, :4].detach()
        return x + self.state + self.table


def test_a_write_to_a_shared_buffer_is_an_error_and_running_statistics_are_not_shared():
    model = nn.Sequential(Writes(), Writes())
    fixes.apply_to_model("shared_buffers", model)
    assert model[0].norm.running_mean is not model[1].norm.running_mean
    with pytest.raises(UserError, match=r"forward writes buffer '0\.state', which is shared"):
        model(torch.ones(2, 2048))
    fixes.undo(model)
    fixes.apply_to_model("shared_buffers:buffers=table", model)
    assert model[0].table is model[1].table
    assert model[0].state is not model[1].state
    model(torch.ones(2, 2048))


# 256 KiB are real in a prediction, 16 MiB are not.
@pytest.mark.parametrize(("longest", "layers"), [(512, 3), (2048, 2)])
def test_the_saving_is_proposed_and_is_that_of_the_copies(longest, layers):
    work = workload(layers=layers, longest=longest)
    prediction = oomph.predict(work, gpu="h200")
    (proposal,) = fixes.propose(prediction, work, only=("shared_buffers",))
    copies = (layers - 1) * longest * longest * 4
    assert abs(prediction.peak.allocated - proposal.peak.allocated - copies) < 4096
    assert proposal.saving > 0
    assert ("assumed equal" in proposal.note) == (longest == 2048)


def test_state_that_tells_shared_buffers_apart_is_refused_and_other_state_loaded():
    model, other = seeded(TinyLM), TinyLM()
    fixes.apply_to_model(FixUse("shared_buffers", {"buffers": "mask"}), model)
    around = nn.ModuleDict({"inside": model})
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.head.weight, other.head.weight)
    other.blocks[1].attention.mask[..., 0, 5] = 1
    other.head.weight.data.zero_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = r"other values in 'blocks\.1\.attention\.mask' than in 'blocks\.0\.attention\.mask'"
    for load in (
        lambda: model.load_state_dict(other.state_dict()),
        lambda: around.load_state_dict(
            {f"inside.{name}": value for name, value in other.state_dict().items()}
        ),
        lambda: copy.deepcopy(model).load_state_dict(other.state_dict()),
    ):
        with pytest.raises(UserError, match=message):
            load()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    fixes.undo(model)
    model.load_state_dict(other.state_dict())
    assert model.blocks[1].attention.mask[0, 0, 0, 5] == 1
    assert model.blocks[0].attention.mask[0, 0, 0, 5] == 0
