"""8-bit state and stochastic rounding: the same updates up to what their formats lose, right on average."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from short_training import proposed, trained
from small import tiny_batch, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.fixes.optimizers.low_bit import LowBitAdam, round_stochastically

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.95), eps=1e-6),
    "adamw up": partial(torch.optim.AdamW, lr=1e-2, maximize=True),
}


def stepped(optimizer, parameters, gradients):
    for step_gradients in gradients:
        for parameter, gradient in zip(parameters, step_gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter)
        optimizer.step()
    return parameters


def some_parameters(*shapes, dtype=torch.float32):
    made = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.randn(shape, generator=made).to(dtype)) for shape in shapes]
    gradients = [[torch.randn(shape, generator=made) for shape in shapes] for _ in range(3)]
    return parameters, gradients


def converted(factory, parameters, state_format="float32", stochastic=False):
    made = factory(parameters)
    return LowBitAdam(made, state_format, stochastic=stochastic, fix="test")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_float32_the_update_is_torchs_own(name):
    before, gradients = some_parameters((5, 7), (300,), ())
    after = [nn.Parameter(p.detach().clone()) for p in before]
    gradients[1][1] = None  # a parameter without gradient in some step
    stepped(OPTIMIZERS[name](before), before, gradients)
    stepped(converted(OPTIMIZERS[name], after), after, gradients)
    for p, q in zip(before, after, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "state_format"),
    [*((name, "float32") for name in OPTIMIZERS), ("adam", "8bit"), ("adamw", "8bit")],
)
def test_kernels_do_what_slices_do(name, state_format):
    pytest.importorskip("triton")
    slices, gradients = some_parameters((5, 7), (4099,), (8, 512))
    kernels = [nn.Parameter(p.detach().clone()) for p in slices]
    by_slice, by_kernel = (converted(OPTIMIZERS[name], ps, state_format) for ps in (slices, kernels))
    by_kernel._update_in_slices = by_kernel._launch
    stepped(by_slice, slices, gradients)
    stepped(by_kernel, kernels, gradients)
    for p, q in zip(slices, kernels, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)
        for key, value in by_slice.state[p].items():
            found = by_kernel.state[q][key]
            if value.dtype is torch.uint8:  # a number on the edge between two codes may go either way
                assert (found.int() - value.int()).abs().max() <= 1
                assert (found != value).float().mean() < 1e-2
            else:
                torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-7)


def test_kernels_round_right_on_average():
    pytest.importorskip("triton")
    whole = [nn.Parameter(torch.full((2048,), 1.0))]
    rounded = [nn.Parameter(torch.full((2048,), 1.0, dtype=torch.bfloat16))]
    gradients = [[torch.full((2048,), 0.25)]] * 3
    optimizer = converted(OPTIMIZERS["adamw"], rounded, "bfloat16", stochastic=True)
    optimizer._update_in_slices = optimizer._launch
    torch.manual_seed(0)
    stepped(converted(OPTIMIZERS["adamw"], whole), whole, gradients)
    stepped(optimizer, rounded, gradients)
    assert rounded[0].unique().numel() > 1  # neighbours on both sides
    assert abs(rounded[0].float().mean() - whole[0].mean()) < 3e-4  # a bfloat16 step here is 4e-3


def test_rounding_is_right_on_average_and_reproducible():
    number = torch.tensor([1.001, -3.01, 1e-30, 65000.0, 0.0, 1.0])
    many = number.repeat(20000, 1).flatten()
    out = torch.empty_like(many, dtype=torch.bfloat16)
    torch.manual_seed(0)
    round_stochastically(many.clone(), out)
    mean = out.view(20000, -1).double().mean(0)
    torch.testing.assert_close(mean, number.double(), rtol=2e-4, atol=0)  # half a step is 2e-3
    neighbours = out.view(20000, -1)
    assert [neighbours[:, i].unique().numel() for i in range(6)] == [2, 2, 2, 2, 1, 1]
    again = torch.empty_like(out)
    torch.manual_seed(0)
    round_stochastically(many.clone(), again)
    assert torch.equal(out, again)


def moved_alike(work, before, after):
    """How far two runs are from each other, over how far the first has moved from the start."""
    start = dict(work.model().named_parameters())
    apart = sum((after[name].float() - before[name]).square().sum() for name in start)
    moved = sum((start[name] - before[name]).square().sum() for name in start)
    return (apart / moved).sqrt().item()


def large(**changes):
    """Wide enough that its matrices are kept in 8 bits; few tokens, as bfloat16 is slow on some CPUs."""
    return replace(workload(width=64, layers=1), batch=lambda device: tiny_batch(device, 2, 8), **changes)


def test_training_with_eight_bits_stays_close():
    work = large(optimizer=partial(torch.optim.AdamW, lr=1e-3))
    before, _ = trained(work)
    after, optimizer = trained(fixes.apply("optimizer_8bit", work))
    assert moved_alike(work, before, after) < 0.03
    assert type(optimizer) is LowBitAdam


def test_the_predicted_state_is_a_quarter():
    work = workload(layers=1, width=512, longest=64)
    before = dict(oomph.predict(work, gpu="h200").by_stage())
    after = dict(oomph.predict(fixes.apply("optimizer_8bit", work), gpu="h200").by_stage())
    assert after["optimizer state"] < 0.27 * before["optimizer state"]
    (proposal,) = proposed("optimizer_8bit", work)
    assert proposal.saving > 0
    assert proposal.kind == "precision"


def test_stochastic_rounding_trains_bfloat16_and_combines():
    work = large(optimizer=partial(torch.optim.AdamW, lr=1e-2))
    before, _ = trained(work)
    for names in (
        ["stochastic_rounding"],
        ["stochastic_rounding", "optimizer_in_backward"],
        ["optimizer_8bit", "stochastic_rounding", "optimizer_in_backward"],
    ):
        after, optimizer = trained(fixes.apply(names, work))
        assert all(parameter.dtype is torch.bfloat16 for parameter in after.values())
        assert moved_alike(work, before, after) < 0.3
        inner = getattr(optimizer, "inner", optimizer)
        assert inner.stochastic
        assert inner.state_format == ("8bit" if "optimizer_8bit" in names else "bfloat16")
    one, two = proposed("stochastic_rounding", workload(layers=1, width=512, longest=64))
    assert one.saving > two.saving


def test_rounding_keeps_what_is_not_finite():
    number = torch.tensor([float("inf"), -float("inf")]).repeat(500)
    nans = torch.tensor([2147483647], dtype=torch.int32).view(torch.float32).repeat(1000)  # all bits set
    out = torch.empty(1000, dtype=torch.bfloat16)
    round_stochastically(number.clone(), out)
    assert torch.equal(out.float(), number)
    round_stochastically(nans, out)
    assert out.isnan().all()


def test_small_updates_are_not_lost():
    """One step of 1e-3 is a quarter of what bfloat16 holds at 1: to the nearest, nothing would move."""
    start = torch.ones(4096, dtype=torch.bfloat16)
    plain, rounded = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    gradients = [[torch.ones(4096)]] * 20
    factory = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
    stepped(factory([plain]), [plain], gradients)
    stepped(converted(factory, [rounded], "bfloat16", stochastic=True), [rounded], gradients)
    assert torch.equal(plain.detach(), start)
    assert abs(rounded.float().mean().item() - 0.98) < 2e-3
