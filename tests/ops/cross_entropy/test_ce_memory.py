"""Predicted memory on a GPU: within the budget beside inputs and gradients, flat in the number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import oomph
from oomph.ops import compute_loss_chunked, linear_cross_entropy
from oomph.units import GiB, MiB, parse_bytes

WORKSPACE = 32 * MiB  # cuBLAS's, on this GPU, per thread that computes: forward, backward
HALF = 2


def over_floor(
    n: int, d: int, v: int, loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None, **options: Any
) -> int:
    """The predicted peak less x, weight, target and the gradients of x and weight."""

    def prepare() -> Callable[[], None]:
        x = torch.empty(n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(v, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.zeros(n, device="cuda", dtype=torch.int64)

        def step() -> None:
            found = loss(x, weight, target) if loss else linear_cross_entropy(x, weight, target, **options)
            found.sum().backward()
            x.grad = weight.grad = None  # several steps are predicted

        return step

    floor = 2 * (n + v) * d * HALF + n * 8
    return oomph.predict(prepare, gpu="h200").peak.allocated - floor


@pytest.mark.parametrize(
    ("n", "d", "v", "budget"),
    [
        (4096, 4096, 128256, "64MiB"),
        (4096, 4096, 128256, "1GiB"),
        (4096, 1024, 151936, "64MiB"),
        (8192, 1024, 151936, "256MiB"),
        (16384, 2560, 151936, "512MiB"),
    ],
)
def test_the_budget_is_kept(n: int, d: int, v: int, budget: str) -> None:
    over = over_floor(n, d, v, memory_budget=budget)
    assert over <= parse_bytes(budget) + WORKSPACE
    # And used: a budget that is left lying would be paid for in time.
    assert over >= 0.4 * min(parse_bytes(budget), n * v * HALF)


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "none"},
        {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0},
        {"num_valid": 1500},
        {"impl": "chunked"},
        {"impl": "chunked", "softcap": 30.0},
    ],
    ids=str,
)
def test_the_budget_is_kept_with_options(options: dict[str, Any]) -> None:
    assert over_floor(2048, 1024, 65536, memory_budget="128MiB", **options) <= 128 * MiB + 2 * WORKSPACE


def test_by_default_half_a_gibibyte_is_enough() -> None:
    assert over_floor(16384, 2560, 151936) <= 512 * MiB + WORKSPACE


@pytest.mark.parametrize("impl", ["auto", "chunked"])
def test_the_peak_is_flat_in_the_number_of_tokens(impl: str) -> None:
    """Beyond x, its gradient and 32 bytes a token for log-sum-exp, target and the like."""
    few, many = (over_floor(n, 512, 32768, memory_budget="128MiB", impl=impl) - 32 * n for n in (2048, 8192))
    assert abs(many - few) <= 8 * MiB


def test_the_plain_way_is_not_flat() -> None:
    few, many = (over_floor(n, 512, 65536, impl="plain") for n in (1024, 4096))
    assert many > 3.5 * few


def next_token_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """As report 002 had it: logits, and their shifted copy in fp32."""
    logits = F.linear(x, weight)
    return F.cross_entropy(logits[:-1].float(), target[1:])


def test_the_reports_size_takes_over_111_gibibytes_plainly_and_under_one_here() -> None:
    n, d, v = 131_072, 2560, 151_936
    assert over_floor(n, d, v, next_token_loss) > 111 * GiB
    assert over_floor(n, d, v, shift=True) < GiB


def test_the_reports_function_holds_one_chunk() -> None:
    n, d, v, chunk = 16384, 512, 65536, 1024

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return compute_loss_chunked(x, target, _Head(weight), chunk_size=chunk)

    assert over_floor(n, d, v, loss) <= chunk * v * HALF + 64 * n + WORKSPACE


class _Head(torch.nn.Module):
    """A linear layer around a weight that already exists."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = weight, None
