"""Half precision: the gradients err no more than those of the program everyone writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ce_cases import TINY, Inputs, leaves
from torch import Tensor

from oomph.ops import linear_cross_entropy

# Errors of two roundings differ by chance; 5 % is what the issue allows, the rest is noise of few numbers.
FACTOR, NOISE = 1.05, 2e-5


def case(kind: str, dtype: torch.dtype, n: int, d: int, v: int) -> Inputs:
    """Peaked: the model is nearly sure of the right class. Flat: it knows nothing."""
    generator = torch.Generator().manual_seed(n + v)
    weight = torch.randn(v, d, generator=generator) / d**0.5
    target = torch.randint(v, (n,), generator=generator)
    noise = torch.randn(n, d, generator=generator)
    x = 6.0 * weight[target] + 0.5 * noise if kind == "peaked" else 0.1 * noise
    return leaves(Inputs(x.to(dtype), weight.to(dtype), target))


def gradients(i: Inputs, loss: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, (i.x, i.weight))


def errors(i: Inputs, **options: Any) -> list[tuple[float, float]]:
    """(ours, the naive program's) relative error in the Frobenius norm, of dX and of dW."""
    wide = leaves(i.but(x=i.x.double(), weight=i.weight.double()))
    exact = gradients(wide, F.cross_entropy(F.linear(wide.x, wide.weight), i.target, reduction="sum"))
    naive = gradients(i, F.cross_entropy(F.linear(i.x, i.weight).float(), i.target, reduction="sum"))
    loss = linear_cross_entropy(i.x, i.weight, i.target, reduction="sum", **options)
    ours = gradients(i, loss)

    def error(found: Tensor, right: Tensor) -> float:
        return float((found.double() - right).norm() / right.norm())

    return [
        (error(one, right), error(other, right)) for one, other, right in zip(ours, naive, exact, strict=True)
    ]


@pytest.mark.parametrize("kind", ["peaked", "flat"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_in_one_block_gradients_are_as_exact_as_the_naive_ones(
    impl: str, dtype: torch.dtype, kind: str
) -> None:
    for ours, naive in errors(case(kind, dtype, 128, 32, 300), impl=impl):
        assert ours <= FACTOR * naive + NOISE
        assert naive < 0.05


@pytest.mark.parametrize("kind", ["peaked", "flat"])
def test_the_kernels_are_as_exact_over_several_blocks(kind: str) -> None:
    """float16: the interpreter rounds bfloat16 towards zero, which no GPU does."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    for ours, naive in errors(case(kind, torch.float16, 40, 32, 150), impl="triton", memory_budget=TINY):
        assert ours <= FACTOR * naive + NOISE


@pytest.mark.parametrize("kind", ["peaked", "flat"])
def test_dx_is_as_exact_in_blocks_of_rows_and_classes(kind: str) -> None:
    """Of plain torch; there dW is rounded once per block of rows, and is allowed to show it."""
    dx, dw = errors(case(kind, torch.bfloat16, 48, 32, 300), impl="chunked", memory_budget=TINY)
    assert dx[0] <= FACTOR * dx[1] + NOISE
    assert dw[0] <= 2.0 * dw[1]


@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_the_loss_of_half_precision_inputs_is_exact_to_the_rounding_of_the_logits(impl: str) -> None:
    i = case("peaked", torch.bfloat16, 128, 32, 300)
    loss = linear_cross_entropy(i.x, i.weight, i.target, impl=impl)
    naive = F.cross_entropy(F.linear(i.x, i.weight).float(), i.target)
    torch.testing.assert_close(loss, naive, rtol=1e-5, atol=1e-6)
