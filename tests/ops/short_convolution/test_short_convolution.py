"""short_convolution against torch's own convolution: values, gradients, precision, layouts, arguments."""

import pytest
import torch
import torch.nn.functional as F
from kernel_device import DEVICE

import oomph
from oomph.nn.delta_attention import ShortConvolution
from oomph.ops import tokenwise
from oomph.ops.short_convolution import short_convolution

FAST = ["chunked", "triton"]
CASES = [  # batch, tokens, taps, channels, unit
    (1, 1, 1, 1, None),
    (2, 3, 4, 5, None),
    (1, 127, 3, 70, None),
    (1, 33, 2, 9, 3),
    (2, 150, 4, 20, 20),
]


def inputs(batch, tokens, taps, channels, dtype, impl):
    torch.manual_seed(0)
    where = {"device": DEVICE if impl == "triton" else "cpu", "dtype": dtype}
    x = torch.randn(batch, tokens + taps - 1, channels, dtype=torch.float64)
    weight, grad_out = torch.randn(channels, 1, taps).double(), torch.randn(batch, tokens, channels).double()
    return x.to(**where).requires_grad_(), weight.to(**where).requires_grad_(), grad_out.to(**where)


def by_torch(x, weight, unit):
    y = F.silu(F.conv1d(x.transpose(1, 2), weight, groups=x.shape[2])).transpose(1, 2)
    if unit is None:
        return y
    heads = y.unflatten(-1, (-1, unit))
    return (heads / torch.sqrt(heads.square().sum(-1, keepdim=True) + 1e-6)).flatten(-2)


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_match_torchs_convolution(case, impl):
    *shape, unit = case
    dtype = torch.float32 if impl == "triton" else torch.float64
    x, weight, grad_out = inputs(*shape, dtype, impl)
    y = short_convolution(x, weight, unit_size=unit, impl=impl)
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    right = by_torch(*exact, unit)
    tolerance = {"rtol": 1e-4, "atol": 2e-5} if impl == "triton" else {"rtol": 1e-10, "atol": 1e-11}
    torch.testing.assert_close(y.double(), right, **tolerance)
    found = torch.autograd.grad(y, (x, weight), grad_out)
    for one, two in zip(found, torch.autograd.grad(right, exact, grad_out.double()), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), two, **tolerance)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype, impl):
    x, weight, grad_out = inputs(1, 40, 3, 16, dtype, impl)
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    y, right = short_convolution(x, weight, unit_size=8, impl=impl), by_torch(*exact, 8)
    found = (y, *torch.autograd.grad(y, (x, weight), grad_out))
    for one, two in zip(found, (right, *torch.autograd.grad(right, exact, grad_out.double())), strict=True):
        assert one.dtype == dtype
        assert (one.double() - two).norm() < 1.5 * torch.finfo(dtype).eps * two.norm()


@pytest.mark.parametrize("impl", FAST)
def test_nan_reaches_only_the_tokens_that_read_it(impl):
    x, weight, _ = inputs(1, 20, 4, 8, torch.float32, impl)
    with_nan = x.detach().clone()
    with_nan[0, 10, 3] = torch.nan
    y = short_convolution(with_nan, weight, unit_size=4, impl=impl)
    rows = y[0].isnan().any(-1).nonzero().flatten().tolist()
    assert rows == [7, 8, 9, 10]
    assert not y[..., 4:].isnan().any()


def test_the_predicted_memory_is_that_of_input_output_and_gradients():
    def train():
        x = torch.randn(4, 1027, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(256, 1, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad_out = torch.randn(4, 1024, 256, device="cuda", dtype=torch.bfloat16)

        def step():
            short_convolution(x, weight, unit_size=64).backward(grad_out)
            x.grad = weight.grad = None

        return step

    given, made = 4 * 1027 * 256 * 2, 4 * 1024 * 256 * 2
    small = 4 * 5 * 4 * 256 * 4 + 10 * 256 * 4 * 4  # partial sums of the weight's gradient, and that
    peak = oomph.predict(train, gpu="h200").peak.allocated
    assert 2 * given + 2 * made <= peak <= 2 * given + 2 * made + small


# The module ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("taps", [1, 3])
def test_the_module_is_a_padded_depthwise_convolution(taps, rows, monkeypatch):
    monkeypatch.setattr(tokenwise, "_SLICE_BYTES", rows * 2 * 5 * 4)
    made = ShortConvolution(5, taps, dtype=torch.float64)
    x = torch.randn(2, 9, 5, dtype=torch.float64, requires_grad=True)
    y, last = made(x)
    padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
    right = F.silu(F.conv1d(padded, made.weight, groups=5)).transpose(1, 2)
    torch.testing.assert_close(y, right)
    assert torch.equal(last, x[:, 9 - taps + 1 :])
    grad = torch.randn_like(right)
    pair = (torch.autograd.grad(each, (x, made.weight), grad) for each in (y, right))
    for one, two in zip(*pair, strict=True):
        torch.testing.assert_close(one, two)
