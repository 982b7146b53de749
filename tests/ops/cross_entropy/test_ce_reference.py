"""The specification itself, against torch's own cross-entropy and against formulas written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ce_cases import Inputs, assert_close, expected, inputs, leaves, numbers
from torch import Tensor

from oomph.ops.cross_entropy.reference import CrossEntropyOptions, linear_cross_entropy_reference


def logits_of(i: Inputs) -> Tensor:
    return F.linear(i.x, i.weight, i.bias)


def by_hand(i: Inputs, losses: Tensor) -> list[Tensor]:
    """A scalar and its gradients."""
    return [losses.detach(), *torch.autograd.grad(losses, [i.x, i.weight, i.bias], retain_graph=True)]


def by_reference(i: Inputs, **options: Any) -> list[Tensor]:
    loss, _ = linear_cross_entropy_reference(i.x, i.weight, i.target, i.bias, CrossEntropyOptions(**options))
    return by_hand(i, loss)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 0])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_reference_is_torchs_cross_entropy(
    reduction: str, ignore_index: int, label_smoothing: float, weighted: bool
) -> None:
    i = leaves(inputs(20, bias=True, ignored=ignore_index))
    class_weight = numbers(13) if weighted else None
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    theirs = F.cross_entropy(logits_of(i), i.target, class_weight, reduction=reduction, **options)
    given = CrossEntropyOptions(class_weight=class_weight, reduction=reduction, **options)
    ours, _ = linear_cross_entropy_reference(i.x, i.weight, i.target, i.bias, given)
    assert_close([ours], [theirs], 1e-13)
    factor = numbers(*theirs.shape)
    assert_close(by_hand(i, (ours * factor).sum()), by_hand(i, (theirs * factor).sum()), 1e-13)


def test_z_loss_adds_the_squared_log_sum_exp_of_kept_tokens() -> None:
    i = leaves(inputs(20, bias=True))
    kept = i.target != -100
    logits = logits_of(i)[kept]
    theirs = F.cross_entropy(logits, i.target[kept]) + 0.3 * logits.logsumexp(1).square().mean()
    assert_close(by_reference(i, z_loss=0.3), by_hand(i, theirs), 1e-13)


def test_softcap_bounds_the_logits() -> None:
    i = leaves(inputs(20, bias=True))
    theirs = F.cross_entropy(1.5 * torch.tanh(logits_of(i) / 1.5), i.target)
    assert_close(by_reference(i, softcap=1.5), by_hand(i, theirs), 1e-13)


def test_token_weights_make_a_weighted_mean() -> None:
    i, token_weight = leaves(inputs(20, bias=True)), numbers(20)
    losses = F.cross_entropy(logits_of(i), i.target, reduction="none")
    total = token_weight[i.target != -100].sum()
    theirs = (losses * token_weight).sum() / total
    assert_close(by_reference(i, token_weight=token_weight), by_hand(i, theirs), 1e-13)


def test_shift_compares_each_position_with_the_next_target() -> None:
    i, token_weight = leaves(inputs(4, 5, bias=True)), numbers(4, 5)
    logits, target = logits_of(i)[:, :-1].reshape(-1, 13), i.target[:, 1:].reshape(-1)
    assert_close(by_reference(i, shift=True), by_hand(i, F.cross_entropy(logits, target)), 1e-13)
    weights = token_weight[:, 1:].reshape(-1)
    theirs = (F.cross_entropy(logits, target, reduction="none") * weights).sum()
    ours = by_reference(i, shift=True, token_weight=token_weight, reduction="sum")
    assert_close(ours, by_hand(i, theirs), 1e-13)


def test_the_log_sum_exp_is_that_of_the_logits_and_zero_where_ignored() -> None:
    i = inputs(20, bias=True)
    theirs = torch.where(i.target != -100, logits_of(i).logsumexp(1), 0.0)
    assert_close([expected(i).lse], [theirs], 1e-13)


def test_where_nothing_is_kept_the_reference_is_zero_with_zero_gradients() -> None:
    i = leaves(inputs(4, bias=True).but(target=torch.full((4,), -100)))
    assert all(not each.any() for each in by_reference(i))
