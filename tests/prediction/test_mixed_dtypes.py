"""Ops that take two dtypes on fake tensors and not on CUDA fail in a prediction, in CUDA's words.

What is refused here was refused by an H200 (torch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_programs import line_of
from torch import Tensor, nn
from torch.nn import functional as F

import oomph
from oomph import Prediction, ProgramError

BF16 = torch.bfloat16


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def whole(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda", dtype=torch.int64)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "linear": (
        lambda: F.linear(make(4, 8), make(6, 8, dtype=BF16)),
        "expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16",
    ),
    "linear of tokens": (
        lambda: F.linear(make(2, 4, 8, dtype=BF16), make(6, 8)),
        "expected mat1 and mat2 to have the same dtype, but got: c10::BFloat16 != float",
    ),
    "linear with bias": (
        lambda: F.linear(make(4, 8), make(6, 8, dtype=BF16), make(6, dtype=BF16)),
        "mat1 and mat2 must have the same dtype, but got Float and BFloat16",
    ),
    "linear with another bias": (
        lambda: F.linear(make(4, 8), make(6, 8), make(6, dtype=BF16)),
        "self and mat2 must have the same dtype, but got BFloat16 and Float",
    ),
    "product of whole numbers": (
        lambda: whole(4, 8) @ whole(8, 6),
        "\"addmm_cuda\" not implemented for 'Long'",
    ),
    "products": (
        lambda: make(2, 4, 8) @ make(2, 8, 6, dtype=BF16),
        "expected scalar type Float but found BFloat16",
    ),
    "products of whole numbers": (
        lambda: whole(2, 4, 8) @ whole(2, 8, 6),
        "\"baddbmm_cuda\" not implemented for 'Long'",
    ),
    "sum of products": (
        lambda: torch.addbmm(make(4, 6), make(2, 4, 8), make(2, 8, 6, dtype=BF16)),
        "self and mat2 must have the same dtype, but got Float and BFloat16",
    ),
    "product with a vector": (
        lambda: make(4, 8) @ make(8, dtype=BF16),
        "expected scalar type Float but found BFloat16",
    ),
    "product in place": (
        lambda: make(4, 6).addmm_(make(4, 8), make(8, 6, dtype=BF16)),
        "self and mat2 must have the same dtype, but got Float and BFloat16",
    ),
    "product into a tensor": (
        lambda: torch.mm(make(4, 8), make(8, 6, dtype=BF16), out=make(4, 6)),
        "expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16",
    ),
    "convolution": (
        lambda: F.conv2d(make(1, 2, 8, 8), make(3, 2, 3, 3, dtype=BF16)),
        r"Input type \(float\) and weight type \(c10::BFloat16\) should be the same",
    ),
    "convolution with another bias": (
        lambda: F.conv2d(make(1, 2, 8, 8), make(3, 2, 3, 3), make(3, dtype=BF16)),
        r"Input type \(float\) and bias type \(c10::BFloat16\) should be the same",
    ),
    "layer norm": (
        lambda: F.layer_norm(make(4, 8, dtype=BF16), (8,), make(8)),
        "expected scalar type BFloat16 but found Float",
    ),
    "group norm": (
        lambda: F.group_norm(make(4, 8, dtype=BF16), 2, make(8)),
        "expected scalar type BFloat16 but found Float",
    ),
    "weights of classes": (
        lambda: F.cross_entropy(make(4, 8, dtype=BF16), whole(4), weight=make(8)),
        "expected scalar type BFloat16 but found Float",
    ),
    "added rows": (
        lambda: make(4, 8).index_add_(0, whole(2), make(2, 8, dtype=BF16)),
        r"index_add_\(\): self \(Float\) and source \(BFloat16\) must have the same scalar type",
    ),
    "assigned rows": (
        lambda: make(4, 8).__setitem__(whole(2), make(2, 8, dtype=BF16)),
        "Index put requires the source and destination dtypes match",
    ),
}


def run(call: Callable[[], object]) -> Prediction:
    def program() -> None:
        call()

    return oomph.predict(program, gpu="h200")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_is_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(ProgramError, match=words):
        run(call)


def under_autocast() -> Tensor:
    with torch.autocast("cuda", BF16):
        return F.layer_norm(F.linear(make(4, 8), make(8, 8, dtype=BF16)), (8,), make(8))


TAKEN: dict[str, Callable[[], object]] = {
    "autocast": under_autocast,
    "RMS norm": lambda: F.rms_norm(make(4, 8), (8,), make(8, dtype=BF16)),
    "batch norm": lambda: F.batch_norm(make(4, 8, dtype=BF16), None, None, make(8), training=True),
    "mean square": lambda: F.mse_loss(make(4, 8), make(4, 8, dtype=BF16)),
    "probabilities": lambda: F.cross_entropy(make(4, 8), make(4, 8, dtype=BF16)),
    "product in a wider dtype": lambda: torch.mm(
        make(4, 8, dtype=BF16), make(8, 6, dtype=BF16), out_dtype=torch.float32
    ),
    "sum in a wider dtype": lambda: torch.addmm(
        make(4, 6), make(4, 8, dtype=BF16), make(8, 6, dtype=BF16), out_dtype=torch.float32
    ),
    "a number": lambda: make(4, 8).__setitem__(whole(2), 1),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", TAKEN)
def test_what_cuda_takes_is_taken(name: str) -> None:
    assert run(TAKEN[name]).peak.allocated > 0


def test_the_failure_has_the_programs_own_line() -> None:
    def program() -> None:
        layer = nn.Linear(8, 8, device="cuda", dtype=BF16)
        x = torch.randn(4, 8, device="cuda")
        layer(x)  # forgot to cast

    with pytest.raises(ProgramError, match="must have the same dtype") as failed:
        oomph.predict(program, gpu="h200")
    assert (failed.value.file, failed.value.line) == (__file__, line_of(program, "forgot to cast"))
