"""The kernels, in Triton's interpreter where there is no GPU: the same numbers as the specification."""

import pytest
import torch
from ce_cases import TINY, TOLERANCE, Inputs, assert_close, check, expected, inputs, numbers, run
from kernel_device import DEVICE, HALF
from torch import nn

from oomph.ops import linear_cross_entropy

pytest.importorskip("triton")
pytestmark = [
    # NumPy, which the interpreter computes with, warns of NaN and infinity; kernels do not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum"},
        {"reduction": "none", "through_lse": True},
        {"ignore_index": 0, "ignored": 0},
        {"z_loss": 0.2, "through_lse": True},
        {"softcap": 1.5},
        {"class_weight": numbers(13)},
        {"label_smoothing": 0.2, "class_weight": numbers(13), "softcap": 2.0},
        {"token_weight": numbers(2, 5, seed=3)},
        {"shift": True, "token_weight": numbers(2, 5, seed=3)},
    ],
    ids=str,
)
def test_the_options(options):
    options = dict(options)
    case = inputs(2, 5, dtype=torch.float32, bias=True, ignored=options.pop("ignored", -100))
    check(case, impl="triton", **options)


EVERYTHING = {"label_smoothing": 0.1, "z_loss": 0.05, "softcap": 3.0, "through_lse": True}


@pytest.mark.parametrize(("dtype", "reduction"), [(torch.float32, "mean"), (HALF, "none")])
def test_everything_at_once_in_blocks_of_rows_and_of_classes(dtype, reduction):
    case = inputs(19, v=200, dtype=dtype, bias=True)
    weights = {"class_weight": numbers(200), "token_weight": numbers(19)}
    check(case, impl="triton", memory_budget=TINY, reduction=reduction, **weights, **EVERYTHING)


@pytest.mark.parametrize("v", [1, 127, 129, 1100])
def test_odd_numbers_of_classes(v):
    """1100: whole steps of four blocks, and a remainder."""
    # Of one class, the gradient is the difference of two equal numbers: a rounding error.
    tolerance = 1e-4 if v == 1 else None
    check(
        inputs(3, v=v, d=3, dtype=torch.float32, ignored=None), tolerance, impl="triton", label_smoothing=0.1
    )


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, {"shift": True}), (HALF, {"shift": True}), (torch.bfloat16, {})]
)
def test_the_gradient_of_a_half_precision_weight_over_several_blocks_of_rows(dtype, options):
    """There the targets' rows are added apart; many tokens share a target."""
    check(inputs(20, v=5, d=7, dtype=dtype), impl="triton", memory_budget=TINY, **options)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_strides_do_not_matter(dtype):
    whole = inputs(20, dtype=dtype, bias=True)
    case = Inputs(
        x=whole.x.t().contiguous().t(),
        weight=whole.weight.t().contiguous().t(),
        target=whole.target.int().repeat_interleave(3)[::3],
        bias=whole.bias.repeat_interleave(2)[::2],
    )
    extra = {"class_weight": numbers(26).float()[::2], "token_weight": numbers(1).expand(20)}
    check(case, impl="triton", label_smoothing=0.1, memory_budget=TINY, **extra)


@pytest.mark.parametrize(("dtype", "transposed"), [(torch.float32, False), (HALF, True)])
def test_accumulation_into_the_gradient(dtype, transposed):
    case = inputs(20, v=11, dtype=dtype, ignored=None).to(DEVICE)
    weight = nn.Parameter(case.weight.t().contiguous().t() if transposed else case.weight)
    for _ in range(2):
        loss = linear_cross_entropy(case.x, weight, case.target, impl="triton", accumulate_into_grad=True)
        loss.backward()
    once = expected(case).gradients[1] / numbers()
    assert_close([weight.grad.cpu()], [2 * once.cpu()], TOLERANCE[dtype])


def test_autocast_keeps_fp32_gradients():
    case = inputs(20, v=40, dtype=torch.float32)
    with torch.autocast(DEVICE, dtype=HALF):
        ours = run(case, impl="triton", memory_budget=TINY)
    assert all(each.dtype == torch.float32 for each in ours.all)
    assert_close(ours.all, expected(case).all, TOLERANCE[HALF])
