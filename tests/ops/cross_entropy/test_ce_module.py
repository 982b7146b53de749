"""nn.LinearCrossEntropyLoss: the op with its weight and options in a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ce_cases import assert_close, inputs, numbers
from torch import nn

from oomph.errors import ArgumentError
from oomph.nn.loss import LinearCrossEntropyLoss


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_a_linear_layer_and_a_cross_entropy(bias: bool) -> None:
    case = inputs(4, 5)
    loss = LinearCrossEntropyLoss(6, 13, bias=bias, dtype=torch.float64)
    linear = nn.Linear(6, 13, bias=bias, dtype=torch.float64)
    linear.load_state_dict(loss.state_dict())
    x = case.x.requires_grad_()
    ours = loss(x, case.target)
    theirs = F.cross_entropy(linear(x).reshape(-1, 13), case.target.reshape(-1))
    assert_close([ours], [theirs], 1e-12)
    assert_close(
        torch.autograd.grad(ours, [x, *loss.parameters()]),
        torch.autograd.grad(theirs, [x, *linear.parameters()]),
        1e-12,
    )


@pytest.mark.parametrize("bias", [False, True])
def test_first_values_and_names_are_those_of_a_linear_layer(bias: bool) -> None:
    torch.manual_seed(0)
    loss = LinearCrossEntropyLoss(6, 13, bias=bias)
    torch.manual_seed(0)
    linear = nn.Linear(6, 13, bias=bias)
    assert list(loss.state_dict()) == list(linear.state_dict())
    assert all(
        torch.equal(one, other) for one, other in zip(loss.parameters(), linear.parameters(), strict=True)
    )
    torch.manual_seed(0)
    loss.reset_parameters()
    assert torch.equal(loss.weight, linear.weight)


def test_options_are_those_of_the_op() -> None:
    case, class_weight = inputs(4, 5), numbers(13)
    options: dict[str, Any] = {"label_smoothing": 0.1, "shift": True, "reduction": "sum"}
    loss = LinearCrossEntropyLoss(6, 13, dtype=torch.float64, class_weight=class_weight, **options)
    logits = F.linear(case.x, loss.weight)[:, :-1].reshape(-1, 13)
    target = case.target[:, 1:].reshape(-1)
    theirs = F.cross_entropy(logits, target, class_weight, label_smoothing=0.1, reduction="sum")
    assert_close([loss(case.x, case.target)], [theirs], 1e-12)


def test_what_differs_per_call_is_given_per_call() -> None:
    case, token_weight = inputs(20), numbers(20)
    loss = LinearCrossEntropyLoss(6, 13, dtype=torch.float64, reduction="sum", return_lse=True)
    losses = F.cross_entropy(F.linear(case.x, loss.weight), case.target, reduction="none")
    ours, lse = loss(case.x, case.target, token_weight=token_weight, num_valid=13)
    assert_close([ours], [(losses * token_weight).sum()], 1e-12)
    assert lse.shape == (20,)
    assert loss(case.x, case.target, num_valid=1)[0].isnan()


@pytest.mark.parametrize("bias", [False, True])
def test_from_linear_shares_the_parameters(bias: bool) -> None:
    linear = nn.Linear(6, 13, bias=bias).eval()
    loss = LinearCrossEntropyLoss.from_linear(linear, z_loss=0.1)
    assert loss.weight is linear.weight
    assert loss.bias is linear.bias
    assert not loss.training
    assert (loss.in_features, loss.num_classes, loss.options) == (6, 13, {"z_loss": 0.1})
    case = inputs(20, dtype=torch.float32)
    loss(case.x, case.target).backward()
    assert linear.weight.grad is not None


def test_from_an_embedding_as_tied_heads_have_it() -> None:
    table = nn.Embedding(13, 6)
    assert LinearCrossEntropyLoss.from_linear(table).weight is table.weight


def test_shared_parameters_are_counted_once_in_a_model() -> None:
    head = nn.Linear(6, 13)
    model = nn.ModuleDict({"head": head, "loss": LinearCrossEntropyLoss.from_linear(head)})
    assert len(list(model.parameters())) == 2


@pytest.mark.parametrize("given", [nn.ReLU(), nn.Conv1d(6, 13, 1), None, torch.ones(13, 6)], ids=str)
def test_from_something_else(given: Any) -> None:
    with pytest.raises(
        ArgumentError, match=f"linear is a {type(given).__name__}; valid: an nn.Linear or an nn.Emb"
    ):
        LinearCrossEntropyLoss.from_linear(given)


def test_a_computed_weight_cannot_be_shared() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(6, 13))
    with pytest.raises(ArgumentError, match="weight is computed"):
        LinearCrossEntropyLoss.from_linear(linear)


def test_it_can_be_made_without_memory_and_filled_later() -> None:
    with torch.device("meta"):
        loss = LinearCrossEntropyLoss(6, 13, bias=True, memory_budget="64MiB", label_smoothing=0.1)
    assert loss.weight.is_meta
    assert LinearCrossEntropyLoss(6, 13, device="meta").weight.is_meta
    loss = loss.to_empty(device="cpu")
    loss.reset_parameters()
    case = inputs(20, dtype=torch.float32)
    assert loss(case.x, case.target).isfinite()


def test_class_weights_move_with_the_module_and_are_not_saved() -> None:
    loss = LinearCrossEntropyLoss(6, 13, class_weight=torch.ones(13)).double()
    assert loss.class_weight.dtype == torch.float64
    assert "class_weight" not in loss.state_dict()
    loss.load_state_dict(nn.Linear(6, 13, bias=False).state_dict())


def test_it_shows_its_sizes_and_options() -> None:
    loss = LinearCrossEntropyLoss(6, 13, softcap=30.0, class_weight=torch.ones(13))
    assert repr(loss) == (
        "LinearCrossEntropyLoss(in_features=6, num_classes=13, bias=False, softcap=30.0, class_weight=given)"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smoothing": 0.1}, "option 'smoothing' is not known; did you mean 'label_smoothing'?"),
        ({"temperature": 2}, "option 'temperature' is not known; choose from reduction, ignore_index"),
        (
            {"token_weight": torch.ones(3)},
            r"token_weight is given per call: loss\(x, target, token_weight=...\)",
        ),
        ({"num_valid": 3}, "num_valid is given per call"),
        ({"reduction": "average"}, "reduction='average' is not valid; choose from 'mean'"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0 is not valid"),
        ({"class_weight": torch.ones(6)}, r"class_weight must be \[13\], one per class; given: \[6\]"),
        ({"memory_budget": "lots"}, "size 'lots' is not valid"),
    ],
    ids=str,
)
def test_bad_options_are_refused_when_the_module_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        LinearCrossEntropyLoss(6, 13, **options)
    with pytest.raises(ArgumentError, match=message):
        LinearCrossEntropyLoss.from_linear(nn.Linear(6, 13), **options)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "6"])
def test_bad_sizes(size: Any) -> None:
    with pytest.raises(ArgumentError, match=f"in_features={size!r} is not valid; give a whole number >= 1"):
        LinearCrossEntropyLoss(size, 13)
    with pytest.raises(ArgumentError, match=f"num_classes={size!r} is not valid"):
        LinearCrossEntropyLoss(6, size)
