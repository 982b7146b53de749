"""The memory of tiled_mlp, predicted: flat in the number of tokens beyond what is unavoidable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mlp_samples import NormalisedGated, PlainGated
from torch import nn

import oomph
from oomph.ops.mlp import tiled_mlp

D, F = 256, 1024


def step_of(module_class: type[nn.Module], tokens: int, impl: str) -> Callable[[], Callable[[], None]]:
    def prepare() -> Callable[[], None]:
        module = module_class(D, F).to("cuda", torch.bfloat16)
        x = torch.randn(tokens, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(tokens, D, device="cuda", dtype=torch.bfloat16)

        def step() -> None:
            tiled_mlp(module, x, tile=512, impl=impl).backward(grad)
            module.zero_grad()
            x.grad = None

        return step

    return prepare


def beyond_tokens(module_class: type[nn.Module], tokens: int, impl: str) -> int:
    """The predicted peak less x, dY, the result and dX, all of them [tokens, D]."""
    peak = oomph.predict(step_of(module_class, tokens, impl), gpu="h200").peak.allocated
    return peak - 4 * tokens * D * 2


@pytest.mark.parametrize(
    ("module_class", "impl"), [(PlainGated, "auto"), (PlainGated, "chunked"), (NormalisedGated, "auto")]
)
def test_the_peak_is_flat_in_the_number_of_tokens(module_class: type[nn.Module], impl: str) -> None:
    once, twice = (beyond_tokens(module_class, tokens, impl) for tokens in (4096, 8192))
    assert once == twice


def test_beyond_its_results_a_known_mlp_takes_three_buffers_and_the_fp32_gradients() -> None:
    weights, gradients, buffers = 3 * D * F * 2, 3 * D * F * 4, 3 * 512 * F * 2
    workspaces = 2 * (32 << 20)  # cuBLAS's, of the forward and of the backward thread
    assert beyond_tokens(PlainGated, 4096, "auto") == weights + gradients + buffers + workspaces
