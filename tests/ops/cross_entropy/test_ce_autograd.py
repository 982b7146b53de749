"""Inside a program: several backward passes, any gradient that arrives, checkpoints, autocast, compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ce_cases import TINY, TOLERANCE, Inputs, assert_close, expected, inputs, leaves, numbers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from oomph.errors import ArgumentError
from oomph.ops import linear_cross_entropy

WAYS: list[dict[str, Any]] = [
    {"impl": "plain"},
    {"impl": "chunked"},
    {"impl": "chunked", "memory_budget": TINY},
    {"impl": "chunked", "reduction": "none"},
]
WAY_NAMES = ["plain", "one block", "small blocks", "per token"]
every_way = pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)


def loss_of(i: Inputs, **options: Any) -> Tensor:
    """One number, whatever the reduction."""
    loss = linear_cross_entropy(i.x, i.weight, i.target, bias=i.bias, **options)
    assert isinstance(loss, Tensor)
    return loss.sum() / 13 if options.get("reduction") == "none" else loss


def gradients(i: Inputs, loss: Tensor, **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [i.x, i.weight, i.bias], **options))


def truth(i: Inputs) -> list[Tensor]:
    wide = leaves(Inputs(i.x.double(), i.weight.double(), i.target, i.bias.double()))
    loss = F.cross_entropy(F.linear(wide.x, wide.weight, wide.bias), wide.target)
    return gradients(wide, loss)


@every_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_graph_that_is_kept_gives_the_same_gradients_thrice(
    dtype: torch.dtype, way: dict[str, Any]
) -> None:
    case = leaves(inputs(20, v=200, bias=True, dtype=dtype))
    loss = loss_of(case, **way)
    for _ in range(3):
        assert_close(gradients(case, loss, retain_graph=True), truth(case), TOLERANCE[dtype])


@every_way
def test_backward_twice_accumulates_and_leaves_earlier_gradients_alone(way: dict[str, Any]) -> None:
    case = leaves(inputs(20, v=200, bias=True))
    loss = loss_of(case, **way)
    loss.backward(retain_graph=True)
    first = [each.grad for each in (case.x, case.weight, case.bias)]
    for each in (case.x, case.weight, case.bias):
        each.grad = None
    loss.backward(retain_graph=True)
    assert_close(first, truth(case), 1e-12)
    loss.backward()
    twice = [each.grad for each in (case.x, case.weight, case.bias)]
    assert_close(twice, [2 * each for each in truth(case)], 1e-12)


@every_way
@pytest.mark.parametrize("factor", [3.0, -2.0, 0.0, 1e-3])
def test_the_gradient_that_arrives_multiplies(factor: float, way: dict[str, Any]) -> None:
    case = leaves(inputs(20, v=200, bias=True))
    loss = loss_of(case, **way) * factor
    for _ in range(3):
        ours = gradients(case, loss, retain_graph=True)
        assert_close(ours, [factor * each for each in truth(case)], 1e-12)


@every_way
def test_two_losses_of_the_same_inputs_add_up(way: dict[str, Any]) -> None:
    case = leaves(inputs(20, v=200, bias=True))
    ours = gradients(case, 2 * loss_of(case, **way) + loss_of(case, **way))
    assert_close(ours, [3 * each for each in truth(case)], 1e-12)


@every_way
def test_gradients_may_be_asked_for_one_at_a_time(way: dict[str, Any]) -> None:
    case = leaves(inputs(20, v=200, bias=True))
    loss = loss_of(case, **way)
    ours = [
        torch.autograd.grad(loss, each, retain_graph=True)[0] for each in (case.bias, case.weight, case.x)
    ]
    assert_close(ours, truth(case)[::-1], 1e-12)


@pytest.mark.parametrize("num_valid", [None, 15])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_the_gradient_may_come_through_the_log_sum_exp_alone(
    impl: str, reduction: str, num_valid: int | None
) -> None:
    case = leaves(inputs(20, bias=True))
    options: dict[str, Any] = {
        "impl": impl,
        "reduction": reduction,
        "num_valid": num_valid,
        "return_lse": True,
    }
    _, lse = linear_cross_entropy(case.x, case.weight, case.target, bias=case.bias, **options)
    kept = case.target != -100
    theirs = F.linear(case.x[kept], case.weight, case.bias).logsumexp(1).square().sum()
    assert_close(gradients(case, lse.square().sum()), gradients(case, theirs), 1e-12)


@every_way
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant: bool, way: dict[str, Any]) -> None:
    case = leaves(inputs(20, v=200, bias=True))
    before = torch.eye(6, dtype=torch.float64, requires_grad=True)

    def head(x: Tensor) -> Tensor:
        return loss_of(case.but(x=x @ before), **way)

    checkpoint(head, case.x, use_reentrant=use_reentrant).backward()
    ours = [case.x.grad, case.weight.grad, case.bias.grad]
    assert_close(ours, truth(case), 1e-12)
    assert_close([before.grad], [case.x.detach().t() @ truth(case)[0]], 1e-12)


# The compiler itself looks at .grad of whatever it hands to a function it does not compile.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@every_way
def test_a_compiled_program_gets_the_same_results(way: dict[str, Any]) -> None:
    case = leaves(inputs(20, v=200, bias=True))

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return 2 * loss_of(case.but(x=x * 1.0, weight=weight), **way)

    torch._dynamo.reset()
    loss = torch.compile(step, backend="eager")(case.x, case.weight)
    assert_close(gradients(case, loss), [2 * each for each in truth(case)], 1e-12)


@every_way
def test_autocast_computes_in_half_precision_and_keeps_fp32_gradients(way: dict[str, Any]) -> None:
    case = leaves(inputs(40, v=200, bias=True, dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(case.x, case.weight, case.target, bias=case.bias, **way)
    assert loss.dtype == torch.float32
    scalar = loss.sum() / (case.target != -100).sum() if loss.dim() else loss
    ours = gradients(case, scalar)
    assert all(each.dtype == torch.float32 for each in ours)
    assert_close(ours, truth(case), TOLERANCE[torch.bfloat16])
    # It did compute in half precision.
    assert not torch.equal(ours[0], ours[0].new_tensor(truth(case)[0].tolist()))


@every_way
def test_under_autocast_x_may_be_half_and_the_weight_fp32(way: dict[str, Any]) -> None:
    case = inputs(40, v=200, bias=True, dtype=torch.float32)
    case = leaves(case.but(x=case.x.bfloat16()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(case.x, case.weight, case.target, bias=case.bias, **way)
    scalar = loss.sum() / (case.target != -100).sum() if loss.dim() else loss
    ours = gradients(case, scalar)
    assert [each.dtype for each in ours] == [torch.bfloat16, torch.float32, torch.float32]
    assert_close(ours, truth(case), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("way", WAYS[1:], ids=WAY_NAMES[1:])
def test_gradients_of_gradients_are_refused(way: dict[str, Any]) -> None:
    case = leaves(inputs(20, bias=True))
    loss = loss_of(case, **way)
    # Refused, not left out: a penalty on gradients would otherwise be a constant, unseen.
    with pytest.raises((RuntimeError, ArgumentError), match="twice"):
        (loss + gradients(case, loss, create_graph=True)[0].square().sum()).backward()


def test_a_large_loss_scale_does_not_underflow_in_float16() -> None:
    """As with a GradScaler: what is below float16's smallest number is scaled before it is rounded."""
    case = leaves(inputs(4096, v=3, d=2, dtype=torch.float16, ignored=None))
    tiny = case.but(weight=(case.weight.detach() * 1e-3).requires_grad_())
    loss = linear_cross_entropy(tiny.x, tiny.weight, tiny.target, impl="chunked")
    (x_grad,) = torch.autograd.grad(loss * 2.0**14, tiny.x)
    # `expected` lets a number arrive as gradient; here it is 2**14.
    exact = expected(tiny).gradients[0] / numbers() * 2.0**14
    assert_close([x_grad], [exact], TOLERANCE[torch.float16])


@pytest.mark.parametrize("changed", ["target", "class_weight"])
def test_a_backward_that_makes_the_logits_again_refuses_what_was_changed_since(changed: str) -> None:
    case = leaves(inputs(20, v=200, bias=True))
    class_weight = torch.rand(200, dtype=case.x.dtype)
    loss = loss_of(case, class_weight=class_weight, reduction="none", impl="chunked")
    (case.target if changed == "target" else class_weight).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
