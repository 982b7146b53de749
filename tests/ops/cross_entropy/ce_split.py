"""What two ranks check of a vocabulary that is split between them; run by test_ce_ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ce_cases import TINY, Inputs, Outcome, assert_close, expected, inputs, numbers
from ce_ranks import RANKS
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from oomph.errors import ArgumentError
from oomph.ops import explain, linear_cross_entropy


def split(tensor: Tensor, mesh: DeviceMesh, placement: Any = None) -> DTensor:
    return distribute_tensor(tensor.detach(), mesh, [placement or Shard(0)]).requires_grad_()


def run_split(
    i: Inputs, mesh: DeviceMesh, *, plain_bias: bool, plain_x: bool, through_lse: bool, **options: Any
) -> Outcome:
    """As ce_cases.run, with all gradients made whole again."""
    x = i.x.detach().requires_grad_() if plain_x else split(i.x, mesh, Replicate())
    weight, bias = split(i.weight, mesh), None
    if i.bias is not None:
        bias = i.bias.detach().requires_grad_() if plain_bias else split(i.bias, mesh)
    loss, lse = linear_cross_entropy(x, weight, i.target, bias=bias, return_lse=True, **options)
    total = (loss * numbers(*loss.shape).to(loss)).sum()
    if through_lse:
        total = total + (lse * numbers(*lse.shape, seed=8).to(lse)).sum()
    total.backward()
    found = [None if each is None else each.grad for each in (x, weight, bias)]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in found]
    return Outcome(loss.detach(), lse.detach(), tuple(whole))


CASES: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "through_lse": True, "softcap": 2.0},
    {"z_loss": 0.1, "through_lse": True, "num_valid": 15},
    {"label_smoothing": 0.2, "class_weight": True, "shift": True, "plain_x": False},
    {"label_smoothing": 0.2, "class_weight": True, "memory_budget": TINY, "plain_bias": True},
    {"ignore_index": 0, "memory_budget": TINY, "check": True},
]


def losses_and_gradients_are_those_of_the_whole_vocabulary(rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for v in (14, 13, 301, 2):
        for position, given in enumerate(CASES):
            options = {"plain_bias": False, "plain_x": True, "through_lse": False} | given
            if options.pop("class_weight", False):
                options["class_weight"] = numbers(v)
            case = inputs(20, v=v, bias=position % 3 != 1, ignored=options.get("ignore_index", -100), seed=v)
            ours = run_split(case, mesh, impl="chunked", **options)
            layout = ("plain_bias", "plain_x")
            theirs = expected(case, **{name: value for name, value in options.items() if name not in layout})
            assert_close(ours.all, theirs.all, 1e-11)


def what_cannot_be_split_is_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    case = inputs(6)
    weight = split(case.weight, mesh)
    with pytest.raises(ArgumentError, match="x differs between them; x must be the same on all"):
        linear_cross_entropy(case.x + rank, weight, case.target, check=True)
    # A NaN is no difference.
    linear_cross_entropy(case.x * float("nan"), weight, case.target, check=True)
    for placement in (Shard(1), Replicate()):
        with pytest.raises(
            ArgumentError, match=r"a DTensor weight must be Shard\(0\) over one mesh dimension"
        ):
            linear_cross_entropy(case.x, split(case.weight, mesh, placement), case.target)
    with pytest.raises(ArgumentError, match="1 classes over 2 ranks leave a rank without any"):
        linear_cross_entropy(case.x, split(case.weight[:1], mesh), case.target)
    for impl in ("plain", "reference"):
        with pytest.raises(
            ArgumentError, match=f"impl='{impl}' takes no vocabulary-sharded weight; choose from"
        ):
            linear_cross_entropy(case.x, weight, case.target, impl=impl)
    with pytest.raises(ArgumentError, match="accumulate_into_grad=True is not supported"):
        linear_cross_entropy(case.x, weight, case.target, accumulate_into_grad=True)
    assert explain(linear_cross_entropy, case.x, weight, case.target).impl == "chunked"

    wrong = case.target.clone()
    wrong[3] = 13
    losses = linear_cross_entropy(case.x, weight, wrong, reduction="none")
    assert losses[3].isnan()
    assert losses[torch.arange(6) != 3].isfinite().all()
    with pytest.raises(ArgumentError, match="target 13 is out of range; valid: 0 to 12"):
        linear_cross_entropy(case.x, weight, wrong, check=True)
