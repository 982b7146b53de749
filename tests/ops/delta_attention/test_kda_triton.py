"""The Triton kernels of delta attention, in Triton's interpreter where there is no GPU."""

import importlib.util

import pytest
import torch
from kda_cases import Case, errors, expected, token_by_token
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.delta_attention.fused import fused_kda
from oomph.ops.delta_attention.triton_plan import make_plan

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    # The interpreter computes lanes that are thrown away, and numpy warns of them.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SCALE = 0.3


@pytest.fixture(autouse=True)
def _poisoned_memory():  # type: ignore[no-untyped-def]
    """New memory is NaN, so that a value nobody wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _run(case: Case, segment: int | None) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in case.inputs()]
    cu_seqlens = None if case.packed is None else torch.tensor(case.packed)
    o, state = fused_kda(*leaves, SCALE, cu_seqlens, segment)
    torch.autograd.backward([o, state], case.gradients())
    return [o.detach(), state.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize(
    ("case", "segment"),
    [
        (Case(tokens=40, heads=2), None),
        (Case(batch=2, tokens=67, dk=20, dv=40), 32),
        (Case(tokens=1, dk=32), None),
        (Case(tokens=33, dk=80, dv=16), 32),
    ],
    ids=["plain", "segments and odd sizes", "one token", "sliced channels"],
)
def test_results_and_gradients_are_those_of_the_recurrence(case: Case, segment: int | None) -> None:
    found = errors(_run(case, segment), expected(case, SCALE))
    assert max(found.values()) < 2e-6, found


def test_a_decay_of_twenty_a_token_stays_finite_and_right() -> None:
    case = Case(tokens=50, decay=20.0)
    found = errors(_run(case, 32), expected(case, SCALE))
    assert max(found.values()) < 2e-6, found


def test_sudden_decays_between_tokens_that_keep_everything_are_right() -> None:
    case = Case(tokens=32)
    xs = case.inputs()
    xs[3].zero_()
    xs[3][:, [3, 4, 9, 17, 30]] = -20.0
    o, _ = fused_kda(*xs, SCALE, None, None)
    right, _ = token_by_token([x.double() for x in xs], SCALE)
    assert float((o - right).norm() / right.norm()) < 2e-6


def test_a_log_decay_of_minus_infinity_forgets() -> None:
    case = Case(tokens=20)
    xs = case.inputs()
    xs[3][:, 10] = -torch.inf
    o, state = fused_kda(*xs, SCALE, None, None)
    tail, tail_state = fused_kda(*(x[:, 10:] for x in xs[:5]), torch.zeros_like(xs[5]), SCALE, None, None)
    torch.testing.assert_close(o[:, 10:], tail)
    torch.testing.assert_close(state, tail_state)


def test_half_precision_is_as_exact_as_its_format() -> None:
    case = Case(tokens=70, dk=32, dtype=torch.float16)
    found = errors(_run(case, 64), expected(case, SCALE))
    assert max(found.values()) < 3e-3, found


def test_packed_sequences_do_not_see_each_other() -> None:
    case = Case(tokens=75, packed=(0, 3, 40, 40, 75))
    found = errors(_run(case, 32), expected(case, SCALE))
    assert max(found.values()) < 2e-6, found


def test_tokens_without_decay_and_strength_leave_the_state_untouched() -> None:
    xs = Case(tokens=40).inputs()
    xs[3].zero_()
    xs[4].zero_()
    _, state = fused_kda(*xs, SCALE, None, 32)
    assert torch.equal(state, xs[5])


def test_the_future_does_not_reach_the_past() -> None:
    xs = Case(tokens=40).inputs()
    before, _ = fused_kda(*xs, SCALE, None, None)
    for x in xs[:5]:
        x[:, 21:] = -x[:, 21:].flip(1).abs() if x is xs[3] else x[:, 21:].flip(1)
    after, _ = fused_kda(*xs, SCALE, None, None)
    assert torch.equal(before[:, :21], after[:, :21])
    assert not torch.equal(before[:, 21:], after[:, 21:])


def test_inputs_may_be_strided() -> None:
    case = Case(batch=2, tokens=20, heads=2)
    xs = case.inputs()
    fused_qkv = torch.cat([xs[0], xs[1], xs[2]], dim=-1)
    strided = [*fused_qkv.split(16, dim=-1), xs[3].transpose(2, 3).contiguous().transpose(2, 3), xs[4], xs[5]]
    strided[4] = xs[4].transpose(1, 2).contiguous().transpose(1, 2)
    for a, b in zip(fused_kda(*strided, SCALE, None, None), fused_kda(*xs, SCALE, None, None), strict=True):
        assert torch.equal(a, b)


def test_without_an_initial_state_it_is_zero() -> None:
    xs = Case(tokens=20).inputs()
    for a, b in zip(
        fused_kda(*xs[:5], None, SCALE, None, None),
        fused_kda(*xs[:5], torch.zeros_like(xs[5]), SCALE, None, None),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_only_the_gradients_that_are_asked_for_are_made() -> None:
    case = Case(tokens=20)
    right = expected(case, SCALE)
    xs = case.inputs()
    for wanted in (2, 5):
        leaves = [x.clone().requires_grad_(n == wanted) for n, x in enumerate(xs)]
        torch.autograd.backward(fused_kda(*leaves, SCALE, None, None), case.gradients())
        assert [x.grad is None for x in leaves] == [n != wanted for n in range(6)]
        torch.testing.assert_close(leaves[wanted].grad, right[2 + wanted].float(), rtol=1e-4, atol=1e-5)


def test_a_gradient_for_the_final_state_alone_is_enough() -> None:
    leaves = [x.requires_grad_() for x in Case(tokens=20).inputs()]
    fused_kda(*leaves, SCALE, None, None)[1].sum().backward()
    right = [x.detach().double().requires_grad_() for x in leaves]
    token_by_token(right, SCALE)[1].sum().backward()
    for ours, theirs in zip(leaves[1:], right[1:], strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=1e-4, atol=1e-5)
    assert not leaves[0].grad.any()


def test_saved_for_backward_are_the_inputs_and_the_states_between_segments() -> None:
    xs = [x.requires_grad_() for x in Case(tokens=70).inputs()]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        fused_kda(*xs, SCALE, None, 32)
    ours = {x.untyped_storage().data_ptr() for x in xs}
    more = [x for x in saved if x.untyped_storage().data_ptr() not in ours]
    assert [tuple(x.shape) for x in more] == [(2, 1, 1, 16, 16)]


def test_backward_may_run_twice() -> None:
    leaves = [x.requires_grad_() for x in Case(tokens=20).inputs()]
    total = fused_kda(*leaves, SCALE, None, None)[0].sum()
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(total, leaves), strict=True):
        assert torch.equal(a, b)


def test_a_second_derivative_is_refused() -> None:
    leaves = [x.requires_grad_() for x in Case(tokens=4).inputs()]
    o, _ = fused_kda(*leaves, SCALE, None, None)
    with pytest.raises(ArgumentError, match="twice"):
        torch.autograd.grad(o.sum(), leaves, create_graph=True)


def test_nan_reaches_what_follows_it() -> None:
    xs = Case(tokens=20).inputs()
    xs[3][0, 8, 0, 3] = torch.nan
    o, state = fused_kda(*xs, SCALE, None, None)
    assert o[:, 8:].isnan().all()
    assert state[:, :, 3].isnan().all()


@pytest.mark.parametrize(
    ("tokens", "segment", "segments"), [(70, 32, 3), (70, 1, 3), (64, None, 1), (70, 1000, 1)]
)
def test_segments_are_whole_chunks(tokens: int, segment: int | None, segments: int) -> None:
    q = torch.empty(1, tokens, 1, 16)
    assert make_plan(q, q, None, segment).segments == segments
