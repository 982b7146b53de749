"""Arguments, the choice of an implementation, autograd, compute_loss_chunked and the module."""

import pytest
import torch
import torch.nn.functional as F
from ce_cases import TINY, TOLERANCE, Inputs, assert_close, expected, inputs, leaves, numbers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oomph.errors import ArgumentError
from oomph.nn.loss import LinearCrossEntropyLoss
from oomph.ops import explain, linear_cross_entropy

PLAIN_LIMIT = 16 << 20


def explained(n, v, d=2, device="cpu", dtype=torch.float32, **options):
    with FakeTensorMode():
        x, weight = (torch.empty(rows, d, device=device, dtype=dtype) for rows in (n, v))
        target = torch.zeros(n, device=device, dtype=torch.int64)
        return explain(linear_cross_entropy, x, weight, target, **options)


@pytest.mark.parametrize(("device", "above"), [("cpu", "chunked"), ("cuda", "triton")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_up_to_16_mebibytes_of_fp32_logits_auto_is_plain(device, above, dtype):
    v = 1 << 14
    n = PLAIN_LIMIT // 4 // v
    small = explained(n, v, device=device, dtype=dtype)
    assert small.impl == "plain"
    assert "the logits are 16 MiB in fp32, at most 16 MiB" in small.reason
    large = explained(n + 1, v, device=device, dtype=dtype)
    assert large.impl == above
    assert "the logits would be 16 MiB in fp32; 1 block of 257 tokens" in large.reason
    assert explained(64, v, dtype=dtype, memory_budget="16MiB").impl == "plain"  # four copies must fit
    assert explained(64, v, dtype=dtype, memory_budget="15MiB").impl == "chunked"
    assert explained(4, 4, dtype=dtype, accumulate_into_grad=True).impl == "chunked"


WAYS = [
    {"impl": "plain"},
    {"impl": "chunked"},
    {"impl": "chunked", "memory_budget": TINY},
    {"impl": "chunked", "reduction": "none"},
]


def gradients(i, loss, **options):
    return list(torch.autograd.grad(loss, [i.x, i.weight, i.bias], **options))


def truth(i):
    wide = leaves(Inputs(i.x.double(), i.weight.double(), i.target, i.bias.double()))
    loss = F.cross_entropy(F.linear(wide.x, wide.weight, wide.bias), wide.target)
    return gradients(wide, loss)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_the_gradient_may_come_through_the_log_sum_exp_alone(impl, reduction):
    case = leaves(inputs(20, bias=True))
    options = {"impl": impl, "reduction": reduction, "return_lse": True}
    _, lse = linear_cross_entropy(case.x, case.weight, case.target, bias=case.bias, **options)
    kept = case.target != -100
    theirs = F.linear(case.x[kept], case.weight, case.bias).logsumexp(1).square().sum()
    assert_close(gradients(case, lse.square().sum()), gradients(case, theirs), 1e-12)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_in_half_precision_and_gradients_keep_their_dtypes(dtype, way):
    case = inputs(40, v=200, bias=True, dtype=torch.float32)
    case = leaves(case.but(x=case.x.to(dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(case.x, case.weight, case.target, bias=case.bias, **way)
    assert loss.dtype == torch.float32
    ours = gradients(case, loss.sum() / (case.target != -100).sum() if loss.dim() else loss)
    assert [each.dtype for each in ours] == [dtype, torch.float32, torch.float32]
    assert_close(ours, truth(case), TOLERANCE[torch.bfloat16])
    assert not torch.equal(ours[0], truth(case)[0].to(dtype))  # it did compute in half precision


def test_a_large_loss_scale_does_not_underflow_in_float16():
    """As with a GradScaler: what is below float16's smallest number is scaled before it is rounded."""
    case = leaves(inputs(4096, v=3, d=2, dtype=torch.float16, ignored=None))
    tiny = case.but(weight=(case.weight.detach() * 1e-3).requires_grad_())
    loss = linear_cross_entropy(tiny.x, tiny.weight, tiny.target, impl="chunked")
    (x_grad,) = torch.autograd.grad(loss * 2.0**14, tiny.x)
    # `expected` lets a number arrive as gradient; here it is 2**14.
    exact = expected(tiny).gradients[0] / numbers() * 2.0**14
    assert_close([x_grad], [exact], TOLERANCE[torch.float16])


@pytest.mark.parametrize("changed", ["target", "class_weight"])
def test_a_backward_that_makes_the_logits_again_refuses_what_was_changed_since(changed):
    case = leaves(inputs(20, v=200, bias=True))
    class_weight = torch.rand(200, dtype=case.x.dtype)
    options = {"class_weight": class_weight, "reduction": "none", "impl": "chunked"}
    loss = linear_cross_entropy(case.x, case.weight, case.target, **options).sum()
    (case.target if changed == "target" else class_weight).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("bias", [False, True])
def test_the_module_is_a_linear_layer_and_a_cross_entropy_with_the_options_of_the_op(bias):
    case, token_weight = inputs(4, 5), numbers(4, 5)
    options = {"label_smoothing": 0.1, "reduction": "sum"}
    linear = nn.Linear(6, 13, bias=bias, dtype=torch.float64).eval()
    shared = LinearCrossEntropyLoss.from_linear(linear, **options)
    assert shared.weight is linear.weight
    assert shared.bias is linear.bias
    assert not shared.training
    own = LinearCrossEntropyLoss(6, 13, bias=bias, dtype=torch.float64, return_lse=True, **options)
    own.load_state_dict(linear.state_dict())
    x = case.x.requires_grad_()
    losses = F.cross_entropy(
        linear(x).reshape(-1, 13), case.target.reshape(-1), label_smoothing=0.1, reduction="none"
    )
    loss, lse = own(x, case.target, token_weight=token_weight)
    assert_close([loss], [(losses * token_weight.reshape(-1)).sum()], 1e-12)
    assert lse.shape == (4, 5)
    ours, theirs = shared(x, case.target), losses.sum()
    assert_close([ours], [theirs], 1e-12)
    found, right = (
        torch.autograd.grad(each, [x, *linear.parameters()], retain_graph=True) for each in (ours, theirs)
    )
    assert_close(found, right, 1e-12)


def test_the_module_shares_a_tied_head_and_moves_its_class_weights():
    table = nn.Embedding(13, 6)
    assert LinearCrossEntropyLoss.from_linear(table).weight is table.weight
    with pytest.raises(ArgumentError, match="weight is computed"):
        LinearCrossEntropyLoss.from_linear(nn.utils.parametrizations.weight_norm(nn.Linear(6, 13)))
    loss = LinearCrossEntropyLoss(6, 13, class_weight=torch.ones(13)).double()
    assert loss.class_weight.dtype == torch.float64
    assert "class_weight" not in loss.state_dict()
