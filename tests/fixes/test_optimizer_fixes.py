"""Fixes of the optimizer's step: the same parameters after real steps, less memory, honest refusals."""

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from short_training import not_found, same_parameters, trained
from small import TinyLM, plain_loss, seeded, tiny_batch, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.prediction import isolation

ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
EXACT = ["optimizer_in_backward", "fused_optimizer", "no_foreach", "optimizer_cpu_offload"]


def grouped(params):
    """Matrices and the rest apart, as many programs have it."""
    params = list(params)
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.5, "lr": 3e-2},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        eps=1e-4,
    )


class Awkward(TinyLM):
    """A frozen part, tied weights, and a parameter that nothing uses."""

    def __init__(self):
        super().__init__(layers=2)
        self.head.weight = self.embed.weight
        self.blocks[0].requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))


def larger(**changes):
    work = workload(layers=1, width=1024, heads=4, longest=64)
    return replace(work, **changes)


@pytest.fixture(scope="module")
def unfixed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "_inside", True)
        return oomph.predict(larger(), gpu="h200")


@pytest.mark.parametrize("fix", EXACT)
def test_groups_frozen_tied_and_unused_parameters_and_schedulers_are_kept(fix):
    work = replace(workload(), model=lambda: seeded(Awkward), optimizer=grouped)
    schedulers = {}

    def schedule(optimizer):
        if id(optimizer) not in schedulers:
            schedulers[id(optimizer)] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        else:
            schedulers[id(optimizer)].step()

    before, one = trained(work, steps=4, each=schedule)
    after, two = trained(fixes.apply(fix, work), steps=4, each=schedule)
    same_parameters(before, after, 1e-5)
    rates = [group["lr"] for group in one.param_groups]
    assert [group["lr"] for group in two.param_groups] == rates == pytest.approx([3e-2 / 8, 1e-2 / 8])
    assert len(two.state_dict()["state"]) == len(one.state_dict()["state"])
    assert torch.equal(after["blocks.0.mlp.fc.weight"], seeded(Awkward).blocks[0].mlp.fc.weight)


@pytest.mark.parametrize("fix", EXACT)
def test_a_scheduler_made_by_the_factory_goes_on(fix):
    made = []

    def factory(params):
        optimizer = ADAMW(params)
        made.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        return optimizer

    work = replace(workload(layers=1), optimizer=factory)
    before, _ = trained(work, each=lambda _: made[-1].step())
    after, optimizer = trained(fixes.apply(fix, work), each=lambda _: made[-1].step())
    same_parameters(before, after, 1e-5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)


@pytest.mark.parametrize("fix", [*EXACT, "optimizer_8bit"])
def test_a_checkpoint_continues_where_it_was(fix):
    work = replace(workload(layers=1), optimizer=ADAMW)
    fixed = fixes.apply(fix, work)
    _, saved = trained(fixed, steps=2)
    state = saved.state_dict()
    fresh = fixed.optimizer(fixed.model().parameters())
    fresh.load_state_dict(state)
    for (_, one), (_, two) in zip(state["state"].items(), fresh.state_dict()["state"].items(), strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) and one[key].dtype == two[key].dtype for key in one)


@pytest.mark.parametrize("fix", EXACT)
def test_it_is_proposed_where_it_saves_memory_and_not_twice(fix, unfixed):
    work = larger()
    (proposal,) = fixes.propose(unfixed, work, only=(fix,))
    assert proposal.saving > 0
    assert proposal.kind == "exact"
    assert not_found(fix, fixes.apply(fix, work))
    assert not_found(fix, replace(work, optimizer=None))


def test_the_same_saving_is_not_found_in_a_fused_or_slow_optimizer():
    work = larger(optimizer=partial(torch.optim.AdamW, fused=True))
    assert not_found("no_foreach", work)
    assert not_found("fused_optimizer", work)
    assert not_found("no_foreach", larger(optimizer=partial(torch.optim.AdamW, foreach=False)))
    assert not_found("fused_optimizer", larger(optimizer=torch.optim.RMSprop))


# -- in backward ------------------------------------------------------------------------------------------


def test_gradients_are_gone_when_backward_is_over():
    work = fixes.apply("optimizer_in_backward", workload())
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    before = model.head.weight.detach().clone()
    plain_loss(model, tiny_batch("cpu")).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(model.head.weight, before)
    assert optimizer.updates_in_backward
    after = model.head.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.head.weight, after)


def test_the_prediction_holds_one_gradient_at_a_time(unfixed):
    after = oomph.predict(fixes.apply("optimizer_in_backward", larger()), gpu="h200")
    state = [dict(prediction.by_stage())["optimizer state"] for prediction in (unfixed, after)]
    assert state[1] == pytest.approx(state[0], rel=0.05)
    assert dict(after.by_stage()).get("gradients", 0) < 0.35 * dict(unfixed.by_stage())["gradients"]
    assert [step.end for step in after.steps] == [step.end for step in unfixed.steps]


def test_a_second_backward_before_the_step_is_refused():
    work = fixes.apply("optimizer_in_backward", workload())
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    plain_loss(model, tiny_batch("cpu")).backward()
    assert optimizer.state
    with pytest.raises(RuntimeError, match=r"second gradient before optimizer\.step"):
        plain_loss(model, tiny_batch("cpu")).backward()


def test_a_model_trains_without_an_optimizer_that_is_gone():
    work = fixes.apply("optimizer_in_backward", workload())
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    del optimizer
    gc.collect()
    before = model.head.weight.detach().clone()
    plain_loss(model, tiny_batch("cpu")).backward()
    assert torch.equal(model.head.weight, before)
    assert model.head.weight.grad is not None
    assert not model.head.weight._post_accumulate_grad_hooks


def test_new_groups_are_stepped_too():
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    work = fixes.apply(
        "optimizer_in_backward", replace(workload(), optimizer=partial(torch.optim.SGD, lr=1.0))
    )
    optimizer = work.optimizer([one])
    optimizer.add_param_group({"params": [two], "lr": 0.5})
    (one.sum() + two.sum()).backward()
    assert one.tolist() == [0, 0]
    assert two.tolist() == [0.5, 0.5]


def hooked(params, log, before=False):
    made = torch.optim.AdamW(params, lr=1e-2)
    made.register_step_post_hook(lambda optimizer, *_: log.append(("after", optimizer)))
    if before:
        made.register_step_pre_hook(lambda optimizer, *_: log.append(("before", optimizer)))
    return made


@pytest.mark.parametrize("fix", [*EXACT, "optimizer_8bit", "stochastic_rounding"])
def test_hooks_after_the_step_run_once_a_step_and_see_the_optimizer_that_steps(fix):
    log = []
    work = replace(workload(layers=2), optimizer=partial(hooked, log=log))
    _, optimizer = trained(fixes.apply(fix, work), steps=2)
    assert [when for when, _ in log] == ["after", "after"]
    assert all(seen is optimizer for _, seen in log)


@pytest.mark.parametrize("fix", ["fused_optimizer", "no_foreach", "optimizer_8bit", "stochastic_rounding"])
def test_hooks_before_the_step_are_kept_and_can_be_removed(fix):
    log, handles = [], []

    def make(params):
        made = torch.optim.AdamW(params, lr=1e-2)
        handles.append(made.register_step_pre_hook(lambda *_: log.append("before")))
        return made

    def remove(optimizer):
        handles[0].remove()

    trained(fixes.apply(fix, replace(workload(layers=1), optimizer=make)), steps=2, each=remove)
    assert log == ["before"]


def test_hooks_before_the_step_are_refused_where_gradients_are_gone_by_then():
    work = replace(workload(layers=1), optimizer=partial(hooked, log=[], before=True))
    with pytest.raises(UserError, match="step pre-hooks, which need all gradients"):
        trained(fixes.apply("optimizer_in_backward", work))
    _, optimizer = trained(fixes.apply("optimizer_in_backward", workload(layers=1)), steps=1)
    with pytest.raises(UserError, match="the parameters are updated and their gradients are freed"):
        optimizer.register_step_pre_hook(lambda *_: None)


# -- offload ----------------------------------------------------------------------------------------------


def test_offloaded_steps_see_parameters_that_were_written_in_between():
    start, work = torch.ones(2), replace(workload(), optimizer=partial(torch.optim.SGD, lr=1.0))
    optimizer = fixes.apply("optimizer_cpu_offload", work).optimizer([parameter := nn.Parameter(start)])
    for _ in range(2):
        parameter.grad = torch.ones(2)
        optimizer.step()
        with torch.no_grad():
            parameter.fill_(5.0)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert parameter.tolist() == [4, 4]


def test_offload_leaves_no_state_on_the_gpu_and_counts_its_copies(unfixed):
    work = larger()
    after = oomph.predict(fixes.apply("optimizer_cpu_offload", work), gpu="h200")
    assert "optimizer state" not in dict(after.by_stage())
    parameters = sum(parameter.numel() * 4 for parameter in work.model().parameters())
    assert after.work.optimizer.to_host == after.work.optimizer.to_device == parameters
    assert unfixed.steps[-1].end - after.steps[-1].end >= 2 * parameters


# -- flags ------------------------------------------------------------------------------------------------


class Zeroing(torch.optim.AdamW):
    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none=False)


def test_gradients_are_freed_where_they_were_zeroed():
    work = larger(optimizer=partial(Zeroing, lr=1e-2))
    prediction = oomph.predict(work, gpu="h200")
    (proposal,) = fixes.propose(prediction, work, only=("set_to_none",))
    fixed = oomph.predict(fixes.apply("set_to_none", work), gpu="h200")
    assert prediction.steps[-1].end - fixed.steps[-1].end > 0.9 * sum(
        parameter.numel() * 4 for parameter in work.model().parameters()
    )
    assert proposal.saving is not None
    assert not_found("set_to_none", workload(layers=1))
    assert not_found("set_to_none", replace(workload(layers=1), optimizer=None))
    small = replace(workload(), optimizer=partial(Zeroing, lr=1e-2))
    before, _ = trained(small)
    after, optimizer = trained(fixes.apply("set_to_none", small))
    same_parameters(before, after, 0)
    assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize(
    ("fix", "flags"), [("fused_optimizer", (True, False)), ("no_foreach", (None, False))]
)
def test_flags_are_set_on_every_group_and_a_fused_optimizer_is_left_alone(fix, flags):
    made = fixes.apply(fix, replace(workload(), optimizer=grouped)).optimizer(TinyLM().parameters())
    assert [(group["fused"], group["foreach"]) for group in made.param_groups] == [flags] * 2
    already = replace(workload(), optimizer=partial(torch.optim.SGD, fused=True))
    made = fixes.apply(fix, already).optimizer(TinyLM().parameters())
    assert all(group["fused"] and not group["foreach"] for group in made.param_groups)


class Coupled(torch.optim.SGD):
    """Not torch's own."""


def test_an_optimizer_that_is_said_to_be_independent():
    work = replace(workload(layers=1), optimizer=Coupled)
    fixed = fixes.apply("optimizer_in_backward:independent=true", work)
    same_parameters(trained(work)[0], trained(fixed)[0], 0)
