"""The deltas of a few tokens, and every token's norm without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modulation_inputs import inputs
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.modulation import compute_weight_delta, modulated_linear, weight_delta_norm


def every_delta(A: Tensor, B: Tensor, mod: Tensor) -> Tensor:
    return torch.einsum("...r,dr,rf->...df", mod, A, B)


@pytest.mark.parametrize(
    ("token_idx", "picked"),
    [
        ((1, 3), (1, 3)),
        ((-1, slice(1, 3)), (-1, slice(1, 3))),
        (3, (slice(None), 3)),
        (-5, (slice(None), -5)),
        ([0, 4, 4], (slice(None), [0, 4, 4])),
        (slice(1, 4), (slice(None), slice(1, 4))),
        (torch.tensor([2, 0]), (slice(None), [2, 0])),
        (torch.tensor(2), (slice(None), 2)),
        ([], (slice(None), [])),
    ],
    ids=str,
)
def test_the_delta_of_the_chosen_tokens_is_the_einsum_of_the_report(token_idx: Any, picked: Any) -> None:
    given = inputs()
    found = compute_weight_delta(given.A, given.B, given.mod, token_idx)
    torch.testing.assert_close(found, every_delta(given.A, given.B, given.mod)[picked])


def test_one_modulation_for_all_has_one_delta() -> None:
    given = inputs(mod_lead=())
    found = compute_weight_delta(given.A, given.B, given.mod, ())
    torch.testing.assert_close(found, every_delta(given.A, given.B, given.mod))


def test_a_token_times_its_own_weight_is_what_the_op_gives() -> None:
    given = inputs(bias=False)
    own = given.weight + compute_weight_delta(given.A, given.B, given.mod, (1, 2))
    torch.testing.assert_close(modulated_linear(*given.all())[1, 2], given.h[1, 2] @ own)


def test_a_delta_is_differentiable() -> None:
    given = inputs().copy(torch.float64)
    compute_weight_delta(given.A, given.B, given.mod, 0).sum().backward()
    assert set(given.gradients()) == {"A", "B", "mod"}
    assert not given.mod.grad[:, 1:].any()


@pytest.mark.parametrize(
    ("token_idx", "message"),
    [
        (5, "token_idx 5 is not valid; the tokens are 0 to 4"),
        (-6, "token_idx -6 is not valid"),
        ([0, 7], "token_idx 7 is not valid"),
        ((2, 0), "token_idx 2 is not valid; the tokens are 0 to 1"),
        ((1,), r"token_idx=\(1,\) has 1 number; mod \[2, 5, 3\] takes 2 in a tuple"),
        (1.5, "token_idx 1.5 is not valid; give ints, a list or a tuple"),
        ("all", "token_idx 'all' is not valid"),
        (True, "token_idx True is not valid"),
        (torch.tensor([1.0]), "token_idx has dtype torch.float32; valid: integers"),
    ],
)
def test_a_token_that_is_not_there_is_refused(token_idx: Any, message: str) -> None:
    given = inputs()
    with pytest.raises(ArgumentError, match=message):
        compute_weight_delta(given.A, given.B, given.mod, token_idx)


def test_a_modulation_without_tokens_asks_for_an_empty_tuple() -> None:
    given = inputs(mod_lead=())
    with pytest.raises(ArgumentError, match=r"has no tokens to choose from; give token_idx=\(\)"):
        compute_weight_delta(given.A, given.B, given.mod, 0)


@pytest.mark.parametrize("lead", [(), (4,), (2, 5), (0,)])
@pytest.mark.parametrize("squared", [False, True])
def test_the_norm_and_its_gradients_are_those_of_the_deltas(lead: tuple[int, ...], squared: bool) -> None:
    given, plain = inputs(lead=lead).copy(torch.float64), inputs(lead=lead).copy(torch.float64)
    found = weight_delta_norm(given.A, given.B, given.mod, squared=squared)
    right = every_delta(plain.A, plain.B, plain.mod).square().sum(dim=(-2, -1))
    right = right if squared else right.sqrt()
    torch.testing.assert_close(found, right)
    found.sum().backward()
    right.sum().backward()
    for name, gradient in given.gradients().items():
        torch.testing.assert_close(gradient, plain.gradients()[name])


@pytest.mark.parametrize("squared", [False, True])
def test_at_the_start_where_b_is_zero_the_norm_and_its_gradients_are_zero(squared: bool) -> None:
    given = inputs().copy(torch.float32)
    B = torch.zeros(3, 11, requires_grad=True)
    norm = weight_delta_norm(given.A, B, given.mod, squared=squared)
    assert not norm.any()
    norm.sum().backward()
    for each in (given.A, B, given.mod):
        assert torch.equal(each.grad, torch.zeros_like(each))


def test_nan_stays_nan_in_its_own_token() -> None:
    given = inputs()
    given.mod[0, 1, 0] = float("nan")
    norm = weight_delta_norm(given.A, given.B, given.mod)
    assert norm.isnan().sum() == 1
    assert norm[0, 1].isnan()


def test_16_bit_factors_are_summed_in_float32_also_under_autocast() -> None:
    given = inputs(lead=(50,), d=300, f=400, dtype=torch.bfloat16)
    right = (
        every_delta(*(each.double() for each in (given.A, given.B, given.mod))).square().sum((-2, -1)).sqrt()
    )
    with torch.autocast("cpu", torch.bfloat16):
        norm = weight_delta_norm(given.A, given.B, given.mod)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), right, rtol=1e-5, atol=0)


def test_factors_that_do_not_fit_are_refused() -> None:
    given = inputs()
    with pytest.raises(
        ArgumentError, match=r"A \[7, 3\], B \[3, 11\] and mod \[2, 5, 4\] do not fit together"
    ):
        weight_delta_norm(given.A, given.B, torch.ones(2, 5, 4))
    with pytest.raises(ArgumentError, match=r"A has dtype torch\.int64"):
        weight_delta_norm(given.A.long(), given.B, given.mod)
