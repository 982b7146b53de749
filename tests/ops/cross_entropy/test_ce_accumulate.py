"""accumulate_into_grad: the weight's gradient goes into the .grad that is there, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ce_cases import TINY, TOLERANCE, Inputs, assert_close, inputs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import oomph
from oomph.errors import ArgumentError
from oomph.ops import linear_cross_entropy
from oomph.units import MiB

WAYS: list[dict[str, Any]] = [
    {"impl": "chunked"},
    {"impl": "chunked", "memory_budget": TINY},
    {"impl": "chunked", "reduction": "none"},
    {"impl": "chunked", "num_valid": 16},
    {"impl": "plain"},
    {"impl": "auto"},
]
every_way = pytest.mark.parametrize("way", WAYS, ids=str)


def micro_batches(dtype: torch.dtype = torch.float64) -> list[Inputs]:
    first, second, third = (inputs(20, v=200, dtype=dtype, seed=seed) for seed in range(3))
    return [first, second.but(weight=first.weight), third.but(weight=first.weight)]


def train(weight: nn.Parameter, batches: list[Inputs], **options: Any) -> list[Tensor]:
    """The gradients of x; the weight's is in weight.grad."""
    found = []
    for each in batches:
        x = each.x.detach().requires_grad_()
        loss = linear_cross_entropy(x, weight, each.target, **options)
        loss.sum().backward()
        found.append(x.grad)
    return found


@every_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_later_micro_batches_add_to_the_same_memory(dtype: torch.dtype, way: dict[str, Any]) -> None:
    batches = micro_batches(dtype)
    weight, plain = nn.Parameter(batches[0].weight), nn.Parameter(batches[0].weight.double())
    ours = train(weight, batches[:1], accumulate_into_grad=True, **way)
    memory = weight.grad.data_ptr()
    ours += train(weight, batches[1:], accumulate_into_grad=True, **way)
    assert weight.grad.data_ptr() == memory
    reduction = way.get("reduction", "mean")
    wide = [Inputs(each.x.double(), each.weight, each.target) for each in batches]
    theirs = train(plain, wide, impl="plain", reduction=reduction)
    assert_close([*ours, weight.grad], [*theirs, plain.grad], TOLERANCE[dtype])


@every_way
def test_the_factor_that_arrives_scales_only_what_is_added(way: dict[str, Any]) -> None:
    (batch, *_) = micro_batches()
    weight = nn.Parameter(batch.weight)
    train(weight, [batch], **way)
    once = weight.grad.clone()
    loss = linear_cross_entropy(batch.x, weight, batch.target, accumulate_into_grad=True, **way)
    (loss.sum() * -3.0).backward()
    assert_close([weight.grad], [-2 * once], 1e-12)


def test_a_graph_that_is_kept_adds_at_every_backward() -> None:
    (batch, *_) = micro_batches()
    weight = nn.Parameter(batch.weight)
    loss = linear_cross_entropy(batch.x, weight, batch.target, accumulate_into_grad=True, impl="chunked")
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward(retain_graph=True)
    loss.backward()
    assert_close([weight.grad], [3 * once], 1e-12)


def test_two_forward_passes_before_the_first_backward() -> None:
    first, second, _ = micro_batches()
    weight, plain = nn.Parameter(first.weight), nn.Parameter(first.weight)
    losses = [
        linear_cross_entropy(each.x, weight, each.target, accumulate_into_grad=True, impl="chunked")
        for each in (first, second)
    ]
    for loss in losses:
        loss.backward()
    train(plain, [first, second], impl="plain")
    assert_close([weight.grad], [plain.grad], 1e-12)


@every_way
def test_a_gradient_that_is_handed_out_leaves_grad_alone(way: dict[str, Any]) -> None:
    (batch, *_) = micro_batches()
    weight, x = nn.Parameter(batch.weight), batch.x.detach().requires_grad_()
    train(weight, [batch], **way)
    once = weight.grad.clone()

    def loss() -> Tensor:
        return linear_cross_entropy(x, weight, batch.target, accumulate_into_grad=True, **way).sum()

    (handed_out,) = torch.autograd.grad(loss(), weight)
    assert_close([handed_out, weight.grad], [once, once], 1e-12)
    loss().backward(inputs=[x])
    assert_close([weight.grad], [once], 0)
    loss().backward(inputs=[weight])
    assert_close([weight.grad], [2 * once], 1e-12)


@every_way
def test_hooks_see_the_gradient_arrive(way: dict[str, Any]) -> None:
    (batch, *_) = micro_batches()
    weight = nn.Parameter(batch.weight)
    train(weight, [batch], **way)
    once, seen = weight.grad.clone(), []
    weight.register_hook(lambda grad: (seen.append(1), 2 * grad)[1])
    train(weight, [batch], accumulate_into_grad=True, **way)
    assert seen == [1]
    assert_close([weight.grad], [3 * once], 1e-12)


def test_gradients_set_to_none_between_forward_and_backward() -> None:
    (batch, *_) = micro_batches()
    weight = nn.Parameter(batch.weight)
    train(weight, [batch], impl="chunked")
    once = weight.grad.clone()
    loss = linear_cross_entropy(batch.x, weight, batch.target, accumulate_into_grad=True, impl="chunked")
    weight.grad = None
    loss.backward()
    assert_close([weight.grad], [once], 1e-12)


def test_under_autocast_it_adds_in_fp32() -> None:
    batches = micro_batches(torch.float32)
    weight, plain = nn.Parameter(batches[0].weight), nn.Parameter(batches[0].weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(weight, batches, accumulate_into_grad=True, impl="chunked")
    train(plain, batches, impl="plain")
    assert weight.grad.dtype == torch.float32
    assert_close([weight.grad], [plain.grad], TOLERANCE[torch.bfloat16])


def test_a_frozen_weight_is_left_alone() -> None:
    (batch, *_) = micro_batches()
    weight = nn.Parameter(batch.weight, requires_grad=False)
    weight.grad = torch.ones_like(weight)
    train(weight, [batch], accumulate_into_grad=True, impl="chunked")
    assert (weight.grad == 1).all()


def test_a_weight_that_is_computed_is_refused() -> None:
    (batch, *_) = micro_batches()
    weight = nn.Parameter(batch.weight)
    message = (
        r"accumulate_into_grad=True needs a weight that owns its \.grad \(a parameter\); .* a computation"
    )
    with pytest.raises(ArgumentError, match=message):
        linear_cross_entropy(batch.x, weight * 2, batch.target, accumulate_into_grad=True)


class WeightSized(TorchDispatchMode):
    """Counts new tensors of the weight's size."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.size, self.known, self.count = weight.numel(), {weight.data_ptr(), weight.grad.data_ptr()}, 0

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = op(*arguments, **options or {})
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in self.known:
            self.count += result.numel() >= self.size
        return result


@pytest.mark.parametrize("budget", [None, TINY])
def test_nothing_of_the_weights_size_is_made(budget: int | None) -> None:
    case = inputs(3, d=50, v=400)
    weight = nn.Parameter(case.weight)
    train(weight, [case], impl="chunked")
    with WeightSized(weight) as made:
        train(weight, [case], impl="chunked", memory_budget=budget, accumulate_into_grad=True)
    assert made.count == 0
    with WeightSized(weight) as made:
        train(weight, [case], impl="chunked", memory_budget=budget)
    assert made.count > 0


def test_the_predicted_peak_on_a_gpu_is_less_by_one_gradient_of_the_weight() -> None:
    n, d, v = 512, 512, 32768

    def peak(accumulate: bool) -> int:
        def prepare() -> Any:
            weight = nn.Parameter(torch.empty(v, d, device="cuda", dtype=torch.bfloat16))
            weight.grad = torch.zeros_like(weight)
            x = torch.empty(n, d, device="cuda", dtype=torch.bfloat16)
            target = torch.zeros(n, device="cuda", dtype=torch.int64)
            other = torch.empty(8, 8, device="cuda", requires_grad=True)

            def step() -> None:
                # The rest of a model: cuBLAS has its workspaces in both passes already.
                (other @ other).sum().backward()
                linear_cross_entropy(
                    x, weight, target, accumulate_into_grad=accumulate, impl="triton"
                ).backward()

            return step

        return oomph.predict(prepare, gpu="h200").peak.allocated

    assert abs(peak(False) - peak(True) - v * d * 2) < MiB
