"""activation_offloading: the same gradients; memory is freed and allocated at fixed points; undo is exact."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from small import TinyLM, gradients, plain_loss, same_gradients, seeded, state_of, tiny_batch, workload

import oomph
from oomph import fixes
from oomph.records import FixUse

EVERYTHING = FixUse("activation_offloading", {"smallest": 1})


def offloader_of(block):
    return block.forward.wrapper.keywords["offloader"]


@pytest.mark.parametrize(
    "others",
    [[], ["activation_checkpointing"], ["activation_checkpointing:keep=attention"]],
    ids=["alone", "checkpointed", "attention kept"],
)
def test_gradients_are_the_same_bit_by_bit_and_undo_restores_the_model(others):
    model, batch = seeded(TinyLM), tiny_batch("cpu")
    before, state = gradients(model, plain_loss, batch), state_of(model)
    fixes.apply_to_model([EVERYTHING, *others], model)
    same_gradients(before, gradients(model, plain_loss, batch), 0)
    fixes.undo(model)
    assert state_of(model) == state


@pytest.mark.parametrize(
    ("blocks", "offloaded"),
    [
        (["blocks.1", "blocks.0"], {"blocks.0", "blocks.1"}),
        ("blocks.*.mlp", {"blocks.0.mlp", "blocks.1.mlp"}),  # not the last one's
    ],
)
def test_chosen_modules_alone_are_offloaded(blocks, offloaded):
    model, batch = seeded(TinyLM), tiny_batch("cpu")
    before = gradients(model, plain_loss, batch)
    changed = fixes.apply_to_model(FixUse("activation_offloading", {"blocks": blocks, "smallest": 1}), model)
    assert {change.where for change in changed if "host" in change.what} == offloaded
    same_gradients(before, gradients(model, plain_loss, batch), 0)


# Backward of blocks 3, 2, 1, 0: what was taken is autograd's; of the others, one waits on the device or none.
@pytest.mark.parametrize(("ahead", "waiting"), [(True, [1, 1, 1, 0]), (False, [0, 0, 0, 0])])
def test_a_block_comes_back_when_the_one_after_it_begins_its_backward_or_when_it_does(ahead, waiting):
    model, events = seeded(lambda: TinyLM(layers=4)), []
    use = FixUse("activation_offloading", {"smallest": 1, "ahead": ahead})
    fixes.apply_to_model(["activation_checkpointing", use], model)
    for block in model.blocks:
        inner = block.norm_2.forward  # runs in forward, and again when backward comes to the block

        def tell(x, inner=inner):
            events.append([each.on_device for each in list(offloader_of(model.blocks[0]).storages.values())])
            return inner(x)

        block.norm_2.forward = tell
    loss = plain_loss(model, tiny_batch("cpu"))
    events.clear()
    loss.backward()
    assert [sum(event) for event in events] == waiting


def test_host_memory_is_used_again_and_goes_with_the_model():
    model, batch = seeded(TinyLM), tiny_batch("cpu")
    fixes.apply_to_model(EVERYTHING, model)
    gradients(model, plain_loss, batch)
    made = offloader_of(model.blocks[0]).pool.bytes
    for _ in range(2):
        gradients(model, plain_loss, batch)
    plain_loss(model, batch)  # a forward without a backward gives back what it took
    gradients(model, plain_loss, batch)
    assert offloader_of(model.blocks[0]).pool.bytes == made > 0
    pool = weakref.ref(offloader_of(model.blocks[0]).pool)
    del model
    gc.collect()
    assert pool() is None


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_has_host_memory_of_its_own(twin_of):
    model, batch = seeded(TinyLM), tiny_batch("cpu")
    before = gradients(model, plain_loss, batch)
    fixes.apply_to_model(EVERYTHING, model)
    twin = twin_of(model)
    same_gradients(before, gradients(twin, plain_loss, batch), 0)
    assert offloader_of(twin.blocks[0]).pool.bytes > 0 == offloader_of(model.blocks[0]).pool.bytes
    assert offloader_of(twin.blocks[0]) is offloader_of(twin.blocks[2])


class WritesOver(torch.nn.Module):
    """Multiplies by y and by a tensor in y's memory, which it has written to before or after."""

    def __init__(self, after):
        super().__init__()
        self.inner, self.after = torch.nn.Linear(3, 3), after

    def forward(self, x):
        with torch.no_grad():
            y = self.inner(x)
        x = x * y if self.after else x + 1
        y.mul_(2)
        return x * y


@pytest.mark.parametrize("smallest", [1, "1MiB"])
@pytest.mark.parametrize("blocks", [1, 4])
def test_what_is_written_over_while_it_waits_is_told_as_autograd_tells_it(blocks, smallest):
    def run(after):
        made = [torch.nn.Sequential(WritesOver(after and number == 0)) for number in range(blocks + 1)]
        model = seeded(lambda: torch.nn.Sequential(*made))
        fixes.apply_to_model(FixUse("activation_offloading", {"smallest": smallest}), model)
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()

    run(after=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(after=True)


def large_workload(layers):
    work = workload(layers=layers, width=128, heads=4, longest=256)
    return oomph.Workload(work.model, lambda device: tiny_batch(device, 64, 256), work.loss, optimizer=None)


def test_the_peak_falls_and_host_memory_is_not_counted():
    work = large_workload(layers=6)
    prediction = oomph.predict(work, gpu="h200")
    (proposal,) = fixes.propose(prediction, work, only=("activation_offloading",))
    # Four of six blocks' activations are away at any time.
    assert proposal.saving > 0.35 * prediction.peak.reserved
    assert proposal.where == tuple(f"blocks.{number}" for number in range(5))


def test_recomputed_blocks_leave_their_inputs_to_the_host():
    recomputed = oomph.apply("activation_checkpointing", large_workload(layers=4))
    before = oomph.predict(recomputed, gpu="h200").peak.allocated
    both = oomph.predict(oomph.apply("activation_offloading", recomputed), gpu="h200").peak.allocated
    x = 64 * 256 * 128 * 4
    # The peak is in the backward of the last block: there are its own input, the one before's, and no other.
    assert before - both == 2 * x


def test_backward_may_run_twice_and_without_gradients_nothing_is_copied():
    model, batch = seeded(TinyLM), tiny_batch("cpu")
    _, once = gradients(model, plain_loss, batch)
    fixes.apply_to_model(EVERYTHING, model)
    model.zero_grad()
    loss = plain_loss(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], msg=name)
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        plain_loss(fresh, batch)
    assert offloader_of(fresh.blocks[0]).pool.bytes == 0
