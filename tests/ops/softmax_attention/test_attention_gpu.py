"""attention on a real GPU: the fused kernels, our own and FlexAttention against the float64 reference."""

import pytest
import torch

from oomph.ops.common import explain
from oomph.ops.softmax_attention import attention, global_, local, locality_bias, mixed
from oomph.ops.softmax_attention.reference import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]


def points(length, spread=1.0):
    return torch.rand(length, 2, device="cuda") * spread


def by_index(b, h, q_index, k_index):
    return -0.1 * (q_index - k_index).abs()


@pytest.mark.parametrize(
    ("options", "impl"),
    [
        ({}, None),
        ({"causal": True}, None),
        ({"lengths": True}, "cudnn"),
        ({"lengths": True, "causal": True}, "triton"),
        ({"points": True}, "triton"),
        ({"points": True, "causal": True}, "triton"),
        ({"points": True, "lengths": True}, "triton"),
        ({"bias": by_index}, "flex"),
        ({"bias": by_index, "causal": True}, "flex"),
        ({"pattern": local(1), "causal": True}, "triton"),
        ({"pattern": global_(2), "causal": True}, "triton"),
        ({"pattern": mixed(1, 3)}, "triton"),
        ({"pattern": mixed(1, 3), "lengths": True}, "triton"),
        ({"pattern": mixed(1, 3), "points": True, "lengths": True}, "triton"),
        ({"pattern": mixed(1, 3), "bias": by_index, "lengths": True}, "chunked"),
    ],
)
@pytest.mark.parametrize(("queries", "keys"), [(257, 257), (320, 320), (129, 257)])
def test_a_gpu_agrees_with_the_reference(options, impl, queries, keys):
    torch.manual_seed(0)
    q = torch.randn(2, 4, queries, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(2, 2, keys, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv"
    )
    options = dict(options)
    lengths = torch.tensor([0, 200], device="cuda") if options.pop("lengths", False) else None
    if options.pop("points", False):
        options["bias"] = locality_bias(points(queries), points(keys))
    choice = explain(attention, q, k, v, key_lengths=lengths, **options)
    assert impl is None or choice.impl == impl
    out = attention(q, k, v, key_lengths=lengths, **options)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    key_mask = None if lengths is None else torch.arange(keys, device="cuda") < lengths[:, None]
    expected = reference(*wide, key_mask_BK=key_mask, **options)
    weight = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), weight)
    right = torch.autograd.grad(expected, wide, weight.double())
    for a, b in zip((out, *got), (expected, *right), strict=True):
        assert (a.double() - b).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * b.abs().max()


@pytest.mark.parametrize(
    ("head", "dtype"),
    [
        (32, torch.float16),
        (64, torch.bfloat16),
        (64, torch.float32),
        (80, torch.bfloat16),
        (128, torch.bfloat16),
        (256, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("spread", "shift"), [(1.0, 0.0), (1.0, 1000.0), (100.0, 0.0)])
def test_the_locality_bias_on_a_gpu_rounds_no_more_than_the_reference_in_its_dtype(
    head, spread, shift, dtype
):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 200, head, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, 2, 333, head, device="cuda", dtype=dtype, requires_grad=True) for _ in "kv")
    t, s = points(200, spread) + shift, points(333, spread)[None].repeat(2, 1, 1) + shift
    out = attention(q, k, v, bias=locality_bias(t, s), impl="triton")
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = reference(*wide, bias=locality_bias(t.double(), s.double()))
    weight = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, (q, k, v), weight))
    right = (expected, *torch.autograd.grad(expected, wide, weight.double()))
    # In half precision the factors of products are rounded; a bias of -b is rounded by b / 2^24 in any.
    relative = 4 * torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps * spread
    for a, b in zip(got, right, strict=True):
        assert (a.double() - b).abs().max() <= relative * max(1.0, b.abs().max())
