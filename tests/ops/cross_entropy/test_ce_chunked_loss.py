"""compute_loss_chunked, by the name and with the arguments of report 002."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ce_cases import assert_close, inputs
from torch import nn

from oomph.errors import ArgumentError
from oomph.ops import compute_loss_chunked


def head_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    head.weight = nn.Parameter(weight)
    head.bias = None if bias is None else nn.Parameter(bias)
    return head


@pytest.mark.parametrize("chunk_size", [1, 7, 4096])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(12,), (3, 7), (2, 2, 4)])
def test_it_is_the_shifted_cross_entropy(leading: tuple[int, ...], bias: bool, chunk_size: int) -> None:
    case = inputs(*leading, v=200, bias=bias)
    head = head_of(case.weight, case.bias)
    x = case.x.clone().requires_grad_()
    wanted = [x, *head.parameters()]
    logits = head(x)[..., :-1, :].reshape(-1, 200)
    theirs = F.cross_entropy(logits, case.target[..., 1:].reshape(-1))
    ours = compute_loss_chunked(x, case.target, head, chunk_size=chunk_size)
    assert_close([ours], [theirs], 1e-12)
    assert_close(torch.autograd.grad(ours, wanted), torch.autograd.grad(theirs, wanted), 1e-12)


def test_the_chunk_size_has_a_default_and_a_sequence_of_one_has_no_next_token() -> None:
    case = inputs(3, 1)
    assert compute_loss_chunked(case.x, case.target, head_of(case.weight, None)) == 0


@pytest.mark.parametrize("chunk_size", [0, -1, 2.5, True, None, "4096"])
def test_bad_chunk_sizes(chunk_size: Any) -> None:
    case = inputs(3, 4)
    with pytest.raises(
        ArgumentError, match=rf"chunk_size={chunk_size!r} is not valid; give a positive number"
    ):
        compute_loss_chunked(case.x, case.target, head_of(case.weight, None), chunk_size=chunk_size)


@pytest.mark.parametrize("head", [nn.ReLU(), nn.LayerNorm(6), nn.Conv1d(6, 13, 1), None], ids=str)
def test_a_head_that_is_no_linear_layer(head: Any) -> None:
    case = inputs(3, 4)
    message = rf"lm_head must be a linear layer with a weight \[V, D\]; given: {type(head).__name__}"
    with pytest.raises(ArgumentError, match=message):
        compute_loss_chunked(case.x, case.target, head)


def test_labels_of_another_shape_are_named() -> None:
    case = inputs(3, 4)
    with pytest.raises(ArgumentError, match=r"target must have x's leading shape \[3, 4\].* given: \[3, 3\]"):
        compute_loss_chunked(case.x, case.target[:, 1:], head_of(case.weight, None))
