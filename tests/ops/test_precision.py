"""The dtype of an op's products, with and without autocast."""

from __future__ import annotations

import pytest
import torch

from oomph.ops.common import matmul_dtype, no_autocast

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_autocast_products_run_in_the_tensors_own_dtype(dtype: torch.dtype, device: str) -> None:
    assert matmul_dtype(torch.ones(2, dtype=dtype, device=device)) == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_decides_for_all_but_float64(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.float64 if dtype == torch.float64 else torch.bfloat16
        assert matmul_dtype(torch.ones(2, dtype=dtype)) == expected


def test_inside_no_autocast_a_product_keeps_its_dtype() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with no_autocast(x):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


def test_a_device_without_autocast_is_left_alone() -> None:
    with no_autocast(torch.ones(2, device="meta")):
        assert not torch.is_autocast_enabled("cpu")
