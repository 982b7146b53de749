"""tiled_mlp on a real GPU: every gradient against float64, poisoned memory, repeatability, predicted peak."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mlp_samples import tokens, weights
from torch import Tensor

from oomph.ops.mlp import MLPWeights, tiled_mlp
from oomph.ops.mlp.weights import ACTIVATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Poisoning comes with torch's deterministic mode, which says so of every product by cuBLAS.
    pytest.mark.filterwarnings("ignore:.*[Dd]eterministic"),
    # torch's own, the first time that autograd's thread multiplies.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

IMPLS = ["chunked", "triton", "generic"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# (leading dimensions, in, hidden, out, tile)
SHAPES = [
    ((1,), 16, 16, 16, None),
    ((3,), 127, 257, 1, 2),
    ((2, 257), 64, 333, 127, 100),
    ((5, 1000), 256, 512, 256, 1024),
]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """What torch.empty gives is NaN: nothing may be read before it is written."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


def moved(given: MLPWeights, dtype: torch.dtype) -> MLPWeights:
    named = {name: each.detach().to("cuda", dtype).requires_grad_() for name, each in given.named().items()}
    return MLPWeights(**named, activation=given.activation)


def on_gpu(
    impl: str, dtype: torch.dtype, given: MLPWeights, x: Tensor, tile: int | None = None
) -> list[Tensor]:
    """The result, and the gradients of x and of every weight and bias."""
    # Rounded first: the float64 version then gets the very numbers that the others get.
    w, x = moved(given, dtype), x.detach().to("cuda", dtype).requires_grad_()
    value = tiled_mlp(w, x, tile=tile, impl=impl)
    grad = torch.linspace(-1, 2, value.numel(), device="cuda", dtype=torch.float32).view(value.shape)
    inputs = [x, *w.named().values()]
    return [value.detach(), *torch.autograd.grad(value, inputs, grad.to(torch.float16).to(dtype))]


def rounded(given: MLPWeights, x: Tensor, dtype: torch.dtype) -> tuple[MLPWeights, Tensor]:
    named = {name: each.detach().to(dtype) for name, each in given.named().items()}
    return MLPWeights(**named, activation=given.activation), x.detach().to(dtype)


def error_of(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm().clamp_min(1e-30))


def check(given: MLPWeights, x: Tensor, tile: int | None, impl: str, dtype: torch.dtype) -> None:
    given, x = rounded(given, x, dtype)
    right = on_gpu("reference", torch.float64, given, x)
    plain, found = on_gpu("reference", dtype, given, x), on_gpu(impl, dtype, given, x, tile)
    for name, each, one, truth in zip(("value", "x", *given.named()), found, plain, right, strict=True):
        assert each.dtype == dtype
        error, allowed = error_of(each, truth), error_of(one, truth)
        # In float32 the order of the sums decides, and "generic" gets the gradient of every tile rounded.
        factor = 1.5 if dtype == torch.float32 or impl == "generic" else 1.1
        # A gradient of few numbers may be rounded well in one version and badly in the other.
        slack = torch.finfo(dtype).eps * (1 if each.numel() < 1000 else 0.1)
        assert error <= factor * allowed + slack, (name, error, allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_no_result_is_worse_than_plain_torch_makes_it(impl: str, shape: tuple, dtype: torch.dtype) -> None:
    lead, d, f, out, tile = shape
    check(weights(bias=True, d=d, f=f, out=out), tokens(*lead, d), tile, impl, dtype)


@pytest.mark.parametrize("impl", ["chunked", "triton"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_has_its_own_derivative(activation: str, gated: bool, impl: str) -> None:
    given, x = weights(activation, gated, d=96, f=200, out=64), tokens(300, 96)
    for dtype in (torch.bfloat16, torch.float32):
        check(given, x, 128, impl, dtype)
