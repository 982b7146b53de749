"""Recomputation: the same gradients, less memory, and nothing left after undo."""

import pytest
import torch
from small import TinyLM, gradients, plain_loss, same_gradients, seeded, state_of, tiny_batch, workload

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.records import FixUse


@pytest.mark.parametrize("options", [{}, {"keep": "products"}, {"blocks": ["blocks.0", "blocks.2"]}])
def test_gradients_are_the_same_and_undo_restores_the_model(options):
    model, batch = seeded(TinyLM), tiny_batch("cpu")
    before, state = gradients(model, plain_loss, batch), state_of(model)
    changed = fixes.apply_to_model(FixUse("recompute", options), model)
    assert [change.where for change in changed] == options.get("blocks", ["blocks.0", "blocks.1", "blocks.2"])
    same_gradients(before, gradients(model, plain_loss, batch), 0)
    fixes.undo(model)
    assert state_of(model) == state


def test_the_blocks_do_run_twice():
    model, calls = seeded(TinyLM), []
    model.blocks[1].register_forward_hook(lambda *_: calls.append("hook"))  # hooks stay outside
    real = model.blocks[1].attention.forward
    model.blocks[1].attention.forward = lambda x: (calls.append("attention"), real(x))[1]
    fixes.apply_to_model("recompute", model)
    gradients(model, plain_loss, tiny_batch("cpu"))
    assert calls == ["attention", "hook", "attention"]


def test_the_peak_falls_and_the_step_gets_slower():
    work = workload(layers=6, width=256, heads=4, longest=512)
    work = oomph.Workload(work.model, lambda device: tiny_batch(device, 16, 256), work.loss)
    prediction = oomph.predict(work, gpu="h200")
    proposals = fixes.find("recompute").propose(prediction, work)
    whole, products, half = proposals
    assert whole.saving > products.saving > 0
    assert whole.saving > half.saving > 0
    assert whole.slowdown > half.slowdown > 1


def test_mistakes_are_told_and_change_nothing():
    model = seeded(TinyLM)
    state = state_of(model)
    with pytest.raises(UserError, match="keep='all' is not valid; valid: nothing, products"):
        fixes.apply_to_model(FixUse("recompute", {"keep": "all"}), model)
    with pytest.raises(UserError, match=r"has no module 'blocks\.7'"):
        fixes.apply_to_model(FixUse("recompute", {"blocks": ["blocks.0", "blocks.7"]}), model)
    with pytest.raises(UserError, match="no list of blocks"):
        fixes.apply_to_model("recompute", torch.nn.Linear(2, 2))
    assert state_of(model) == state
