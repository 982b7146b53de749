"""FSDP2 on two processes: the same loss and gradients as the whole model."""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small import TinyLM, gradients, plain_loss, seeded, tiny_batch, workload

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.nn.blocks import blocks
from oomph.parallel.parallelize import blocks_with_own_parameters
from oomph.records import FixUse

OPTIONS = ({"ranks": 2}, {"reshard_after_forward": False})


def on_rank(rank, port, told):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        told.put([_compared(rank, options) for options in OPTIONS])
    finally:
        dist.destroy_process_group()


def _compared(rank, options):
    """How far the sharded model's loss and gradients are from the whole one's."""
    batch = {name: rows[rank * 2 : rank * 2 + 2] for name, rows in tiny_batch("cpu").items()}
    whole = seeded(TinyLM)
    loss, grads = gradients(whole, plain_loss, batch)
    for grad in grads.values():  # FSDP averages over the ranks
        dist.all_reduce(grad)
        grad /= 2
    model = seeded(TinyLM)
    changed = fixes.apply_to_model(FixUse("fsdp2", options), model)
    local = sum(one.to_local().numel() for one in model.parameters())
    new_loss = plain_loss(model, batch)
    new_loss.backward()
    off = [
        ((one.grad.full_tensor() - grads[name]).abs().max() / grads[name].abs().max()).item()
        for name, one in model.named_parameters()
    ]
    with pytest.raises(UserError, match="'fsdp2' cannot be undone in a model; build the model again"):
        fixes.undo(model)
    return {
        "loss": abs((new_loss.detach() - loss).item()),
        "gradients": max(off),
        "part": local / sum(one.numel() for one in model.parameters()),
        "where": [change.where for change in changed],
    }


def test_two_ranks_compute_what_one_does_and_undo_is_refused(run_ranks):
    told = mp.get_context("spawn").SimpleQueue()
    run_ranks(on_rank, 2, told)
    for found in [*told.get(), *told.get()]:
        assert found["loss"] < 1e-6
        assert found["gradients"] < 1e-5
        assert found["part"] < 0.55
        assert found["where"] == ["", "blocks.0", "blocks.1", "blocks.2"]


class ReturnsView(TinyLM):
    def __init__(self, **options):
        super().__init__(**options)
        for block in self.blocks:
            block.register_forward_hook(lambda block, given, out: out.view(out.shape))


def test_the_saving_is_predicted_and_warnings_of_fsdp2_are_not_shown():
    work = replace(workload(), model=lambda: ReturnsView(layers=3, width=512, heads=4))
    prediction = oomph.predict(work, gpu="h200")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        eight, two = fixes.propose(prediction, work, only=("fsdp2",))
    assert not [each for each in shown if "FSDP2" in str(each.message)]
    assert eight.saving > two.saving > 0
    held = sum(
        size
        for stage, size in prediction.by_stage()
        if stage in ("parameters", "gradients", "optimizer state")
    )
    assert two.saving < held / 2
    assert eight.saving < held * 7 / 8
    assert two.peak.allocated > eight.peak.allocated


def test_blocks_that_share_a_parameter_are_left_to_the_whole_model():
    model = TinyLM()
    model.blocks[2].mlp = model.blocks[0].mlp
    assert [name for name, _ in blocks_with_own_parameters(blocks(model))] == ["blocks.1"]
