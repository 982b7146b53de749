"""A step of deterministic kernels: what they need more, and that asking for them ends with the trace."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import oomph
from oomph.prediction.cuda.workspaces import cublas_workspace_bytes
from oomph.workload import Workload, deterministic_algorithms

MiB = 2**20
B, H, T, D = 1, 8, 4096, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(H * D, 3 * H * D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (H, D)).transpose(1, 2) for part in self.proj(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention(deterministic: bool) -> Workload:
    return Workload(
        model=Attention,
        batch=lambda device: torch.randn(B, T, H * D, device=device, dtype=torch.bfloat16),
        loss=lambda model, x: model(x).float().sum(),
        optimizer=None,
        dtype="bfloat16",
        deterministic=deterministic,
    )


def test_flash_keeps_a_sum_for_every_part_of_the_keys() -> None:
    """On an A100 with its 108 multiprocessors, 8 heads: 14 sums of q's size in float32, in place of one."""
    plain, exact = (oomph.predict(attention(each), gpu="a100-80gb").peak.allocated for each in (False, True))
    more_sums = (14 - 1) * B * H * T * D * 4
    workspaces = 2 * (32 * MiB - cublas_workspace_bytes((8, 0)))  # forward's thread and backward's
    assert exact - plain == pytest.approx(more_sums + workspaces, abs=MiB)


def test_asking_ends_with_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    oomph.predict(attention(True), gpu="h200")
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_what_was_asked_before_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_algorithms():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("given", "right"),
    [(None, 8320 * 1024), (":4096:8", 32 * MiB), (":16:8", 128 * 1024), (":4096:2:16:8", 8320 * 1024)],
)
def test_the_workspace_of_matrix_products_is_what_the_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch, given: str | None, right: int
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if given is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
    assert cublas_workspace_bytes((8, 0)) == right
