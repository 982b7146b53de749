"""What auto takes, and that it says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from oomph.errors import ArgumentError
from oomph.ops import Choice, common, explain, linear_cross_entropy

PLAIN_LIMIT = 16 << 20


def explained(
    n: int, v: int, d: int = 2, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any
) -> Choice:
    with FakeTensorMode():
        x, weight = (torch.empty(rows, d, device=device, dtype=dtype) for rows in (n, v))
        target = torch.zeros(n, device=device, dtype=torch.int64)
        return explain(linear_cross_entropy, x, weight, target, **options)


@pytest.mark.parametrize(("device", "above"), [("cpu", "chunked"), ("cuda", "triton")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_up_to_16_mebibytes_of_fp32_logits_auto_is_plain(device: str, above: str, dtype: torch.dtype) -> None:
    v = 1 << 14
    n = PLAIN_LIMIT // 4 // v
    small = explained(n, v, device=device, dtype=dtype)
    assert small.impl == "plain"
    assert "the logits are 16 MiB in fp32, at most 16 MiB" in small.reason
    large = explained(n + 1, v, device=device, dtype=dtype)
    assert large.impl == above
    assert "the logits would be 16 MiB in fp32; 1 block of 257 tokens" in large.reason


def test_ignored_rows_that_are_dropped_do_not_count() -> None:
    assert explained(4096, 1 << 14).impl == "chunked"
    assert explained(4096, 1 << 14, num_valid=100).impl == "plain"


def test_a_small_budget_lowers_the_threshold() -> None:
    """Four copies of the logits must fit."""
    assert explained(64, 1 << 14, memory_budget="16MiB").impl == "plain"
    small = explained(64, 1 << 14, memory_budget="15MiB")
    assert small.impl == "chunked"


def test_accumulation_into_the_gradient_is_never_plain() -> None:
    assert explained(4, 4, accumulate_into_grad=True).impl == "chunked"


def test_on_the_cpu_the_reason_says_why_there_are_no_kernels() -> None:
    assert "no kernels: the tensors are on cpu" in explained(4096, 1 << 14).reason


def test_float64_is_never_given_to_kernels() -> None:
    found = explained(4096, 1 << 14, device="cuda", dtype=torch.float64)
    assert found.impl == "chunked"
    assert "float64 is computed in float64" in found.reason


@pytest.mark.parametrize("impl", ["plain", "chunked", "reference", "triton"])
def test_what_is_asked_for_is_taken(impl: str) -> None:
    found = explained(4096, 1 << 14, device="cuda", impl=impl)
    assert found.impl == impl
    assert found.reason.startswith("asked for; ")


def test_kernels_are_refused_on_a_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ArgumentError, match=r"impl='triton' cannot run: .*; choose 'auto' or 'chunked'"):
        linear_cross_entropy(
            torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64), impl="triton"
        )


def test_blocks_shrink_with_the_budget() -> None:
    shape: dict[str, Any] = {"n": 16384, "v": 151936, "d": 2560, "device": "cuda", "dtype": torch.bfloat16}
    default, small, tiny = (explained(**shape, memory_budget=budget) for budget in (None, "256MiB", "64MiB"))
    assert default.settings["rows"] >= 1024
    assert default.settings["columns"] == 151936
    assert 384 <= small.settings["rows"] < default.settings["rows"]
    assert small.settings["columns"] == 151936
    assert tiny.settings["columns"] < 151936
    assert "logits computed twice" in tiny.reason


def test_the_choice_is_logged_once_per_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "_announced", set())
    x, weight, target = torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64)
    run: Callable[[], Any] = lambda: linear_cross_entropy(x, weight, target)  # noqa: E731
    with caplog.at_level(logging.INFO, logger="oomph.ops"):
        run()
        run()
    assert caplog.messages == ["linear_cross_entropy: plain (the logits are 32 B in fp32, at most 16 MiB)"]


def test_explaining_checks_the_arguments_and_computes_nothing() -> None:
    with pytest.raises(ArgumentError, match="reduction='average' is not valid"):
        explained(4, 4, reduction="average")
    with pytest.raises(ArgumentError, match="size 'lots' is not valid"):
        explained(4, 4, memory_budget="lots")
