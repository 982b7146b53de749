"""short_convolution against torch's own convolution: values, gradients, precision, layouts, arguments."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import oomph
from oomph.errors import ArgumentError
from oomph.ops.common import explain
from oomph.ops.short_convolution import short_convolution

FAST = ["chunked", "triton"]
CASES = [  # batch, tokens, taps, channels, unit
    (1, 1, 1, 1, None),
    (2, 3, 4, 5, None),
    (1, 127, 3, 70, None),
    (1, 33, 2, 9, 3),
    (2, 150, 4, 20, 20),
]


def inputs(batch: int, tokens: int, taps: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(batch, tokens + taps - 1, channels, dtype=torch.float64)
    weight, pull = torch.randn(channels, 1, taps).double(), torch.randn(batch, tokens, channels).double()
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), pull.to(dtype)


def by_torch(x: Tensor, weight: Tensor, unit: int | None) -> Tensor:
    y = F.silu(F.conv1d(x.transpose(1, 2), weight, groups=x.shape[2])).transpose(1, 2)
    if unit is None:
        return y
    heads = y.unflatten(-1, (-1, unit))
    return (heads / torch.sqrt(heads.square().sum(-1, keepdim=True) + 1e-6)).flatten(-2)


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_and_its_gradients_are_those_of_torchs_convolution(case: tuple, impl: str) -> None:
    *shape, unit = case
    dtype = torch.float32 if impl == "triton" else torch.float64
    x, weight, pull = inputs(*shape, dtype)
    y = short_convolution(x, weight, unit_size=unit, impl=impl)
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    right = by_torch(*exact, unit)
    tolerance = {"rtol": 1e-4, "atol": 2e-5} if impl == "triton" else {"rtol": 1e-10, "atol": 1e-11}
    torch.testing.assert_close(y.double(), right, **tolerance)
    found = torch.autograd.grad(y, (x, weight), pull)
    for one, two in zip(found, torch.autograd.grad(right, exact, pull.double()), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), two, **tolerance)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype, impl: str) -> None:
    x, weight, pull = inputs(1, 40, 3, 16, dtype)
    y = short_convolution(x, weight, unit_size=8, impl=impl)
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    right = by_torch(*exact, 8)
    found = (y, *torch.autograd.grad(y, (x, weight), pull))
    for one, two in zip(found, (right, *torch.autograd.grad(right, exact, pull.double())), strict=True):
        assert one.dtype == dtype
        assert (one.double() - two).norm() < 1.5 * torch.finfo(dtype).eps * two.norm()


@pytest.mark.parametrize("impl", FAST)
def test_memory_may_have_any_layout_and_a_frozen_input_gets_no_gradient(impl: str) -> None:
    x, weight, _ = inputs(2, 9, 3, 6, torch.float32)
    turned = x.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0)
    sliced = torch.cat([x.detach(), x.detach()], dim=2)[..., :6]
    right = short_convolution(x, weight, impl="reference").detach()
    for each in (turned, sliced):
        y = short_convolution(each, weight, impl=impl)
        torch.testing.assert_close(y, right)
        (grad,) = torch.autograd.grad(y.sum(), weight)  # of one number seen everywhere
        torch.testing.assert_close(
            grad, torch.autograd.grad(short_convolution(x, weight).sum(), weight)[0], rtol=1e-4, atol=1e-5
        )
    assert not short_convolution(x.detach(), weight.detach(), impl=impl).requires_grad


@pytest.mark.parametrize("impl", FAST)
def test_nan_reaches_the_tokens_that_see_it_and_no_others(impl: str) -> None:
    x, weight, _ = inputs(1, 20, 4, 8, torch.float32)
    spoiled = x.detach().clone()
    spoiled[0, 10, 3] = torch.nan
    y = short_convolution(spoiled, weight, unit_size=4, impl=impl)
    rows = y[0].isnan().any(-1).nonzero().flatten().tolist()
    assert rows == [7, 8, 9, 10]
    assert not y[..., 4:].isnan().any()


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_no_tokens_give_no_tokens(impl: str) -> None:
    x, weight = torch.zeros(2, 3, 4, requires_grad=True), torch.zeros(4, 1, 4, requires_grad=True)
    y = short_convolution(x, weight, impl=impl)
    assert y.shape == (2, 0, 4)
    y.sum().backward()
    assert not x.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("impl", FAST)
def test_it_runs_twice_backward_checkpointed_without_gradients_and_under_autocast(impl: str) -> None:
    x, weight, pull = inputs(2, 9, 3, 6, torch.float32)

    def run(given: Tensor) -> Tensor:
        return short_convolution(given, weight, unit_size=3, impl=impl)

    y = run(x)
    right = torch.autograd.grad(y, (x, weight), pull, retain_graph=True)
    again = torch.autograd.grad(y, (x, weight), pull)
    checkpointed = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    with torch.autocast("cpu", torch.bfloat16):
        under = run(x)  # no product here that autocast would make smaller
    found = (torch.autograd.grad(each, (x, weight), pull) for each in (checkpointed, under))
    for each in (again, *found):
        assert all(torch.equal(one, two) for one, two in zip(each, right, strict=True))
    with torch.no_grad():
        assert torch.equal(run(x), y)


def test_a_compiled_program_steps_around_it() -> None:
    x, weight, _ = inputs(1, 5, 2, 4, torch.float32)
    compiled = torch.compile(lambda given: 2 * short_convolution(given * 2, weight), backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), 2 * short_convolution(x * 2, weight))


@pytest.mark.parametrize("impl", FAST)
def test_second_derivatives_are_refused(impl: str) -> None:
    x, weight, _ = inputs(1, 4, 2, 4, torch.float32)
    with pytest.raises(ArgumentError, match="cannot be differentiated twice"):
        torch.autograd.grad(short_convolution(x, weight, impl=impl).sum(), x, create_graph=True)


def test_a_prediction_sees_the_input_the_output_and_the_gradients() -> None:
    def train():  # type: ignore[no-untyped-def]
        x = torch.randn(4, 1027, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(256, 1, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        pull = torch.randn(4, 1024, 256, device="cuda", dtype=torch.bfloat16)

        def step() -> None:
            short_convolution(x, weight, unit_size=64).backward(pull)
            x.grad = weight.grad = None

        return step

    given, made = 4 * 1027 * 256 * 2, 4 * 1024 * 256 * 2
    small = 4 * 5 * 4 * 256 * 4 + 10 * 256 * 4 * 4  # partial sums of the weight's gradient, and that
    peak = oomph.predict(train, gpu="h200").peak.allocated
    assert 2 * given + 2 * made <= peak <= 2 * given + 2 * made + small


BAD = [
    ({"x": torch.zeros(2, 4, 5, dtype=torch.int64)}, "x has dtype torch.int64"),
    ({"x": torch.zeros(4, 5)}, r"x \[4, 5\] and weight \[5, 1, 3\] do not fit together; valid: x \[B, T"),
    ({"x": torch.zeros(2, 4, 6)}, "do not fit together"),
    ({"x": torch.zeros(2, 1, 5)}, "do not fit together"),
    ({"unit_size": 2}, "unit_size=2 is not valid; a divisor of the 5 channels"),
    ({"unit_size": 0}, "unit_size=0 is not valid"),
    ({"impl": "cuda"}, "impl='cuda' is not valid"),
    ({"x": torch.zeros(2, 4, 5).double(), "impl": "triton"}, "cannot run: the kernel computes in float32"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_argument_is_named_with_what_is_valid(wrong: dict, message: str) -> None:
    arguments = {"x": torch.zeros(2, 4, 5), "weight": torch.zeros(5, 1, 3), **wrong}
    with pytest.raises(ArgumentError, match=message):
        short_convolution(**arguments)


def test_the_choice_is_explained() -> None:
    x, weight, _ = inputs(1, 4, 2, 4, torch.float32)
    assert explain(short_convolution, x, weight).impl == "chunked"
    assert "on cpu" in explain(short_convolution, x, weight).reason


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from oomph.ops.short_convolution import triton as kernels

def compiled(kernel, types, **constants):
    names = [name for name in kernel.arg_names if name not in constants]
    types = dict(zip(names, types.split(), strict=True))
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.metadata.shared <= 64 * 1024

tile = dict(TAPS=2, SIZE=64, UNIT=True, EPSILON=1e-6, BLOCK_C=64, BLOCK_T=16)
compiled(kernels.pull_back, "*bf16 *bf16 *bf16 *bf16 *fp32 i32 i32 i32 i32 i32 i32", ROUNDS=2, **tile)
print("compiled")
"""


def test_the_kernels_compile_for_hopper() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
